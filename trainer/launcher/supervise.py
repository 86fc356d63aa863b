"""Start the processes of a run, watch them, and end them.

    launcher (main thread)
      ├── guard                     ends everything when the launcher is killed (composer_prime/run/process.py)
      ├── orchestrator ┐
      ├── trainer-0 .. ┘            an exit with an error ends the run
      ├── node-0 ..                 restarted after a pause, up to inference.max_restarts times
      └── auditor-0 .., teachers                same; after that the run continues without them

`poll` never waits. `stop` ends one kind after another: ranks first, which make a checkpoint while the others still
work (trainer.checkpoint.stop_timeout_s); then nodes and auditors; then the orchestrator, with more time for paid
answers; then teachers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import psutil

from composer_prime.address import free_port
from composer_prime.config import Config
from composer_prime.config.teachers import MODELS_VARIABLE
from composer_prime.console import EXIT_USAGE, console_script
from composer_prime.errors import RoleFailedError
from composer_prime.host import cuda_visible_devices, place_processes
from composer_prime.plan.footprint import stop_timeout_s
from composer_prime.run.process import (
    MARK_VARIABLE,
    ORCHESTRATOR_END,
    OrphanGuard,
    child_options,
    exit_text,
    last_words,
    signal_session,
    terminate,
)
from composer_prime.run.retry import Restarts
from composer_prime.run.run_dir import RunDir

Kind = Literal["orchestrator", "node", "auditor", "rank", "teachers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleCommand:
    """One process to start."""

    name: str
    """Name of its log: orchestrator, node-0, auditor-0, trainer-0, teachers."""
    kind: Kind
    """An error of the orchestrator or a rank ends the run; the others are started again when they die."""
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    """On top of the launcher's environment."""
    gpus: int = 0
    """GPUs that only this process uses."""


def role_commands(config: Config, run_dir: RunDir, *, gpus: int) -> list[RoleCommand]:
    """Return every role that runs on this machine, in start order. Raises ConfigError when there are too few GPUs."""
    placement = place_processes(config, gpus)
    where = ["--run-dir", str(run_dir.root)]
    commands = [] if config.orchestrator.address is not None else _orchestrator_commands(config, where)
    for index, devices in enumerate(placement.nodes):
        argv = [*console_script("inference"), *where, "--node-name", f"node-{index}"]
        env = {**_threads(config.inference.threads), **_devices(devices)}
        commands.append(RoleCommand(name=f"node-{index}", kind="node", argv=argv, env=env, gpus=len(devices)))
    if config.run.max_steps and config.trainer.address is None:
        commands += _rank_commands(config, where, placement.ranks)
    return commands


def _orchestrator_commands(config: Config, where: list[str]) -> list[RoleCommand]:
    """Return the orchestrator with what serves it: teachers, auditors."""
    commands, env = [], _threads(1)
    if models := config.teachers.models_served() if config.teachers.online else []:
        port = free_port()  # the same after a restart
        argv = [sys.executable, "-P", "-m", "inference.model_server", "--port", str(port)]
        argv += [word for model in models for word in ("--model", model)]
        commands.append(RoleCommand(name="teachers", kind="teachers", argv=argv, env=_threads(1)))
        env[MODELS_VARIABLE] = f"http://127.0.0.1:{port}/v1"
    argv = [*console_script("orchestrator"), *where]
    commands.append(RoleCommand(name="orchestrator", kind="orchestrator", argv=argv, env=env))
    audit = config.orchestrator.audit
    for index in range(audit.auditors if audit.enabled else 0):
        argv = [*console_script("inference"), "audit", *where, "--node-name", f"auditor-{index}"]
        env = {**_threads(config.inference.threads), "CUDA_VISIBLE_DEVICES": ""}  # The nodes' GPUs are dealt later.
        commands.append(RoleCommand(name=f"auditor-{index}", kind="auditor", argv=argv, env=env))
    return commands


def _rank_commands(config: Config, where: list[str], devices: tuple[int, ...]) -> list[RoleCommand]:
    world = config.trainer.ranks
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    shared = {  # as torchrun would set it
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback),
        **_threads(config.trainer.threads),
        **_devices(devices),
    }
    argv, gpus = [sys.executable, "-P", "-m", "trainer.train", *where], 1 if devices else 0
    commands = []
    for rank in range(world):
        env = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        commands.append(RoleCommand(name=f"trainer-{rank}", kind="rank", argv=argv, env=env, gpus=gpus))
    return commands


