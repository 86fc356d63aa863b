"""The memory of a peer that has taken over another's state."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial

from joint_run import settings, together, train

from diloco.heal import Healer


# Neither the state's tensors, which are views of what arrived, nor the link's reference to it outlive the take-over.
# They are as large as the model, and replaying the rounds since takes time.
def test_a_state_is_let_go_of(make_rendezvous, key_file, monkeypatch):
    apart = partial(settings, make_rendezvous(keep_rounds=2).endpoint, key_file, sync_every=2)
    advanced, finished = threading.Event(), threading.Event()
    taken: list[weakref.ref] = []
    alive: list[bool] = []
    take_over, replay = Healer._take_over, Healer.replay

    def note(healer, header, tensors):
        taken.extend(map(weakref.ref, tensors.values()))
        take_over(healer, header, tensors)

    def look(healer, newest, exposed_s=0.0):
        if taken and not alive:  # a collection takes a third of a second, and peer a replays all the time
            gc.collect()
            alive.extend(each() is not None for each in taken)
        assert healer.link._source is None
        return replay(healer, newest, exposed_s)

    monkeypatch.setattr(Healer, "_take_over", note)
    monkeypatch.setattr(Healer, "replay", look)

    def steady():
        def before_step(step, engine):
            if step == 10:
                advanced.set()
            finished.wait(0.02)

        train(apart("a"), 0, 4000, before_step=before_step, stop=finished.is_set)

    def late():
        assert advanced.wait(200)
        try:
            train(apart("c"), 1, 2, seed=7)
        finally:
            finished.set()

    together(steady, late)
    assert taken and alive and not any(alive)
