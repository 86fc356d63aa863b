"""The density gate: its two figures against counts by hand, and what the verdict decides."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from loopback import Endpoint, call, configured, replayed, serving, state

from composer_prime.config import Config
from composer_prime.config.teachers import MIN_WINDOW_PAIRS, GateConfig
from composer_prime.data.pairs import Pair, PairFile, PairState, gate_file, read_gate
from composer_prime.errors import ConfigError
from composer_prime.plan.preflight import check_start
from composer_prime.traces.replay.actions import RULES
from composer_prime.traces.replay.density import RunningGate, main, measure
from composer_prime.traces.replay.records import ReplayRecords, StateRecord, VoteRecord, votes_beside
from orchestrator.preferences import ReleasedPairs
from tests.verdicts import release


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
    density = measure(records, 3)
    assert (density.judged_traces, density.asked_traces) == (2, 2)
    assert density.pairs_a_trace == 1.5 and density.usd_a_trace == pytest.approx(0.4)
    assert density.verdict(0, 3, 1.5).passed and not density.verdict(0, 3, 1.6).passed


# Nothing is worth a weight that was not measured, that missed the gate, or that is not what was measured.
def test_the_verdict_holds_the_weight_at_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        async with serving(Endpoint(answers=lambda model, messages: ("cat", {"path": "a.py"}))) as endpoint:
            await replayed(tmp_path, configured(tmp_path, endpoint.url), [state(number) for number in range(3)])

    asyncio.run(run())
    pairs = tmp_path / "pairs.jsonl"
    assert "never measured" in problems(pairs, weight=0.5) and problems(pairs, weight=0.0) == ""
    assert main([str(pairs)]) == 1 and "3.00 pairs a trace" in problems(pairs, weight=0.5)
    assert main([str(pairs), "--min-pairs", "3"]) == 0 and problems(pairs, weight=0.5) == ""
    assert main([str(pairs)]) == 0  # as last time
    pairs.write_bytes(b"".join(pairs.read_bytes().splitlines(keepends=True)[:2]))
    assert "composer pairs report" in problems(pairs, weight=0.5)
    for words in ([tmp_path / "none.jsonl"], [tmp_path], [pairs, "--min-pairs", "0"], [pairs, "--min-pairs", "nan"]):
        with pytest.raises(SystemExit):
            main([str(word) for word in words])


# What was appended after the verdict waits for the next one; what it covered may be trained meanwhile.
def test_a_verdict_holds_for_what_it_measured(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_bytes(b"".join(msgspec.json.encode(pair("a", number)) + b"\n" for number in range(4)))
    release(pairs)
    with pairs.open("ab") as file:
        file.write(msgspec.json.encode(pair("a", 4)) + b"\n")
    assert problems(pairs, weight=0.5) == ""


# A verdict covers what was measured, and nothing else: not a line that is still being written, and a file with a line
# that is no pair has none.
@pytest.mark.parametrize("line", [b"{}", b'{"trace": "\xff"}', b"no pair"])
def test_a_verdict_covers_what_was_measured(line: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = tmp_path / "pairs.jsonl"
    ReplayRecords(pairs, votes_beside(pairs)).add(record("a", 0), [pair("a", number) for number in range(3)])
    whole = pairs.read_bytes()
    pairs.write_bytes(whole + msgspec.json.encode(pair("a", 3)))  # without the end of its line
    assert main([str(pairs)]) == 1 and "3 (3 with epsilon" in capsys.readouterr().out
    gate = read_gate(pairs)
    assert gate.measured == 3
    pairs.write_bytes(line + b"\n" + whole)
    with pytest.raises(SystemExit):
        main([str(pairs)])
    assert "pairs.jsonl, pair 1 is invalid" in capsys.readouterr().err and read_gate(pairs) == gate


# Without votes the traces without a pair are not known: no verdict.
def test_a_report_without_votes(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_bytes(b"".join(msgspec.json.encode(pair(name, 0)) + b"\n" for name in "abb"))
    with pytest.raises(SystemExit):
        main([str(pairs)])
    assert not gate_file(pairs).exists()


async def come(pairs: Path, numbers: range, traces: int, config: GateConfig) -> list[tuple[int, int, bool]]:
    """States of so many traces in turn, with a pair each. Returns the verdicts so far."""
    records = ReplayRecords(pairs, votes_beside(pairs))
    gate = RunningGate(config, records)
    for number in numbers:
        made = pair(f"t{number % traces}", number)
        kept = msgspec.structs.replace(record(made.trace, number), pairs=[made.pair_id])
        records.add(kept, [made])
        await gate.note(kept)
    return [(each.first, each.last, each.passed) for each in gate.gate.verdicts]


# While pairs are trained as they come, each window has its verdict; a resumed one goes on, also after one that missed.
def test_the_running_gate(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    dense = GateConfig(window_pairs=16, min_pairs_a_trace=2.0)
    strict = GateConfig(window_pairs=16, min_pairs_a_trace=9.0)
    assert asyncio.run(come(pairs, range(20), 8, dense)) == [(0, 16, True)]
    assert asyncio.run(come(pairs, range(20, 34), 8, strict)) == [(0, 16, True), (16, 32, False)]
    assert asyncio.run(come(pairs, range(34, 48), 8, dense))[2:] == [(32, 48, True)]
    released = ReleasedPairs(PairFile(pairs))
    assert released.refresh()
    assert [index for index in range(48) if released.allows(index)] == [*range(16), *range(32, 48)]
    pairs.write_bytes(b"")
    with pytest.raises(ConfigError):
        RunningGate(dense, ReplayRecords(pairs, votes_beside(pairs)))


# A window of few traces stays open. What is left at the end has its verdict too, unless it is too little for one.
def test_what_is_left_at_the_end(tmp_path: Path) -> None:
    pairs, config = tmp_path / "pairs.jsonl", GateConfig(window_pairs=32, min_pairs_a_trace=1.0)
    assert asyncio.run(come(pairs, range(24), 7, config)) == []

    async def rest(number: int) -> list[int]:
        records = ReplayRecords(pairs, votes_beside(pairs))
        gate = RunningGate(config, records)
        made = pair("last", number)
        kept = msgspec.structs.replace(record("last", number), pairs=[made.pair_id])
        records.add(kept, [made])
        await gate.note(kept)
        await gate.measure(MIN_WINDOW_PAIRS)
        return [each.last for each in gate.gate.verdicts]

    assert asyncio.run(rest(24)) == [25] and asyncio.run(rest(25)) == [25]


# A state that was replayed anew, for its pairs were lost, gave them once: its trace is no denser for it.
def test_a_state_that_was_replayed_anew_counts_once(tmp_path: Path) -> None:
    pairs, config = tmp_path / "pairs.jsonl", GateConfig(window_pairs=16, min_pairs_a_trace=1.5)
    asyncio.run(come(pairs, range(15), 16, config))
    asyncio.run(come(pairs, range(15), 16, config))
    assert asyncio.run(come(pairs, range(15, 16), 16, config)) == [(0, 16, False)]


def problems(pairs: Path, weight: float) -> str:
    """What is wrong with such a run."""
    source = {"name": "t", "taskset": {"id": "orchestrator.environments.toolsmith"}}
    config = Config.model_validate(
        {
            "run": {"name": "x", "max_steps": 2, "output_dir": str(pairs.parent / "out")},
            "model": {"path": "tiny", "max_context": 384},
            "orchestrator": {
                "source": [source],
                "sampling": {"max_tokens": 64},
                "preferences": {"pairs": str(pairs), "pairs_per_step": 2 if weight else 0},
            },
            "channels": {"replay_dpo": {"weight": weight}},
        }
    )
    return "\n".join(check_start(config, gpus=0).problems)
