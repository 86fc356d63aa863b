"""Prepare the run directory before any role starts; composer_prime/plan/check_run_dir.py has the rules.

A run that crashed before its first checkpoint starts over and keeps what was paid for: answers of endpoints, teachers'
pairs and votes, and their costs.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from dataclasses import dataclass
from typing import IO

from composer_prime.config import Config, load
from composer_prime.errors import ConfigError
from composer_prime.monitor.rollouts import rollout_files
from composer_prime.plan.check_run_dir import check_run_folder, is_run_directory, with_length_divisor
from composer_prime.run.keys import RunKeys
from composer_prime.run.run_dir import PAID_ENTRIES, RunDir, create_run_id, write_atomic

_KEPT_ON_RESTART = {"keys", "run_id", "logs", ".launcher.lock"} | PAID_ENTRIES


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run directory that roles can be started in."""

    run_dir: RunDir
    config: Config
    """As written to config.json: run.resume is on only where there is a checkpoint to resume, and the length divisor is
    a number."""
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
    """Return the step to continue from and what changed since. Empties the directory when nothing was saved yet."""
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
    """Create the run's keys. When the orchestrator runs elsewhere they must come from there: it refuses new ones."""
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
