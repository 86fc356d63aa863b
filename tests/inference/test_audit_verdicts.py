"""What an auditor says of an answer whose tokens it has scored."""

import numpy as np

from composer_prime.wire.node_messages import AuditRequest, PartVerdict, Sampling
from composer_prime.wire.types import VersionSpan, pack_floats, pack_ints
from inference.audit import OpenAudit, judge

TOLERANCE = 0.02


def verdict(tokens: int = 20, **claims) -> PartVerdict:
    """Judge an answer of one node."""
    [part] = verdicts([tokens], **claims)
    return part


def verdicts(
    parts: list[int],
    *,
    misses: dict[int, float] | None = None,
    gaps: dict[int, float] | None = None,
    own: dict[int, float] | None = None,
    stop: int | None = None,
    finish: str = "length",
    swap: int | None = None,
    newer: int = 4,
) -> list[PartVerdict]:
    """Judge an answer of nodes with these numbers of tokens: misses, errors of logprobs, own logprobs by position."""
    tokens = sum(parts)
    claimed = np.full(tokens, -1.0, np.float32)
    for index, gap in (gaps or {}).items():
        claimed[index] += gap
    spans = [VersionSpan(0, tokens, 3)] if swap is None else [VersionSpan(0, swap, 3), VersionSpan(swap, tokens, newer)]
    audit = OpenAudit(
        AuditRequest(
            audit=9,
            prompt_ids=pack_ints([1, 2]),
            token_ids=pack_ints(range(tokens)),
            logprobs=pack_floats(claimed),
            sampled_by=[(f"n{at}", count) for at, count in enumerate(parts)],
            version_spans=spans,
            finish_reason=finish,
            sampling=Sampling(max_tokens=tokens, seed=1),
            tolerance=TOLERANCE,
        )
    )
    assert audit.missing == {span.version for span in spans}
    audit.logprobs[:] = -1.0
    for index, value in (own or {}).items():
        audit.logprobs[index] = value
    for index, miss in (misses or {}).items():
        audit.misses[index] = miss
    result = judge(audit, stop)
    assert result.audit == 9
    return result.parts


def test_an_honest_answer_is_clean():
    # Small misses and gaps are rounding.
    result = verdict(misses={3: 0.019}, gaps={4: -0.2, 5: 0.1})
    assert (result.tokens, result.wrong, result.fault) == (20, [], None)
    assert abs(result.gap_max - 0.2) < 1e-6 and abs(result.gap_mean - 0.3 / 20) < 1e-6


def test_tokens_that_are_not_the_draw_are_named():
    # By their positions in the completion.
    assert verdict(misses={3: 0.021, 17: 0.5}).wrong == [3, 17]


def test_a_logprob_that_is_far_off_makes_its_token_wrong():
    # 12 times the tolerance, in nats, on either side.
    assert verdict(gaps={2: 0.25, 3: -0.25, 4: 0.23}).wrong == [2, 3]


def test_logprobs_that_are_all_a_little_off_are_a_fault():
    # No token alone is wrong, but the mean error is 1.5 times the tolerance and more. Of few tokens it says nothing.
    result = verdict(gaps=dict.fromkeys(range(20), -0.04))
    assert result.wrong == [] and "0.04 nats on average, at most 0.03" in (result.fault or "")
    assert verdict(gaps=dict.fromkeys(range(20), -0.02)).fault is None
    assert verdict(tokens=7, gaps=dict.fromkeys(range(7), -0.04)).fault is None


def test_a_token_that_top_p_removes_here_is_judged_by_its_draw():
    # Rounding decides at the edge of the nucleus: its own logprob is -inf there, and no gap.
    assert verdict(own={5: -np.inf}).wrong == [] and verdict(own={5: -np.inf}, misses={5: 0.1}).wrong == [5]


def test_a_stop_must_be_one_and_be_drawn():
    # Claimed without a stop, drawn by nobody, or passed over.
    assert verdict(finish="stop", stop=20).fault is None
    assert "none of its 20 tokens is one" in (verdict(finish="stop").fault or "")
    assert "not what its seed draws" in (verdict(finish="stop", stop=20, misses={19: 0.3}).fault or "")
    assert "continues for 5 tokens after a stop" in (verdict(finish="length", stop=15).fault or "")


def test_each_part_of_an_answer_is_judged_alone():
    # A node whose logprobs are off, or that goes on after a stop, cannot have another one blamed that continues.
    first, last = verdicts([12, 8], gaps=dict.fromkeys(range(12), -0.05), misses={11: 0.3, 14: 0.3})
    assert (first.tokens, first.wrong, last.tokens, last.wrong) == (12, [11], 8, [2])
    assert "0.05 nats on average" in (first.fault or "") and last.fault is None
    for stop, blamed in ((5, 0), (12, 0), (13, 1)):
        faults = [part.fault for part in verdicts([12, 8], stop=stop, finish="stop")]
        assert "after a stop" in (faults[blamed] or "") and faults[1 - blamed] is None
    # Who claims a stop that is none, or was not drawn, is the last one.
    assert [bool(part.fault) for part in verdicts([12, 8], finish="stop")] == [False, True]
    assert [bool(part.fault) for part in verdicts([12, 8], finish="stop", stop=20, misses={19: 0.3})] == [False, True]


def test_behind_a_swap_the_tolerance_is_wider():
    # The node's cache still holds keys and values of the weights before.
    assert verdict(misses={9: 0.05, 10: 0.05, 11: 0.09}, swap=10).wrong == [9, 11]
    # Two spans of one version are no swap.
    assert verdict(misses={9: 0.05, 10: 0.05}, swap=10, newer=3).wrong == [9, 10]
