"""States that no peer can join with: the joining peer refuses them, and gets one from another source."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from joint_run import settings, together, train

from diloco.state import pack_state, unpack_state
from diloco.streaming import StreamingDiLoCo


def damage(engine: StreamingDiLoCo) -> None:
    engine.global_model.masters[0][7] += 0.25


def claim_another_hash(engine: StreamingDiLoCo) -> None:
    exchange, serve = engine._link._exchange, engine.replica.state_to_serve
    exchange._state_to_serve = lambda: (*serve()[:2], "0" * 32)


def leave_a_part_out(engine: StreamingDiLoCo) -> None:
    exchange, serve = engine._link._exchange, engine.replica.state_to_serve

    def without() -> tuple[memoryview, int, str]:
        body, outer_step, base_hash = serve()
        tensors, facts = unpack_state(body)
        del tensors["velocity.0"]
        return pack_state(tensors, facts), outer_step, base_hash

    exchange._state_to_serve = without


# Peer a, which is asked first, has a damaged model in memory, or serves a state that is not what its header says, or
# half of one: the joining peer refuses it and gets the state of peer b, the very model that b holds.
@pytest.mark.parametrize("fault", [damage, claim_another_hash, leave_a_part_out])
def test_another_source_is_asked(make_rendezvous, key_file, caplog, fault):
    server = make_rendezvous()
    values = {"sync_every": 1000, "outer": {"lr": 0.7, "momentum": 0.9}}  # no round comes in between
    apart = partial(settings, server.endpoint, key_file, **values)
    ready, finished = threading.Barrier(3), threading.Event()

    def steady(name: str, peer: int):
        def before_step(step, engine):
            if step == 1:
                if name == "a":
                    fault(engine)
                ready.wait(200)
            finished.wait(0.02)

        return train(apart(name), peer, 5000, before_step=before_step, stop=finished.is_set)

    def join():
        ready.wait(200)
        try:
            return train(apart("c", heal_timeout_s=20), 2, 1, seed=7)
        finally:
            finished.set()

    _, b, c = together(partial(steady, "a", 0), partial(steady, "b", 1), join)
    assert torch.equal(c.masters[0], b.masters[0]) and c.hashes[0] == b.hashes[0]
    assert "the state of peer a is dropped" in caplog.text and server.server.handler.joins.current.source == "b"
