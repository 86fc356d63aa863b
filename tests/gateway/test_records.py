"""Records of sampled tokens by themselves."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.gateway.http import GenerationRecord, Redraw, RolloutRecords
from tests.records_made import record_of

IDS = st.lists(st.integers(0, 3), max_size=6)


def record(session: str, prompt: list[int], completion: list[int]) -> GenerationRecord:
    return record_of(session, prompt, completion, logprobs=[-float(at) for at in range(len(completion))], version=1)


@given(st.lists(st.tuples(st.sampled_from(["r", "r#1", "r#2"]), st.booleans(), IDS, IDS), max_size=12))
def test_records_come_back_as_they_went_in(turns):
    """Whether a turn continues the one before or not, its ids and logprobs are returned exactly and nothing stays."""
    records, expected, newest = RolloutRecords(), [], {}
    records.open("r")
    for order, (session, goes_on, prompt, completion) in enumerate(turns):
        full = newest.get(session, []) + prompt if goes_on else prompt
        newest[session] = full + completion
        expected.append((session, full, completion))
        records.append(record(session, full, completion), order)
    taken = records.take("r")
    assert [(r.session, r.prompt_ids.tolist(), r.answer.ids.tolist()) for r in taken] == expected
    assert all(len(r.answer.token_logprobs) == len(r.answer) for r in taken)
    assert records.num_bytes == 0


def test_a_long_conversation_is_held_once():
    """Memory grows with the conversation's length, not with the sum of all its prompts."""
    records = RolloutRecords()
    records.open("r")
    tokens: list[int] = []
    for order in range(200):
        prompt = tokens + [1] * 50
        tokens = prompt + [2] * 50
        records.append(record("r", prompt, [2] * 50), order)
    assert records.num_bytes < 4 * len(tokens) + 8 * 50 * 200
    taken = records.take("r")
    assert taken[100].prompt_ids.tolist() == tokens[: 100 * 100 + 50]
    assert np.shares_memory(taken[100].prompt_ids, taken[199].prompt_ids)


def test_a_rollout_without_an_answer_is_over_too():
    """Whoever counts rollouts learns of each one's end, once, and of the end of each of its sessions."""
    ended: list[str] = []
    records = RolloutRecords(SimpleNamespace(forget=ended.append))
    for name in ("r", "silent"):
        records.open(name)
    records.append(record("r#1", [1], [2]), 0)
    for name in ("r", "silent", "silent"):
        records.take(name)
    assert sorted(ended) == ["r", "r#1", "silent"]


def test_what_a_redraw_draws_freely_is_audited():
    """Not what it repeats, and not the turn behind a hint, which its record does not show."""
    asked: list[list[int]] = []
    audits = SimpleNamespace(offer=lambda name, prompt, answer, sampling: asked.append(prompt.tolist()))
    records = RolloutRecords(audits=audits)
    records.open("rd1", redraw=Redraw(records=[record("r", [turn], [2]) for turn in range(2)], turn=1, draw=1))
    for turn in range(4):
        records.append(record("rd1", [turn], [2]), turn)
    assert asked == [[2], [3]]


def test_only_open_rollouts_are_recorded_and_ids_are_used_once():
    """An unknown session leaves nothing; opening an id twice is an error."""
    records = RolloutRecords()
    records.append(record("r", [1], [2]), 0)
    records.open("r")
    assert records.take("r") == []
    records.open("r")
    with pytest.raises(ValueError, match="open already"):
        records.open("r")
    assert records.find("r#12") is records.find("r") is not None
    assert records.find("r#x") is None
    assert records.take("nobody") == []
