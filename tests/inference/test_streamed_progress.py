"""What a node streams of an answer that is not complete, and how an engine goes on from there."""

from __future__ import annotations

import asyncio

import pytest

from composer_prime.wire.node_messages import Generate, Sampled, Sampling
from composer_prime.wire.types import ints, pack_ints
from inference.partial_answers import ProgressStreams
from inference.receiver import Receiver

PROMPT = [5, 6, 7, 8, 9, 10]


def test_only_tokens_of_proven_weights_are_streamed(loop, engine, folder):
    """Nothing leaves while a swap is unproven or after weights were taken back; else the parts are the answer's."""

    async def scenario():
        sent: list[Sampled] = []
        receiver = Receiver(engine, None, folder, 1e-3)  # type: ignore[arg-type]
        streams = ProgressStreams(engine, receiver, sent.append)
        sampling = Sampling(max_tokens=240, seed=3, ignore_eos=True)
        message = Generate(request_id="r", lease=4, prompt_ids=pack_ints(PROMPT), sampling=sampling, session="s")
        streams.begin("r/4", message)
        call = asyncio.ensure_future(engine.generate("r/4", PROMPT, sampling, "s"))
        await asyncio.sleep(0)
        receiver.settled.clear()
        await streams.flush()
        unproven = len(sent)
        receiver.settled.set()
        while not call.done() and len(sent) < 2:
            await streams.flush()
        receiver.rollbacks += 1
        before = len(sent)
        await streams.flush()
        receiver.close()
        return unproven, sent, before, await call

    unproven, sent, before, done = loop.run(scenario())
    assert unproven == 0 and len(sent) == before >= 1
    streamed: list[int] = []
    for part in sent:
        assert (part.request_id, part.lease, part.start) == ("r", 4, len(streamed))
        assert part.version_spans[0].start == 0 and part.version_spans[-1].end == len(ints(part.token_ids))
        streamed += ints(part.token_ids).tolist()
    assert streamed == done.ids.tolist()[: len(streamed)]


@pytest.mark.parametrize("known", [True, False])
def test_a_stop_string_that_begins_before_the_seam_is_found_after_it(loop, engine, known):
    """The engine looks at the resumed tokens too; as mere prompt they do not count."""

    async def scenario():
        sampling = Sampling(max_tokens=12, seed=5, ignore_eos=True)
        whole = await engine.generate("whole", PROMPT, sampling, "s")
        first, rest = whole.ids.tolist()[:6], whole.ids.tolist()[6:]
        stop = engine._computer._decode_text(whole.ids.tolist()[4:7])
        resumed = Sampling(max_tokens=6, seed=5, ignore_eos=True, stop=[stop], resumed=6 if known else 0)
        return stop, rest, await engine.generate("rest", PROMPT + first, resumed, "t")

    stop, rest, done = loop.run(scenario())
    assert stop and done.ids.tolist() == (rest[:1] if known else rest)
    assert done.finish_reason == ("stop" if known else "length")
