"""Moving averages of a peer's weights (a teacher, a reference) where the global model moves without its own steps."""

from __future__ import annotations

import threading
from functools import partial

import torch
from joint_run import Blocks, adamw, inner_step, settings, together, until

from composer_prime.config.channels import ChannelsConfig
from diloco.streaming import StreamingDiLoCo
from trainer.model.policy_model import SelfTeacher

RATES = {"teacher": 0.3, "reference": 0.01}
CHANNELS = ChannelsConfig.model_validate({
    "policy": {"kl": {"weight": 0.1, "reference": "ema"}},
    "sdpo": {"weight": 1.0, "teacher": {"kind": "ema", "rate": RATES["teacher"]}},
})  # fmt: skip


class Cluster:
    """A peer whose trainer keeps a teacher and a reference; `before_step` sees it as it is about to take a step."""

    def __init__(self, config, peer: int, seed: int = 0) -> None:
        self.model, self.peer = Blocks(seed), peer
        self.start = self.weights()
        self.optimizer = adamw(self.model)
        self.teacher = SelfTeacher(self.model, CHANNELS)
        self.events: list[int | str] = []
        """Steps that it caught up with, and replaced states."""
        self.engine = StreamingDiLoCo(
            self.model.named_parameters(), self.optimizer, config,
            on_catch_up=self._catch_up, on_state_replaced=self._start_anew,
        )  # fmt: skip

    def _catch_up(self, steps: int) -> None:
        self.events.append(steps)
        self.teacher.catch_up(steps)

    def _start_anew(self) -> None:
        self.events.append("replaced")
        self.teacher.start_anew()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def train(self, steps: int, before_step=lambda step: None) -> Cluster:
        with self.engine:
            for step in range(steps):
                before_step(step)
                self.engine.count(tokens=1)
                inner_step(self.model, self.optimizer, self.peer, step)
                self.teacher.follow()
            self.engine.finish()
        return self


def join_late(make_rendezvous, key_file, keep_rounds: int, seed: int) -> Cluster:
    """Peer b, which came when peer a had closed five rounds of two steps each, and took no step."""
    server = make_rendezvous(keep_rounds=keep_rounds)
    config = partial(settings, server.endpoint, key_file, sync_every=2)
    first, advanced, finished = Cluster(config("a"), 0), threading.Event(), threading.Event()

    def hold(step: int) -> None:
        if step == 10:
            advanced.set()
            assert finished.wait(200)

    def late() -> Cluster:
        assert advanced.wait(200)
        try:
            return Cluster(config("b"), 1, seed).train(0)
        finally:
            finished.set()

    return together(lambda: first.train(12, hold), late)[1]


# A peer from another start takes over a state: its averages are the global model, and nothing of its own past.
def test_a_state_starts_averages_anew(make_rendezvous, key_file):
    late = join_late(make_rendezvous, key_file, keep_rounds=2, seed=7)
    now = late.weights()
    assert late.engine.outer_step == 5 and late.events == ["replaced"]
    assert not now["embed.weight"].equal(late.start["embed.weight"])
    for average in late.teacher.averages().values():
        assert all(average[name].equal(now[name]) for name in now)


# A peer that catches up with rounds holds a model of the same past: its averages follow as far as in the ten steps
# that the rounds took, each at its own rate.
def test_averages_follow_replayed_rounds(make_rendezvous, key_file):
    late = join_late(make_rendezvous, key_file, keep_rounds=16, seed=0)
    assert late.engine.run_step == 11
    now = late.weights()
    assert late.engine.outer_step == 5 and late.events == [10]
    for name, average in late.teacher.averages().items():
        for key, value in average.items():
            kept = (1 - RATES[name]) ** 10
            torch.testing.assert_close(value, kept * late.start[key] + (1 - kept) * now[key])


# A peer in time catches up with nothing. One that brings its delta when round 2 is long over takes that round for its
# own steps, and catches up with the four steps behind rounds 3 and 4.
def test_only_steps_elsewhere_count(make_rendezvous, key_file):
    server = make_rendezvous(start_peers=2)
    config = partial(settings, server.endpoint, key_file, sync_every=2)
    alone = threading.Event()

    def lead(step: int) -> None:
        if step == 4:
            server.server.rounds.peers["a"].deadline_s = 0.2
        if step == 9:
            alone.set()

    def lag(step: int) -> None:
        if step == 4:
            assert alone.wait(200)
            until(lambda: server.server.rounds.newest == 4, "peer a does not go on alone")

    a, b = together(lambda: Cluster(config("a"), 0).train(10, lead), lambda: Cluster(config("b"), 1).train(6, lag))
    assert (a.events, b.events) == ([], [4]) and b.engine.outer_step >= 5
