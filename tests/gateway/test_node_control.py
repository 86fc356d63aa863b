"""Drain, evict, ban and unban, on a router by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from fleet import Fleet

from composer_prime.errors import ConfigError, InviteError, RequestError
from composer_prime.run.keys import RunKeys
from composer_prime.wire.node_messages import Drain, NodeHello, ToNode
from orchestrator.gateway.nodes import AttachedNode
from orchestrator.swarm.accounts import NodeAccounts
from orchestrator.swarm.node_control import NodeControl


class Controlled:
    """A fleet under control, and what the control sent to nodes."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.now = 0.0
        self.fleet = Fleet(**{name: {} for name in names})
        self.keys = RunKeys(folder)
        self.told: list[tuple[str, ToNode]] = []
        self.accounts = NodeAccounts(self.fleet.router, None, clock=lambda: self.now)
        self.control = NodeControl(
            self.fleet.router,
            self.accounts,
            self.keys,
            self._send,
            drain_s=600.0,
        )

    def _send(self, node: AttachedNode, message: ToNode) -> bool:
        self.told.append((node.node_id, message))
        return True


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
        assert [(name, type(message)) for name, message in its.told] == [("a", Drain)]
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
        assert [(name, type(message)) for name, message in its.told] == [("a", Drain)]
        (request,) = its.fleet.sent["a"]
        its.fleet.stream("a", request, [5, 6])
        its.fleet.router.leave(its.fleet.node("a"), "said goodbye")
        await asyncio.sleep(0)
        again = its.fleet.sent["b"][-1]
        assert again.request_id == request.request_id and len(again.prompt_ids) == len(request.prompt_ids) + 8

    with_control(tmp_path, test, "a", "b")


# The last node that serves may be drained too; the answer says what follows.
def test_draining_the_last_node_says_so(tmp_path):
    async def test(its: Controlled) -> None:
        assert "no other node serves now" in its.control.drain("a")

    with_control(tmp_path, test, "a")


# An evicted node's requests go elsewhere at once. Its name is refused until it is let in again; a new orchestrator
# knows nothing of it.
def test_evict_reissues_at_once(tmp_path):
    async def test(its: Controlled) -> None:
        await its.fleet.ask(2)
        text = its.control.evict("a")
        assert "requests that go elsewhere now: 1." in text and len(its.fleet.sent["b"]) == 2
        # Its process ends without an error. What it still answers is dropped: another node has the request.
        assert [(name, type(message)) for name, message in its.told] == [("a", Drain)]
        its.fleet.answer("a", its.fleet.sent["a"][0])
        counters = its.fleet.router.counters
        assert (counters.answered, counters.late_answers, its.fleet.router.in_flight) == (0, 1, 2)
        assert its.fleet.router.nodes.refused["a"] == ("evicted", "evicted by the operator")
        (row,) = [row for row in its.accounts.rows() if row.name == "a"]
        assert row.state == "evicted"
        with pytest.raises(RequestError, match="refused already"):
            its.control.evict("a")
        with pytest.raises(RequestError, match="only a connected node can be drained"):
            its.control.drain("a")
        assert Controlled(tmp_path).fleet.router.nodes.refused == {}
        its.control.unban("a")
        assert its.fleet.router.nodes.refused == {}

    with_control(tmp_path, test, "a", "b")


# A ban outlasts the orchestrator, of a node without a key of its own by name; unban ends it for good.
def test_a_ban_is_remembered(tmp_path):
    async def test(its: Controlled) -> None:
        assert "by name, as it has no key of its own" in its.control.ban("a")
        later = Controlled(tmp_path)
        assert later.fleet.router.nodes.refused == {"a": ("banned", "banned by the operator")}
        assert [(row.name, row.state) for row in later.accounts.rows()] == [("a", "banned")]
        with pytest.raises(RequestError, match="banned already"):
            later.control.ban("a")
        with pytest.raises(RequestError, match="node x is not refused: refused are a"):
            later.control.unban("x")
        later.control.unban("a")
        assert Controlled(tmp_path).fleet.router.nodes.refused == {}

    with_control(tmp_path, test, "a", "b")


# The key of a node that has its own is revoked and admitted again, also while the node is away.
def test_a_ban_revokes_the_nodes_key(tmp_path):
    async def test(its: Controlled) -> None:
        key = b"k" * 40
        its.keys.registry.admit(key, "rented")
        assert "refused by name and key" in its.control.ban("rented")
        assert not its.keys.registry.is_known(key)
        its.control.unban("rented")
        assert its.keys.registry.is_known(key)

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


# A revoked key without a name in banned.json, after a crash between the two or a removed file, is let in again.
def test_unban_finds_a_key_that_is_revoked(tmp_path):
    async def test(its: Controlled) -> None:
        its.keys.registry.admit(b"k" * 40, "rented")
        its.control.ban("rented")
        (tmp_path / "banned.json").unlink()
        later = Controlled(tmp_path)
        with pytest.raises(RequestError, match="node x is not refused: refused are rented"):
            later.control.unban("x")
        assert "may connect again" in later.control.unban("rented")
        assert its.keys.registry.is_known(b"k" * 40)

    with_control(tmp_path, test, "a")


# An unknown name is answered with the known ones and the nearest.
@pytest.mark.parametrize("action", ["drain", "evict", "ban"])
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
        assert its.fleet.node("a").draining and isinstance(its.told[-1][1], Drain)

    with_control(tmp_path, test, "a", "b")


# A damaged list of banned nodes stops the start: an empty one would admit them all.
def test_a_damaged_list_admits_nobody(tmp_path):
    (tmp_path / "banned.json").write_text('{"a": ')
    with pytest.raises(ConfigError, match="remove it to admit every banned name again"):
        asyncio.run(_make(tmp_path))


async def _make(folder: Path) -> Controlled:
    return Controlled(folder)
