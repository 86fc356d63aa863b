"""States that no peer can join with: the joining peer refuses them."""

from __future__ import annotations

import threading

import msgspec
import pytest
from joint_run import settings, together, train

from composer_prime.errors import CheckpointError
from diloco.state import pack_state, unpack_state
from diloco.streaming import StreamingDiLoCo
from diloco.transport.messages import body_checksum


def damage(engine: StreamingDiLoCo) -> None:
    engine.global_model.masters[0][7] += 0.25


def claim_another_hash(engine: StreamingDiLoCo) -> None:
    blob = engine._link._state_blob

    def other_hash(serial):
        header, body = blob(serial)
        return msgspec.structs.replace(header, base_hash="0" * 32), body

    engine._link._state_blob = other_hash


def leave_a_part_out(engine: StreamingDiLoCo) -> None:
    blob = engine._link._state_blob

    def without(serial):
        header, body = blob(serial)
        tensors, facts = unpack_state(body)
        del tensors["velocity.0"]
        body = pack_state(tensors, facts)
        return msgspec.structs.replace(header, size=len(body), checksum=body_checksum(body)), body

    engine._link._state_blob = without


# Peer a has a damaged model in memory, or serves a state that is not what its header says, or half of one: the joining
# peer refuses it, and names the peer.
@pytest.mark.parametrize("fault", [damage, claim_another_hash, leave_a_part_out])
def test_a_bad_state_is_refused(make_rendezvous, key_file, fault):
    server = make_rendezvous()
    ready, finished = threading.Event(), threading.Event()
    values = {"sync_every": 1000, "outer": {"lr": 0.7, "momentum": 0.9}}  # no round comes in between

    def steady():
        def before_step(step, engine):
            if step == 1:
                fault(engine)
                ready.set()
            finished.wait(0.02)

        train(
            settings(server.endpoint, key_file, "a", **values), 0, 5000, before_step=before_step, stop=finished.is_set
        )

    def join():
        assert ready.wait(200)
        try:
            with pytest.raises(CheckpointError, match="the state that peer a serves"):
                train(settings(server.endpoint, key_file, "c", heal_timeout_s=20, **values), 1, 1, seed=7)
        finally:
            finished.set()

    together(steady, join)
