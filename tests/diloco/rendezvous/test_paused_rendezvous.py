"""A rendezvous whose process stood still: it could hear no peer meanwhile, so none counts as silent."""

import time
from functools import partial

from joint_run import assert_same_globals, settings, together, train, until


# Peer a has brought its delta and waits for that of b when the rendezvous' event loop stands still for longer than its
# beat timeout, twice. Every round closes with both: peers that are alive are heard before it closes.
def test_rounds_close_with_all_after_a_pause(make_rendezvous, key_file, caplog):
    server = make_rendezvous(start_peers=2, beat_timeout_s=1.5)

    def lag(step, engine):
        if step < 2:
            until(lambda: engine._link.time_left_s(step) is not None, "peer a has not brought its delta")
            server._loop.call_soon_threadsafe(time.sleep, 2.5)
            time.sleep(2.5)

    waits = {"round_deadline_s": 30, "round_timeout_s": 40, "offline_timeout_s": 50}
    config = partial(settings, server.endpoint, key_file, sync_every=1, **waits)
    seen = together(partial(train, config("a"), 0, 3), partial(train, config("b"), 1, 3, before_step=lag))
    assert_same_globals(*seen)
    assert [each.metrics[step]["diloco/participants"] for each in seen for step in (1, 2, 3)] == [2] * 6
    assert "stood still" in caplog.text
