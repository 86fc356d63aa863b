"""Which inference nodes may connect to a run: its open invites, and the identities that joined by them.

    orchestrator invite --invite()--> keys/nodes.sqlite <--enroll(), is_known()-- gateway, at each handshake
    orchestrator evict  --revoke()-->

Several processes read and change it, each in single transactions. Public keys only: the secret of an invite is in its
string, that of a node on its own disk. What is revoked is refused from the next handshake on; the gateway ends
connections that are open.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from composer_prime.errors import ConfigError, InviteError

_WAIT_S = 10.0
"""How long a change waits for that of another process."""
_KEEP_EXPIRED_S = 30 * 86400.0
"""An expired invite is refused with its reason for this long; then its key is unknown."""
_TABLES = """
create table if not exists invites (key blob primary key, uses integer not null, taken integer not null default 0,
    expires real not null);
create table if not exists nodes (key blob primary key, name text not null unique, machine text not null,
    admitted real not null, revoked real, reason text not null default '')
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredNode:
    """One identity that joined by an invite."""

    key: bytes
    """Its public CURVE key, Z85."""
    name: str
    """The only node_id that it may use; nobody else may."""
    machine: str
    """What it found on its machine, in words."""
    admitted: float
    """Unix seconds."""
    revoked: float | None
    """Unix seconds; None while it may connect."""
    reason: str
    """Why it was revoked."""


class NodeRegistry:
    """The file `keys/nodes.sqlite` of one run. May be used from several threads."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """`folder`: the run's keys/. Opens nothing: the file is made by the first change."""
        self.path = folder / "nodes.sqlite"
        self._clock = clock
        self._lock = threading.Lock()

    # -- nodes -------------------------------------------------------------------------------------------------------

    def admit(self, key: bytes, name: str, machine: str = "") -> RegisteredNode:
        """Let `key` connect, also one that was revoked. Return it with its name, numbered where that was taken."""
        with self._change() as database:
            return self._admit(database, key, name, machine)

    def revoke(self, key: bytes, reason: str) -> bool:
        """Refuse `key` from now on. Return False when no such node may connect."""
        with self._change() as database:
            sql = "update nodes set revoked = ?, reason = ? where key = ? and revoked is null"
            return database.execute(sql, (self._clock(), reason, key)).rowcount > 0

    def is_known(self, key: bytes) -> bool:
        """Return whether `key` is a node's that may connect."""
        return bool(self._read("select 1 from nodes where key = ? and revoked is null", key))

    def find(self, key_or_name: bytes | str) -> RegisteredNode | None:
        """Return the node with this key (bytes) or name (str), revoked or not."""
        column = "key" if isinstance(key_or_name, bytes) else "name"
        rows = self._read(f"select * from nodes where {column} = ?", key_or_name)
        return _node(rows[0]) if rows else None

    def list(self) -> Sequence[RegisteredNode]:
        """Return all nodes, revoked ones too, in the order in which they joined."""
        return [_node(row) for row in self._read("select * from nodes order by admitted")]

    def revoked(self) -> dict[bytes, str]:
        """Return the reason by revoked key."""
        return dict(self._read("select key, reason from nodes where revoked is not null"))

    # -- invites -----------------------------------------------------------------------------------------------------

    def invite(self, key: bytes, *, uses: int, expires: float) -> None:
        """Let `uses` nodes enroll with the invite's public `key` until `expires`, Unix seconds."""
        with self._change() as database:
            database.execute("delete from invites where expires < ?", (self._clock() - _KEEP_EXPIRED_S,))
            database.execute("insert into invites (key, uses, expires) values (?, ?, ?)", (key, uses, expires))

    def is_invite(self, key: bytes) -> bool:
        """Return whether `key` is an invite's. Expired and used ones count: their holder hears the reason."""
        return bool(self._read("select 1 from invites where key = ?", key))

    def uses_left(self, key: bytes) -> int | None:
        """Return how many nodes the invite's public `key` still admits, None where the run has no such invite."""
        rows = self._read("select uses - taken from invites where key = ?", key)
        return rows[0][0] if rows else None

    def enroll(self, invite: bytes, key: bytes, name: str, machine: str) -> RegisteredNode:
        """Admit the node `key` and count a use of `invite`, both or neither. A node counts once, however often it asks.

        Raises InviteError (expired, used up, unknown, or the node was revoked).
        """
        with self._change() as database:
            row = database.execute("select * from nodes where key = ?", (key,)).fetchone()
            if row is not None:
                node = _node(row)
                if node.revoked is not None:
                    raise InviteError(f"node {node.name} was turned away for good: {node.reason or 'no reason given'}")
                return node
            found = database.execute("select uses, taken, expires from invites where key = ?", (invite,)).fetchone()
            if found is None:
                raise InviteError("the run has no such invite: make one with `orchestrator invite RUN_DIR`")
            uses, taken, expires = found
            if self._clock() >= expires:
                raise InviteError(
                    f"the invite expired at {utc_text(expires)}, it is {utc_text(self._clock())}: make another with "
                    "`orchestrator invite RUN_DIR`"
                )
            if taken >= uses:
                raise InviteError(
                    f"the invite was for {uses} nodes and {taken} have used it: make another with "
                    "`orchestrator invite RUN_DIR --nodes N` (a node that joined before needs its state folder)"
                )
            database.execute("update invites set taken = taken + 1 where key = ?", (invite,))
            return self._admit(database, key, name, machine)

    # -- the file ----------------------------------------------------------------------------------------------------

    def _admit(self, database: sqlite3.Connection, key: bytes, name: str, machine: str) -> RegisteredNode:
        row = database.execute("select * from nodes where key = ?", (key,)).fetchone()
        if row is not None:
            database.execute("update nodes set revoked = null, reason = '' where key = ?", (key,))
        else:
            taken = {name for (name,) in database.execute("select name from nodes")}
            free, number = name, 2
            while free in taken:
                free, number = f"{name}-{number}", number + 1
            sql = "insert into nodes (key, name, machine, admitted) values (?, ?, ?, ?)"
            database.execute(sql, (key, free, machine, self._clock()))
        return _node(database.execute("select * from nodes where key = ?", (key,)).fetchone())

    def _read(self, sql: str, *values: bytes | str) -> Sequence[tuple]:
        if not self.path.exists():
            return []
        with self._open() as database:
            return database.execute(sql, values).fetchall()

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """One transaction, written when the block ends without an error."""
        if not self.path.exists():
            os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600))
        with self._open() as database:
            database.execute("begin immediate")
            try:
                yield database
            except BaseException:
                database.execute("rollback")
                raise
            database.execute("commit")

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Raises ConfigError when the file cannot be used."""
        with self._lock:
            database = sqlite3.connect(self.path, timeout=_WAIT_S, isolation_level=None)
            try:
                database.executescript(_TABLES)
                yield database
            except sqlite3.Error as error:
                raise ConfigError(
                    f"the registry of nodes {self.path} cannot be used: {error}; check that disk and its rights"
                ) from error
            finally:
                database.close()


def utc_text(unix_s: float) -> str:
    """Return a time as `2026-11-23 07:00 UTC`."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix_s))


def _node(row: tuple) -> RegisteredNode:
    key, name, machine, admitted, revoked, reason = row
    return RegisteredNode(key=key, name=name, machine=machine, admitted=admitted, revoked=revoked, reason=reason)
