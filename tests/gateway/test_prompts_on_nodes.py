"""A turn brings its node new tokens only, and the whole prompt wherever that node does not hold the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fleet import Fleet
from http_calls import generate_body, post
from node_peer import PeerNode, tokens_for

from composer_prime.wire.node import Generate, GenerateFailed
from composer_prime.wire.turns import HeldPrompts, Prefix, TokenHash
from composer_prime.wire.types import ints, pack_ints

TAILS = ([], [7, 8, 9], [3], [4] * 40)


async def converse(url: str, session: str, prompt: list[int], tails: Any = TAILS) -> list[int]:
    """Play turns in JSON. Returns the conversation; each answer must be that to the whole prompt."""
    ids = list(prompt)
    for tail in tails:
        ids += tail
        status, reply = await post(url, generate_body(*ids), X_Session_ID=session)
        answer = reply["choices"][0]["token_ids"]
        assert status == 200 and answer == tokens_for(ids, 6)[0].tolist()
        ids += answer
    return ids


def on_the_wire(node: PeerNode) -> list[tuple[int, int]]:
    """Tokens of the prefix and of the rest, of each Generate."""
    return [(g.prefix.num_tokens if g.prefix else 0, len(ints(g.prompt_ids))) for g in node.on_the_wire]


async def test_a_node_gets_new_tokens_only(open_gateway, node_keys):
    """Answers and records are those of the whole prompts."""
    async with (
        open_gateway() as gateway,
        PeerNode(gateway.node_endpoint, node_keys, "n0") as node,
    ):
        gateway.records.open("r")
        ids = await converse(gateway.http_url, "r", [5, 6])
        assert on_the_wire(node) == [(0, 2), (8, 3), (17, 1), (24, 40)]
        records = gateway.records.take("r")
        assert [*records[-1].prompt_ids, *records[-1].answer.ids] == ids
        assert [len(record.prompt_ids) for record in records] == [2, 11, 18, 64]
        assert gateway.metrics()["gateway/prompt_bytes_sent"] == 4 * 46


async def test_a_node_that_restarted_asks_for_the_whole_prompt(open_gateway, node_keys):
    """It costs one more message. Afterwards its turns are short again, and nobody is blamed."""
    async with open_gateway() as gateway:
        gateway.records.open("r")
        async with PeerNode(gateway.node_endpoint, node_keys, "n0") as node:
            ids = await converse(gateway.http_url, "r", [5, 6], TAILS[:2])
            node.goodbye()
        async with PeerNode(gateway.node_endpoint, node_keys, "n0") as again:
            await converse(gateway.http_url, "r", ids, [[9], [9]])
            assert on_the_wire(again) == [(17, 1), (0, 18), (24, 1)]
            assert gateway.metrics()["gateway/prefixes_missing_at_nodes"] == 1
            assert gateway.router.counters.reissued == 0 and not any(
                node.counters.failures for node in gateway.router.nodes
            )


async def test_a_conversation_that_moves_is_sent_whole(open_gateway, node_keys):
    """To the other node, and back to the first one too, which holds an older part of it."""
    async with open_gateway() as gateway:
        gateway.records.open("r")
        async with PeerNode(gateway.node_endpoint, node_keys, "n0") as first:
            ids = await converse(gateway.http_url, "r", [5, 6], TAILS[:2])
            first.goodbye()
            async with PeerNode(gateway.node_endpoint, node_keys, "n1") as second:
                ids = await converse(gateway.http_url, "r", ids, [[9], [9]])
                second.goodbye()
            first.say_hello()
            await first.until(lambda: first.welcome is not None)
            await converse(gateway.http_url, "r", ids, [[9], [9]])
        assert on_the_wire(second) == [(0, 18), (24, 1)]
        assert on_the_wire(first)[2:] == [(0, 32), (38, 1)]
        assert gateway.metrics()["gateway/prefixes_missing_at_nodes"] == 0


async def test_a_prompt_that_writes_the_answer_anew_continues_the_prompt_before(open_gateway, node_keys):
    """The node gets what follows the earlier prompt, or all when nothing is common."""
    async with (
        open_gateway() as gateway,
        PeerNode(gateway.node_endpoint, node_keys, "n0") as node,
    ):
        gateway.records.open("r")
        for ids in ([5, 6, 7], [5, 6, 7, 100, 101], [5, 6, 7, 100, 101, 9], [5, 9]):
            status, reply = await post(gateway.http_url, generate_body(*ids), X_Session_ID="r")
            assert status == 200 and reply["choices"][0]["token_ids"] == tokens_for(ids, 6)[0].tolist()
        assert on_the_wire(node) == [(0, 3), (3, 2), (5, 1), (0, 2)]


# -- the router by itself ------------------------------------------------------------------------------------------


async def fleet_with_a_turn(**hellos: dict) -> tuple[Fleet, str, Prefix]:
    """A fleet that has answered the first turn of session `s`, by the node that is returned, and the next prefix."""
    fleet = Fleet(**{name: {"engine": "local"} | changes for name, changes in hellos.items()})
    await fleet.ask(session="s", prompt=3)
    (name,) = [name for name, sent in fleet.sent.items() if sent]
    fleet.answer(name, fleet.sent[name][0])
    return fleet, name, TokenHash().extended(pack_ints([5] * 3)).prefix()


def missing(request: Generate) -> GenerateFailed:
    return GenerateFailed(request_id=request.request_id, lease=request.lease, error="no", retryable=True,
                          tried=False, prefix_missing=True)  # fmt: skip


async def test_a_node_that_lacks_what_it_was_sent_has_failed():
    """The whole prompt goes to the node that asked, once; a second such answer is its failure."""
    fleet, name, prefix = await fleet_with_a_turn(a={}, b={})
    try:
        await fleet.ask(session="s", prompt=5, prefix=prefix)
        short = fleet.sent[name][-1]
        assert (short.prefix, len(ints(short.prompt_ids))) == (prefix, 2)
        fleet.router.on_failed(fleet.node(name), missing(short))
        whole = fleet.sent[name][-1]
        assert (whole.prefix, len(ints(whole.prompt_ids))) == (None, 5) and whole.lease != short.lease
        assert fleet.node(name).counters.failures == 0 and not fleet.node(name).draining
        fleet.router.on_failed(fleet.node(name), missing(whole))
        assert fleet.node(name).counters.failures == 1
        other = "b" if name == "a" else "a"
        assert len(ints(fleet.sent[other][-1].prompt_ids)) == 5
        fleet.answer(other, fleet.sent[other][-1])
        assert (await fleet.calls[-1]).node_id == other
    finally:
        await fleet.close()


async def test_a_node_that_continues_an_answer_gets_prompt_and_answer_whole():
    """What the gone node streamed follows the whole prompt."""
    fleet, name, prefix = await fleet_with_a_turn(a={}, b={})
    try:
        await fleet.ask(session="s", prompt=5, max_tokens=8, prefix=prefix)
        fleet.stream(name, fleet.sent[name][-1], [7, 8])
        fleet.router.leave(fleet.node(name), "test")
        other = "b" if name == "a" else "a"
        request = fleet.sent[other][-1]
        assert request.prefix is None and ints(request.prompt_ids).tolist() == [5] * 5 + [7, 8]
        assert request.sampling.resumed == 2
    finally:
        await fleet.close()


# -- what a node keeps ---------------------------------------------------------------------------------------------


def test_what_a_node_keeps_is_bounded_and_never_guessed():
    """The conversation that was used least recently goes first; another digest, length or session is not held."""
    held = HeldPrompts(max_tokens=100)
    prompt = held.take("a", None, pack_ints(range(40)))
    held.add_answer("a", prompt, [1, 2])
    whole = [*range(40), 1, 2]
    for ids, session in (([*range(39), 9], "a"), ([*whole, 3], "a"), (whole, "b")):
        assert held.take(session, TokenHash().extended(pack_ints(ids)).prefix(), b"") is None
    for size in (42, 40, 7):  # The conversation, its first prompt, and any other start.
        prefix = TokenHash().extended(pack_ints(whole[:size])).prefix()
        assert held.take("a", prefix, pack_ints(whole[size:])).tolist() == whole
    held.take("b", None, pack_ints([5] * 50))
    held.take("a", prefix, pack_ints(whole[7:]))
    held.take("c", None, pack_ints([5] * 20))
    assert held.take("b", TokenHash().extended(pack_ints([5] * 50)).prefix(), b"") is None
    assert held.take("a", prefix, b"") is not None
    with pytest.raises(ValueError, match="buffer"):
        held.take("a", None, b"123")


def test_an_answer_to_an_older_prompt_does_not_replace_a_newer_one():
    """Requests of one session may cross; the newest prompt is what is kept."""
    held = HeldPrompts()
    older = held.take("s", None, pack_ints([1, 2]))
    newer = held.take("s", None, pack_ints([3, 4]))
    held.add_answer("s", older, [9])
    held.add_answer("s", newer, [8])
    prefix = TokenHash().extended(pack_ints([3, 4, 8])).prefix()
    assert np.array_equal(held.take("s", prefix, pack_ints([6])), [3, 4, 8, 6])
