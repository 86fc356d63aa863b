"""Pairs hold whole contexts: who counts them holds one at a time."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import msgspec
import pytest
from loopback import call

from composer_prime.traces.pairs import Pair, PairState
from composer_prime.traces.replay.density import main
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


# A resumed replay knows its pairs by their digests, the report by one reading after another.
@pytest.mark.parametrize("by", ["records", "report"])
def test_one_context_at_a_time(tmp_path: Path, by: str) -> None:
    path, count = tmp_path / "pairs.jsonl", 60
    write_pairs(path, count)
    write_pairs(tmp_path / "one.jsonl", 1)
    main([str(tmp_path / "one.jsonl")])  # What it imports is no part of the peak.
    tracemalloc.start()
    try:
        if by == "records":
            assert len(ReplayRecords(path, votes_beside(path)).contents) == count
        else:
            assert main([str(path)]) == 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 * CONTEXT < count * CONTEXT
