"""Work that a round's outcome does not hold: carried on where the outcome is late, offered again where the delta is."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from joint_run import (
    Blocks,
    Trajectory,
    adamw,
    assert_same_globals,
    inner_step,
    record,
    settings,
    together,
    train,
    until,
)
from torch import Tensor, nn

from diloco.codec import codec_of
from diloco.fragments import Ranks, partition
from diloco.state import LocalWork, PendingDelta, Replica
from diloco.streaming import StreamingDiLoCo
from diloco.transport.messages import BeatReply

LR, MOMENTUM = 0.7, 0.9
OUTER = {"outer": {"lr": LR, "momentum": MOMENTUM}}


class PlainPeer:
    """A peer of the oracle: its own steps, and its parameters as one vector."""

    def __init__(self, peer: int) -> None:
        self.model, self.peer, self.step = Blocks(), peer, 0
        self.optimizer = adamw(self.model)
        self.fragment = partition(self.model.named_parameters(), 1)[0]

    def train(self, steps: int) -> Tensor:
        for _ in range(steps):
            inner_step(self.model, self.optimizer, self.peer, self.step)
            self.step += 1
        return self.fragment.read()


class PlainOuter:
    """Nesterov on one vector."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.velocity = values, torch.zeros_like(values)

    def advance(self, *deltas: tuple[Tensor, float]) -> Tensor:
        total = sum(weight for _, weight in deltas)
        mean = deltas[0][0] * (deltas[0][1] / total)
        for delta, weight in deltas[1:]:
            mean = mean + delta * (weight / total)
        self.velocity = self.velocity * MOMENTUM + mean
        self.values = self.values - (mean + self.velocity * MOMENTUM) * LR
        return self.values


# Peer b is held up past round 1's deadline. Its work, two steps, is not lost: it is in its next delta, relative to the
# global model of then, with its weight; the joint run is that of the plain algorithm, bit for bit.
def test_missed_deadline_loses_nothing(make_rendezvous, key_file):
    server = make_rendezvous(start_peers=2)
    advanced = threading.Event()

    def rounds():
        return server.server.rounds.rounds

    def lead(step, engine):
        if step == 2:
            server.server.rounds.peers["a"].deadline_s = 0.4
        if step == 4:
            advanced.set()
            until(lambda: (found := rounds().get(2)) and ("b", 0) in found.blobs, "b does not offer again")

    def lag(step, engine):
        if step == 2:
            assert advanced.wait(200)
            until(lambda: engine._link.time_left_s(1) is None, "b does not hear that round 1 is over")

    waits = {"round_deadline_s": 30, "round_timeout_s": 30}
    config = partial(settings, server.endpoint, key_file, sync_every=2, **waits, **OUTER)
    seen = together(
        partial(train, config("a"), 0, 6, before_step=lead, tokens=3),
        partial(train, config("b"), 1, 4, before_step=lag, tokens=5),
    )
    a, b = PlainPeer(0), PlainPeer(1)
    outer = PlainOuter(a.fragment.read())
    start = outer.values
    first = outer.advance((start - a.train(2), 6), (start - b.train(2), 10))
    a.fragment.write(first)
    b.fragment.write(first)
    second = outer.advance((first - a.train(2), 6))
    a.fragment.write(second)
    b.fragment.write(second + (b.train(2) - first))
    outer.advance((second - a.train(2), 6), (second - b.fragment.read(), 10))
    assert_same_globals(*seen)
    assert torch.equal(seen[0].masters[0], outer.values)
    last = seen[1].metrics[3]
    assert [last[f"diloco/{name}"] for name in ("missed_rounds", "carried_tokens", "overwritten_tokens")] == [1, 10, 0]
    assert (last["diloco/b/inner_steps"], last["diloco/b/weight"]) == (2, 10)


# While peer b trains on its first step, peer a requests the outcome again and again. The round closes without b when
# the deadline is over, which is longer than one such request.
def test_a_slow_peer_is_not_waited_for_beyond_the_deadline(make_rendezvous, key_file):
    server, deadline_s = make_rendezvous(start_peers=2), 2.0
    over = threading.Event()

    def lead(step, engine):
        if step == 2:
            over.set()

    def lag(step, engine):
        if step == 1:
            assert over.wait(200)

    config = partial(settings, server.endpoint, key_file, sync_every=2, round_deadline_s=deadline_s)
    seen = together(
        partial(train, config("a"), 0, 3, before_step=lead), partial(train, config("b"), 1, 2, before_step=lag)
    )
    assert server.server.rounds.closed(0).members == ("a",)
    assert seen[1].metrics[2]["diloco/missed_rounds"] == 1


