"""A request whose node is gone goes on elsewhere after the tokens that the node had streamed."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from fleet import Fleet, status
from gateway_made import MODEL, generate_body, post
from node_peer import failed

from composer_prime.config.inference import InferenceConfig, LocalEngineConfig
from composer_prime.wire.node_messages import Generate, NodeHello, Sampling
from composer_prime.wire.types import VersionSpan, ints, pack_ints
from inference.engines.local.local_engine import Computer, LocalEngine
from inference.node import GatewayLink, InferenceNode
from inference.receiver import Receiver


@pytest.mark.parametrize("how", ["vanishes", "drains", "stalls"])
async def test_another_node_continues_after_the_streamed_tokens(how):
    """It gets them as a part of the prompt, samples the rest, and the caller gets one answer of both."""
    fleet = Fleet(a={}, b={})
    await fleet.ask(prompt=3, seed=7)
    [first] = fleet.sent["a"]
    fleet.stream("a", first, [10, 11])
    fleet.stream("a", first, [12], start=2)
    node = fleet.node("a")
    if how == "vanishes":
        fleet.router.leave(node, "silent")
    elif how == "drains":
        fleet.router.on_failed(node, failed(first, "it is draining", retryable=True, tried=False))
    else:
        for request in node.leases.values():
            request.running.placed -= 100.0
        node.progress -= 100.0
        fleet.router.reclaim_stalled(75.0)
    [second] = fleet.sent["b"]
    assert ints(second.prompt_ids).tolist() == [5, 5, 5, 10, 11, 12]
    assert (second.sampling.max_tokens, second.sampling.resumed, second.sampling.seed) == (5, 3, 7)
    fleet.finish("b", second, [13, 14])
    answer = await fleet.calls[0]
    assert answer.ids.tolist() == [10, 11, 12, 13, 14]
    assert answer.token_logprobs.tolist() == [-0.5, -0.5, -0.5, -0.25, -0.25]
    assert answer.version_spans == [VersionSpan(0, 5, 0)] and tuple(answer.sampled_by) == (("a", 3), ("b", 2))
    assert (fleet.router.counters["tokens_resumed"], fleet.router.counters["tokens_lost"]) == (3, 0)


async def test_an_answer_goes_on_with_the_same_or_newer_weights():
    """The versions of an answer never fall: it waits for a node with the new weights, and its spans show both."""
    fleet = Fleet(a={"version": 2}, old={"version": 1})
    fleet.router.policy.newest = 3
    await fleet.ask()
    [first] = fleet.sent["a"]
    fleet.stream("a", first, [10, 11], version=2)
    hello = NodeHello(node_id="new", engine="test", run_id=None, version=3, max_concurrent=64, instance="new")
    fleet.sent["new"], fleet.cancelled["new"] = [], []
    fleet.router.attach(b"new", hello)
    fleet.router.leave(fleet.node("a"), "silent")
    assert not fleet.sent["old"]
    fleet.finish("new", fleet.sent["new"][0], [12], version=3)
    assert (await fleet.calls[0]).version_spans == [VersionSpan(0, 2, 2), VersionSpan(2, 3, 3)]


@pytest.mark.parametrize("how", ["answers", "streams"])
async def test_a_claim_of_older_weights_than_the_request_allows_is_refused(how):
    """Neither below the rollout's oldest version nor below that of the tokens that it continues."""
    fleet = Fleet(a={"version": 3}, b={"version": 3}, c={"version": 3})
    fleet.router.policy.newest = 3
    work = fleet.router.generate("g", "g", pack_ints([5]), Sampling(max_tokens=8), oldest_version=2)
    fleet.calls.append(asyncio.create_task(work))
    await asyncio.sleep(0)
    claim = fleet.finish if how == "answers" else fleet.stream
    claim("a", fleet.sent["a"][0], [10], version=1)
    fleet.stream("b", fleet.sent["b"][0], [10], version=3)
    fleet.router.leave(fleet.node("b"), "silent")
    claim("c", fleet.sent["c"][0], [11], version=2)
    assert [fleet.node(name).record.bad_answers for name in "abc"] == [1, 0, 1]


