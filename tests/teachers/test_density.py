"""The density gate: agreement and permutation tests against known figures, and what the verdict decides."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from loopback import Endpoint, call, configured, replayed, serving, state

from composer_prime.config import Config
from composer_prime.config.teachers import GateConfig
from composer_prime.errors import ConfigError, EndpointError, TeacherError
from composer_prime.plan.preflight import check_start
from composer_prime.stats import plot
from composer_prime.traces.pairs import Pair, PairFile, PairState, check_binding, gate_file, read_gate
from composer_prime.traces.replay.actions.canonical import RULES
from composer_prime.traces.replay.density import (
    Density,
    density_chart,
    main,
    measure,
    report_lines,
)
from composer_prime.traces.replay.frozen_base import Margins, base_margins
from composer_prime.traces.replay.records import ReplayRecords, StateRecord, VoteRecord, votes_beside
from composer_prime.traces.replay.running_gate import RunningGate
from composer_prime.traces.states_file import check_own
from orchestrator.preferences import ReleasedPairs
from tests.verdicts import release


def vote(teacher: str, form: str, agrees: bool) -> VoteRecord:
    return VoteRecord(
        teacher=teacher, family=teacher, form=form, agrees=agrees, answer="k", cached=False, cost_usd=0.1,
        seconds=0.5,
    )  # fmt: skip


def record(trace: str, number: int, forms: str, *, usd: float = 0.2, seconds: float = 1.0) -> StateRecord:
    """Teachers gpt, qwen, glm gave these forms; the student's is `s`."""
    votes = [vote(name, form, form == "s") for name, form in zip(("gpt", "qwen", "glm"), forms, strict=False)]
    return StateRecord(
        trace=trace, state=f"{trace}/{number}", step=number, family="claude", outcome="overruled", planned=3,
        votes=votes, cost_usd=usd, seconds=seconds, rules=RULES,
    )  # fmt: skip


def pair(trace: str, number: int) -> Pair:
    sides = [{"role": "assistant", "tool_calls": [call(name, {"n": number})]} for name in ("cat", "ls")]
    asked = PairState(state_id=f"{trace}/{number}", messages=[{"role": "user", "content": str(number)}])
    return Pair(trace=trace, state=asked, chosen=sides[0], rejected=sides[1], epsilon=1 / 6)


def margins(real: list[float], cross_step: list[float], traces: int = 8) -> Margins:
    return Margins(real=real, cross_step=cross_step, traces=[f"t{index % traces}" for index in range(len(real))])


# Pairs that were counted by hand: means, agreement between families, and the gates that are missed.
def test_the_figures_of_a_replay() -> None:
    records = [record("a", 0, "xx"), record("a", 1, "sxs"), record("b", 0, "ss", usd=0.6), record("b", 1, "xyz")]
    density = measure(records, [pair("a", 0), pair("a", 1), pair("b", 0)], None)
    assert (density.traces, density.states, density.pairs) == (2, 4, 3)
    assert density.pairs_a_trace == 1.5 and density.usd_a_trace == pytest.approx(0.6)
    assert density.agreement == {("gpt", "qwen"): (2, 4), ("glm", "gpt"): (1, 2), ("glm", "qwen"): (0, 2)}
    assert [reason.split(",")[0] for reason in density.failures] == [
        "1.50 pairs a trace",
        "the base margins were not measured",
    ]


def measured(**changes) -> Density:
    """A replay that passes, changed."""
    good = margins(real=[1.0 + 0.01 * n for n in range(40)], cross_step=[3.0] * 40)
    values = {"usd": 0.2, "seconds": 1.0, "margins": good, "pairs": 5} | changes
    records = [record("a", n, "xx", usd=values["usd"], seconds=values["seconds"]) for n in range(4)]
    return measure(records, [pair("a", n) for n in range(values["pairs"])], values["margins"])


