"""The density gate: two figures of a replay, pairs a trace and dollars a trace, and a threshold for the first.

Too few pairs a trace say that the teachers seldom agree against the student, or that most of its states were refused.
Pairs are counted over the traces that anybody could judge, dollars over those that a teacher was asked about, an answer
from the cache at what it cost when it was asked for. Traces that were refused would thin both out. The gate is our own.

    composer pairs report PAIRS.jsonl    the figures and a verdict on the whole file
    RunningGate                          a verdict for each window of a file that is trained while it grows
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from composer_prime.config.teachers import GateConfig
from composer_prime.console import fail
from composer_prime.data.pairs import (
    EMBEDDED_PAIRS,
    Gate,
    PairFile,
    Verdict,
    checked_gate,
    gate_file,
    read_gate,
    resolve_pairs,
)
from composer_prime.errors import ComposerError, ConfigError
from composer_prime.run.run_dir import write_atomic
from composer_prime.traces.replay.records import (
    ReplayRecords,
    StateRecord,
    latest,
    only_writer,
    read_records,
    votes_beside,
)

logger = logging.getLogger(__name__)

MISSED = 1
FEWEST_TRACES = 8
"""Traces that a window needs: fewer tell nothing of the next ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Density:
    """The two figures, and what they are made of."""

    pairs: int
    judged_traces: int
    """Traces with a state that was not refused."""
    asked_traces: int
    """Traces for which an answer was paid, now or when the cache got it."""
    usd: float

    @property
    def pairs_a_trace(self) -> float:
        return self.pairs / max(self.judged_traces, 1)

    @property
    def usd_a_trace(self) -> float:
        return self.usd / max(self.asked_traces, 1)

    def verdict(self, first: int, last: int, min_pairs: float) -> Verdict:
        """Return the verdict on the pairs `first` to `last` - 1."""
        reasons = []
        if self.pairs_a_trace < min_pairs:
            reasons.append(f"{self.pairs_a_trace:.2f} pairs a trace, {min_pairs:g} are wanted")
        return Verdict(first=first, last=last, passed=not reasons, reasons=reasons, min_pairs_a_trace=min_pairs)


def measure(records: Iterable[StateRecord], pairs: int) -> Density:
    """Measure a replay that gave `pairs`, by the last record of each state. A state that was tried twice found the
    votes of the first time in the cache."""
    decided = latest(records).values()
    judged = {record.trace for record in decided if record.outcome != "refused"}
    asked = {record.trace for record in decided if record.votes or record.calls or record.price_usd}
    usd = sum(record.price_usd for record in decided)
    return Density(pairs=pairs, judged_traces=len(judged), asked_traces=len(asked), usd=usd)


def write_gate(pairs: Path, gate: Gate) -> None:
    """Raises OSError."""
    write_atomic(gate_file(pairs), msgspec.json.encode(gate) + b"\n")


