"""What audits do to the trust in a node."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_prime.wire.audit import PartVerdict, Suspect
from orchestrator.swarm.trust import BOUND, SUSPECT_BOUND, NodeTrust

FLOOR = 0.02


def verdict(tokens: int = 50, wrong: list[int] | None = None, fault: str | None = None) -> PartVerdict:
    return PartVerdict(tokens=tokens, wrong=wrong or [], fault=fault)


def note(trust: NodeTrust, found: PartVerdict, prompt: int = 0) -> bool:
    return trust.note(found, prompt) is not None


def test_a_new_node_is_audited_whole_and_a_clean_one_ever_less():
    # The share starts at 1, falls with each clean answer once the node is known, and stops at the floor.
    trust = NodeTrust()
    shares = []
    for _ in range(400):
        shares.append(trust.share(FLOOR))
        assert not note(trust, verdict())
    assert shares[:32] == [1.0] * 32 and shares[32] < 0.2
    assert shares == sorted(shares, reverse=True) and shares[-1] == FLOOR
    assert trust.state(0.0) == "known" and (trust.expectation(0.0) or 0.0) > 0.99


def test_one_wrong_token_is_not_enough():
    # An auditor whose rounding is unlucky once in 10,000 tokens does not quarantine an honest node.
    trust, random = NodeTrust(), np.random.default_rng(1)
    for _ in range(3000):
        wrong = np.flatnonzero(random.random(100) < 1e-4).tolist()
        assert not note(trust, verdict(100, wrong))


def test_four_wrong_tokens_close_together_are():
    # Within one answer, or over several.
    assert not note(NodeTrust(), verdict(60, [10, 12, 30]))
    assert note(NodeTrust(), verdict(60, [10, 12, 30, 31]))
    trust = NodeTrust()
    assert [note(trust, verdict(20, [5])) for _ in range(4)] == [False, False, False, True]


def test_clean_answers_buy_no_credit():
    # A node that was honest for long is caught as fast as a new one.
    trust = NodeTrust()
    for _ in range(5000):
        note(trust, verdict())
    assert note(trust, verdict(60, [10, 12, 30, 31]))


def test_a_fault_of_the_answer_counts_however_long_it_is():
    # An answer that stops early has one wrong token among many; three such answers are enough.
    trust = NodeTrust()
    assert [note(trust, verdict(2000, [1999], "its stop is not what its seed draws")) for _ in range(3)][-1]


def test_a_quarantine_ends_in_probation_and_the_next_one_is_longer():
    # What was good before is forgotten: all answers are audited again, and relapse costs twice the time.
    trust = NodeTrust(clean=900, audited=900)
    assert trust.quarantine(100.0, 60.0) == 60.0
    assert trust.state(159.0) == "quarantined" and trust.expectation(159.0) == 0.0
    assert trust.state(161.0) == "new" and trust.share(FLOOR) == 1.0 and trust.token_evidence == 0.0 < BOUND
    assert trust.quarantine(200.0, 60.0) == 120.0
    for _ in range(20):
        longest = trust.quarantine(200.0, 60.0)
    assert longest == 64 * 60.0
    for _ in range(32):
        note(trust, verdict())
    assert trust.state(10_000.0) == "known"


def test_nothing_is_known_of_a_node_that_was_never_audited():
    # The operator's table shows no figure then.
    assert NodeTrust().expectation(0.0) is None


# -- suspect weights -----------------------------------------------------------------------------------------------


def compared(leaning: int, count: int, draws: tuple[int, int] = (0, 0), suspect: Suspect = "older") -> PartVerdict:
    """A clean answer of which `leaning` of `count` logprobs lean to the suspect weights."""
    return msgspec.structs.replace(verdict(max(1, count)), by_logprob=(leaning, count), by_draw=draws, suspect=suspect)


def answers_until_caught(share: float, tokens: int, answers: int, seed: int) -> float:
    """Answers of a node until it is refused, each token leaning with probability `share`."""
    trust = NodeTrust()
    for number, nearer in enumerate(np.random.default_rng(seed).binomial(tokens, share, answers)):
        if note(trust, compared(int(nearer), tokens), number):
            return number + 1
    return math.inf


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 60), share=st.floats(0.0, 0.54), is_draw=st.booleans())
def test_an_honest_answer_multiplies_evidence_by_at_most_one_on_average(count, share, is_draw):
    # So exp(sum) is a supermartingale, and Ville's inequality bounds how often an honest node passes any bound. The
    # mean is over the binomial distribution, from its definition, on sums that are far above the floor at 0.
    mean = np.zeros(4)
    for nearer in range(count + 1):
        trust = NodeTrust(suspect_evidence={"older": [1e4] * 4})
        trust.note(compared(0, 0, (nearer, count)) if is_draw else compared(nearer, count), 0)
        chance = math.comb(count, nearer) * share**nearer * (1.0 - share) ** (count - nearer)
        mean += chance * np.exp(np.array(trust.suspect_evidence["older"]) - 1e4)
    assert (mean <= 1.0 + 1e-6).all()


@pytest.mark.parametrize(("share", "most_answers"), [(0.6, 120), (0.75, 20), (1.0, 7)])
def test_old_weights_are_found_though_rounding_hides_most_of_them(share, most_answers):
    # 60 of 100 tokens that lean to the version before are enough, over many answers. No answer alone is.
    found = [answers_until_caught(share, 100, 400, seed) for seed in range(20)]
    assert min(found) >= 7 and max(found) <= most_answers


def test_an_honest_nodes_rounding_is_no_evidence():
    # 40 nodes of 500 answers each, with errors that favor neither version, or the older one a little.
    assert all(math.isinf(answers_until_caught(0.5 + 0.02 * (seed % 2), 40, 500, seed)) for seed in range(40))


def test_draws_that_only_old_weights_make_are_enough():
    # Whatever logprobs the node claims.
    trust = NodeTrust()
    caught = [note(trust, compared(0, 40, (5, 5)), number) for number in range(12)]
    assert caught == [False] * 10 + [True] * 2


def test_a_prompt_that_comes_again_counts_once():
    # Rounding repeats itself there, and would pass for evidence. The same answer to other prompts does count.
    trust = NodeTrust()
    assert not any(note(trust, compared(40, 40), 7) for _ in range(100))
    assert max(trust.suspect_evidence["older"]) < SUSPECT_BOUND
    assert any(note(trust, compared(40, 40), prompt) for prompt in range(8, 16))


def test_a_quarantine_forgets_the_evidence_for_old_weights():
    # It has led to the quarantine already.
    trust = NodeTrust(suspect_evidence={"older": [20.0] * 4})
    trust.quarantine(0.0, 60.0)
    assert not note(trust, compared(40, 40), 1)


def test_evidence_for_each_suspect_adds_up_apart():
    # Seven answers that lean to either one quarantine, with that one as the reason; four of each do not.
    trust = NodeTrust()
    for number in range(4):
        assert not note(trust, compared(40, 40), number) and not note(trust, compared(40, 40, suspect="int8"), number)
    reasons = [trust.note(compared(40, 40, suspect="int8"), number) for number in range(4, 7)]
    assert reasons[:2] == [None, None] and "in int8" in (reasons[2] or "")