# The outcome of round 1 comes three steps after it was due. They stand on top of the new global values and weigh in the
# next delta; with delay and mixing only the steps of the delay are mixed. Bit for bit that of the plain algorithm.
@pytest.mark.parametrize(("delay", "alpha"), [(0, 0.0), (1, 0.5)])
def test_late_outcome_keeps_the_steps_since(make_rendezvous, key_file, delay, alpha):
    address = make_rendezvous(start_peers=2).endpoint
    far = threading.Event()

    def hold(step, engine):
        if step == 2:
            assert far.wait(200)

    def run_ahead(step, engine):
        if step == 2:
            engine.config = engine.config.model_copy(update={"round_timeout_s": 0.1})
        if step == 6:
            raw = engine.state()  # a checkpoint of now holds the late delta and what it stands on
            copy = Blocks()
            resumed = StreamingDiLoCo(copy.named_parameters(), adamw(copy), engine.config)
            resumed.load(raw)
            assert resumed.state() == raw and resumed.replica.pending.due_n is not None
            far.set()
            engine.config = engine.config.model_copy(update={"round_timeout_s": 15})
            until(engine._link._round.done, "round 1 does not end")

    values = {"sync_every": 2, "delay": delay, "mixing": alpha, "round_deadline_s": 30, **OUTER}
    seen = together(
        partial(train, settings(address, key_file, "a", **values), 0, 6, before_step=hold),
        partial(train, settings(address, key_file, "b", **values), 1, 9, before_step=run_ahead),
    )
    a, b = PlainPeer(0), PlainPeer(1)
    outer = PlainOuter(a.fragment.read())

    def mixed(local: Tensor) -> Tensor:
        return torch.lerp(outer.values, local, alpha) if alpha else outer.values

    start = outer.values
    outer.advance((start - a.train(2 - delay), 1), (start - b.train(2 - delay), 1))
    for peer in (a, b):
        peer.fragment.write(mixed(peer.train(delay)))
    first, kept = outer.values, alpha * delay
    deltas = (first - a.train(2 - delay), 1), (first - b.train(2 - delay), 1)
    due_a, due_b = a.train(delay), b.train(delay)
    now_b = b.train(3)
    outer.advance(*deltas)
    a.fragment.write(mixed(due_a))
    b.fragment.write(mixed(due_b) + (now_b - due_b))
    second, steps = outer.values, 2 - delay
    outer.advance((second - a.train(steps), kept + steps), (second - b.train(steps), kept + 3 + steps))
    assert_same_globals(*seen)
    assert torch.equal(seen[0].masters[0], outer.values)
    assert seen[1].metrics[3]["diloco/b/weight"] == kept + 3 + steps
    assert seen[1].metrics[3]["diloco/carried_tokens"] == 3
    assert seen[1].metrics[3]["diloco/missed_rounds"] == 0
    assert seen[0].metrics[3]["diloco/overwritten_tokens"] == 3 * (1 - alpha) * delay


# With mixing = "carry" the steps of the delay stand on top of the new global values and weigh in the next delta, and
# nothing is overwritten. Bit for bit that of the plain algorithm.
def test_the_delays_steps_are_carried(make_rendezvous, key_file):
    address = make_rendezvous(start_peers=2).endpoint
    values = {"sync_every": 3, "delay": 2, "mixing": "carry", **OUTER}
    seen = together(*(
        partial(train, settings(address, key_file, name, **values), peer, 9) for peer, name in enumerate("ab")
    ))  # fmt: skip
    peers = [PlainPeer(0), PlainPeer(1)]
    outer = PlainOuter(peers[0].fragment.read())
    for weight in (1, 3, 3):
        prepared = [peer.train(1) for peer in peers]
        before = outer.values
        outer.advance(*((before - local, weight) for local in prepared))
        for peer, local in zip(peers, prepared, strict=True):
            peer.fragment.write(outer.values + (peer.train(2) - local))
    assert_same_globals(*seen)
    assert torch.equal(seen[0].masters[0], outer.values)
    last = seen[0].metrics[3]
    assert (last["diloco/a/weight"], last["diloco/overwritten_tokens"], last["diloco/carried_tokens"]) == (3, 0, 6)


# On a link that needs seconds for a delta, a peer sends what it has that much earlier before a deadline.
def test_the_upload_counts_before_a_deadline(make_rendezvous, key_file):
    config = settings(make_rendezvous().endpoint, key_file, "a", sync_every=2, rate_limit_mbit=0.005)
    left: list[float] = []

    def look(step, engine):
        if step == 2:
            link = engine._link._exchange
            link.status = BeatReply(beat_s=1.0, open_round=1, left_s=5.0)
            link.status_at = time.monotonic()
            left.append(engine._link.time_left_s(1))

    train(config, 0, 3, before_step=look)
    assert left[0] < 4