# Each gate alone can fail the verdict.
@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, None),
        ({"pairs": 4}, "pairs a trace"),
        ({"usd": 1.25}, "$5.00 a trace"),
        ({"seconds": 30.0}, "30.0 s a step"),
        ({"margins": margins(real=[1.0, -1.0] * 20, cross_step=[3.0] * 40)}, "label-flipped"),
        ({"margins": margins(real=[1.0] * 40, cross_step=[1.0] * 40)}, "cross-step"),
        (
            {"margins": margins(real=[1.0] * 40, cross_step=[3.0] * 40, traces=7)},
            "7 traces, which can reach p = 0.0156",
        ),
        ({"margins": None}, "not measured"),
    ],
)
def test_the_gates(changes: dict, missed: str | None) -> None:
    density = measured(**changes)
    assert density.passed == (missed is None)
    assert missed is None or [missed in reason for reason in density.failures] == [True]
    assert ("passed" if missed is None else missed) in "\n".join(report_lines(density))


# The chart is well-formed and tells the verdict, with and without margins.
@pytest.mark.parametrize("changes", [{}, {"margins": None}, {"pairs": 0}])
def test_the_chart(tmp_path: Path, changes: dict) -> None:
    density, path = measured(**changes), tmp_path / "chart.svg"
    plot.save(density_chart(density), path)
    words = " ".join(element.text or "" for element in ElementTree.fromstring(path.read_text()).iter())
    assert ("gate passed" if density.passed else "gate missed") in words
    check_own(path, plot.chart_check(path), "a chart")


# Without matplotlib the report is whole but for its chart, and names what to install.
def test_a_report_without_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_bytes(b"".join(msgspec.json.encode(pair("t", number)) + b"\n" for number in range(3)))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([str(pairs)]) == 1
    shown = capsys.readouterr().out
    assert "pairs       3" in shown and "chart       not drawn: charts need matplotlib" in shown
    assert "uv sync --extra plot" in shown and not (tmp_path / "pairs.svg").exists()


# Margins are of the base: a scorer that likes "cat" gives +1 for real pairs, and cross-step pairs another's answer.
def test_margins_of_real_and_cross_step_pairs() -> None:
    found = asyncio.run(base_margins(Likes(), [pair(f"t{number}", number) for number in range(12)]))
    assert found.real == [1.0] * 12 and found.cross_step == [3.0] * 12
    assert sorted(found.traces) == sorted(f"t{number}" for number in range(12))


# A base that cannot read every pair measures the others, and the report tells how many it left out.
def test_margins_of_the_pairs_that_the_base_reads() -> None:
    class Short(Likes):
        async def logprobs_per_token(self, messages, tools, answers) -> list[float]:
            if messages[0]["content"] in ("3", "4"):
                raise TeacherError("the context is longer than the base's")
            return await super().logprobs_per_token(messages, tools, answers)

    pairs = [pair(f"t{number}", number) for number in range(14)]
    found = asyncio.run(base_margins(Short(), pairs))
    assert (len(found.real), found.unread) == (12, 2)
    density = measure([record(f"t{number}", number, "xx") for number in range(14)], pairs, found)
    assert any("(2 that the base cannot read left out)" in line for line in report_lines(density))