class RunningGate:
    """A verdict for each window of pairs: `window_pairs` of them, from FEWEST_TRACES traces, or the rest at the end.

    A window is measured by the traces that had a state in it, with all their pairs so far. The pairs of a window that
    missed are never trained; the next window may pass. A resumed run finds its place in votes and verdicts.
    """

    def __init__(self, config: GateConfig, records: ReplayRecords) -> None:
        """Raises ConfigError when the verdicts there are on more pairs than the file holds."""
        self._config = config
        self._path = records.pairs_path
        self.gate = checked_gate(PairFile(self._path))
        self._by_trace: dict[str, list[StateRecord]] = defaultdict(list)
        self._in_window: set[str] = set()
        """Traces that had a state since the newest verdict."""
        self._pairs: set[str] = set()
        for record in records.history:
            self._take(record)
            if record.pairs and len(self._pairs) <= self.gate.measured:
                self._in_window.clear()

    def _take(self, record: StateRecord) -> None:
        self._by_trace[record.trace].append(record)
        self._in_window.add(record.trace)
        self._pairs.update(record.pairs)

    async def note(self, record: StateRecord) -> None:
        """Take in the record of a state whose pairs are in the file. Raises OSError."""
        self._take(record)
        await self.measure(self._config.window_pairs)

    async def measure(self, window_pairs: int) -> None:
        """Give the open window its verdict where it has this many pairs, from enough traces. Raises OSError."""
        records = [record for trace in self._in_window for record in self._by_trace[trace]]
        giving = {record.trace for record in records if record.pairs}
        if len(self._pairs) - self.gate.measured < window_pairs or len(giving) < FEWEST_TRACES:
            return
        pairs = sum(len(set(record.pairs)) for record in latest(records).values())
        density = measure(records, pairs)
        verdict = density.verdict(self.gate.measured, len(self._pairs), self._config.min_pairs_a_trace)
        self.gate = Gate(verdicts=[*self.gate.verdicts, verdict])
        self._in_window.clear()
        await asyncio.to_thread(write_gate, self._path, self.gate)
        outcome = "passed" if verdict.passed else f"missed ({'; '.join(verdict.reasons)}); these are never trained"
        log = logger.info if verdict.passed else logger.warning
        log("density gate, pairs %d to %d: %s; %d may train", verdict.first, verdict.last, outcome, self.gate.passed)


def pairs_parser() -> argparse.ArgumentParser:
    description = "Measures preference pairs with the density gate, and keeps its verdict."
    parser = argparse.ArgumentParser(prog="composer pairs report", description=description)
    parser.add_argument("pairs", type=Path, help="pairs.jsonl of a replay or a run, or tiny, tiny_code")
    limit = GateConfig().min_pairs_a_trace
    parser.add_argument("--min-pairs", type=float, help=f"required pairs per trace (as last time, or {limit:g})")
    return parser


def main(words: list[str] | None = None) -> int:
    """Exit status: 0 the gate is passed, 1 it is missed, 2 wrong input."""
    options = pairs_parser().parse_args(words)
    try:
        return report_pairs(options.pairs, options.min_pairs)
    except ComposerError as error:
        fail(error, command="composer pairs report")


def report_pairs(name: Path, min_pairs: float | None) -> int:
    """Print the figures of a file and write its verdict. Raises ConfigError."""
    path = resolve_pairs(name, Path())
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: name a pairs.jsonl that `composer replay` wrote")
    if min_pairs is not None and not 0 < min_pairs < math.inf:
        raise ConfigError(f"--min-pairs is {min_pairs:g}: give a number above 0")
    file, votes = PairFile(path), votes_beside(path)
    held = file.refresh()
    doubts = Counter(round(file.read(number).epsilon, 4) for number in range(held))
    records = list(read_records(votes))
    if not records:
        raise ConfigError(
            f"{votes} holds no votes, so traces without a pair and the cost are not known: make pairs and votes with "
            "`composer replay`"
        )
    density, before = measure(records, held), read_gate(path).verdicts
    usual = before[-1].min_pairs_a_trace if before else GateConfig().min_pairs_a_trace
    verdict = density.verdict(0, held, min_pairs or usual)
    if str(name) not in EMBEDDED_PAIRS:
        with only_writer(path):
            write_gate(path, Gate(verdicts=[verdict]))
    outcomes = Counter(record.outcome.replace("_", " ") for record in latest(records).values())
    listed = ", ".join(f"{count} with epsilon {epsilon:g}" for epsilon, count in sorted(doubts.items()))
    print(f"pairs       {held} ({listed or 'none'})")
    print(f"states      {', '.join(f'{count} {outcome}' for outcome, count in outcomes.most_common())}")
    print(f"a trace     {density.pairs_a_trace:.2f} pairs, over {density.judged_traces} traces that were not refused")
    print(f"cost        ${density.usd_a_trace:.4f} a trace, over {density.asked_traces} that teachers were asked about")
    print(f"gate        {'passed' if verdict.passed else 'missed: ' + '; '.join(verdict.reasons)}")
    return 0 if verdict.passed else MISSED
