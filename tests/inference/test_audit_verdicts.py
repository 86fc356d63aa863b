"""What an auditor says of an answer whose tokens it has scored."""

from __future__ import annotations

import math

import numpy as np
import pytest

from composer_prime.wire.audit import AuditRequest, PartVerdict
from composer_prime.wire.node import Sampling
from composer_prime.wire.types import VersionSpan, pack_floats, pack_ints
from inference.audit import OpenAudit, judge
from orchestrator.swarm.trust import NodeTrust

TOLERANCE = 0.02


def verdict(
    *,
    misses: dict[int, float] | None = None,
    gaps: dict[int, float] | None = None,
    own: dict[int, float] | None = None,
    tokens: int = 20,
    stop: int | None = None,
    finish: str = "length",
    swap: int | None = None,
    newer: int = 4,
) -> PartVerdict:
    """Judge an answer of `tokens` tokens: misses, errors of logprobs and own logprobs by position, 0 elsewhere."""
    [part] = verdicts([tokens], misses=misses, gaps=gaps, own=own, stop=stop, finish=finish, swap=swap, newer=newer)
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
    """Judge an answer of several nodes, each with a number of tokens."""
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
            parts=parts,
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


def counted(claimed: list[float], own: list[float], older: list[float], misses: list[float], older_misses: list[float]):
    """Count what leans to the version before, in an answer whose last token is behind a swap."""
    [part] = counted_by_part([len(claimed)], claimed, own, older, misses, older_misses)
    return part


def counted_by_part(parts: list[int], claimed: list[float], own, older, misses, older_misses):
    tokens = len(claimed)
    audit = OpenAudit(
        AuditRequest(
            audit=9,
            prompt_ids=pack_ints([1, 2]),
            token_ids=pack_ints(range(tokens)),
            logprobs=pack_floats(claimed),
            parts=parts,
            version_spans=[VersionSpan(0, tokens - 1, 3), VersionSpan(tokens - 1, tokens, 4)],
            finish_reason="length",
            sampling=Sampling(max_tokens=tokens, seed=1),
            tolerance=TOLERANCE,
        ),
        older=2,
    )
    assert audit.missing == {2, 3, 4}
    audit.logprobs[:], audit.misses[:] = own, misses
    audit.suspect_scores = np.array(older_misses), np.array(older, np.float32)
    return [(part.by_logprob, part.by_draw) for part in judge(audit, None).parts]


def test_tokens_that_lean_to_the_version_before_are_counted():
    # Of four, two lean to it, one does not, and one says nothing. What a swap precedes is left out.
    own, older = [-1.0, -1.0, -1.0, -2.0, -1.0], [-1.1, -1.1, -0.9, -2.0]
    claimed, right = [-1.08, -0.99, -0.8, -2.0, -1.1], [0.0] * 5
    assert counted(claimed, own, older, right, right[:4]) == ((2, 3), (0, 0))
    # A quarter of the way is too little, and a token that top-k removes is not compared.
    assert counted([-1.25, -1.0], [-1.0, 0.0], [-2.0], [0.0, 0.0], [0.0]) == ((0, 1), (0, 0))
    assert counted([-1.5, -1.0], [-np.inf, 0.0], [-2.0], [0.0, 0.0], [0.0]) == ((0, 0), (0, 0))


def test_tokens_that_lean_are_counted_in_their_part():
    # Also where the last part lies wholly behind a swap.
    own, older = [-1.0, -1.0, -1.0, -2.0, -1.0], [-1.1, -1.1, -0.9, -2.1]
    claimed, right = [-1.08, -0.99, -0.8, -2.0, -1.1], [0.0] * 5
    compared = counted_by_part([2, 2, 1], claimed, own, older, right, [0.0, 0.0, 0.0, 0.1])
    assert compared == [((1, 2), (0, 0)), ((1, 1), (0, 1)), ((0, 0), (0, 0))]
    assert counted_by_part([1, 4], claimed, own, older, right, right[:4])[1] == ((1, 3), (0, 0))


def test_a_draw_that_one_version_makes_is_told_by_that():
    # Its logprob may be invented: here each is that of the claimed version.
    own, older = [-1.0] * 5, [-1.1] * 4
    misses, older_misses = [0.01, 0.0, 0.01, 0.0, 0.0], [0.0, 0.01, 0.02, 0.0]
    assert counted(own, own, older, misses, older_misses) == ((0, 2), (1, 2))


def answers_until_quarantine(way: float, *, old: bool = False, auditor: float = 0.0) -> float:
    """Answers until a node is quarantined, of 3,000 with 40 tokens each; inf for never.

    Logprobs by the named version and the suspect one differ by `way` on average. The node, which has one or the `old`
    one, rounds each by 0.004 nats, and its auditor by `auditor`.
    """
    rng, trust, count = np.random.default_rng(5), NodeTrust(), 40
    for number in range(3000):
        named = rng.uniform(-3.0, -1.0, count)
        suspect = named + rng.normal(0.0, way, count)
        claimed = (suspect if old else named) + rng.normal(0.0, 0.004, count)
        audit = OpenAudit(
            AuditRequest(
                audit=number,
                prompt_ids=pack_ints([1]),
                token_ids=pack_ints(range(count)),
                logprobs=pack_floats(claimed.astype(np.float32)),
                parts=[count],
                version_spans=[VersionSpan(0, count, 3)],
                finish_reason="length",
                sampling=Sampling(max_tokens=count, seed=1),
                tolerance=0.05,
            ),
            older=2,
        )
        audit.logprobs[:] = named + rng.normal(0.0, auditor, count)
        audit.suspect_scores = np.zeros(count), (suspect + rng.normal(0.0, auditor, count)).astype(np.float32)
        if trust.note(judge(audit, None).parts[0], number) is not None:
            return number + 1
    return math.inf


@pytest.mark.parametrize("way", [1e-5, 0.0004, 0.002, 0.02])
def test_an_honest_nodes_rounding_does_not_lean(way):
    # However much more, or less, it is than the way to the suspect weights. The auditor's own must be none: with as
    # much as the node's, and a short way, honest nodes are quarantined.
    assert math.isinf(answers_until_quarantine(way))
    assert math.isinf(answers_until_quarantine(way, auditor=1e-6))
    if way < 0.001:
        assert answers_until_quarantine(way, auditor=0.004) < 3000


def test_suspect_weights_are_found_below_rounding():
    # Their logprobs differ by half as much as the node rounds.
    assert answers_until_quarantine(0.002, old=True) < 300
