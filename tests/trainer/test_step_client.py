"""A rank's side of the step protocol, in this process: refused answers, deadlines, repetitions."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from small_runs import Run, make_samples
from step_peer import StepPeer

from composer_prime.errors import ComposerError, DeadlineError
from composer_prime.run.keys import RunKeys
from composer_prime.wire.types import StepRefused, StepRequest
from trainer import data
from trainer.data import StepClient, find_endpoint, never, next_batch

VERSIONS = (-1, 0)


@contextmanager
def connected(run: Run, peer: StepPeer, silence_timeout_s: float = 20) -> Iterator[StepClient]:
    rank = StepRequest(run_id=peer.run_id, step=0, rank=0, world_size=1, max_tokens=128)
    address = json.loads(run.dir.endpoints.read_bytes())["step"]
    keys = RunKeys(run.dir.keys).client("trainer")
    client = StepClient(address, keys, rank, lambda: False, silence_timeout_s=silence_timeout_s)
    try:
        yield client
    finally:
        client.close()


def with_batches(change):
    """An answer that alters each micro-batch of the honest reply."""

    def answer(peer, request):
        reply = peer.honest(request)
        batches = [change(batch) for batch in reply.micro_batches]
        return msgspec.msgpack.encode(msgspec.structs.replace(reply, micro_batches=batches))

    return answer


def flipped(batch):
    ids = bytearray(batch.input_ids)
    ids[0] ^= 1
    return msgspec.structs.replace(batch, input_ids=bytes(ids))


def one_more(field):
    """An answer whose totals count one more of `field` than its micro-batches hold."""

    def answer(peer, request):
        reply = peer.honest(request)
        wrong = msgspec.structs.replace(reply.totals, **{field: getattr(reply.totals, field) + 1})
        return msgspec.msgpack.encode(msgspec.structs.replace(reply, totals=wrong))

    return answer


ANSWERS = {
    "a flipped bit": (with_batches(flipped), "ChecksumError: micro-batch 0 of step 1 has checksum"),
    "a batch of another run": (
        with_batches(lambda batch: msgspec.structs.replace(batch, run_id="other")),
        "RunMismatchError: micro-batch has run_id 'other', this trainer rank asked for 'run-",
    ),
    "rollouts that are too old": (
        with_batches(lambda batch: msgspec.structs.replace(batch, versions=(-5, batch.versions[1]))),
        "holds policy versions -5..0; allowed are -1..0 (raise orchestrator.max_staleness",
    ),
    **{
        f"a wrong count of {name}": (one_more(field), f"{name}, the orchestrator's totals say")
        for field, name in {
            "samples": "12 samples with trained tokens",
            "tokens": "trained tokens",
            "micro_batches": "micro-batches with trained tokens",
            "distilled_turns": "0 distilled turns",
        }.items()
    },
    "a refusal": (
        lambda peer, request: msgspec.msgpack.encode(StepRefused(error="this is run 'x'")),
        "RunMismatchError: the orchestrator refused the request for the batch of step 1: this is run 'x'",
    ),
}


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("case", ANSWERS)
def test_a_wrong_answer_is_refused_by_name(make_run, case):
    # Each wrong answer of the step server is an error that names what is wrong, before anything is trained.
    answer, reason = ANSWERS[case]
    run = make_run()
    with (
        StepPeer(run.dir, make_samples, max_steps=3, answer=answer) as peer,
        connected(run, peer) as client,
        pytest.raises(ComposerError) as caught,
    ):
        next_batch(client, 1, VERSIONS)
    assert reason in f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.usefixtures("world")
def test_silence_has_a_deadline(make_run):
    # An orchestrator that never answers, and one that never wrote its address: DeadlineError says what was awaited.
    run = make_run()
    with StepPeer(run.dir, make_samples, max_steps=3) as peer, connected(run, peer, 0.5) as client:
        peer.quiet_from = 1
        with pytest.raises(DeadlineError, match=r"batch of step 1.*the limit is 0\.5"):
            list(client.asking(1, VERSIONS))
    run.dir.endpoints.unlink()
    with pytest.raises(DeadlineError, match=r"to write its address to .*endpoints\.json"):
        find_endpoint(run.dir.endpoints, 0.1, never)


def test_a_request_is_repeated_ever_more_rarely(make_run, monkeypatch):
    # A large batch over a thin link looks like silence: each repetition would put it on the link once more.
    monkeypatch.setattr(data, "REPEAT_S", 0.1)
    run = make_run()
    with StepPeer(run.dir, make_samples, max_steps=3) as peer, connected(run, peer, 3.5) as client:
        peer.quiet_from = 1
        with pytest.raises(DeadlineError):
            list(client.asking(1, VERSIONS))
    assert 2 <= len(peer.requests) <= 6


def test_a_lost_step_done_is_repeated(make_run, monkeypatch):
    # The link loses StepDone of step 1 and of the last step: both arrive in the end, in order, before the checkpoint.
    monkeypatch.setattr(data, "REPEAT_S", 0.2)
    run = make_run()
    with StepPeer(run.dir, make_samples, max_steps=3) as peer, connected(run, peer) as client:
        peer.lost_first = {1, 3}
        client.announce(0, 0, [], {}, None, never)
        for step in (1, 2, 3):
            next(filter(None, client.asking(step, (0, step - 1))))
            client.announce(step, step, [f"s{step}"], {}, None, never)
        client.checkpoint(3)
        assert peer.checkpoints == [3]
    assert list(dict.fromkeys(message.step for message in peer.done)) == [0, 1, 2, 3]
