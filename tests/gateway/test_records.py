"""Records of sampled tokens by themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_prime.wire.node import Sampling
from composer_prime.wire.types import VersionSpan
from orchestrator.gateway.generation import GenerationRecord, RolloutRecords

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


def test_a_rollout_without_an_answer_is_over_too():
    """Whoever counts rollouts learns of each one's end, once, and of the end of each of its sessions."""
    ended: list[str] = []
    records = RolloutRecords(on_taken=ended.append)
    for name in ("r", "silent"):
        records.open(name)
    records.append(record("r#1", [1], [2]), 0)
    for name in ("r", "silent", "silent"):
        records.take(name)
    assert ended == ["r", "r#1", "silent"]


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
