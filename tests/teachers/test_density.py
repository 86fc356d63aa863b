"""The two figures of a replay's pairs against counts by hand."""

from composer_prime.traces.records import RULES, StateRecord, VoteRecord, figures_of


def record(trace: str, *, outcome: str = "overruled", usd: float = 0.2, price: float = 0.2, pairs=()) -> StateRecord:
    vote = VoteRecord(teacher="gpt", family="gpt", form="x", agrees=False, answer="k", cached=False, cost_usd=usd)
    votes = [] if outcome == "refused" else [vote]
    return StateRecord(
        trace=trace, state=f"{trace}/0", outcome=outcome, votes=votes, cost_usd=usd, price_usd=price, rules=RULES,
        pairs=[*pairs],
    )  # fmt: skip


# Refused traces thin out neither figure, an answer from the cache counts at its price, and a state that was tried
# twice counts once: its first votes were in the cache then.
def test_the_two_figures() -> None:
    tries = [record("a", outcome="failed"), record("a", pairs=["x", "y", "z"])]
    records = [*tries, record("b", usd=0.0, price=0.6), record("c", outcome="refused", usd=0.0, price=0.0)]
    shown = "1.50 pairs over 2 that were not refused, $0.4000 over 2 that teachers were asked about"
    assert figures_of(records) == shown
