"""Records, the adaptive limit and the lag monitor by themselves."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_prime.wire.node import Sampling
from composer_prime.wire.types import VersionSpan
from orchestrator.event_loop import LoopLag
from orchestrator.gateway.adaptive import AdaptiveLimit, GatewayLoad
from orchestrator.gateway.records import GenerationRecord, RolloutRecords

IDS = st.lists(st.integers(0, 3), max_size=6)


def record(session: str, prompt: list[int], completion: list[int]) -> GenerationRecord:
    return GenerationRecord(
        session=session,
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=np.array(completion, np.int32),
        logprobs=-np.arange(len(completion), dtype=np.float32),
        version_spans=(VersionSpan(0, len(completion), 1),) if completion else (),
        finish_reason="stop",
        sampling=Sampling(max_tokens=8),
        node_id="n0",
        time=0.0,
    )


@given(st.lists(st.tuples(st.sampled_from(["r", "r#1", "r#2"]), st.booleans(), IDS, IDS), max_size=12))
def test_records_come_back_as_they_went_in(turns):
    """Whether a turn continues the one before or not, its ids and logprobs are returned exactly and nothing stays."""
    records, expected, newest = RolloutRecords(), [], {}
    records.open("r")
    for order, (session, goes_on, prompt, completion) in enumerate(turns):
        full = newest.get(session, []) + prompt if goes_on else prompt
        newest[session] = full + completion
        expected.append((session, full, completion))
        assert records.append(record(session, full, completion), order)
    taken = records.take("r")
    assert [(r.session, r.prompt_ids.tolist(), r.completion_ids.tolist()) for r in taken] == expected
    assert all(len(r.logprobs) == len(r.completion_ids) for r in taken)
    assert records.num_bytes == 0 and len(records) == 0


def test_a_long_conversation_is_held_once():
    """Memory grows with the conversation's length, not with the sum of all its prompts."""
    records = RolloutRecords()
    records.open("r")
    tokens: list[int] = []
    for order in range(200):
        prompt = tokens + [1] * 50
        tokens = prompt + [2] * 50
        records.append(record("r", prompt, [2] * 50), order)
    assert records.num_bytes == 4 * len(tokens) + 4 * 50 * 200
    taken = records.take("r")
    assert taken[100].prompt_ids.tolist() == tokens[: 100 * 100 + 50]


def test_only_open_rollouts_are_recorded_and_ids_are_used_once():
    """An unknown session leaves nothing; opening an id twice is an error."""
    records = RolloutRecords()
    assert not records.append(record("r", [1], [2]), 0)
    records.open("r")
    with pytest.raises(ValueError, match="open already"):
        records.open("r")
    assert records.rollout_of("r#12") == "r"
    assert records.rollout_of("r#x") is None
    assert records.take("nobody") == []


def load(running: int, waiting: int = 0, kv_used: float = 0.1) -> GatewayLoad:
    return GatewayLoad(running=running, waiting=waiting, kv_used=kv_used)


def test_the_limit_finds_what_the_nodes_can_take():
    """With nodes that queue above 40 rollouts, the limit settles around 40 and stays within its bounds."""
    limit = AdaptiveLimit(floor=8, ceiling=512)
    seen = []
    for _ in range(200):
        in_use = limit.limit()
        limit.observe(load(min(in_use, 40), waiting=max(0, in_use - 40)), in_use)
        seen.append(limit.limit())
    assert seen[0] == 64
    settled = seen[20:]
    assert min(settled) >= 28 and max(settled) <= 56
    assert limit.decreases >= 1


def test_an_unused_limit_does_not_rise_and_a_full_cache_lowers_it():
    """Only a limit that is used proves anything; KV pressure counts like a queue; floor and ceiling hold."""
    limit = AdaptiveLimit(floor=4, ceiling=100)
    limit.observe(load(2), in_use=2)
    limit.observe(None, in_use=32)
    assert limit.limit() == 32
    for _ in range(20):
        limit.observe(load(32, kv_used=0.99), in_use=limit.limit())
    assert limit.limit() == 4
    for _ in range(200):
        limit.observe(load(8), in_use=limit.limit())
    assert limit.limit() == 100


def test_loop_lag_sees_a_blocked_loop():
    """A block of 80 ms shows as the largest lag, as own lag if it was work; the window starts anew."""

    async def scenario() -> None:
        lag = LoopLag(interval_s=0.005)
        lag.start()
        await asyncio.sleep(0.2)
        time.sleep(0.08)
        await asyncio.sleep(0.02)
        stats = lag.window()
        assert stats.p50_s is not None and stats.max_s is not None
        assert stats.max_s >= 0.07 and stats.p50_s < 0.04
        assert stats.own_max_s is not None and stats.own_max_s < 0.04
        assert set(stats.metrics()) == {f"loop_lag/{name}_s" for name in ("p50", "p99", "max", "own_p99")}
        busy_until = time.thread_time() + 0.08
        while time.thread_time() < busy_until:
            pass
        await asyncio.sleep(0.02)
        stats = lag.window()
        assert stats.own_max_s is not None and stats.own_max_s >= 0.07
        lag.stop()
        lag.window()
        await asyncio.sleep(0.03)
        assert lag.window().samples == 0

    asyncio.run(scenario())
