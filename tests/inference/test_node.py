"""A node against a real CURVE ROUTER: requests, weights over the link, lost gateways, garbage, the end."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

from composer_prime.config.inference import InferenceConfig
from composer_prime.errors import DeadlineError, EngineError, LostWeightsError, RunMismatchError, WireError
from composer_prime.run.weights import Canary
from composer_prime.wire.node_messages import (
    CancelGenerate,
    Dismissed,
    GenerateFailed,
    Goodbye,
    Heard,
    Sampled,
    Sampling,
)
from composer_prime.wire.types import floats, ints
from inference.engines.local.local_engine import Computer, LocalEngine
from tests.engines.models import MAX_CONTEXT
from tests.inference.gateway_peer import GatewayPeer
from tests.inference.live_node import live_node
from tests.inference.publisher import CANARY

PROMPT = [5, 6, 7, 8, 9, 10]
IMPATIENT = {"connect_timeout_s": 1.0, "lost_after_s": 0.5}


@pytest.fixture
def serving(folder, config, keys, publisher):
    """A node that has sent a heartbeat, and its gateway: `async with serving() as (gateway, node, ended)`."""

    @asynccontextmanager
    async def serving(
        manifest: bytes = b"",
        config: InferenceConfig = config,
        computer: type[Computer] = Computer,
    ):
        gateway = GatewayPeer(keys, publisher.store)
        gateway.manifest = manifest
        engine, client = LocalEngine(folder, config, MAX_CONTEXT, computer), keys.client("node")
        link = {"chunk_timeout_s": 1.0}
        try:
            async with live_node("node-a", engine, folder, config, lambda: gateway.endpoint, client, link=link) as made:
                await gateway.until(lambda: gateway.statuses, "a heartbeat")
                yield gateway, *made
        finally:
            await gateway.close()

    return serving


async def test_a_request_is_answered_with_its_lease(serving, reference):
    # Ids, logprobs, spans and lease come back; the logprobs are those of the reference.
    async with serving() as (gateway, _, _):
        gateway.generate("r1", PROMPT, lease=41, temperature=0.8, seed=3)
        hello, done = gateway.hellos[0], await gateway.next()
    assert (hello.node_id, hello.engine, hello.run_id, hello.version) == ("node-a", "local", None, 0)
    assert isinstance(done, Sampled) and (done.request_id, done.lease, done.finish_reason) == ("r1", 41, "length")
    tokens = ints(done.token_ids).tolist()
    expected = reference.rescore(PROMPT, tokens, done.version_spans, Sampling(max_tokens=8, temperature=0.8))
    assert np.abs(floats(done.logprobs) - expected.numpy()).max() < 1e-4


async def test_what_cannot_be_served_is_said(serving):
    # A prompt beyond the context, ids beyond the vocabulary and torn bytes fail for good; the node goes on.
    async with serving() as (gateway, _, _):
        gateway.generate("long", [5] * MAX_CONTEXT)
        gateway.generate("odd", [5, 100_000])
        answers = [await gateway.next(), await gateway.next()]
        gateway.generate("fine", PROMPT)
        failures, fine = answers, await gateway.next()
    assert all(isinstance(answer, GenerateFailed) and not answer.retryable for answer in failures)
    assert "context" in failures[0].error and "vocabulary" in failures[1].error
    assert isinstance(fine, Sampled)


async def test_an_engine_that_gives_no_scores_ends_its_node(serving, monkeypatch):
    # A hung engine fails by its deadline. Its node must not stay attached: it would take requests for ever.
    async def hangs(*_: object) -> None:
        raise DeadlineError("waited 9 s for scores")

    async with serving() as (gateway, node, ended):
        for name in ("generate", "score"):
            monkeypatch.setattr(node._engine, name, hangs)
        gateway.generate("lost", PROMPT)
        assert (await gateway.next()).retryable
        with pytest.raises(EngineError, match="the engine died: waited 9 s for scores"):
            await asyncio.wait_for(ended, 60)


async def test_a_cancelled_request_is_not_answered(serving):
    # Cancel frees the place without an answer; the next request is served.
    async with serving() as (gateway, _, _):
        gateway.generate("gone", PROMPT, max_tokens=240)
        await asyncio.sleep(0.02)
        gateway.send(CancelGenerate(request_id="gone", lease=1))
        gateway.generate("next", PROMPT)
        answer = await gateway.next()
        await gateway.until(lambda: gateway.statuses and gateway.statuses[-1].running == 0, "an idle node")
        silent = gateway.inbox.empty()
    assert answer.request_id == "next" and silent


async def test_weights_come_over_the_link(serving, publisher, reference):
    # The Welcome's manifest and later news are pulled, swapped in and reported; the newest wins.
    async with serving(manifest=publisher.publish(1)) as (gateway, node, _):
        await gateway.until(lambda: gateway.statuses and gateway.statuses[-1].version == 1, "version 1")
        gateway.generate("r", PROMPT, max_tokens=200)
        for version in (2, 3, 4):
            gateway.announce(publisher.publish(version))
        await gateway.until(lambda: gateway.statuses[-1].version == 4, "version 4")
        answer = await gateway.next()
        assert gateway.statuses[-1].canary_error < 1e-3
        seen = {status.version for status in gateway.statuses}
        scores = torch.tensor(await node._engine.score(CANARY))
    assert isinstance(answer, Sampled) and 3 not in seen
    assert (scores - reference.score(CANARY, 4)).abs().max() < 1e-4


class HeldComputer(Computer):
    """Samples the first tokens of answers, and no further ones before it has the weights of version `held_until`."""

    held_until = 0

    def _compute(self, step) -> None:
        if self.version < self.held_until and any(self.running[slot].logprobs for slot in step.slots):
            time.sleep(0.001)
            return
        super()._compute(step)


async def test_a_swap_is_reported_before_the_answers_that_show_it(serving, publisher):
    # The gateway refuses an answer with a swap that it does not know of. Here some go on only with the new weights.
    async with serving(computer=HeldComputer) as (gateway, node, _):
        computer, answers, number = node._engine._computer, [], 0
        for version in (1, 2, 3, 4):
            computer.held_until, sampled = version, computer.sampled
            for _ in range(6):
                number += 1
                gateway.generate(f"r{number}", PROMPT, max_tokens=20 + 11 * (number % 6), session=f"s{number}")
            await gateway.until(lambda sampled=sampled: computer.sampled > sampled, "a first token")
            gateway.announce(publisher.publish(version))
            answers += [await gateway.next() for _ in range(6)]
            await gateway.until(lambda version=version: gateway.statuses[-1].version == version, "the version")
        versions_at = gateway.versions_at
    assert all(isinstance(answer, Sampled) for answer in answers)
    for answer in answers:
        assert {span.version for span in answer.version_spans} <= set(versions_at[answer.request_id])
    swapped_to = {answer.version_spans[-1].version for answer in answers if len(answer.version_spans) > 1}
    assert swapped_to == {1, 2, 3, 4}


async def test_bad_weights_are_reported_and_mended(serving, publisher):
    # A forged manifest and a truncated chunk leave version 0 in use and say why; what is mended is installed.
    async with serving() as (gateway, _, _):
        gateway.announce(publisher.forge(1))
        await gateway.until(lambda: "signature" in (gateway.statuses[-1].weight_error or ""), "the refusal")
        manifest = publisher.manifest(2)
        publisher.damage(manifest, 0, keep=10)
        signed = publisher.publish(2)
        publisher.damage(manifest, 0, keep=10)
        gateway.announce(signed)
        await gateway.until(lambda: "chunk" in (gateway.statuses[-1].weight_error or ""), "the damage")
        assert gateway.statuses[-1].version == 0
        gateway.generate("meanwhile", PROMPT)
        meanwhile = await gateway.next()
        publisher.manifest(2)
        await gateway.until(lambda: gateway.statuses[-1].version == 2, "the mended version")
        status = gateway.statuses[-1]
    assert isinstance(meanwhile, Sampled) and meanwhile.version_spans[0].version == 0
    assert status.weight_error is None


async def test_a_node_that_may_pull_no_more_serves_on(serving, publisher):
    # It says why, keeps its version, and takes the next one once it may pull again.
    async with serving() as (gateway, _, _):
        gateway.refusal = "this node pulled 9 MB: keep its state folder"
        gateway.announce(publisher.publish(1))
        await gateway.until(lambda: "state folder" in (gateway.statuses[-1].weight_error or ""), "the refusal")
        gateway.generate("meanwhile", PROMPT)
        meanwhile = await gateway.next()
        gateway.refusal = None
        gateway.announce(publisher.publish(2))
        await gateway.until(lambda: gateway.statuses[-1].version == 2, "the next version")
        status = gateway.statuses[-1]
    assert isinstance(meanwhile, Sampled) and meanwhile.version_spans[0].version == 0
    assert status.weight_error is None


async def test_a_node_without_weights_ends(serving, publisher):
    """A node whose refused weights cannot be replaced by the old ones says why, ends, and answers nothing."""
    async with serving() as (gateway, node, ended):
        node._receiver._folder = publisher.store.root  # holds no model to go back to
        refused = Canary(token_ids=CANARY, logprobs=[-1.0] * (len(CANARY) - 1))
        gateway.announce(publisher.publish(1, canary=refused))
        await gateway.until(lambda: ended.done(), "the end")
        error, last = ended.exception(), await gateway.next()
    assert isinstance(error, LostWeightsError) and "v0 could not be loaded again" in str(error)
    assert isinstance(last, Goodbye) and last.reason in str(error)


async def test_garbage_is_dropped(serving, caplog):
    # Bytes that are no message are logged and change nothing.
    async with serving() as (gateway, _, _):
        for frames in ([b""], [b"\xc1" * 50], [b"\x81\xa4type\xa5other"], [b"a", b"b"], [b"\x91" * 100_000]):
            gateway.send_raw(*frames)
        gateway.generate("fine", PROMPT)
        assert isinstance(await gateway.next(), Sampled)
    assert caplog.text.count("bytes that are no message of the gateway") == 5


async def test_a_restarted_gateway_is_found_again(serving, keys, publisher):
    # A gateway that comes back (here: at another address) gets a Hello with the run and version, and new requests.
    async with serving() as (gateway, _, _):
        gateway.generate("lost", PROMPT, max_tokens=240)
        await gateway.close()
        await asyncio.sleep(0.5)
        again = GatewayPeer(keys, publisher.store)
        gateway.endpoint = again.endpoint
        await again.until(lambda: again.statuses, "the node to come back")
        again.generate("new", PROMPT)
        answer = await again.next()
        await again.close()
        hello = again.hellos[-1]
    assert (hello.run_id, answer.request_id) == ("run-1", "new")


async def test_hello_is_said_again_when_asked(serving):
    # A gateway that no longer knows the connection asks once more, and what ran for it is dropped.
    async with serving() as (gateway, _, _):
        gateway.generate("old", PROMPT, max_tokens=240)
        gateway.known.clear()
        await gateway.until(lambda: len(gateway.hellos) >= 2, "a second Hello")
        gateway.send(Heard(known=False))
        await gateway.until(lambda: len(gateway.hellos) >= 3, "a third Hello")
        gateway.generate("new", PROMPT)
        answer, empty = await gateway.next(), gateway.inbox.empty()
    assert answer.request_id == "new" and empty


async def test_a_node_without_gateway_gives_up(serving, config):
    # After connect_timeout_s of silence the node ends with an error that says what it waited for.
    async with serving(config=config.model_copy(update=IMPATIENT)) as (gateway, _, ended):
        gateway.silent = True
        with pytest.raises(DeadlineError, match=r"gateway at tcp://127.0.0.1"):
            await asyncio.wait_for(ended, 100)


@pytest.mark.parametrize("may_return", [False, True])
async def test_a_rejected_node_ends(serving, may_return):
    # Dismissed ends the node with the gateway's reason; the error says whether another start may help.
    async with serving() as (gateway, _, ended):
        gateway.send(Dismissed(reason="give nodes own names", may_return=may_return))
        with pytest.raises(WireError, match="own names") as caught:
            await asyncio.wait_for(ended, 100)
    assert isinstance(caught.value, RunMismatchError) is not may_return


async def test_an_evicted_node_ends_without_an_error(serving):
    # Whoever started it would start it again after an error. It is drained, and a Hello on the way is refused.
    async with serving() as (gateway, _, ended):
        gateway.send(Dismissed(reason="this node was evicted by the operator", finish_first=True))
        gateway.send(Dismissed(reason="evicted by the operator", may_return=False))
        await asyncio.wait_for(ended, 100)


@pytest.mark.parametrize("by", ["gateway", "signal"])
async def test_drain_finishes_and_says_goodbye(serving, by):
    # A drained node answers what runs, gives new requests back untried, says Goodbye and ends.
    async with serving() as (gateway, node, ended):
        gateway.generate("running", PROMPT, max_tokens=200)
        await asyncio.sleep(0.02)
        gateway.send(Dismissed(reason="enough", finish_first=True)) if by == "gateway" else node.stop("SIGTERM")
        await asyncio.sleep(0.02)
        gateway.generate("late", PROMPT)
        answers = [await gateway.next() for _ in range(3)]
        await asyncio.wait_for(ended, 100)
    by_kind = {type(answer): answer for answer in answers}
    assert by_kind[Sampled].request_id == "running"
    late = by_kind[GenerateFailed]
    assert (late.request_id, late.retryable, late.tried) == ("late", True, False)
    assert isinstance(answers[-1], Goodbye)


async def test_drain_has_a_deadline(serving, config):
    # Requests that do not end within DRAIN_S are dropped; a second stop drops them at once.
    async with serving() as (gateway, node, ended):
        for k in range(40):
            gateway.generate(f"r{k}", PROMPT, max_tokens=240)
        await asyncio.sleep(0.05)
        node.stop("SIGTERM")
        await asyncio.sleep(0.05)
        node.stop("SIGTERM")
        await asyncio.wait_for(ended, 30)
