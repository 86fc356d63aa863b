"""The one check of a run's folder, used by the plan, the launcher and an orchestrator on its own.

    new run      the folder must be missing or empty, or run.overwrite empties it (only if it is a run directory)
    --resume     there must be a run in it, and its settings must agree with the new ones

It changes nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from composer_prime.errors import ConfigError
from composer_prime.run.run_dir import PAID_ENTRIES, RunDir

if TYPE_CHECKING:
    from composer_prime.config import Config

Starter = Literal["launcher", "orchestrator"]

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
    "orchestrator.demonstrations.rows_per_step",
    "channels.policy.objective",
    "channels.policy.loss.name",
    "trainer.optim.type.name",
    "trainer.lora",
)
"""Keys that a resume may not change: they give saved state its meaning."""
NOT_LOWER = ("orchestrator.max_staleness", "trainer.micro_batch_tokens")
"""Keys that a resume may not lower: batches that were formed are served again."""
_DIVISOR = "channels.policy.max_completion_length"
_FREE_IN_SOURCES = ("workers", "timeout_s", "hang_timeout_s", "eval_taskset")
_NOT_REPORTED = ("run.resume", "run.overwrite", "run.output_dir", "run.import_from")
_COPIED = {"keys", "run_id"}
"""Entries that a remote orchestrator's user may have copied before the first start."""


def check_run_folder(run_dir: RunDir, config: Config, starter: Starter = "launcher") -> list[str]:
    """Return one note for each setting that a resume changes. Raises ConfigError."""
    root, run = run_dir.root, config.run
    if root.exists() and not root.is_dir():
        raise ConfigError(f"{root} is a file: set run.name or run.output_dir to another place")
    if run.resume and run.overwrite:
        raise ConfigError("run.resume and run.overwrite are both on: one continues the run, the other deletes it")
    if not earlier_output(run_dir, starter):
        if run.resume:
            raise ConfigError(
                f"--resume: there is no run in {root}; start without --resume, or set run.name and "
                "run.output_dir to the run to continue"
            )
        return []
    if not is_run_directory(root):
        raise ConfigError(
            f"{root} is not empty and is not a run directory: set run.name or run.output_dir to another place"
        )
    if run.overwrite:
        return []
    steps = run_dir.complete_checkpoints()
    if not run.resume:
        state = f"a checkpoint of step {steps[-1]}" if steps else "no complete checkpoint"
        raise ConfigError(
            f"the run directory {root} exists already, with {state}: continue it with --resume, empty it with "
            "--run.overwrite true, or choose another run.name"
        )
    if starter == "orchestrator" and not steps:
        raise ConfigError(
            f"--resume found no complete checkpoint below {run_dir.checkpoints}: start over with "
            "--run.overwrite true, or set run.name and run.output_dir to the run to continue"
        )
    from composer_prime.config.load import read_config  # takes a second

    if not run_dir.config.is_file():
        return []
    return check_continuation(read_config(run_dir.config), config)


def earlier_output(run_dir: RunDir, starter: Starter = "launcher") -> list[Path]:
    """Return the entries of the folder that a new run may not begin with; what was paid for may stay.

    An orchestrator on its own counts only what a run writes: other machines may have left files there.
    """
    if starter == "orchestrator":
        written = [run_dir.metrics, run_dir.journal, run_dir.checkpoints, run_dir.rollouts(0).parent]
        written += [run_dir.weights, run_dir.ledger, run_dir.final]
        return [path for path in written if path.exists()]
    if not run_dir.root.is_dir():
        return []
    allowed = PAID_ENTRIES | {".launcher.lock"} | (_COPIED if run_dir.keys.is_dir() else set())
    return [path for path in run_dir.root.iterdir() if path.name not in allowed]


def is_run_directory(root: Path) -> bool:
    """Return whether a launcher or an orchestrator made this folder."""
    return (root / "run_id").is_file() or ((root / "config.json").is_file() and (root / "keys").is_dir())