async def test_an_answer_that_no_serving_node_can_continue_starts_anew():
    """The node that is left has older weights: it gets the request as it came, and the lost tokens are counted."""
    fleet = Fleet(a={"version": 2}, old={"version": 1})
    fleet.router.policy.newest = 2
    await fleet.ask(max_tokens=8)
    fleet.stream("a", fleet.sent["a"][0], [10, 11], version=2)
    fleet.router.leave(fleet.node("a"), "silent")
    [again] = fleet.sent["old"]
    assert (len(ints(again.prompt_ids)), again.sampling.resumed, again.sampling.max_tokens) == (1, 0, 8)
    assert fleet.router.counters["tokens_lost"] == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"start": 1},
        {"ids": []},
        {"ids": [10] * 8},
        {"ids": [256]},
        {"version": 5},
        {"logprobs": b""},
        {"version_spans": []},
        {"ids": [10, 11], "version_spans": [VersionSpan(0, 1, 0), VersionSpan(1, 2, 0)]},
    ],
)
async def test_a_part_that_cannot_be_true_costs_the_node_the_request(changes):
    """Gaps, too many tokens, unknown ids, a version from the future: nothing is kept, and another node starts anew."""
    fleet = Fleet(a={}, b={})
    await fleet.ask()
    [first] = fleet.sent["a"]
    fleet.stream("a", first, **({"ids": [10]} | changes))
    assert fleet.node("a").record.bad_answers == 1 and fleet.cancelled["a"] == [first.lease]
    [second] = fleet.sent["b"]
    assert len(ints(second.prompt_ids)) == 1


async def test_an_answer_must_begin_with_what_was_streamed():
    """A node that answers with other tokens than it streamed is not believed in either."""
    fleet = Fleet(a={}, b={})
    await fleet.ask()
    fleet.stream("a", fleet.sent["a"][0], [10, 11])
    fleet.finish("a", fleet.sent["a"][0], [10, 12, 13])
    assert (fleet.node("a").record.bad_answers, fleet.router.counters["tokens_lost"]) == (1, 2)
    assert len(ints(fleet.sent["b"][0].prompt_ids)) == 1


async def test_a_late_part_means_nothing():
    """After its request was taken back, what a node streams is dropped."""
    fleet = Fleet(a={}, b={})
    await fleet.ask()
    [first] = fleet.sent["a"]
    fleet.calls[0].cancel()
    await asyncio.gather(*fleet.calls, return_exceptions=True)
    fleet.stream("a", first, [10])
    fleet.router.update_status(fleet.node("a"), status())
    assert fleet.node("a").record.bad_answers == 0


class SlowComputer(Computer):
    """With a pause at each step an answer takes longer than a part of it needs to be streamed."""

    pause_s = 0.0

    def _compute(self, step) -> None:
        time.sleep(self.pause_s)
        super()._compute(step)


class RealNode:
    """A node with a local engine on loopback, which can end as a killed process does: without a word."""

    def __init__(self, name: str, endpoint: str, keys) -> None:
        config = InferenceConfig(device="cpu", dtype="float32", local=LocalEngineConfig(max_batch=4), heartbeat_s=0.1)
        self.engine: Any = LocalEngine(MODEL, config, 512, SlowComputer)
        self.link = GatewayLink(lambda: endpoint, keys)
        self.receiver = Receiver(self.engine, self.link, MODEL, 0.05)
        self.node = InferenceNode(name, self.engine, self.link, self.receiver, config)
        self.running: asyncio.Future | None = None

    async def start(self) -> None:
        await self.engine.start()
        self.running = asyncio.ensure_future(self.node.run())

    async def kill(self) -> None:
        if self.running is not None:
            self.link.close()
            self.running.cancel()
            await asyncio.gather(self.running, return_exceptions=True)
            self.running = None
            await self.engine.close()
            self.receiver.close()


async def test_killed_in_mid_answer_the_tokens_are_those_of_a_calm_run(open_gateway, node_keys):
    """Two real engines: the second one samples the rest with the same draws, and no streamed token again."""
    body = generate_body(*range(5, 25), max_tokens=120, seed=11, ignore_eos=True)
    async with open_gateway(inference={"heartbeat_s": 0.1, "lost_after_s": 100.0}) as gateway:
        a, b = (RealNode(name, gateway.node_endpoint, node_keys) for name in "ab")
        try:
            await a.start()
            await b.engine.start()
            calm = (await post(gateway.http_url, body))[1]["choices"][0]["token_ids"]
            a.engine._computer.pause_s = 0.04
            b.running = asyncio.ensure_future(b.node.run())
            call = asyncio.create_task(post(gateway.http_url, body))
            async with asyncio.timeout(100):
                while not (held := list(gateway.router.open)) or not held[0].running.streamed:
                    await asyncio.sleep(0.01)
                while "b" not in gateway.versions():
                    await asyncio.sleep(0.01)
                await a.kill()
                [node] = [node for node in gateway.router.attached() if node.node_id == "a"]
                gateway.router.leave(node, "killed")
                status_code, reply = await call
            resumed = gateway.router.counters["tokens_resumed"]
            assert status_code == 200 and reply["choices"][0]["token_ids"] == calm and len(calm) == 120
            assert resumed > 0 and b.engine._computer.sampled == 120 - resumed
        finally:
            await a.kill()
            await b.kill()


