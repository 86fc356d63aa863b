"""Run everything that a configuration describes on this machine: prepare, start, watch, stop, sum up.

    main thread: [ poll children | new lines of metrics.jsonl -> view, trackers ] every TICK_S
                 until the run is finished or failed, or Ctrl-C

The launcher starts console scripts only, and imports no other role. A run that crashed before its first checkpoint
starts over and keeps what was paid for: answers of endpoints, teachers' pairs and votes, and their costs.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

import psutil

from composer_prime.config import Config, load
from composer_prime.console import COMPOSER, printable, tell_waits
from composer_prime.errors import ConfigError, RoleFailedError
from composer_prime.host import visible_gpus
from composer_prime.monitor.alerts import alerts
from composer_prime.monitor.events import EventFile, parse_event
from composer_prime.monitor.metrics_file import Line, MetricsFile, Tail, numeric_field
from composer_prime.monitor.progress import RunProgress
from composer_prime.monitor.rollouts import read_rollouts, rollout_files, rollout_text
from composer_prime.plan.check_run_dir import check_run_folder, is_run_directory, with_length_divisor
from composer_prime.run.costs import write_cost
from composer_prime.run.keys import RunKeys
from composer_prime.run.process import OrphanGuard
from composer_prime.run.run_dir import PAID_ENTRIES, RunDir, create_run_id, write_atomic
from trainer.launcher import supervise
from trainer.launcher.environment import record_environment
from trainer.launcher.supervise import RoleCommand, RoleProcess, Supervisor, role_commands
from trainer.launcher.trackers import Feeder, numbers_of, start_trackers
from trainer.launcher.view import View, run_summary

FAILED = 1
TICK_S = 0.1
MEMORY_EVERY_S = 5.0
TRACKER_CLOSE_S = 30.0
SAME_PRESS_S = 0.3
"""One Ctrl-C can arrive twice: `uv run` passes it on."""
LINKS = ("weights/bytes", "diloco/bytes_sent", "diloco/bytes_received")
"""Bytes on a link. weights/bytes counts one publication, the others all since the start."""
SAMPLE_EVERY_STEPS = 5
"""How often the screen shows one rollout of a step."""
_SHOWN_OTHERWISE = ("evaluation", "process")
"""Kinds of events that the view draws from metrics.jsonl or at once."""
_KEPT_ON_RESTART = {"keys", "run_id", "logs", ".launcher.lock"} | PAID_ENTRIES
Commands = Callable[[Config, RunDir], list[RoleCommand]]


def launch(config: Config, commands: Commands | None = None) -> int:
    """Run `config` to its end and return the exit status: 0 finished, 1 failed, 130 interrupted.

    `commands` makes the processes to start; by default they are the roles of the configuration. Raises ConfigError when
    the run directory cannot be used.
    """
    with tell_waits("preparing the run directory"):
        prepared = prepare(config)
    config, run_dir = prepared.config, prepared.run_dir
    if 0 < config.run.max_steps <= prepared.start_step and run_dir.final.is_dir():
        print(
            f"{config.run.name} is already finished: {prepared.start_step} of {config.run.max_steps} steps, model in "
            f"{run_dir.final}. To train further, raise run.max_steps"
        )
        prepared.lock.close()
        return 0
    with suppress(OSError):
        record_environment(run_dir)
    began_s = time.monotonic()
    roles = commands(config, run_dir) if commands else role_commands(config, run_dir, gpus=len(visible_gpus()))
    monitor = _RunMonitor(prepared, View(config))
    with _Signals() as signals, OrphanGuard(supervise.STOP_GRACE_S) as guard:
        supervisor = Supervisor(
            run_dir=run_dir, roles=roles, guard=guard, config=config, on_event=monitor.process_event
        )
        failure = _run(monitor, supervisor, signals)
        status = signals.status if failure is None else FAILED
        state = "finished" if status == 0 else "interrupted" if status >= 128 else "failed"
        _write_costs(monitor, supervisor, time.monotonic() - began_s)
        monitor.note_end(state, failure)
    with suppress(KeyboardInterrupt):  # Ctrl-C skips what is left of closing, never the summary.
        monitor.close()
    _write_report(prepared, state)
    summary = run_summary(config, run_dir, prepared.start_step, monitor.progress, status, monitor.peak_bytes)
    print(summary, flush=True)
    if failure is not None:  # Its cause is the last word.
        print(f"\nthe run failed: {printable(failure)}", file=sys.stderr)
    prepared.lock.close()
    return status


def _run(monitor: _RunMonitor, supervisor: Supervisor, signals: _Signals) -> str | None:
    """Start, watch and stop the roles. Return the error that ended the run, None without one."""
    failure = None
    names = ", ".join(role.name for role in supervisor.roles) or "no role"
    monitor.view.event(f"starting {names}; their logs are in {supervisor.run_dir.root / 'logs'}")
    runs = shlex.quote(str(supervisor.config.run.output_dir))
    monitor.view.event(f"to watch it in a browser: {COMPOSER} view {runs}")
    try:
        supervisor.start()
        monitor.start_trackers(supervisor.config)
        while supervisor.poll() == "running" and not signals.count:
            monitor.tick(supervisor)
            time.sleep(TICK_S)
    except RoleFailedError as error:
        failure = str(error)
        answers = _answers_text(supervisor)
        how = re.split(r"[\n;:]| \(", failure)[0]  # The cause is the last word.
        monitor.view.event(f"{how}: stopping the run{answers and '; '}{answers}")
    finally:
        if signals.count:
            monitor.view.event(_stopping_text(supervisor))
        supervisor.stop(hurry=lambda: signals.count > 1)
        monitor.tick(supervisor, ended=True)
    return failure


def _stopping_text(supervisor: Supervisor) -> str:
    ranks = any(child.role.kind == "rank" and child.running for child in supervisor.children)
    save = f"finishing the step and writing a checkpoint, at most {supervisor.save_s:.0f} s" if ranks else ""
    waits = "; then ".join(filter(None, [save, _answers_text(supervisor)]))
    return f"stopping{waits and ': '}{waits} (press Ctrl-C again to kill{', without a checkpoint' if ranks else ''})"


def _answers_text(supervisor: Supervisor) -> str:
    """Return what the orchestrator may still wait for, if anything."""
    asks = any(child.role.kind == "orchestrator" and child.running for child in supervisor.children)
    answers_s = supervisor.config.teachers.end_timeout_s
    return f"waiting for pending answers of teachers, at most {answers_s:g} s" if asks and answers_s else ""


def _write_report(prepared: Prepared, state: str) -> None:
    """Write report.html. No failure of it, and no Ctrl-C, fails the run."""
    try:
        from composer_prime.view.report_html import write_report

        write_report(prepared.run_dir, state=state)
    except (Exception, KeyboardInterrupt) as error:
        note = f"report.html could not be written ({type(error).__name__}: {error}); the run is not affected"
        print(note, file=sys.stderr, flush=True)


def _write_costs(monitor: _RunMonitor, supervisor: Supervisor, wall_s: float) -> None:
    """Append what this start used to costs.jsonl, where the disk has room."""
    with suppress(OSError):
        path = supervisor.run_dir.root / "costs.jsonl"
        usd = supervisor.config.run.usd_per_hour * wall_s / 3600
        write_cost(path, "machine", seconds=round(wall_s, 1), usd=round(usd, 6))
        for child in supervisor.children:
            lived_s = round(child.lived_s, 1)
            write_cost(path, "seconds", role=child.role.name, seconds=lived_s, gpu_seconds=lived_s * child.role.gpus)
        lines = Tail(supervisor.run_dir.metrics).read()
        for link, count in sorted(_link_bytes(lines[monitor.history :]).items()):
            write_cost(path, "bytes", link=link, bytes=count)


def _link_bytes(lines: Sequence[Line]) -> Counter[str]:
    """Return the bytes by link that the lines of a start tell."""
    sent, totals = Counter[str](), Counter[str]()
    for line in lines:
        for name in LINKS:
            if (count := numeric_field(line, name)) is None:
                continue
            if name.startswith("diloco/"):
                before, totals[name] = totals[name], int(count)
                count -= before if count >= before else 0
            sent[name] += int(count)
    return sent


class _RunMonitor:
    def __init__(self, prepared: Prepared, view: View) -> None:
        """Read the history of a resumed run."""
        self.view = view
        self.progress = RunProgress()
        self.memory_bytes = 0
        self.peak_bytes = 0
        """Of memory that all processes hold together."""
        self._measured_at = 0.0
        self._run_dir = prepared.run_dir
        self._metrics = MetricsFile(prepared.run_dir.metrics, "launcher")
        self._feeders: list[Feeder] = []
        if prepared.start_step:
            self._metrics.log(prepared.start_step, {"event": "resume"})
        self._tail = Tail(prepared.run_dir.metrics)
        self._events = EventFile(prepared.run_dir, "launcher")
        self._event_tail = Tail(self._run_dir.root / "events.jsonl", lambda line: parse_event(line) is not None)
        self._event_tail.read()
        lines = self._tail.read()
        self.history = len(lines)
        """Lines of metrics.jsonl before this start."""
        self.progress.update(lines)
        self.progress.waiting.clear()
        view.begin(self.progress)
        for note in prepared.notes:
            view.event(note)

    def start_trackers(self, config: Config) -> None:
        self._feeders = start_trackers(config, self._run_dir.root, self.view.event)

    def note_end(self, state: str, failure: str | None) -> None:
        self._metrics.log(
            self.progress.last_step or 0,
            {"event": "ended", "state": state, "problem": failure[:2000] if failure else None},
        )

    def close(self) -> None:
        for feeder in self._feeders:
            feeder.close(TRACKER_CLOSE_S)

    def tick(self, supervisor: Supervisor, *, ended: bool = False) -> None:
        """Pass on what is new. Once all roles have `ended`, nobody waits any more."""
        lines = self._tail.read()
        new_steps = self.progress.update(lines)
        for line in lines:
            for feeder in self._feeders:
                feeder.put(line["step"], numbers_of(line))
        self._measure(supervisor.children)
        if new_steps and self.memory_bytes:
            self._metrics.log(new_steps[-1]["step"], {"memory/total_bytes": self.memory_bytes})
        self._note_alerts([line["step"] for line in new_steps], supervisor.config)
        self._show_events()
        if ended:
            self.progress.waiting.clear()
        self.view.refresh(self.progress, new_steps)
        for step in [line["step"] for line in new_steps]:
            if step == 1 or step % SAMPLE_EVERY_STEPS == 0:
                self._show_rollout(step)

    def _measure(self, children: Sequence[RoleProcess]) -> None:
        if time.monotonic() - self._measured_at >= MEMORY_EVERY_S:
            self._measured_at = time.monotonic()
            self.memory_bytes = _resident_bytes([each.process.pid for each in children if each.running])
            self.peak_bytes = max(self.peak_bytes, self.memory_bytes)

    def process_event(self, text: str) -> None:
        self.view.event(text)
        self._events.write("process", text, level="warning")

    def _note_alerts(self, steps: list[int], config: Config) -> None:
        for step in steps:
            for name, text in alerts(self.progress.steps, step, config.trainer.optim):
                self._events.write("alert", text, level="warning", same_as=name)

    def _show_events(self) -> None:
        for line in self._event_tail.read():
            event = parse_event(line)
            if event is not None and event.kind not in _SHOWN_OTHERWISE:
                self.view.event(event.line)

    def _show_rollout(self, step: int) -> None:
        with suppress(OSError):
            played = [each for each in read_rollouts(self._run_dir.rollouts(step)) if each.get("reward") is not None]
            if played:
                self.view.event(f"  a rollout of step {step}: {rollout_text(played[step % len(played)])}")


def _resident_bytes(roots: list[int]) -> int:
    """Return the memory of these processes and descendants; on Linux shared pages are split."""
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
    """Counts Ctrl-C, SIGTERM and SIGHUP while the run is on."""

    def __init__(self) -> None:
        self.count = 0
        self.status = 0
        """Exit status as a shell reports it: 130 for Ctrl-C; 0 before."""
        self._last_s = 0.0
        self._handlers_before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup
            self._handlers_before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)

    def _catch(self, number: int, _frame: object) -> None:
        now_s = time.monotonic()
        if self.count and now_s - self._last_s < SAME_PRESS_S:
            return
        if self.count == 0:
            self.status = 128 + number
        self.count += 1
        self._last_s = now_s


# -- the run directory -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run directory that roles can be started in."""

    run_dir: RunDir
    config: Config
    """As in config.json: run.resume is on only with a checkpoint to resume, and the length divisor is a number."""
    start_step: int
    """Optimizer steps already taken."""
    notes: tuple[str, ...]
    """Events of the start to show the user."""
    lock: IO[bytes]
    """Held while the launcher runs: one launcher per run directory."""


