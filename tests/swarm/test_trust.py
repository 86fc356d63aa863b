"""What audits do to the trust in a node."""

import numpy as np
import pytest

from composer_prime.wire.node_messages import PartVerdict
from orchestrator.swarm.trust import BOUND, NodeTrust

FLOOR = 0.02


def verdict(tokens: int = 50, wrong: list[int] | None = None, fault: str | None = None) -> PartVerdict:
    return PartVerdict(tokens=tokens, wrong=wrong or [], fault=fault)


def test_a_new_node_is_audited_whole_and_a_clean_one_ever_less():
    # The share starts at 1, falls with each clean answer once the node is known, and stops at the floor.
    trust = NodeTrust()
    shares = []
    for _ in range(400):
        shares.append(trust.share(FLOOR))
        assert not trust.note(verdict())
    assert shares[:32] == [1.0] * 32 and shares[32] < 0.2
    assert shares == sorted(shares, reverse=True) and shares[-1] == FLOOR
    assert not trust.is_new and (trust.expectation(0.0) or 0.0) > 0.99


def test_one_wrong_token_is_not_enough():
    # An auditor whose rounding is unlucky once in 10,000 tokens does not quarantine an honest node.
    trust, random = NodeTrust(), np.random.default_rng(1)
    for _ in range(3000):
        wrong = np.flatnonzero(random.random(100) < 1e-4).tolist()
        assert not trust.note(verdict(100, wrong))


@pytest.mark.parametrize("clean", [0, 5000])
def test_four_wrong_tokens_close_together_are(clean):
    # Within one answer, or over several. A node that was honest for long is caught as fast as a new one.
    for answers in ([verdict(60, [10, 12, 30, 31])], [verdict(20, [5])] * 4):
        trust = NodeTrust()
        assert not any(trust.note(verdict()) for _ in range(clean))
        assert [trust.note(answer) for answer in answers] == [False] * (len(answers) - 1) + [True]
    assert not NodeTrust().note(verdict(60, [10, 12, 30]))


def test_a_fault_of_the_answer_counts_however_long_it_is():
    # An answer that stops early has one wrong token among many; three such answers are enough.
    trust = NodeTrust()
    assert [trust.note(verdict(2000, [1999], "its stop is not what its seed draws")) for _ in range(3)][-1]


def test_a_quarantine_ends_in_probation_and_the_next_one_is_longer():
    # What was good before is forgotten: all answers are audited again, and relapse costs twice the time.
    trust = NodeTrust(clean=900)
    assert trust.quarantine(100.0, 60.0) == 60.0
    assert trust.quarantined_until == 160.0 and trust.expectation(159.0) == 0.0
    assert trust.is_new and trust.share(FLOOR) == 1.0 and trust.tokens.evidence == 0.0 < BOUND
    assert trust.quarantine(200.0, 60.0) == 120.0
    for _ in range(20):
        longest = trust.quarantine(200.0, 60.0)
    assert longest == 64 * 60.0
    for _ in range(32):
        trust.note(verdict())
    assert not trust.is_new
