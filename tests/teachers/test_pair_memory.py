"""Pairs hold whole contexts: who counts them holds one at a time."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import msgspec
from loopback import call

from composer_prime.data.pairs import Pair, PairState
from composer_prime.traces.replay.records import ReplayRecords, votes_beside

CONTEXT = 200_000


def write_pairs(path: Path, count: int) -> None:
    with path.open("wb") as file:
        for number in range(count):
            chosen, rejected = ({"role": "assistant", "tool_calls": [call(name, {})]} for name in ("cat", "ls"))
            asked = PairState(
                state_id=f"t/{number}", messages=[{"role": "user", "content": f"{number}" + "x" * CONTEXT}]
            )
            pair = Pair(trace="t", state=asked, chosen=chosen, rejected=rejected, epsilon=0.1)
            file.write(msgspec.json.encode(pair) + b"\n")


# A resumed replay knows its pairs by their digests.
def test_one_context_at_a_time(tmp_path: Path) -> None:
    path, count = tmp_path / "pairs.jsonl", 60
    write_pairs(path, count)
    tracemalloc.start()
    try:
        assert len(ReplayRecords(path, votes_beside(path)).contents) == count
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 * CONTEXT < count * CONTEXT
