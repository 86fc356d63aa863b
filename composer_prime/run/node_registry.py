"""Which inference nodes may connect to a run: its open invites, and the identities that joined by them.

    orchestrator invite --invite(), withdraw()--> keys/nodes.sqlite <--enroll(), is_known()-- gateway, each handshake
                                                  <--revoke(), withdraw(), admit()-- gateway, at a ban or unban

Several processes use it in single transactions. It holds public keys only. What is revoked is refused from the next
handshake on; the gateway ends open connections. Machines that hold an open invite can draw another key: a ban
withdraws it as well.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from composer_prime.errors import ConfigError, InviteError

_CHANGE_WAIT_S, _READ_WAIT_S = 2.0, 0.2
"""How long a change, or a read, waits for another process's change. An event loop may be what waits."""
_KEEP_EXPIRED_S = 30 * 86400.0
"""For so long an expired invite is refused with its reason."""
_TABLES = """
create table if not exists invites (key blob primary key, uses integer not null, taken integer not null default 0,
    expires real not null);
create table if not exists nodes (key blob primary key, name text not null unique, machine text not null,
    admitted real not null, revoked real, reason text not null default '', invite blob not null default x'')
"""
LAUNCHER_NAME = re.compile(r"node(-[0-9]+)?")
"""The run's own nodes are node-0, node-1, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredNode:
    """One identity that joined by an invite."""

    key: bytes
    """Its public CURVE key, Z85."""
    name: str
    """The only node_id that it may use, and nobody else."""
    machine: str
    """What it found there, in words."""
    admitted: float
    """Unix seconds."""
    revoked: float | None
    """Unix seconds; None while it may connect."""
    reason: str
    """Why it was revoked."""
    invite: bytes
    """The public key of its invite, if any."""


class NodeRegistry:
    """The file `keys/nodes.sqlite` of one run, for several threads."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """`folder`: the run's keys/. The first change makes the file."""
        self.path = folder / "nodes.sqlite"
        self._clock = clock

    def admit(self, key: bytes, name: str, machine: str = "") -> RegisteredNode:
        """Let `key` connect, also a revoked one. Its name is numbered where taken."""
        with self._change() as database:
            return self._admit(database, key, name, machine)

    def revoke(self, key: bytes, reason: str) -> bool:
        """Refuse `key` from now on. Return whether it might connect."""
        with self._change() as database:
            sql = "update nodes set revoked = ?, reason = ? where key = ? and revoked is null"
            return database.execute(sql, (self._clock(), reason, key)).rowcount > 0

    def is_known(self, key: bytes) -> bool:
        """Return whether `key` may connect."""
        return bool(self._read("select 1 from nodes where key = ? and revoked is null", key))

    def find(self, key_or_name: bytes | str) -> RegisteredNode | None:
        """Return the node with this key (bytes) or name (str), revoked or not."""
        column = "key" if isinstance(key_or_name, bytes) else "name"
        rows = self._read(f"select * from nodes where {column} = ?", key_or_name)
        return _node(rows[0]) if rows else None

    def list(self) -> Sequence[RegisteredNode]:
        """Return all nodes, revoked ones too, in the order in which they joined."""
        return [_node(row) for row in self._read("select * from nodes order by admitted")]

    def invite(self, key: bytes, *, uses: int, expires: float) -> None:
        """Let `uses` nodes enroll with the invite's public `key` until `expires`, Unix seconds."""
        with self._change() as database:
            database.execute("delete from invites where expires < ?", (self._clock() - _KEEP_EXPIRED_S,))
            database.execute("insert into invites (key, uses, expires) values (?, ?, ?)", (key, uses, expires))

    def is_invite(self, key: bytes) -> bool:
        """Return whether `key` is an invite's: open, used up, expired or withdrawn."""
        return bool(self._read("select 1 from invites where key = ?", key))

    def open_invites(self) -> Sequence[bytes]:
        """Return the keys of all invites with which nodes may still enroll."""
        sql = "select key from invites where uses > taken and expires > ?"
        return [key for (key,) in self._read(sql, self._clock())]

    def withdraw(self, key: bytes | None = None) -> int:
        """Let no further node enroll with the invite `key`; None for all. Return how many invites were still open."""
        with self._change() as database:
            sql = "update invites set uses = 0 where uses > taken and expires > ? and coalesce(key = ?, true)"
            return database.execute(sql, (self._clock(), key)).rowcount

    def enroll(
        self, invite: bytes, key: bytes, name: str, machine: str, taken_names: Collection[str] = ()
    ) -> RegisteredNode:
        """Admit the node `key` and count a use of `invite`, both or neither; a node counts once.

        `taken_names`: of nodes that are not in here. Raises InviteError (expired, used up, unknown, of a revoked node).
        """
        with self._change() as database:
            row = database.execute("select * from nodes where key = ?", (key,)).fetchone()
            if row is not None:
                node = _node(row)
                if node.revoked is not None:
                    raise InviteError(f"node {node.name} was turned away for good: {node.reason or 'no reason given'}")
                if invite not in (key, node.invite):
                    raise InviteError(f"node {node.name} did not come by this invite: start it with its state folder")
                return node
            found = database.execute("select uses, taken, expires from invites where key = ?", (invite,)).fetchone()
            if found is None:
                raise InviteError("the run has no such invite: make one with `orchestrator invite RUN_DIR`")
            uses, taken, expires = found
            if self._clock() >= expires:
                raise InviteError(
                    f"the invite expired at {utc_text(expires)}, it is {utc_text(self._clock())}: make another "
                    "with `orchestrator invite RUN_DIR`"
                )
            if not uses:
                raise InviteError("the invite was withdrawn: make another with `orchestrator invite RUN_DIR`")
            if taken >= uses:
                raise InviteError(
                    f"the invite was for {uses} nodes and {taken} have used it: make another with "
                    "`orchestrator invite RUN_DIR --nodes N` (a node that joined before needs its state folder)"
                )
            database.execute("update invites set taken = taken + 1 where key = ?", (invite,))
            return self._admit(database, key, name, machine, invite, taken_names)

    def _admit(
        self,
        database: sqlite3.Connection,
        key: bytes,
        name: str,
        machine: str,
        invite: bytes = b"",
        taken_names: Collection[str] = (),
    ) -> RegisteredNode:
        row = database.execute("select * from nodes where key = ?", (key,)).fetchone()
        if row is not None:
            database.execute("update nodes set revoked = null, reason = '' where key = ?", (key,))
        else:
            taken = {name for (name,) in database.execute("select name from nodes")}.union(taken_names)
            base = f"{name[:57]}-joined" if LAUNCHER_NAME.fullmatch(name) else name
            free, number = base, 2
            while free in taken:
                free, number = f"{base[:58]}-{number}", number + 1
            sql = "insert into nodes (key, name, machine, admitted, invite) values (?, ?, ?, ?, ?)"
            database.execute(sql, (key, free, machine, self._clock(), invite))
        return _node(database.execute("select * from nodes where key = ?", (key,)).fetchone())

    def _read(self, sql: str, *values: bytes | str | float) -> Sequence[tuple]:
        if not self.path.exists():
            return []
        with self._open(_READ_WAIT_S) as database:
            return database.execute(sql, values).fetchall()

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """One transaction, written when the block ends well."""
        if not self.path.exists():
            os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600))
        with self._open(_CHANGE_WAIT_S) as database:
            database.execute("begin immediate")
            try:
                yield database
            except BaseException:
                database.execute("rollback")
                raise
            database.execute("commit")

    @contextmanager
    def _open(self, wait_s: float) -> Iterator[sqlite3.Connection]:
        """A connection of this call alone, so threads need no lock. Raises ConfigError."""
        database = None
        try:
            database = sqlite3.connect(self.path, timeout=wait_s, isolation_level=None)
            database.executescript(_TABLES)
            yield database
        except sqlite3.Error as error:
            text = f"the registry of nodes {self.path} cannot be used: {error}; check that disk and its rights"
            raise ConfigError(text) from error
        finally:
            if database is not None:
                database.close()


def utc_text(unix_s: float) -> str:
    """Return a time as `2026-11-23 07:00 UTC`."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix_s))


def _node(row: tuple) -> RegisteredNode:
    key, name, machine, admitted, revoked, reason, invite = row
    return RegisteredNode(
        key=key,
        name=name,
        machine=machine,
        admitted=admitted,
        revoked=revoked,
        reason=reason,
        invite=invite,
    )
