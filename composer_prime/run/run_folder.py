"""Whether a run can start in its folder: new, a run to go on with or to empty, or somebody else's files.

    new run      the folder must be missing or empty, or run.overwrite empties it (only if it is a run directory)
    --resume     there must be a run in it, made under settings that agree

Looks only; trainer/launcher/prepare.py does what the launcher does to the folder.

Which settings a resumed run may change, and which would make it another run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from composer_prime.config import Config
from composer_prime.config.load import read_config
from composer_prime.errors import ConfigError
from composer_prime.run.run_dir import PAID_ENTRIES, RunDir

BINDING = (
    "model.path",
    "model.max_context",
    "model.chat_template",
    "model.renderer",
    "run.seed",
    "orchestrator.source",
    "orchestrator.group_size",
    "orchestrator.groups_per_step",
    "orchestrator.curriculum",
    "channels.policy.objective",
    "trainer.optim.type",
    "trainer.lora",
)
"""Saved state (cursor, journal, optimizer moments) is only meaningful under the same value of these keys."""

NOT_LOWER = ("orchestrator.max_staleness", "trainer.micro_batch_tokens")
"""Batches that were formed before the crash are served again as they were, and must still be allowed."""

_FREE_IN_SOURCES = ("workers", "timeout_s", "eval_taskset")
_SILENT = ("run.resume", "run.overwrite", "run.output_dir")


def check_continuation(before: Config, now: Config) -> list[str]:
    """One note for each allowed change. Raises ConfigError naming both values of every change that is not allowed."""
    old, new = before.model_dump(mode="json"), now.model_dump(mode="json")
    broken = []
    for key in BINDING:
        was, is_now = _bare(_value(old, key)), _bare(_value(new, key))
        if was != is_now:
            broken += _differences(key, was, is_now)
    for key in NOT_LOWER:
        was, is_now = _value(old, key), _value(new, key)
        if is_now < was:
            broken += [f"{line} (batches formed under it must still fit)" for line in _differences(key, was, is_now)]
    if broken:
        listed = "\n".join(f"  {line}" for line in broken)
        raise ConfigError(
            "--resume cannot continue this run, because its saved state was made under other settings:\n"
            f"{listed}\n"
            f"set {'it' if len(broken) == 1 else 'them'} back, or start a new run under another run.name"
        )
    return [f"changed {line}" for line in _differences("", old, new) if not line.startswith(_SILENT)]


def _value(values: dict[str, Any], key: str) -> Any:
    node: Any = values
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _bare(value: Any) -> Any:
    """Sources without the settings that may change between starts."""
    if isinstance(value, list):
        return [
            {name: part for name, part in item.items() if name not in _FREE_IN_SOURCES}
            if isinstance(item, dict)
            else item
            for item in value
        ]
    return value


def _differences(key: str, was: Any, is_now: Any) -> list[str]:
    """`setting: was X, now Y` for each setting at or below `key` that is not the same."""
    if was == is_now:
        return []
    if isinstance(was, dict) and isinstance(is_now, dict):
        lines = []
        for name in sorted(was.keys() | is_now.keys()):
            lines += _differences(f"{key}.{name}" if key else name, was.get(name), is_now.get(name))
        return lines
    if isinstance(was, list) and isinstance(is_now, list) and len(was) == len(is_now):
        lines = []
        for index, (one, other) in enumerate(zip(was, is_now, strict=True)):
            lines += _differences(f"{key}.{index}", one, other)
        return lines
    return [f"{key}: was {was!r}, now {is_now!r}"]


_BROUGHT = {"keys", "run_id"}
"""What a run directory may hold before its first start besides pairs: keys copied from a remote orchestrator's run."""


def check_run_folder(run_dir: RunDir, config: Config) -> list[str]:
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
    return check_continuation(read_config(run_dir.config), config) if run.resume and run_dir.config.is_file() else []


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