def folder_state(run_dir: RunDir) -> str:
    """Return what is in the folder, in words."""
    if not earlier_output(run_dir):
        return "new"
    if not is_run_directory(run_dir.root):
        return "exists, and is not a run directory"
    steps = run_dir.complete_checkpoints()
    return f"exists; newest checkpoint: step {steps[-1]}" if steps else "exists; no checkpoint yet"


def check_continuation(before: Config, now: Config) -> list[str]:
    """Return one note for each allowed change. Raises ConfigError with those that are not."""
    old, new = before.model_dump(mode="json"), now.model_dump(mode="json")
    if broken := [*_changed_bindings(old, new), *_lowered(old, new)]:
        listed = "\n".join(f"  {line}" for line in broken)
        raise ConfigError(
            "--resume cannot continue this run, because its saved state was made under other settings:\n"
            f"{listed}\n"
            f"set {'it' if len(broken) == 1 else 'them'} back, or start a new run under another run.name"
        )
    changes = changed_settings(old, new)
    notes = []
    if now.channels.policy.max_completion_length is None:
        changes = [change for change in changes if change[0] != _DIVISOR]
        notes = _divisor_notes(before, now)
    return notes + [f"changed {line}" for line in _lines(changes) if not line.startswith(_NOT_REPORTED)]


def _changed_bindings(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    changes = []
    for key in BINDING:
        old_value, new_value = (_without_free_keys(_value_at(tree, key)) for tree in (old, new))
        changes += changed_settings(old_value, new_value, key)
    return _lines(changes)


def _lowered(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    values = [(key, _value_at(old, key), _value_at(new, key)) for key in NOT_LOWER]
    lowered = [change for change in values if change[2] < change[1]]
    return [f"{line} (batches formed under it must still fit)" for line in _lines(lowered)]


def with_length_divisor(config: Config, run_dir: RunDir) -> Config:
    """Return `config` with channels.policy.max_completion_length as a number, for config.json.

    A resume keeps the run's own: another divisor would scale the policy loss against the rest.
    """
    from composer_prime.config.load import read_config

    policy = config.channels.policy
    length = config.completion_length
    if config.run.resume and policy.max_completion_length is None and run_dir.config.is_file():
        length = _divisor_of_run(read_config(run_dir.config))
    policy = policy.model_copy(update={"max_completion_length": length})
    return config.model_copy(update={"channels": config.channels.model_copy(update={"policy": policy})})


def _divisor_of_run(before: Config) -> int:
    """Return a run's divisor. One that recorded none began with model.max_context."""
    return before.channels.policy.max_completion_length or before.model.max_context


def _divisor_notes(before: Config, now: Config) -> list[str]:
    kept, current = _divisor_of_run(before), now.completion_length
    if kept == current:
        return []
    begun = f"{_DIVISOR} stays {kept}, with which the run began"
    return [f"{begun}; the settings of now would give {current}: set it to choose another"]


def _value_at(values: dict[str, Any], key: str) -> Any:
    value: Any = values
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _without_free_keys(value: Any) -> Any:
    """Return sources without the settings that may change between starts."""
    if not isinstance(value, list):
        return value
    return [{name: part for name, part in source.items() if name not in _FREE_IN_SOURCES} for source in value]


def changed_settings(old: Any, new: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """Return (dotted name, old value, new value) of each setting at or below `name` that differs."""
    if old == new:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        pairs = [(key, old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys())]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = [(str(index), *both) for index, both in enumerate(zip(old, new, strict=True))]
    else:
        return [(name, old, new)]
    prefix = f"{name}." if name else ""
    return [change for key, before, after in pairs for change in changed_settings(before, after, prefix + key)]


def _lines(changes: list[tuple[str, Any, Any]]) -> list[str]:
    return [f"{name}: was {old!r}, now {new!r}" for name, old, new in changes]
