"""Whether a run can start in its folder: new, a run to go on with or to empty, or somebody else's files.

    new run      the folder must be missing or empty, or run.overwrite empties it (only if it is a run directory)
    --resume     there must be a run in it, made under settings that agree

Looks only; trainer/prepare.py does what the launcher does to the folder.
"""

from __future__ import annotations

from pathlib import Path

from composer_prime.config import Config
from composer_prime.config.load import read
from composer_prime.continuation import check_continuation
from composer_prime.errors import ConfigError
from composer_prime.run_dir import PAID_ENTRIES, RunDir

_BROUGHT = {"keys", "run_id"}
"""What a run directory may hold before its first start besides pairs: keys copied from a remote orchestrator's run."""


def check_folder(run_dir: RunDir, config: Config) -> list[str]:
    """One note for each setting that a resume changes. Raises ConfigError when the folder cannot be used as asked."""
    root, run = run_dir.root, config.run
    if root.exists() and not root.is_dir():
        raise ConfigError(f"{root} is a file: set run.name or run.output_dir to another place")
    if run.resume and run.overwrite:
        raise ConfigError("run.resume and run.overwrite are both on: one continues the run, the other deletes it")
    used = _is_used(run_dir)
    if used and not is_run_directory(root):
        raise ConfigError(
            f"{root} is not empty and is no run directory, so nothing is written or deleted there: "
            "set run.name or run.output_dir to another place"
        )
    if used and not (run.resume or run.overwrite):
        steps = run_dir.complete_checkpoints()
        state = f"a checkpoint of step {steps[-1]}" if steps else "no complete checkpoint"
        raise ConfigError(
            f"the run directory {root} exists already, with {state}: continue it with --resume, empty it with "
            "--run.overwrite true, or choose another run.name"
        )
    if run.resume and not used:
        raise ConfigError(
            f"--resume: there is no run in {root}; start without --resume, or set run.name and run.output_dir to the "
            "run that is to go on"
        )
    return check_continuation(read(run_dir.config), config) if run.resume and run_dir.config.is_file() else []


def is_run_directory(root: Path) -> bool:
    """Whether the launcher made this folder."""
    return (root / "run_id").is_file() or ((root / "config.json").is_file() and (root / "keys").is_dir())


def folder_state(run_dir: RunDir) -> str:
    """What is in the folder, in a few words."""
    if not _is_used(run_dir):
        return "new"
    if not is_run_directory(run_dir.root):
        return "exists, and is no run directory"
    steps = run_dir.complete_checkpoints()
    return f"exists; newest checkpoint: step {steps[-1]}" if steps else "exists; no checkpoint yet"


def _is_used(run_dir: RunDir) -> bool:
    """Whether anything lies there that a new run may not begin with."""
    if not run_dir.root.is_dir():
        return False
    entries = {path.name for path in run_dir.root.iterdir()} - {".launcher.lock"}
    return not entries <= PAID_ENTRIES | (_BROUGHT if run_dir.keys.is_dir() else set())
