"""Replay during training: rollouts in, pairs.jsonl of the run directory out. Replay-DPO reads it as it grows.

It never delays training: what stops the replay is logged, and the run continues with the pairs so far. The end of the
run waits for calls in flight, which may be charged, at most for their own deadline. Dropped calls count at their
reservation and are repeated after a resume.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from composer_prime.config import Config
from composer_prime.console import pluralize
from composer_prime.errors import ComposerError, ConfigError, LedgerError, UnwritableError
from composer_prime.monitor.events import event
from composer_prime.monitor.metrics_file import MetricsFile
from composer_prime.monitor.rollouts import rollout_files
from composer_prime.run.run_dir import RunDir
from composer_prime.traces.ingest.ingest import ingest
from composer_prime.traces.ingest.trace_file import Options, Tally
from composer_prime.traces.records import TraceState, votes_beside
from composer_prime.traces.replay.replay import Replay, open_replay

logger = logging.getLogger(__name__)

LOOK_S = 1.0
REPORT_S = 5.0
END = "the run ended"


class OnlineReplay:
    def __init__(self, config: Config, run_dir: RunDir, metrics: MetricsFile, step: Callable[[], int]) -> None:
        """`step`: the newest trained step, for metrics."""
        self._config = config
        self._run_dir = run_dir
        self._metrics = metrics
        self._step = step
        self._tally = Tally()
        self._logged = set[str]()
        self._replay: Replay | None = None
        """Set while states are replayed."""
        self._ended = asyncio.Event()
        self._ending_since: float | None = None

    async def run(self) -> None:
        """Replay until something stops it or the task is canceled.

        Raises ConfigError before it begins: no key, no price. Any later error ends the replay, not the run.
        """
        pairs, costs = self._run_dir.root / "pairs.jsonl", self._run_dir.root / "costs.jsonl"
        begun = False
        try:
            async with open_replay(self._config, pairs=pairs, votes=votes_beside(pairs), costs=costs) as replay:
                begun = True
                if self._ending_since is not None:
                    return
                self._replay, report = replay, asyncio.create_task(self._report(replay))
                try:
                    await replay.run(self._states())
                finally:
                    self._replay = None
                    self._ended.set()
                    report.cancel()
                    self._log(replay)
                if _stopped(replay):
                    why = replay.progress.stopped
                    logger.error("replay stopped, training continues: %s", why, extra=event("budget"))
        except Exception as error:
            own_files = isinstance(error, (UnwritableError, LedgerError))
            if not begun and isinstance(error, ConfigError) and not own_files:
                raise
            expected = isinstance(error, (ComposerError, OSError))
            logger.error("replay failed, training continues: %s", error, exc_info=None if expected else error)
            self._metrics.log(self._step(), {"replay/failed": 1.0})

    def stop(self) -> None:
        """Make no more calls, because the run ends."""
        self._ending_since = self._ending_since or time.monotonic()
        if self._replay is not None:
            self._replay.stop(END)

    async def end(self) -> None:
        """After `stop`, wait for the answers under way, at most teachers.end_timeout_s; not if no teacher charges."""
        waited_for, replay = self.waiting_for(), self._replay
        if waited_for is None or replay is None:
            return
        logger.info("before it ends, the run waits for %s", waited_for)
        try:
            await asyncio.wait_for(self._ended.wait(), self._left_s())
        except TimeoutError:
            logger.warning(
                "the replay did not end within %g s (teachers.timeout_s): %s in flight, counted at their "
                "reservation; a resumed run continues these states",
                self._config.teachers.end_timeout_s,
                pluralize(replay.in_flight, "call"),
            )

    def _left_s(self) -> float:
        since = time.monotonic() if self._ending_since is None else self._ending_since
        return max(since + self._config.teachers.end_timeout_s - time.monotonic(), 0.0)

    def waiting_for(self) -> str | None:
        """Return what the end of the run waits for, as `subject: progress`, if anything."""
        if self._ending_since is None or self._replay is None or not self._config.teachers.end_timeout_s:
            return None
        calls = pluralize(self._replay.in_flight, "call")
        return f"answers of teachers that may charge: {calls} in flight, given up in {self._left_s():.0f} s"

    async def _states(self) -> AsyncIterator[TraceState]:
        # A rollout that is in the files of two steps gives its states once.
        seen, fingerprints, names = set[Path](), set[bytes](), set[str]()
        while True:
            fresh = [path for path in rollout_files(self._run_dir, "step").values() if path not in seen]
            for path in fresh:
                seen.add(path)
                for state in await asyncio.to_thread(self._ingested, path, fingerprints, names):
                    yield state
            if not fresh:
                await asyncio.sleep(LOOK_S)

    def _ingested(self, path: Path, fingerprints: set[bytes], names: set[str]) -> list[TraceState]:
        """Return the states of one step's rollouts, masked for remote teachers: they hold what tools printed."""
        remote = any(not teacher.local for teacher in self._config.teachers.teacher)
        options = Options(mask=remote, model=self._config.model.path)
        return list(ingest(path, self._tally, options, fingerprints=fingerprints, trace_ids=names))

    async def _report(self, replay: Replay) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            self._log(replay)

    def _log(self, replay: Replay) -> None:
        progress = replay.progress
        for reason in [reason for reason in progress.votes.without_vote if reason not in self._logged]:
            self._logged.add(reason)
            logger.warning("no vote: %s", reason)
        self._metrics.log(
            self._step(),
            {
                "replay/states": float(progress.states + progress.resumed),
                "replay/pairs": float(progress.pairs),
                "replay/calls": float(progress.votes.calls),
                "replay/cached": float(progress.votes.cached),
                "replay/failed_calls": float(progress.votes.failed),
                "replay/usd": progress.usd,
                "replay/stopped": float(_stopped(replay)),
            },
        )


def _stopped(replay: Replay) -> bool:
    return replay.progress.stopped not in (None, END)
