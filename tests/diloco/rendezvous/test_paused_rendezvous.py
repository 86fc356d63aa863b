"""A rendezvous whose process stood still: it could hear no peer meanwhile, so none counts as silent."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from joint_run import assert_same_globals, settings, together, train, until

from diloco.rendezvous.rendezvous import SuspendAwareClock

ROOT = Path(__file__).parents[3]
BEAT_TIMEOUT_S = 2.0


# Called often, it is the clock behind it; of a longer pause at most `longest_s` counts.
@given(looks=st.lists(st.integers(0, 40), max_size=20))
def test_a_pause_does_not_pass(looks):
    now, expected = 100.0, 0.0
    clock = SuspendAwareClock(8.0, lambda: now)
    for passed in looks:
        now, expected = now + passed, expected + min(passed, 8)
        assert clock() == expected


# Peer a has brought its delta and waits for that of b when the rendezvous' process is stopped for longer than its beat
# timeout, three times. Every round closes with both: peers that are alive are heard before it closes.
@pytest.mark.slow
def test_rounds_close_with_all_after_a_pause(key_file):
    pytest.importorskip("torchft")
    words = ["--run", "joint", "--key-file", str(key_file), "--bind", "tcp://127.0.0.1:0", "--start-peers", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "diloco.main", "rendezvous", *words, "--beat-timeout-s", str(BEAT_TIMEOUT_S)],
        stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True,
    )  # fmt: skip

    def lag(step, engine):
        if step < 3:
            until(lambda: engine._link.time_left_s(step) is not None, "peer a has not brought its delta")
            process.send_signal(signal.SIGSTOP)
            time.sleep(2 * BEAT_TIMEOUT_S)
            process.send_signal(signal.SIGCONT)

    try:
        address = re.search(r"tcp://\S+", process.stdout.readline()).group()
        waits = {"round_deadline_s": 30, "round_timeout_s": 40, "offline_timeout_s": 50}
        config = partial(settings, address, key_file, sync_every=1, **waits)
        seen = together(partial(train, config("a"), 0, 4), partial(train, config("b"), 1, 4, before_step=lag))
    finally:
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM)
        assert process.wait(200) == 0
    assert_same_globals(*seen)
    participants = [[each.metrics[step]["diloco/participants"] for step in (1, 2, 3, 4)] for each in seen]
    assert participants == [[2] * 4] * 2
