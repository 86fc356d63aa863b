"""preregistration.json: what a ladder is to show, and by which rule.

It is written before the first run; later starts must agree with it, so that neither can follow the result.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from composer_prime.errors import ConfigError
from composer_prime.plan.check_run_dir import changed_settings
from composer_prime.run.run_dir import write_atomic

FILE = "preregistration.json"
RULE = """\
VALIDATED  the interval over tasks and the interval over seeds both lie above 0, and the difference is at least the
           smallest effect of interest
REFUTED    both intervals end below the smallest effect of interest: an effect of that size is excluded
PARTIAL    the interval over tasks lies above 0: these trained models are better, but that other seeds would be, or
           that the difference is large enough, is not shown
UNDECIDED  anything else"""
"""How an arm's difference from the baseline is judged. The first line that holds counts."""


class PlannedArm(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration, to be trained with every seed."""

    name: str
    settings: dict[str, Any]
    """The checked configuration without [run] and [monitor]."""
    steps: int
    """Optimizer steps; 0 only evaluates the start model."""

    @property
    def sources(self) -> list[str]:
        """Sources with held-out tasks, those that are trained on first."""
        sources = [source for source in self.settings["orchestrator"]["source"] if source["eval_taskset"]]
        return [source["name"] for source in sorted(sources, key=lambda source: source["weight"] <= 0)]


class Preregistration(msgspec.Struct, frozen=True, kw_only=True):
    """A ladder's question and rule."""

    arms: list[PlannedArm]
    baseline: str
    seeds: list[int]
    held_out: str
    """Source of the primary outcome."""
    minimal_effect: float
    rule: str = RULE
    primary_outcome: str = "held-out reward after the last step, minus that of the baseline arm, paired by task"
    written: str = ""
    """UTC; not compared."""

    def arm(self, name: str) -> PlannedArm:
        return next(arm for arm in self.arms if arm.name == name)

    def run_name(self, arm: str, seed: int) -> str:
        return f"{arm}-seed{seed}"

    @property
    def challengers(self) -> list[PlannedArm]:
        """Arms that train and are compared with the baseline."""
        return [arm for arm in self.arms if arm.steps and arm.name != self.baseline]


def read_preregistration(folder: Path) -> Preregistration | None:
    """Return a ladder's pre-registration, if any. Raises ConfigError for an unreadable file."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Preregistration)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): restore it, or use another folder") from None


def register(folder: Path, planned: Preregistration) -> bool:
    """Write the file, or check that it holds `planned`. Returns whether it was written. Raises ConfigError."""
    path = folder / FILE
    registered = read_preregistration(folder)
    if registered is None:
        write_atomic(path, msgspec.json.format(msgspec.json.encode(planned), indent=1) + b"\n")
        return True
    changes = changed_settings(_compared(registered), _compared(planned))
    if changes:
        listed = "\n".join(f"  {name}: registered {old!r}, now {new!r}" for name, old, new in changes)
        raise ConfigError(
            f"this is not the ladder that {path} announced:\n{listed}\n"
            "repeat it as registered, or start another with another -o"
        )
    return False


def _compared(registration: Preregistration) -> dict[str, Any]:
    """Return what must agree; arms by name, so that a difference names its setting."""
    values = json.loads(msgspec.json.encode(registration))
    del values["written"]
    values["arms"] = {arm.pop("name"): arm for arm in values["arms"]}
    return values
