"""One run on this machine: prepare the directory, start the roles, watch them, stop them, sum up.

    main thread: [ poll children | tail metrics.jsonl -> view, trackers ] every TICK_S until finished, failed or Ctrl-C

Starts console scripts only: this package imports no other role.
"""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from composer_prime.config import Config
from composer_prime.errors import RoleFailedError
from composer_prime.monitor.metrics_file import MetricsFile, Tail
from composer_prime.monitor.progress import RunProgress
from composer_prime.monitor.trackers import Feeder, numbers_of, start_trackers
from composer_prime.plan.machine import visible_gpus
from composer_prime.run.costs import CostLedger
from composer_prime.run.run_dir import RunDir
from trainer.launcher.prepare import Prepared, prepare
from trainer.launcher.summary import run_summary
from trainer.launcher.supervise import RoleCommand, Supervisor, role_commands
from trainer.launcher.view import View, build_view

TICK_S = 0.1
MEMORY_EVERY_S = 5.0
TRACKER_CLOSE_S = 30.0
SAME_PRESS_S = 0.3
"""One Ctrl-C can arrive twice: from the terminal and from `uv run`, which passes it on."""
FAILED = 1
LINKS = ("weights/bytes", "diloco/bytes_sent", "diloco/bytes_received")
"""Metrics that tell what went over a link: of one publication; the others since their connection was made."""
Commands = Callable[[Config, RunDir], list[RoleCommand]]


def launch(config: Config, commands: Commands | None = None) -> int:
    """Run `config` to its end and return the exit status: 0 finished, 1 failed, 130 interrupted.

    `commands` gives the processes to start; by default the roles of the configuration. Raises ConfigError when the run
    directory cannot be used.
    """
    prepared = prepare(config)
    if 0 < config.run.max_steps <= prepared.start_step and prepared.run_dir.final.is_dir():
        print(
            f"{config.run.name} is finished already: {prepared.start_step} of {config.run.max_steps} steps, model in "
            f"{prepared.run_dir.final}. To train on, raise run.max_steps"
        )
        prepared.lock.close()
        return 0
    roles = commands(prepared.config, prepared.run_dir) if commands else _roles(prepared)
    signals = _Signals()
    view = build_view(prepared.config)
    session = _Session(prepared=prepared, view=view, signals=signals)
    supervisor = Supervisor(
        run_dir=prepared.run_dir,
        roles=roles,
        grace_s=prepared.config.run.stop_grace_s,
        save_s=prepared.config.trainer.checkpoint.stop_timeout_s,
        answers_s=prepared.config.teachers.end_timeout_s,
        max_restarts=prepared.config.inference.max_restarts,
        say=view.event,
    )
    with signals:
        status, failure = _run(session, supervisor)
    _account(session, supervisor)
    _close(session, status, failure)
    return status


def _roles(prepared: Prepared) -> list[RoleCommand]:
    return role_commands(prepared.config, prepared.run_dir, gpus=len(visible_gpus()))


def _run(session: _Session, supervisor: Supervisor) -> tuple[int, str | None]:
    """(exit status, what failed)."""
    failure = None
    try:
        session.open()
        session.announce(supervisor.roles)
        supervisor.start()
        session.start_trackers()
        while supervisor.poll() == "running" and not session.signals.count:
            session.tick(supervisor)
            time.sleep(TICK_S)
    except RoleFailedError as error:
        failure = str(error)
        answers = _answers_text(supervisor)
        cause = failure.partition("\n")[0].partition(";")[0]
        session.view.event(f"{cause}: stopping the run{answers and '; '}{answers}")
    finally:
        if session.signals.count:
            session.view.event(_stopping_text(supervisor))
        supervisor.stop(hurry=lambda: session.signals.count > 1)
        session.tick(supervisor)
    if failure is not None:
        return FAILED, failure
    return (session.signals.status if session.signals.count else 0), None


def _account(session: _Session, supervisor: Supervisor) -> None:
    """What this start of the run used, into costs.jsonl. A disk that refuses costs the lines only."""
    with suppress(OSError):
        ledger = CostLedger(session.prepared.run_dir.root / "costs.jsonl")
        for child in supervisor.children:
            lived_s = round(child.lived_s, 1)
            ledger.write("seconds", role=child.role.name, seconds=lived_s, gpu_seconds=lived_s * child.role.gpus)
        for link, count in sorted(session.link_bytes.items()):
            ledger.write("bytes", link=link, bytes=int(count))


def _stopping_text(supervisor: Supervisor) -> str:
    ranks = any(child.role.kind == "rank" and child.running for child in supervisor.children)
    save = f"the step at hand may end and a checkpoint be written, at most {supervisor.save_s:g} s" if ranks else ""
    waits = "; then ".join(filter(None, [save, _answers_text(supervisor)]))
    return f"stopping{waits and ': '}{waits} (again Ctrl-C kills at once{', without one' if ranks else ''})"


