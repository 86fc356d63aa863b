"""What compression still owes after a round, and after a state was taken over: what the global model lacks, no more."""

import pytest
import torch
from joint_run import Blocks, adamw, inner_step, settings

from diloco.codec import codec_of
from diloco.state import LocalWork, PendingDelta
from diloco.streaming import StreamingDiLoCo
from diloco.transport.messages import RoundOutcome
from diloco.transport.peer_link import RoundResult

CODEC = codec_of("int4")


def moved(key_file, peer, steps):
    """A peer that is connected to nobody, after some inner steps, which owes something in each of its two fragments."""
    model = Blocks()
    optimizer = adamw(model)
    config = settings("tcp://127.0.0.1:1", key_file, peer, sync_every=2, fragments=2, codec={"type": "int4"})
    engine = StreamingDiLoCo(model.named_parameters(), optimizer, config)
    for step in range(steps):
        inner_step(model, optimizer, 0, step)
    feedback = engine.replica.feedback
    for index in range(2):
        feedback.settle(index, feedback.encode(index, engine.global_model.delta(index), CODEC)[1])
    assert all(residual.any() for residual in feedback.residuals)
    return engine


def delta(engine):
    """Of its first fragment."""
    data, residual_n = engine.replica.feedback.encode(0, engine.global_model.delta(0), CODEC)
    body, name = memoryview(data.numpy()).cast("B"), CODEC.name
    facts = {"fragment": 0, "codec": name, "weight": 1.0, "inner_steps": 1}
    header = engine._link.delta_header(body, 0, engine.global_model.hash, **facts)
    return PendingDelta(header=header, body=body, residual_n=residual_n, work=LocalWork(steps=1, tokens=1))


# A delta in the global model leaves what encoding it lost; one that came too late leaves what was owed before. Where
# another process delivered in this peer's name, what it owes is not known here: nothing. Other fragments stay.
@pytest.mark.parametrize("whose", ["its own", "another peer's", "another process of this peer's"])
def test_what_a_round_leaves_owed(key_file, whose):
    engine = moved(key_file, "a", 2)
    engine.replica.pending = own = delta(engine)
    before = [residual.clone() for residual in engine.replica.feedback.residuals]
    others = {"another peer's": "b", "another process of this peer's": "a"}
    other = own if whose == "its own" else delta(moved(key_file, others[whose], 3))
    outcome = RoundOutcome(outer_step=0, headers=[other.header], newest=0, digest="")
    engine._take(RoundResult(outcome, [other.body]), 0.0)
    expected = {"its own": own.residual_n, "another peer's": before[0]}.get(whose, torch.zeros_like(before[0]))
    assert engine.outer_step == 1
    assert all(map(torch.equal, engine.replica.feedback.residuals, [expected, before[1]]))


# Who takes over another peer's state owes nothing: what it lost belonged to deltas relative to values that are gone.
def test_a_state_taken_over_leaves_nothing_owed(key_file):
    source, joiner = moved(key_file, "a", 1), moved(key_file, "b", 3)
    tensors = {name: tensor.clone() for name, tensor in source.global_model.tensors().items()}
    joiner.replica.take_over(tensors, 0)
    assert not any(residual.any() for residual in joiner.replica.feedback.residuals)