def prepare(config: Config) -> Prepared:
    """Make the run directory ready. Raises ConfigError when it cannot be used as configured."""
    run_dir = RunDir(config.run_directory.absolute())
    changes = check_run_folder(run_dir, config)
    config = with_length_divisor(config, run_dir)
    lock = _lock(run_dir)
    notes: list[str] = []
    start_step = 0
    if config.run.resume:
        start_step, notes = _resume(run_dir, changes)
        if start_step == 0:
            config = config.model_copy(update={"run": config.run.model_copy(update={"resume": False})})
    elif config.run.overwrite and is_run_directory(run_dir.root):
        _empty(run_dir, keep={".launcher.lock"})
    try:
        _keys(run_dir, config)
        write_atomic(run_dir.config, load.dump(config).encode())
        create_run_id(run_dir, config.run.name)
        run_dir.endpoints.unlink(missing_ok=True)  # it names a dead orchestrator
        if config.orchestrator.address is not None:
            write_atomic(run_dir.endpoints, b'{"step": "%s"}\n' % config.orchestrator.address.encode())
    except OSError as error:
        raise ConfigError(f"cannot write to the run directory {run_dir.root}: {error.strerror}") from None
    return Prepared(run_dir=run_dir, config=config, start_step=start_step, notes=tuple(notes), lock=lock)


