"""Drain, ban and unban, on a router by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from fleet import Fleet

from composer_prime.errors import ConfigError, InviteError, RequestError
from composer_prime.run.keys import RunKeys
from composer_prime.wire.node_messages import Dismissed, NodeHello, ToNode
from orchestrator.gateway.node_control import NodeControl


class Controlled:
    """A fleet under control, and what the control sent to nodes."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.fleet = Fleet(**{name: {} for name in names})
        self.keys = RunKeys(folder)
        self.control = NodeControl(self.fleet.router, self.keys, None)

    @property
    def told(self) -> list[tuple[str, ToNode]]:
        return self.fleet.told


def with_control(folder: Path, test: Callable[[Controlled], Awaitable[None]], *names: str) -> None:
    async def run() -> None:
        controlled = Controlled(folder, *names)
        await test(controlled)
        await controlled.fleet.close()

    folder.mkdir(exist_ok=True)
    asyncio.run(run())


# A drained node gets no new request, keeps those that it has, and is sent away once it has answered them.
def test_drain_lets_a_node_answer(tmp_path):
    async def test(its: Controlled) -> None:
        await its.fleet.ask(2)
        held = {name: list(sent) for name, sent in its.fleet.sent.items()}
        assert len(held["a"]) == len(held["b"]) == 1
        assert "leaves once it has answered 1 request" in its.control.drain("a")
        await its.fleet.ask(3)
        its.control.tick()
        assert its.fleet.sent["a"] == held["a"] and its.told == []
        its.fleet.answer("a", held["a"][0])
        await asyncio.sleep(0)
        its.control.tick()
        assert [(name, type(message)) for name, message in its.told] == [("a", Dismissed)]
        assert its.fleet.calls[0].done() or its.fleet.calls[1].done()
        with pytest.raises(RequestError, match="drained already: it holds 0 requests"):
            its.control.drain("a")

    with_control(tmp_path, test, "a", "b")


# With --now a node is told to leave while it still holds requests, also one that is drained already. They stay its own
# until it says goodbye, because it streams what it has sampled before.
@pytest.mark.parametrize("is_drained", [False, True])
def test_drain_now(tmp_path, is_drained):
    async def test(its: Controlled) -> None:
        await its.fleet.ask(2)
        if is_drained:
            its.control.drain("a")
            its.control.tick()
        assert its.told == []
        assert "other nodes finish what is left of its 1 request" in its.control.drain_now("a")
        its.control.tick()
        assert [(name, type(message)) for name, message in its.told] == [("a", Dismissed)]
        (request,) = its.fleet.sent["a"]
        its.fleet.stream("a", request, [5, 6])
        its.fleet.router.leave(its.fleet.node("a"), "said goodbye")
        await asyncio.sleep(0)
        again = its.fleet.sent["b"][-1]
        assert again.request_id == request.request_id and len(again.prompt_ids) == len(request.prompt_ids) + 8

    with_control(tmp_path, test, "a", "b")


# The last node that serves may be drained too; the answer says what follows.


# The key of a node is revoked, for every later start too, and admitted again by unban; the table shows it meanwhile.
def test_a_ban_revokes_the_nodes_key(tmp_path):
    async def test(its: Controlled) -> None:
        key = b"k" * 40
        its.keys.registry.admit(key, "rented")
        assert "its key is refused" in its.control.ban("rented")
        assert not its.keys.registry.is_known(key)
        later = Controlled(tmp_path).control
        assert [(row.name, row.state) for row in later.rows()] == [("rented", "banned")]
        for act, name in ((later.ban, "rented"), (later.unban, "x")):
            with pytest.raises(RequestError, match="rented"):
                act(name)
        later.unban("rented")
        assert its.keys.registry.is_known(key)

    with_control(tmp_path, test, "a")


# The run's own nodes share a key, which a ban would take from all of them.
def test_a_node_of_the_runs_own_is_not_banned(tmp_path):
    async def test(its: Controlled) -> None:
        with pytest.raises(RequestError, match="drain"):
            its.control.ban("a")
        assert its.fleet.node("a").attached

    with_control(tmp_path, test, "a")


# So is the invite by which it came: its machine could draw another key. Nothing is said of one that is used up.
def test_a_ban_withdraws_the_nodes_invite(tmp_path):
    async def test(its: Controlled) -> None:
        registry, expires = its.keys.registry, time.time() + 1000
        for invite, uses in ((b"open", 2), (b"full", 1)):
            registry.invite(invite, uses=uses, expires=expires)
            registry.enroll(invite, invite * 10, f"by-{invite.decode()}", "")
        assert "the invite by which it came admits no further node" in its.control.ban("by-open")
        assert "invite by which" not in its.control.ban("by-full")
        with pytest.raises(InviteError, match="withdrawn"):
            registry.enroll(b"open", b"another", "again", "")

    with_control(tmp_path, test, "a")


# A ban that was cut short between the invite and the key is ended by repeating it, in either order.
@pytest.mark.parametrize("cut", ["revoke", "withdraw"])
def test_a_ban_that_was_cut_short(tmp_path, monkeypatch, cut):
    async def test(its: Controlled) -> None:
        registry = its.keys.registry
        registry.invite(b"open", uses=2, expires=time.time() + 1000)
        registry.enroll(b"open", b"key", "rented", "")
        with monkeypatch.context() as patch:
            patch.setattr(type(registry), cut, Mock(side_effect=ConfigError("locked")))
            with pytest.raises(ConfigError):
                its.control.ban("rented")
        its.control.ban("rented")
        assert not registry.open_invites() and not registry.is_known(b"key")
        with pytest.raises(RequestError, match="banned already"):
            its.control.ban("rented")

    with_control(tmp_path, test, "a")


# While the registry cannot be read the table shows the nodes all the same.
def test_the_table_without_the_registry(tmp_path, monkeypatch):
    async def test(its: Controlled) -> None:
        monkeypatch.setattr(type(its.keys.registry), "list", Mock(side_effect=ConfigError("locked")))
        assert [row.name for row in its.control.rows()] == ["a"]

    with_control(tmp_path, test, "a")


# Bans by name of an older release do not hold any more, and this is said.
def test_an_old_list_of_bans(tmp_path, caplog):
    async def test(its: Controlled) -> None:
        assert "bans nobody" in caplog.text

    (tmp_path / "banned.json").write_text("{}")
    with_control(tmp_path, test)


# An unknown name is answered with the known ones and the nearest.
@pytest.mark.parametrize("action", ["drain", "ban"])
def test_unknown_names(tmp_path, action):
    async def test(its: Controlled) -> None:
        with pytest.raises(RequestError, match="no node 'node-l': the known ones are node-1, other; did you mean"):
            getattr(its.control, action)("node-l")

    with_control(tmp_path, test, "node-1", "other")


# A node that connects anew while it is drained stays drained.
def test_a_drain_outlasts_a_reconnect(tmp_path):
    async def test(its: Controlled) -> None:
        its.control.drain("a")
        hello = NodeHello(node_id="a", engine="test", run_id=None, version=0, max_concurrent=4, instance="a")
        its.fleet.router.attach(b"again", hello)
        its.control.tick()
        assert its.fleet.node("a").draining and isinstance(its.told[-1][1], Dismissed)

    with_control(tmp_path, test, "a", "b")
