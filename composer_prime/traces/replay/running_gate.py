"""The density gate on pairs that are trained while they are made: a verdict for each window of the growing file.

    a state's record, its pairs ──> window ── teachers.gate.window_pairs, of 8 traces ──> measure ──> PAIRS.gate.json
                                           └─ no more states ─────────────────────────────┘
                                                                         (read by orchestrator/preferences.py)

Pairs of fewer traces can pass no permutation test, so their window stays open until more traces gave a pair.

A window's figures are those of the traces that had a state in it, with all pairs of these traces so far. A trace that
continues in the next window counts there with all its pairs. The pairs of a window that missed the gate are never
trained. The next window has new pairs, is measured separately and may pass. Until a window passes, beta has no effect.
A resumed run finds its place in votes and verdicts.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict

from composer_prime.config.teachers import MIN_WINDOW_PAIRS, GateConfig
from composer_prime.console import pluralize
from composer_prime.errors import ConfigError, EndpointError
from composer_prime.traces.pairs import Gate, PairFile, check_binding, read_gate, write_gate
from composer_prime.traces.replay.density import FEWEST_TRACES, Density, measure
from composer_prime.traces.replay.frozen_base import Scorer, base_margins
from composer_prime.traces.replay.records import ReplayRecords, StateRecord, latest

logger = logging.getLogger(__name__)


class RunningGate:
    def __init__(self, config: GateConfig, records: ReplayRecords, scorer: Scorer | None) -> None:
        """Raises ConfigError when the verdicts there are on other pairs than the file holds."""
        self._config = config
        self._scorer = scorer
        self._file = PairFile(records.pairs_path)
        self._pairs = self._file.refresh()
        """Pairs whose state was noted."""
        self.gate = read_gate(self._file.path) or Gate(verdicts=[])
        check_binding(self.gate, self._file)
        self._votes = 0
        self._by_trace: dict[str, list[StateRecord]] = defaultdict(list)
        self._in_window: set[str] = set()
        """Traces that had a state since the newest verdict."""
        self._giving: set[str] = set()
        """Of these, the traces that gave a pair."""
        self._measuring = asyncio.Lock()
        self._recall(records.history)

    def _recall(self, history: list[StateRecord]) -> None:
        before = self.gate.verdicts[-2].votes if len(self.gate.verdicts) > 1 else 0
        begun = self.gate.verdicts[-1].votes if self.gate.verdicts else 0
        recent = {record.trace for record in history[before:]}
        for record in history:
            if record.trace in recent:
                self._by_trace[record.trace].append(record)
        self._in_window = {record.trace for record in history[begun:]}
        self._giving = {record.trace for record in history[begun:] if record.pairs}
        self._votes = len(history)

    def note(self, record: StateRecord, pairs: int) -> None:
        """Add a state that was recorded with `pairs` new pairs. Call it in the order of the files."""
        self._pairs += pairs
        self._votes += 1
        self._by_trace[record.trace].append(record)
        self._in_window.add(record.trace)
        if record.pairs:
            self._giving.add(record.trace)

    async def measure_when_due(self) -> None:
        """Measure the open window once it is full, then the next one if it filled up meanwhile.

        Raises OSError when a verdict cannot be written.
        """
        if self._measuring.locked():
            return
        async with self._measuring:
            while self._measurable(self._config.window_pairs) and await self._measure():
                pass

    async def measure_rest(self) -> None:
        """Measure what is left once no more states come, or log that it is too little for a verdict.

        Raises OSError when a verdict cannot be written.
        """
        async with self._measuring:
            first, last = self.gate.measured, self._pairs
            if self._measurable(MIN_WINDOW_PAIRS):
                await self._measure()
            elif last > first:
                logger.warning(
                    "density gate, pairs %d to %d of %s: a verdict needs %d pairs of %d traces, so these are not "
                    "trained; further states would open the window again",
                    first,
                    last,
                    pluralize(len(self._giving), "trace"),
                    MIN_WINDOW_PAIRS,
                    FEWEST_TRACES,
                )

    def _measurable(self, pairs: int) -> bool:
        return self._pairs - self.gate.measured >= pairs and len(self._giving) >= FEWEST_TRACES

    async def _measure(self) -> bool:
        """Return whether there was a verdict: without the base the window stays open."""
        first, last, votes = self.gate.measured, self._pairs, self._votes
        traces, giving, self._in_window, self._giving = self._in_window, self._giving, set(), set()
        records = [record for trace in traces for record in self._by_trace[trace]]
        by_trace = Counter[str]()
        for record in latest(records).values():  # a state that was replayed again gave its pairs once
            by_trace[record.trace] += len(record.pairs)
        await asyncio.to_thread(self._file.refresh)
        pairs = await asyncio.to_thread(lambda: [self._file.read(index) for index in range(first, last)])
        margins, unmeasured = None, None
        try:
            margins = None if self._scorer is None else await base_margins(self._scorer, pairs)
        except ConfigError as error:
            unmeasured = str(error)
        except EndpointError as error:
            logger.warning("density gate, pairs %d to %d: measured later, for %s", first, last, error)
            self._in_window, self._giving = traces | self._in_window, giving | self._giving
            return False
        density = measure(records, pairs, margins, min_pairs=self._config.min_pairs_a_trace, by_trace=by_trace)
        if unmeasured is not None:
            density.failures.append(unmeasured)
        verdict = density.verdict(first, last, await asyncio.to_thread(self._file.digest, last, first), votes)
        self.gate = Gate(verdicts=[*self.gate.verdicts, verdict])
        await asyncio.to_thread(write_gate, self._file.path, self.gate)
        needed = traces | self._in_window  # by the next window
        self._by_trace = defaultdict(list, {trace: self._by_trace[trace] for trace in needed})
        _log(self.gate, density)
        return True


def _log(gate: Gate, density: Density) -> None:
    """Log the newest verdict, and what follows from it for beta (channels.replay_dpo.weight)."""
    verdict = gate.verdicts[-1]
    where = f"density gate, pairs {verdict.first} to {verdict.last} of {density.traces} traces"
    if verdict.passed:
        logger.info("%s: passed, beta acts on %d pairs", where, gate.passed)
        return
    effect = f"acts on the {gate.passed} pairs of windows that passed" if gate.passed else "acts on none"
    reasons = "; ".join(verdict.reasons)
    logger.warning(
        "%s: missed (%s); these are never trained, beta %s; the next window may pass", where, reasons, effect
    )