def _answers_text(supervisor: Supervisor) -> str:
    """What the end of the orchestrator may take longer for; nothing where no teacher charges."""
    asks = any(child.role.kind == "orchestrator" and child.running for child in supervisor.children)
    if not asks or not supervisor.answers_s:
        return ""
    return f"teachers may answer what they were asked, at most {supervisor.answers_s:g} s"


def _close(session: _Session, status: int, failure: str | None) -> None:
    session.view.close()
    for feeder in session.feeders:
        feeder.close(TRACKER_CLOSE_S)
    if failure is not None:
        print(f"\nthe run failed: {failure}", file=sys.stderr)
    print(run_summary(session.prepared, session.progress, status, session.peak_bytes), flush=True)
    session.prepared.lock.close()


@dataclass(slots=True, kw_only=True)
class _Session:
    """What the loop keeps between ticks."""

    prepared: Prepared
    view: View
    signals: _Signals
    progress: RunProgress = field(default_factory=RunProgress)
    feeders: list[Feeder] = field(default_factory=list)
    peak_bytes: int = 0
    """Most memory that all processes held together."""
    link_bytes: Counter[str] = field(default_factory=Counter)
    """Since this start, by link."""
    _link_totals: dict[str, int] = field(default_factory=dict)
    _tail: Tail | None = None
    _metrics: MetricsFile | None = None
    _measured: float = 0.0
    _memory_bytes: int | None = None

    def open(self) -> None:
        """Take in the history of a resumed run, and mark the resume."""
        path = self.prepared.run_dir.metrics
        self._metrics = MetricsFile(path, "launcher")
        if self.prepared.start_step:
            self._metrics.log(self.prepared.start_step, {"event": "resume"})
        self._tail = Tail(path)
        self.progress.update(self._tail.read())
        self.progress.waiting.clear()
        self.view.begin(self.progress)
        for note in self.prepared.notes:
            self.view.event(note)

    def announce(self, roles: list[RoleCommand]) -> None:
        names = ", ".join(role.name for role in roles) or "no role"
        self.view.event(f"starting {names}; their logs are in {self.prepared.run_dir.root / 'logs'}")

    def start_trackers(self) -> None:
        self.feeders = start_trackers(self.prepared.config, self.prepared.run_dir.root, self.view.event)

    def tick(self, supervisor: Supervisor) -> None:
        lines = self._tail.read() if self._tail else []
        fresh = self.progress.update(lines)
        for line in lines:
            self._count_links(line)
        for line in lines if self.feeders else []:
            for feeder in self.feeders:
                feeder.put(line["step"], numbers_of(line))
        self._measure(supervisor, fresh_step=fresh[-1].step if fresh else None)
        self.view.refresh(self.progress, fresh, self._memory_bytes)

    def _count_links(self, line: Mapping[str, Any]) -> None:
        for name in LINKS:
            count, before = line.get(name), self._link_totals.get(name, 0)
            if not isinstance(count, int | float):
                continue
            if name.startswith("diloco/"):
                self._link_totals[name] = int(count)
                count -= before if count >= before else 0
            self.link_bytes[name] += int(count)

    def _measure(self, supervisor: Supervisor, fresh_step: int | None) -> None:
        if time.monotonic() - self._measured >= MEMORY_EVERY_S:
            self._measured = time.monotonic()
            roots = [child.process.pid for child in supervisor.children if child.running and child.process]
            self._memory_bytes = resident_bytes(roots)
            self.peak_bytes = max(self.peak_bytes, self._memory_bytes)
        if fresh_step is not None and self._metrics is not None and self._memory_bytes:
            self._metrics.log(fresh_step, {"memory/total_bytes": self._memory_bytes})


def resident_bytes(roots: list[int]) -> int:
    """Memory of these processes and all their descendants, each shared page counted once (proportionally) on Linux."""
    total = 0
    for pid in roots:
        with suppress(psutil.Error):
            root = psutil.Process(pid)
            for process in [root, *root.children(recursive=True)]:
                with suppress(psutil.Error):
                    memory = process.memory_full_info()
                    total += getattr(memory, "pss", None) or memory.rss
    return total


class _Signals:
    """Counts Ctrl-C, SIGTERM and SIGHUP while the run is on; the loop looks at the count."""

    def __init__(self) -> None:
        self.count = 0
        self._last = 0.0
        self.number: int = signal.SIGINT
        self._before: dict[int, object] = {}

    @property
    def status(self) -> int:
        """As a shell reports it: 130 for Ctrl-C."""
        return 128 + self.number

    def __enter__(self) -> _Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup
            self._before[number] = signal.signal(number, self._caught)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _caught(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if self.count and now - self._last < SAME_PRESS_S:
            return
        self.number = number if self.count == 0 else self.number
        self.count, self._last = self.count + 1, now