def swapped(fleet: Fleet, name: str, request: Generate, swap: int, versions: tuple[int, int], count: int = 4) -> None:
    """Have a node answer and claim that it swapped weights after `swap` tokens."""
    ids, (old, new) = [10, 11, 12, 13][:count], versions
    spans = [VersionSpan(0, swap, old), VersionSpan(swap, count, new)]
    fleet.stream(name, request, ids, version_spans=spans, finish_reason="stop")


def report(fleet: Fleet, name: str, version: int) -> None:
    fleet.router.update_status(fleet.node(name), status(version=version))


@pytest.mark.parametrize("swap", [1, 3])
async def test_a_swap_that_the_node_did_not_report_meanwhile_is_refused(swap):
    """With one in each answer, most tokens of a node with old weights would not be compared with those."""
    fleet = Fleet(a={"version": 3}, b={"version": 4})
    fleet.router.policy.newest = 4
    await fleet.ask(2)
    swapped(fleet, "a", fleet.sent["a"][0], swap, (3, 4))
    assert fleet.node("a").record.bad_answers == 1 and len(fleet.sent["b"]) == 2, "it goes to another node"
    report(fleet, "a", 4)
    await fleet.ask(2)
    swapped(fleet, "a", fleet.sent["a"][1], swap, (3, 4))
    assert fleet.node("a").record.bad_answers == 2, "it had swapped before it got this one"


async def test_honest_swaps_within_answers_are_taken():
    """All requests in flight may show it, also one to a version after the next, and so may streamed parts."""
    fleet = Fleet(a={"version": 3})
    fleet.router.policy.newest = 5
    await fleet.ask(5)
    for request in fleet.sent["a"]:
        fleet.stream("a", request, [10], version=3)
    report(fleet, "a", 5)
    one, two, three, four, late = fleet.sent["a"]
    swapped(fleet, "a", one, 1, (3, 5))
    swapped(fleet, "a", two, 3, (3, 5))
    fleet.stream("a", three, [11], start=1, version=5)
    swapped(fleet, "a", three, 1, (3, 5))
    fleet.stream("a", four, [11, 12], start=1, version_spans=[VersionSpan(0, 1, 3), VersionSpan(1, 2, 5)])
    swapped(fleet, "a", four, 2, (3, 5))
    await fleet.ask()
    fleet.finish("a", fleet.sent["a"][5], [10], version=5)
    fleet.finish("a", late, [10, 11], version=3)
    answers = await asyncio.gather(*fleet.calls)
    assert [len(answer.version_spans) for answer in answers] == [2, 2, 2, 2, 1, 1]
    assert fleet.node("a").record.bad_answers == 0


async def test_a_version_is_swapped_in_once():
    """Going back and forth in its reports lets a node claim nothing; a trainer that resumed lets it swap again."""
    fleet = Fleet(a={"version": 3})
    fleet.router.policy.newest = 4
    report(fleet, "a", 4)
    await fleet.ask()
    report(fleet, "a", 3)
    report(fleet, "a", 4)
    swapped(fleet, "a", fleet.sent["a"][0], 1, (3, 4))
    assert fleet.node("a").record.bad_answers == 1
    report(fleet, "a", 3)
    fleet.node("a").record.forget_version(4)
    report(fleet, "a", 4)
    swapped(fleet, "a", fleet.sent["a"][1], 1, (3, 4))
    assert fleet.node("a").record.bad_answers == 1


async def test_what_was_streamed_keeps_its_version():
    """A node cannot say afterwards that newer weights sampled it, nor swap between two parts without a report."""
    fleet = Fleet(a={"version": 3})
    fleet.router.policy.newest = 4
    await fleet.ask()
    fleet.stream("a", fleet.sent["a"][0], [10, 11, 12], version=3)
    report(fleet, "a", 4)
    swapped(fleet, "a", fleet.sent["a"][0], 1, (3, 4))
    assert fleet.node("a").record.bad_answers == 1
    report(fleet, "a", 3)
    fleet.stream("a", fleet.sent["a"][1], [10], version=3)
    fleet.stream("a", fleet.sent["a"][1], [11], start=1, version=4)
    assert fleet.node("a").record.bad_answers == 2
