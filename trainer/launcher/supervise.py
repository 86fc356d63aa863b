"""Starts the processes of a run, watches them, and leaves none behind.

    launcher (main thread)
      ├── guard                     ends everything should the launcher be killed (guard.py)
      ├── orchestrator ┐
      ├── trainer-0 .. ┘            any of these ending with an error ends the run
      ├── node-0 ..                 may die: started again after a pause, up to inference.max_restarts times
      └── teachers                  likewise; given up, the run goes on without them

Each role has its own session and its own log. Nobody waits on anybody here: `poll` looks and returns. `stop` waits at
most stop_grace_s for each kind in turn: ranks, which make a checkpoint with the orchestrator while the rest works
on and get save_s more for it; nodes; the orchestrator, with answers_s more for what teachers were asked; teachers.

The processes of a run, as commands: what the launcher starts. Built from the configuration alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import psutil

from composer_prime.config import Config
from composer_prime.config.teachers import MODELS_VARIABLE
from composer_prime.console import console_script
from composer_prime.errors import RoleFailedError
from composer_prime.plan.placement import cuda_visible_devices, place_processes
from composer_prime.run.run_dir import RunDir
from trainer.launcher import guard

Kind = Literal["orchestrator", "node", "rank", "teachers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleCommand:
    """One process to start."""

    name: str
    """Name of its log: orchestrator, node-0, trainer-0, teachers."""
    kind: Kind
    """Nodes and teachers may die and are started again; the end of any other ends the run, and of the last node."""
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    """On top of the launcher's environment."""
    gpus: int = 0
    """That it has for itself."""


def role_commands(config: Config, run_dir: RunDir, *, gpus: int) -> list[RoleCommand]:
    """Every role that runs here, in start order. Raises ConfigError when there are too few GPUs."""
    placement = place_processes(config, gpus)
    where = ["--run-dir", str(run_dir.root)]
    commands = []
    if config.orchestrator.address is None:
        served = config.teachers.models_served(config.model.path) if config.teachers.online else []
        port = free_port() if served else 0
        commands += [_teachers(config, served, port)] if served else []
        env = {**_threads(1), **({MODELS_VARIABLE: f"http://127.0.0.1:{port}/v1"} if served else {})}
        argv = [*console_script("orchestrator"), *where]
        commands.append(RoleCommand(name="orchestrator", kind="orchestrator", argv=argv, env=env))
    for index, devices in enumerate(placement.nodes):
        argv = [*console_script("inference"), *where, "--node-name", f"node-{index}"]
        env = {**_threads(config.inference.threads), **_devices(devices)}
        commands.append(RoleCommand(name=f"node-{index}", kind="node", argv=argv, env=env, gpus=len(devices)))
    if config.run.max_steps and config.trainer.address is None:
        commands += _ranks(config, where, placement.ranks)
    return commands


def _teachers(config: Config, models: list[str], port: int) -> RoleCommand:
    """Local teachers and the frozen base, on a port that stays the same when they are started again."""
    threads = config.teachers.local_threads
    argv = [sys.executable, "-m", "inference.model_server", "--supervised", "--port", str(port)]
    argv += ["--threads", str(threads), *(word for model in models for word in ("--model", model))]
    return RoleCommand(name="teachers", kind="teachers", argv=argv, env=_threads(threads))


def _ranks(config: Config, where: list[str], devices: tuple[int, ...]) -> list[RoleCommand]:
    """torchrun's environment, for ranks on this machine."""
    world, port = config.trainer.ranks, str(free_port())
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    shared = {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback),
        **_threads(config.trainer.threads),
        **_devices(devices),
    }
    argv = [sys.executable, "-m", "trainer.train", *where]
    return [
        RoleCommand(
            name=f"trainer-{rank}",
            kind="rank",
            argv=argv,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            gpus=1 if devices else 0,
        )
        for rank in range(world)
    ]