# A peer whose single step takes longer than the others' deadline still gets its work in, again and again.
def test_step_longer_than_the_deadline(make_rendezvous, key_file):
    address = make_rendezvous(start_peers=2).endpoint
    values = {"sync_every": 4, "round_deadline_s": 0.5, "codec": {"type": "int4"}}
    finished = threading.Event()

    def run(name: str, peer: int, pace_s: float) -> Trajectory:
        model, seen = Blocks(), Trajectory()
        optimizer, config = adamw(model), settings(address, key_file, name, **values)
        with StreamingDiLoCo(model.named_parameters(), optimizer, config) as engine:
            step = 0
            while engine.outer_step < 8 and not finished.is_set():
                finished.wait(pace_s)
                engine.count(tokens=1)
                inner_step(model, optimizer, peer, step)
                record(seen, engine)
                step += 1
            finished.set()
        return seen

    fast, slow = together(partial(run, "a", 0, 0.02), partial(run, "b", 1, 0.8))
    both = fast.hashes.keys() & slow.hashes.keys()
    assert both and all(fast.hashes[step] == slow.hashes[step] for step in both)
    assert sum(metrics.get("diloco/participants") == 2 for metrics in fast.metrics.values()) >= 2
    assert max(metrics.get("diloco/missed_rounds", 0) for metrics in slow.metrics.values()) >= 1


def alone() -> tuple[nn.Parameter, Replica]:
    """The values of a model, and what its only peer holds."""
    values = nn.Parameter(torch.zeros(4))
    config = settings("tcp://127.0.0.1:1", Path("none"), "a")
    return values, Replica(partition([("values", values)], 1), config, Ranks())


def on_offer(replica: Replica) -> PendingDelta:
    """A delta that holds all work so far."""
    header: Any = SimpleNamespace(fragment=0)
    return PendingDelta(header=header, body=memoryview(b""), residual_n=torch.zeros(0), work=replica.held[0])


# Another process of this peer delivered in its name: this one's delta on offer is lost and counted as such. A process
# that only catches up has lost nothing.
@pytest.mark.parametrize(("offered", "lost"), [(True, 7), (False, 0)])
def test_a_delta_of_another_process(offered, lost):
    _, replica = alone()
    replica.count(LocalWork(steps=1, tokens=7))
    replica.install(0, "predecessor", on_offer(replica) if offered else None, None)
    assert replica.totals["overwritten"] == lost and replica.tokens_held() == 0


# However a peer's rounds end (in time, late, missed), the sum of its steps is what its deltas delivered, plus what
# compression still owes, plus the lead of the local values over the global ones. Moves are whole numbers, so the sums
# are exact. The tokens counted follow the same rule.
@hypothesis_settings(deadline=None)
@given(
    codec=st.sampled_from(["fp32", "int8"]),
    rounds=st.lists(
        st.tuples(
            st.sampled_from(["counted", "missed"]),
            st.lists(st.integers(-50, 50), min_size=1, max_size=3),  # steps before the delta
            st.lists(st.integers(-50, 50), max_size=3),  # steps after the outcome was due
            st.integers(-50, 50),  # how far the others move the global values
        ),
        max_size=6,
    ),
)
def test_nothing_is_lost(codec, rounds):
    (values, work), encoder = alone(), codec_of(codec)
    model, feedback = work.global_model, work.feedback
    moved, delivered, tokens = torch.zeros(4), torch.zeros(4), 0.0

    def train(moves):
        for move in moves:
            step = torch.tensor([move, 2 * move, -move, 1.0])
            values.data += step
            moved.add_(step)
            work.count(LocalWork(steps=1, tokens=7))

    for fate, before, after, others in rounds:
        train(before)
        offer = on_offer(work)
        data, residual_n = feedback.encode(0, model.delta(0), encoder)
        sent = encoder.decode(data, 4)
        if after:
            work.mark_late(offer)
            train(after)
        global_before = model.masters[0].clone()
        if fate == "counted":
            feedback.settle(0, residual_n)
            delivered -= sent
            tokens += offer.work.tokens
        model.advance(0, [sent if fate == "counted" else torch.full((4,), float(others))], [1.0])
        work.install(0, fate, offer, global_before)
    ahead = values.detach() - model.masters[0]
    left = delivered - feedback.residuals[0] + ahead
    assert torch.allclose(moved, left, rtol=0, atol=0 if codec == "fp32" else 1e-2)
    total = 7 * sum(len(before) + len(after) for _, before, after, _ in rounds)
    assert tokens + work.held[0].tokens == total and work.totals["overwritten"] == 0