def _lock(run_dir: RunDir) -> IO[bytes]:
    try:
        run_dir.root.mkdir(parents=True, exist_ok=True)
        file = (run_dir.root / ".launcher.lock").open("a+b")
    except OSError as error:
        raise ConfigError(
            f"cannot write to the run directory {run_dir.root}: {error.strerror}; set run.output_dir"
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().decode(errors="replace").strip() or "unknown"
        raise ConfigError(
            f"another launcher (process {holder}) runs in {run_dir.root}: stop it first, or choose another run.name"
        ) from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n".encode())
    file.flush()
    return file


def _resume(run_dir: RunDir, changes: list[str]) -> tuple[int, list[str]]:
    """Return the step to continue from and what changed since. Without one, empty the directory."""
    steps = run_dir.complete_checkpoints()
    if steps:
        for evaluated, path in rollout_files(run_dir, "eval").items():
            if evaluated > steps[-1]:  # these steps are trained again
                path.unlink()
        return steps[-1], [f"resuming after step {steps[-1]}", *changes]
    _empty(run_dir, keep=_KEPT_ON_RESTART)
    note = "no complete checkpoint yet: starting over from step 0 (keys, logs and paid answers are kept)"
    return 0, [note, *changes]


def _empty(run_dir: RunDir, *, keep: set[str]) -> None:
    for path in run_dir.root.iterdir():
        if path.name in keep:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _keys(run_dir: RunDir, config: Config) -> None:
    """Create the run's keys. Those of an orchestrator elsewhere must come from there."""
    if config.orchestrator.address is None:
        RunKeys.create(run_dir.keys)
        return
    needed = ("trainer.token", "signing.ed25519")
    if missing := [name for name in needed if not (run_dir.keys / name).exists()]:
        raise ConfigError(
            f"orchestrator.address is {config.orchestrator.address!r}, but {run_dir.keys} lacks {', '.join(missing)}: "
            "copy run_id, keys/trainer.token and keys/signing.ed25519 from the orchestrator's run directory (the "
            "other keys stay there)"
        )
