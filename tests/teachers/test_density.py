"""`composer pairs report`: its two figures against counts by hand."""

from pathlib import Path

import msgspec
import pytest
from loopback import call

from composer_prime.data.pairs import Pair, PairState
from composer_prime.traces.records import RULES, ReplayRecords, StateRecord, VoteRecord, main, measure, votes_beside


def record(trace: str, number: int, *, outcome: str = "overruled", usd: float = 0.2, price: float = 0.0) -> StateRecord:
    vote = VoteRecord(teacher="gpt", family="gpt", form="x", agrees=False, answer="k", cached=False, cost_usd=usd)
    return StateRecord(
        trace=trace,
        state=f"{trace}/{number}",
        outcome=outcome,
        votes=[] if outcome == "refused" else [vote],
        cost_usd=0.0 if outcome == "refused" else usd,
        price_usd=price or (0.0 if outcome == "refused" else usd),
        rules=RULES,
    )


def pair(trace: str, number: int) -> Pair:
    sides = [{"role": "assistant", "tool_calls": [call(name, {"n": number})]} for name in ("cat", "ls")]
    asked = PairState(state_id=f"{trace}/{number}", messages=[{"role": "user", "content": str(number)}])
    return Pair(trace=trace, state=asked, chosen=sides[0], rejected=sides[1], epsilon=1 / 6)


# Counted by hand: refused traces thin out neither figure, an answer from the cache counts at its price, and a state
# that was tried twice counts once: its first votes were in the cache then.
def test_the_two_figures() -> None:
    records = [record("a", 0), record("a", 0), record("b", 0, usd=0.0, price=0.6), record("c", 0, outcome="refused")]
    assert measure(records) == (2, 2, pytest.approx(0.8))


# A line that is still being written does not count. Fewer pairs than wanted are status 1, a line that is no pair is 2.
def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = tmp_path / "pairs.jsonl"
    with pytest.raises(SystemExit):  # there is no such file
        main([str(pairs)])
    ReplayRecords(pairs, votes_beside(pairs)).add(record("a", 0), [pair("a", number) for number in range(3)])
    whole = pairs.read_bytes()
    pairs.write_bytes(whole + msgspec.json.encode(pair("a", 3)))
    assert main([str(pairs), "--min-pairs", "3"]) == 0 and "3 (3 with epsilon" in capsys.readouterr().out
    assert main([str(pairs), "--min-pairs", "3.1"]) == 1
    pairs.write_bytes(b"{}\n" + whole)
    with pytest.raises(SystemExit) as ended:
        main([str(pairs)])
    assert ended.value.code == 2


# Without votes the traces without a pair are not known.
def test_a_report_without_votes(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_bytes(b"".join(msgspec.json.encode(pair(name, 0)) + b"\n" for name in "abb"))
    with pytest.raises(SystemExit):
        main([str(pairs)])