def free_port() -> int:
    """A port that is free at the moment, for torch's rendezvous on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _threads(count: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(count), "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


def _devices(devices: tuple[int, ...]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": cuda_visible_devices(devices)} if devices else {}


QUIET_S = 600.0
"""A node that lived this long has its restarts forgotten."""
SETTLE_S = 3.0
"""After a rank failed: how long the launcher waits for the orchestrator to fail too, and then names that one first."""
USAGE_ERROR = 2
"""Exit status of a role that refuses its configuration: starting it again cannot help."""
_STOP_ORDER: tuple[Kind, ...] = ("rank", "node", "orchestrator", "teachers")
_MAY_DIE = ("node", "teachers")


@dataclass(slots=True, kw_only=True)
class RoleProcess:
    """One role's process, over its restarts."""

    role: RoleCommand
    process: subprocess.Popen[bytes] | None = None
    log_offset: int = 0
    """Where this start's output begins in the log."""
    started: float = 0.0
    restarts: int = 0
    restart_at: float | None = None
    """When a dead node is to be started again; None while it runs or for good."""
    lived_s: float = 0.0
    """Over all starts that ended."""
    code: int | None = None
    """Exit status of the last end; negative for a signal."""

    @property
    def running(self) -> bool:
        return self.process is not None and self.code is None

    def ending(self) -> str:
        """How it ended, in words."""
        if self.code is not None and self.code < 0:
            name = signal.Signals(-self.code).name if -self.code in set(signal.Signals) else str(-self.code)
            return f"was ended by {name}"
        return f"ended with exit status {self.code}"