def _threads(count: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(count), "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


def _devices(devices: tuple[int, ...]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": cuda_visible_devices(devices)} if devices else {}


CAUSE_WAIT_S = 3.0
"""How long to wait, after a rank failed, for the orchestrator as the cause."""
STOP_GRACE_S = 15.0
"""Time between SIGTERM and SIGKILL when a role must stop."""
_STOP_ORDER: tuple[Kind, ...] = ("rank", "node", "auditor", "orchestrator", "teachers")
_STOP_SIGNALS = {"orchestrator": ORCHESTRATOR_END}
"""Instead of SIGTERM."""
_RESTARTED = ("node", "auditor", "teachers")


@dataclass(slots=True, kw_only=True)
class RoleProcess:
    """One role's process, over its restarts."""

    role: RoleCommand
    process: subprocess.Popen[Any]
    log_offset: int
    """Byte of the log where the output of this start begins."""
    started: float
    restarts: Restarts = field(default_factory=Restarts)
    restart_at: float | None = None
    """When to start it again, monotonic seconds; None while it runs or never."""
    lived_s: float = 0.0
    """Seconds over all starts that ended."""
    code: int | None = None
    """Exit status; negative for a signal, None while it runs."""

    @property
    def running(self) -> bool:
        return self.code is None

    def is_needed(self) -> bool:
        """Tell whether the run ends with it: such a role is not started again."""
        return self.role.kind not in _RESTARTED

    def is_due(self) -> bool:
        return self.restart_at is not None and time.monotonic() >= self.restart_at

    def poll(self, *, wait: bool = False) -> bool:
        """Look whether the process runs, or wait for its end. Note the end."""
        if self.code is None:
            self.code = self.process.wait() if wait else self.process.poll()
            if self.code is not None:
                self.lived_s += time.monotonic() - self.started
        return self.running


@dataclass(slots=True, kw_only=True)
class Supervisor:
    """The processes of one run."""

    run_dir: RunDir
    roles: list[RoleCommand]
    guard: OrphanGuard
    config: Config
    on_event: Callable[[str], None]
    """Called with one line for each restart or kill."""
    children: list[RoleProcess] = field(default_factory=list)
    _failed: list[RoleProcess] = field(default_factory=list)
    """Roles that ended with an error, the cause first."""
    _failed_at: float = 0.0
    save_s: float = 0.0
    """For the ranks' last checkpoint: read at the start, since a stop must not fail."""

    def start(self) -> None:
        """Start every role. Raises RoleFailedError when a command cannot be run."""
        self.save_s = stop_timeout_s(self.config)
        for role in self.roles:
            process, log_offset = self._spawn(role)
            started = time.monotonic()
            self.children.append(RoleProcess(role=role, process=process, log_offset=log_offset, started=started))

    def poll(self) -> Literal["running", "finished"]:
        """Look at every child and start those again that are due.

        Raises RoleFailedError, with the last lines of the failed role's log, when the run cannot continue.
        """
        crashed = [child for child in self.children if child.running and not child.poll() and child.code != 0]
        self._failed += filter(RoleProcess.is_needed, crashed)
        if self._failed and self._cause_known():
            raise RoleFailedError(self._report(self._failed))
        needed = list(filter(RoleProcess.is_needed, self.children))
        if all(child.code == 0 for child in needed or self.children):
            return "finished"
        self._restart(crashed)
        return "running"

    def _restart(self, crashed: list[RoleProcess]) -> None:
        for child in crashed:
            if not child.is_needed():
                self._plan_restart(child)
        for child in filter(RoleProcess.is_due, self.children):
            child.process, child.log_offset = self._spawn(child.role)
            child.code, child.restart_at, child.started = None, None, time.monotonic()

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> None:
        """End every process of the run. As soon as `hurry()` is true, kill what is left."""
        descendants = []  # they may leave their sessions, and the mark is hidden from us on macOS
        for child in self.children:
            with suppress(psutil.Error):
                descendants += psutil.Process(child.process.pid).children(recursive=True) if child.running else []
        for kind in _STOP_ORDER:
            self._stop_kind(kind, hurry)
        leftovers = {process.pid: process for process in [*descendants, *self.guard.members()]}
        terminate([each for each in leftovers.values() if each.is_running()], 0 if hurry() else min(STOP_GRACE_S, 2))

    def _stop_kind(self, kind: Kind, hurry: Callable[[], bool]) -> None:
        group = [child for child in self.children if child.role.kind == kind and child.running]
        at_once = kind == "rank" and not self._can_save()
        number = signal.SIGKILL if at_once or hurry() else _STOP_SIGNALS.get(kind, signal.SIGTERM)
        for child in group:
            signal_session(child.process.pid, number)
        more_s = {"rank": self.save_s, "orchestrator": self.config.teachers.end_timeout_s}
        grace_s = STOP_GRACE_S + more_s.get(kind, 0)
        deadline = time.monotonic() + grace_s
        while (alive := [child for child in group if child.poll()]) and not hurry():
            if time.monotonic() > deadline:
                names = ", ".join(child.role.name for child in alive)
                self.on_event(f"{names} did not end within {grace_s:g} s: killing it")
                break
            time.sleep(0.02)
        for child in group:
            signal_session(child.process.pid, signal.SIGKILL)
            child.poll(wait=True)

    def _can_save(self) -> bool:
        """Return whether all are alive that a checkpoint needs: ranks would wait for nothing."""
        started = len(self.children) == len(self.roles)
        return started and all(child.running for child in self.children if child.is_needed())

    def _spawn(self, role: RoleCommand) -> tuple[subprocess.Popen[Any], int]:
        """Start a role; returns its process and the length of its log so far."""
        log = self.run_dir.log(role.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        options = child_options({**role.env, MARK_VARIABLE: self.guard.mark})
        with log.open("ab") as output:
            log_offset = output.tell()
            try:
                process = subprocess.Popen(role.argv, stdout=output, stderr=subprocess.STDOUT, **options)
            except OSError as error:
                raise RoleFailedError(f"{role.name} cannot be started ({role.argv[0]}: {error})") from None
        self.guard.watch(process.pid)
        return process, log_offset

    def _cause_known(self) -> bool:
        """Tell whether to report now: a rank may end before the orchestrator, the cause, does.

        Of ranks that end at the same time, who fails first writes its last word first.
        """
        self._failed_at = self._failed_at or time.monotonic()
        with suppress(OSError):  # Its folder may be gone.
            self._failed.sort(key=lambda child: self.run_dir.log(child.role.name).stat().st_mtime_ns)
        self._failed.sort(key=lambda child: child.role.kind != "orchestrator")
        return self._failed[0].role.kind == "orchestrator" or time.monotonic() - self._failed_at > CAUSE_WAIT_S

    def _plan_restart(self, child: RoleProcess) -> None:
        """Raises RoleFailedError when the last node is lost or a role refuses its configuration."""
        max_restarts = self.config.inference.max_restarts
        pause_s = child.restarts.pause_s(time.monotonic() - child.started, max_restarts)
        ends_run = child.role.kind in ("node", "auditor")
        if ends_run and child.code == EXIT_USAGE:
            raise RoleFailedError(self._report([child]))
        if pause_s is None:
            nodes = [other for other in self.children if other.role.kind == "node"]
            if child in nodes and not any(node.running or node.restart_at is not None for node in nodes):
                raise RoleFailedError(
                    f"{child.role.name} died {max_restarts + 1} times and no other node is left "
                    f"(inference.max_restarts is {max_restarts})\n{self._report([child])}"
                )
            self.on_event(f"{child.role.name} {exit_text(child.code)}; gave up after {max_restarts} restarts")
            return
        child.restart_at = time.monotonic() + pause_s
        self.on_event(
            f"{child.role.name} {exit_text(child.code)}; restarting it in {pause_s:g} s "
            f"({child.restarts.count} of {max_restarts})"
        )

    def _report(self, failed: list[RoleProcess]) -> str:
        """Return how roles ended, with their last messages; of the first, the cause, its traceback."""
        parts = []
        for child in failed[:3]:
            log = self.run_dir.log(child.role.name)
            words = last_words(log, child.log_offset)
            lines = textwrap.dedent(words).splitlines()
            start = max((number for number, line in enumerate(lines) if line[:1].strip()), default=0)
            cause = "\n".join(lines[start:])
            how = f"{child.role.name} {exit_text(child.code)}"
            if (child.code or 0) < 0:
                parts.append(f"{how}; the end of {log}:\n{words}")
            elif child is failed[0] and lines[max(start - 1, 0)].startswith(" "):
                parts.append(f"{how}: {cause}\nthe end of {log}:\n{words}")
            else:
                parts.append(f"{how} (log: {log}): {cause}")
        return "\n".join(parts)