# Where the base can measure too few pairs, all else is reported, with the reason.
@pytest.mark.process
def test_a_report_with_a_base_that_measures_too_little(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = tmp_path / "pairs.jsonl"
    made = [pair(f"t{number}", number) for number in range(3)]
    kept = [record(each.trace, number, "xx") for number, each in enumerate(made)]
    ReplayRecords(pairs, votes_beside(pairs)).add(kept[0], made)
    assert main([str(pairs), "--base", "tiny"]) == 1
    shown = capsys.readouterr().out
    assert "pairs       3" in shown and "the base scored 3 of 3 pairs: at least ten" in shown
    gate = read_gate(pairs)
    assert gate is not None and not gate.passed


WRONG_NUMBERS = [("--min-pairs", value) for value in ("0", "nan", "-1", "inf", "many")] + [("--timeout-s", "0")]


# Nothing is worth a weight that was not measured, that missed the gate, or that is not what was measured.
def test_the_verdict_holds_the_weight_at_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        async with serving(Endpoint(answers=lambda model, messages: ("cat", {"path": "a.py"}))) as endpoint:
            await replayed(tmp_path, configured(tmp_path, endpoint.url), [state(number) for number in range(3)])

    asyncio.run(run())
    pairs = tmp_path / "pairs.jsonl"
    assert "never measured" in problems(pairs, weight=0.5) and problems(pairs, weight=0.0) == ""
    assert main([str(pairs)]) == 1 and "missed: 3.00 pairs a trace" in capsys.readouterr().out
    assert "missed the density gate (3.00 pairs a trace" in problems(pairs, weight=0.5)
    measured = read_gate(release(pairs))
    assert measured is not None and problems(pairs, weight=0.5) == ""
    # A look without --base measures no margins: it does not undo what was measured with it.
    assert main([str(pairs)]) == 1 and read_gate(pairs) == measured
    pairs.write_bytes(pairs.read_bytes().replace(b"a.py", b"b.py"))
    found, file = problems(pairs, weight=0.5), PairFile(pairs)
    file.refresh()
    assert measured.verdicts[0].digest in found and file.digest(3) in found and "composer pairs report" in found
    wrong = {(tmp_path / "none.jsonl",): "does not exist", (tmp_path,): "is a folder"}
    wrong[pairs, "--base", tmp_path / "model"] = "there is no folder"
    wrong |= {(pairs, "--min-pairs", word): "not a number above 0" for word in ("nan", "0", "many")}
    wrong |= {(pairs, option, value): f"'{value}' is not a number above 0" for option, value in WRONG_NUMBERS}
    for words, told in wrong.items():
        with pytest.raises(SystemExit):
            main([str(word) for word in words])
        assert told in capsys.readouterr().err


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
    ReplayRecords(pairs, votes_beside(pairs)).add(record("a", 0, "xx"), [pair("a", number) for number in range(3)])
    whole = pairs.read_bytes()
    pairs.write_bytes(whole + msgspec.json.encode(pair("a", 3)))  # without the end of its line
    assert main([str(pairs)]) == 1 and "3 (3 with epsilon" in capsys.readouterr().out
    gate = read_gate(pairs)
    assert gate is not None and gate.measured == 3
    pairs.write_bytes(line + b"\n" + whole)
    with pytest.raises(SystemExit):
        main([str(pairs)])
    assert "pairs.jsonl, pair 1 is invalid" in capsys.readouterr().err and read_gate(pairs) == gate


# Without votes the report tells what pairs alone tell, names what is missing, and gives no verdict.
def test_a_report_without_votes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_bytes(b"".join(msgspec.json.encode(pair(name, 0)) + b"\n" for name in "abb"))
    assert main([str(pairs)]) == 1
    told = capsys.readouterr().out
    assert "1.50 pairs" in told and "3 with epsilon 0.1667" in told and "missing     votes" in told
    assert not gate_file(pairs).exists() and (tmp_path / "pairs.svg").is_file()


class Likes:
    """A base that likes "cat" and finds what does not belong to the state unlikely."""

    async def logprobs_per_token(self, messages, tools, answers) -> list[float]:
        return [self.likes(messages[0]["content"], answer["tool_calls"][0]["function"]) for answer in answers]

    def likes(self, state: str, function: dict) -> float:
        stranger = str(json.loads(function["arguments"])["n"]) != state
        return 0.0 if function["name"] == "cat" else -3.0 if stranger else -1.0


class Undecided:
    async def logprobs_per_token(self, messages, tools, answers) -> list[float]:
        return [-1.0] * len(answers)


# While pairs are trained as they come, each window has its verdict, bound to its lines; a resumed one goes on.
def test_the_running_gate(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    config = GateConfig(window_pairs=16, min_pairs_a_trace=2.0)

    async def come(scorer, numbers: range) -> RunningGate:
        records = ReplayRecords(pairs, votes_beside(pairs))
        gate = RunningGate(config, records, scorer)
        for number in numbers:
            made = pair(f"t{number // 2}", number)
            kept = msgspec.structs.replace(record(made.trace, number, "xx"), pairs=[made.pair_id])
            gate.note(kept, records.add(kept, [made]))
            await gate.measure_when_due()
        return gate

    asyncio.run(come(Likes(), range(20)))
    first = read_gate(pairs)
    assert first is not None
    assert [(each.first, each.last, each.passed, each.votes) for each in first.verdicts] == [(0, 16, True, 16)]
    asyncio.run(come(Undecided(), range(20, 40)))
    asyncio.run(come(None, range(40, 50)))
    gate = read_gate(pairs)
    assert gate is not None and gate.verdicts[0] == first.verdicts[0]
    assert [(each.first, each.last, each.passed) for each in gate.verdicts[1:]] == [(16, 32, False), (32, 48, False)]
    assert "label-flipped" in gate.verdicts[1].reasons[0] and "not measured" in gate.verdicts[2].reasons[0]
    assert (gate.measured, gate.passed) == (48, 16)
    # Two windows missed; fresh pairs open the gate again, and those that missed stay out.
    asyncio.run(come(Likes(), range(50, 64)))
    gate = read_gate(pairs)
    assert gate is not None and [each.passed for each in gate.verdicts] == [True, False, False, True]
    released = ReleasedPairs(PairFile(pairs))
    assert released.refresh()
    assert [index for index in range(64) if released.allows(index)] == [*range(16), *range(48, 64)]
    check_binding(gate, PairFile(pairs))
    pairs.write_bytes(pairs.read_bytes().replace(b"cat", b"dog", 1))
    with pytest.raises(ConfigError, match=first.verdicts[0].digest):
        RunningGate(config, ReplayRecords(pairs, votes_beside(pairs)), None)


# When no more states come, what is left has its verdict too; what is too little for one does not, and the log says so.
def test_what_is_left_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pairs = tmp_path / "pairs.jsonl"

    async def come(numbers: range) -> list[tuple[int, int, bool]]:
        records = ReplayRecords(pairs, votes_beside(pairs))
        gate = RunningGate(GateConfig(window_pairs=32, min_pairs_a_trace=1.0), records, Likes())
        for number in numbers:
            made = pair(f"t{number}", number)
            kept = msgspec.structs.replace(record(made.trace, number, "xx"), pairs=[made.pair_id])
            gate.note(kept, records.add(kept, [made]))
            await gate.measure_when_due()
        await gate.measure_rest()
        return [(each.first, each.last, each.passed) for each in gate.gate.verdicts]

    assert asyncio.run(come(range(47))) == [(0, 32, True)]
    assert "pairs 32 to 47 of 15 traces: a verdict needs 16 pairs of 8 traces" in caplog.text
    assert asyncio.run(come(range(47, 48))) == [(0, 32, True), (32, 48, True)]


# A base that is gone decides on no window: it stays open, and is measured once the base is back.
def test_a_window_waits_for_the_base(tmp_path: Path) -> None:
    class Gone:
        async def logprobs_per_token(self, messages, tools, answers) -> list[float]:
            raise EndpointError("the base is gone")

    async def run() -> None:
        records = ReplayRecords(tmp_path / "pairs.jsonl", tmp_path / "votes.jsonl")
        gate = RunningGate(GateConfig(min_pairs_a_trace=1.0), records, Gone())
        for number in range(16):
            made = pair(f"t{number}", number)
            kept = msgspec.structs.replace(record(made.trace, number, "xx"), pairs=[made.pair_id])
            gate.note(kept, records.add(kept, [made]))
        await gate.measure_rest()
        assert not gate.gate.verdicts
        gate._scorer = Likes()
        await gate.measure_rest()
        assert [(each.last, each.passed) for each in gate.gate.verdicts] == [(16, True)]

    asyncio.run(run())


# A window that fills up while the one before it is measured has its verdict too, though no further state may come.
def test_a_window_that_fills_meanwhile(tmp_path: Path) -> None:
    class Waits(Likes):
        def __init__(self) -> None:
            self.asked, self.go = asyncio.Event(), asyncio.Event()

        async def logprobs_per_token(self, messages, tools, answers) -> list[float]:
            self.asked.set()
            await self.go.wait()
            return await super().logprobs_per_token(messages, tools, answers)

    async def run() -> list[tuple[int, int]]:
        records, scorer = ReplayRecords(tmp_path / "pairs.jsonl", tmp_path / "votes.jsonl"), Waits()
        gate = RunningGate(GateConfig(window_pairs=16, min_pairs_a_trace=1.0), records, scorer)

        def come(numbers: range) -> None:
            for number in numbers:
                made = pair(f"t{number}", number)
                kept = msgspec.structs.replace(record(made.trace, number, "xx"), pairs=[made.pair_id])
                gate.note(kept, records.add(kept, [made]))

        come(range(16))
        async with asyncio.timeout(30):
            measuring = asyncio.create_task(gate.measure_when_due())
            await scorer.asked.wait()
            come(range(16, 32))
            await gate.measure_when_due()
            scorer.go.set()
            await measuring
        return [(each.first, each.last) for each in gate.gate.verdicts]

    assert asyncio.run(run()) == [(0, 16), (16, 32)]


# A trace that is cut by a window's end counts in the next window with all that it gave. A window of fewer traces than
# a test can tell from noise stays open, and the log says so where none come any more.
def test_a_trace_over_two_windows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pairs = tmp_path / "pairs.jsonl"

    async def come(numbers: range, density: float) -> list[tuple[int, int, bool]]:
        records = ReplayRecords(pairs, votes_beside(pairs))
        gate = RunningGate(GateConfig(window_pairs=16, min_pairs_a_trace=density), records, Likes())
        for number in numbers:
            trace = "long" if number < 24 else f"t{number % 8}"
            made = pair(trace, number)
            kept = msgspec.structs.replace(record(trace, number, "xx"), pairs=[made.pair_id])
            gate.note(kept, records.add(kept, [made]))
            await gate.measure_when_due()
        await gate.measure_rest()
        return [(each.first, each.last, each.passed) for each in gate.gate.verdicts]

    assert asyncio.run(come(range(24), 4.0)) == []
    assert "pairs 0 to 24 of 1 trace: a verdict needs 16 pairs of 8 traces" in caplog.text
    first = (0, 31, True)  # eight traces; 24 + 7 pairs
    assert asyncio.run(come(range(24, 31), 3.8)) == [first]
    # 24 to 38 are two pairs of each of seven traces and one of the eighth.
    assert asyncio.run(come(range(31, 47), 2.8)) == [first, (31, 47, True)]


# A state that was replayed anew, for its pairs were lost, gave them once: its trace is no denser for it.
def test_a_state_that_was_replayed_anew_counts_once(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"

    async def come() -> None:
        records = ReplayRecords(pairs, votes_beside(pairs))
        gate = RunningGate(GateConfig(window_pairs=16, min_pairs_a_trace=1.5), records, Likes())
        for number in range(16):
            made = pair(f"t{number}", number)
            kept = msgspec.structs.replace(record(made.trace, number, "xx"), pairs=[made.pair_id])
            for _ in range(2):
                gate.note(kept, records.add(kept, [made]))
        await gate.measure_when_due()

    asyncio.run(come())
    gate = read_gate(pairs)
    assert gate is not None and gate.verdicts[0].reasons == ["1.00 pairs a trace, 1.5 are wanted (--min-pairs)"]


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