@dataclass(slots=True, kw_only=True)
class Supervisor:
    run_dir: RunDir
    roles: list[RoleCommand]
    grace_s: float
    save_s: float
    """What ranks get on top of grace_s, for a checkpoint."""
    answers_s: float
    """What the orchestrator gets on top of grace_s, for answers of teachers that may be charged."""
    max_restarts: int
    say: Callable[[str], None]
    """Where events go (a restart, a stop): one line each."""
    backoff_s: float = 1.0
    """Pause before a node's first restart; doubles with each."""
    children: list[RoleProcess] = field(default_factory=list)
    _mark: str = field(default_factory=lambda: secrets.token_hex(16))
    _guard: subprocess.Popen[bytes] | None = None
    _descendants: dict[int, psutil.Process] = field(default_factory=dict)
    _failed: list[RoleProcess] = field(default_factory=list)
    """Roles that ended with an error, first one first."""
    _failed_at: float = 0.0

    def start(self) -> None:
        """Start the guard and every role. Raises RoleFailedError when a command cannot be run."""
        self._guard = subprocess.Popen(
            [sys.executable, "-m", "trainer.launcher.guard", self._mark, str(self.grace_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.children = [RoleProcess(role=role) for role in self.roles]
        for child in self.children:
            self._spawn(child)

    def poll(self) -> Literal["running", "finished"]:
        """Look at every child; restart nodes that are due.

        Raises RoleFailedError when the run cannot go on; its message ends with the failing role's last log lines.
        """
        ended = [child for child in self.children if child.running and self._ended(child)]
        needed = [child for child in self.children if child.role.kind not in _MAY_DIE]
        finished = bool(needed) and all(child.code == 0 for child in needed)
        self._failed += [child for child in ended if child.role.kind not in _MAY_DIE and child.code != 0]
        if self._failed and self._settled():
            raise RoleFailedError(self._report(self._failed))
        if finished or (not needed and all(child.code == 0 for child in self.children)):
            return "finished"
        for child in ended:
            if child.role.kind in _MAY_DIE and child.code != 0:
                self._plan_restart(child)
        for child in self.children:
            if child.restart_at is not None and time.monotonic() >= child.restart_at:
                self._spawn(child)
        return "running"

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> None:
        """End every process of the run; `hurry()` turning true kills what is left at once."""
        self._remember_descendants()
        for kind in _STOP_ORDER:
            self._stop_kind(kind, hurry)
        leftovers = [process for process in self._descendants.values() if process.is_running()]
        leftovers += guard.members(self._mark, {child.process.pid for child in self.children if child.process})
        own_guard = self._guard.pid if self._guard else None
        pause_s = 0 if hurry() else min(self.grace_s, 2)
        guard.end([process for process in leftovers if process.pid != own_guard], pause_s)
        self._dismiss_guard()

    def _stop_kind(self, kind: Kind, hurry: Callable[[], bool]) -> None:
        group = [child for child in self.children if child.role.kind == kind and child.running]
        at_once = kind == "rank" and not self._can_save()
        for child in group:
            _signal_group(child, signal.SIGKILL if at_once or hurry() else signal.SIGTERM)
        grace_s = self.grace_s + {"rank": self.save_s, "orchestrator": self.answers_s}.get(kind, 0)
        deadline = time.monotonic() + grace_s
        while any(child.running and not self._ended(child) for child in group):
            if hurry() or time.monotonic() > deadline:
                if not hurry():
                    names = ", ".join(child.role.name for child in group if child.running)
                    self.say(f"{names} did not end within {grace_s:g} s: killing it")
                break
            time.sleep(0.02)
        for child in group:
            _signal_group(child, signal.SIGKILL)
            if child.running and child.process is not None:
                child.code = child.process.wait()
                child.lived_s += time.monotonic() - child.started

    def _can_save(self) -> bool:
        """Whether all who make a checkpoint are alive; else ranks would only wait, for one another or in vain."""
        return all(child.running for child in self.children if child.role.kind not in _MAY_DIE)

    def _spawn(self, child: RoleProcess) -> None:
        log = self.run_dir.log(child.role.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **child.role.env, guard.MARK: self._mark}
        with log.open("ab") as output:
            child.log_offset = output.tell()
            try:
                child.process = subprocess.Popen(
                    child.role.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                    preexec_fn=_die_with_parent(os.getpid()),
                )
            except OSError as error:
                raise RoleFailedError(f"{child.role.name} cannot be started ({child.role.argv[0]}: {error})") from None
        child.code, child.restart_at, child.started = None, None, time.monotonic()
        if self._guard and self._guard.stdin:
            with contextlib.suppress(OSError):
                self._guard.stdin.write(b"role %d\n" % child.process.pid)
                self._guard.stdin.flush()

    def _ended(self, child: RoleProcess) -> bool:
        if child.process is not None and child.code is None:
            child.code = child.process.poll()
            if child.code is not None:
                child.lived_s += time.monotonic() - child.started
        return child.code is not None

    def _settled(self) -> bool:
        """Whether the cause of a failure is known: a rank that was told of the orchestrator's end may end before it."""
        self._failed_at = self._failed_at or time.monotonic()
        orchestrators = [child for child in self._failed if child.role.kind == "orchestrator"]
        if orchestrators:
            self._failed = orchestrators + [child for child in self._failed if child not in orchestrators]
            return True
        return time.monotonic() - self._failed_at > SETTLE_S

    def _plan_restart(self, child: RoleProcess) -> None:
        if time.monotonic() - child.started > QUIET_S:
            child.restarts = 0
        if child.role.kind == "node" and child.code == USAGE_ERROR:
            raise RoleFailedError(self._report([child]))
        if child.restarts >= self.max_restarts:
            self._give_up(child)
            return
        pause = self.backoff_s * 2**child.restarts
        child.restarts += 1
        child.restart_at = time.monotonic() + pause
        self.say(
            f"{child.role.name} {child.ending()}; starting it again in {pause:g} s "
            f"({child.restarts} of {self.max_restarts})"
        )

    def _give_up(self, child: RoleProcess) -> None:
        """Raises RoleFailedError when it was the last node."""
        if child.role.kind == "node":
            alive = [other for other in self.children if other.role.kind == "node" and other is not child]
            if not any(other.running or other.restart_at is not None for other in alive):
                raise RoleFailedError(
                    f"{child.role.name} died {child.restarts + 1} times and no other node is left "
                    f"(inference.max_restarts is {self.max_restarts})\n{self._report([child])}"
                )
        self.say(f"{child.role.name} {child.ending()}; given up after {child.restarts} restarts")

    def _report(self, failed: list[RoleProcess]) -> str:
        parts = []
        for child in failed[:3]:
            log = self.run_dir.log(child.role.name)
            parts.append(f"{child.role.name} {child.ending()}; the end of {log}:\n{last_lines(log, child.log_offset)}")
        return "\n".join(parts)

    def _remember_descendants(self) -> None:
        for child in self.children:
            if child.running and child.process is not None:
                with contextlib.suppress(psutil.Error):
                    for process in psutil.Process(child.process.pid).children(recursive=True):
                        self._descendants[process.pid] = process

    def _dismiss_guard(self) -> None:
        if self._guard is None or self._guard.stdin is None:
            return
        with contextlib.suppress(OSError):
            self._guard.stdin.write(b"bye\n")
            self._guard.stdin.close()
        try:
            self._guard.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()


def last_lines(log: os.PathLike[str], offset: int = 0, count: int = 25) -> str:
    """The last `count` lines that were written to `log` after `offset`, indented."""
    try:
        with open(log, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(offset, end - 32_768))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"    (unreadable: {error})"
    return "\n".join(f"    {line}" for line in lines[-count:]) or "    (it wrote nothing)"


def _signal_group(child: RoleProcess, number: signal.Signals) -> None:
    if child.process is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, number)


def _die_with_parent(parent: int) -> Callable[[], None] | None:
    """Linux: the kernel sends SIGTERM to the role when the launcher dies; the guard takes care of the rest."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def arm() -> None:
        prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)

    return arm
