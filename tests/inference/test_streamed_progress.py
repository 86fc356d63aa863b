"""What a node streams of an answer that is not complete, and how an engine goes on from there."""

import asyncio

from composer_prime.wire.node_messages import Generate, Sampled, Sampling
from composer_prime.wire.types import ints, pack_ints
from inference.node import RunningAnswers
from inference.receiver import Receiver

PROMPT = [5, 6, 7, 8, 9, 10]


async def test_only_tokens_of_proven_weights_are_streamed(engine, folder):
    """Nothing leaves while a swap is unproven or after weights were taken back; else the parts are the answer's."""
    sent: list[Sampled] = []
    receiver = Receiver(engine, None, folder, 1e-3)  # type: ignore[arg-type]
    answers = RunningAnswers(engine, receiver, sent.append, asyncio.get_running_loop().create_future())
    sampling = Sampling(max_tokens=240, seed=3, ignore_eos=True)
    message = Generate(request_id="r", lease=4, prompt_ids=pack_ints(PROMPT), sampling=sampling, session="s")
    answers.accept(message)
    await asyncio.sleep(0)
    receiver.settled.clear()
    await answers.flush()
    unproven = len(sent)
    receiver.settled.set()
    while len(answers) and len(sent) < 2:
        await answers.flush()
    receiver.rollbacks += 1
    before = len(sent)
    await answers.flush()
    answers.drop()
    receiver.close()
    done = await engine.generate("whole", PROMPT, sampling, "t")
    assert unproven == 0 and len(sent) == before >= 1
    streamed: list[int] = []
    for part in sent:
        assert (part.request_id, part.lease, part.start) == ("r", 4, len(streamed))
        assert part.version_spans[0].start == 0 and part.version_spans[-1].end == len(ints(part.token_ids))
        streamed += ints(part.token_ids).tolist()
    assert streamed == done.ids.tolist()[: len(streamed)]
