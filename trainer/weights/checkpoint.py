"""Checkpoints: model masters, optimizer moments, moving averages, random state; any number of ranks can load them.

    rank 0: CheckpointRequest ------> orchestrator writes orchestrator/ ... ------> CheckpointSaved
    ranks:  torch.distributed.checkpoint writes trainer/, each rank its shards
    rank 0: when both are whole: COMPLETE (last), then older checkpoints are removed

A folder without COMPLETE never counts. When a write fails (a full disk), the unfinished folder is removed and the
checkpoint before it stays as it was. Training continues and the next one is tried, unless it was the last of the run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from composer_prime.config.load import read_config
from composer_prime.errors import CheckpointError, ComposerError
from composer_prime.model_source import resolve_model
from composer_prime.run.run_dir import RunDir, write_atomic, write_remedy
from diloco.streaming import StreamingDiLoCo
from trainer import world as worlds
from trainer.data import StepClient, first_alone
from trainer.model.build import build_policy
from trainer.model.policy_model import Policy, SelfTeacher
from trainer.optim import Optimizer
from trainer.weights.publish import export
from trainer.world import World, gather_texts

FORMAT = 1
PARTIAL = StateDictOptions(strict=False)
"""The model folder has the frozen parameters. A parameter that never got a gradient has no moments in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """Writes and reads the checkpoints of one run, on all ranks together."""

    run_dir: RunDir
    world: World
    policy: Policy
    optimizer: Optimizer
    teacher: SelfTeacher
    outer: StreamingDiLoCo | None
    """The loop across clusters; its state is a file of each rank."""
    keep: int
    """How many checkpoints stay."""

    def save(self, step: int, client: StepClient) -> None:
        """Write checkpoint `step` with the orchestrator. A collective.

        Raises CheckpointError on every rank when any part fails. The folder is then gone, and older ones are intact.
        """
        folder = self.run_dir.checkpoint(step)
        state = self._state(step)
        self._agree(folder, self._by_first(step, partial(_prepare, folder, step, client)))
        failure = ""
        try:
            dcp.save(state, checkpoint_id=folder / "trainer")
            if self.outer is not None:
                write_atomic(self._outer_file(folder / "trainer"), self.outer.state())
        except (Exception, dcp.CheckpointException) as error:  # CheckpointException is a BaseException
            failure = f"rank {self.world.rank}: {_root_cause(error)}"
        self._agree(folder, failure)
        self._agree(folder, self._by_first(step, partial(self._complete, folder)))

    def load(self, step: int) -> None:
        """Restore checkpoint `step`, whatever number of ranks wrote it. A collective.

        Raises CheckpointError when it does not fit this model and optimizer or cannot be read.
        """
        folder = self.run_dir.checkpoint(step) / "trainer"
        state = self._state(step)
        try:
            absent = _drop_absent(state, dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)
            dcp.load(state, checkpoint_id=folder)
        except (Exception, dcp.CheckpointException) as error:  # CheckpointException is a BaseException
            raise CheckpointError(
                f"checkpoint {folder} cannot be loaded: {_root_cause(error)}; was model.path, trainer.lora or "
                "trainer.optim.type changed since? Remove that folder to resume from the one before it"
            ) from error
        if state["meta"] != {"step": step, "format": FORMAT}:
            raise CheckpointError(f"checkpoint {folder} says {state['meta']}, expected step {step}, format {FORMAT}")
        # Moments come from the checkpoint, hyper-parameters from the configuration: a resumed run may change them.
        settings = self.optimizer.settings()
        set_state_dict(self.policy, self.optimizer.parts, model_state_dict=state["model"],
                       optim_state_dict=state["optimizer"], options=PARTIAL)  # fmt: skip
        for group, configured in zip(self.optimizer.groups(), settings, strict=True):
            group.update(configured)
        for name in absent:
            self.teacher.begin(name)
        for key, value in state.get("random", {}).items():
            if key.endswith("-cuda"):
                torch.cuda.set_rng_state(value.cpu(), torch.cuda.current_device())
            else:
                torch.set_rng_state(value)
        self._load_outer(folder)

    def _by_first(self, step: int, work: Callable[[], str]) -> str:
        """Return the failure of rank 0's part on that rank, "" on others. A collective."""
        return first_alone(self.world, "training", f"rank 0's part of checkpoint {step}", work) or ""

    def _agree(self, folder: Path, failure: str) -> None:
        """Raise CheckpointError on every rank when `failure` is not empty on any. A collective."""
        failures = [text for text in gather_texts(failure) if text]
        if not failures:
            return
        if self.world.first:
            shutil.rmtree(folder, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint {folder} could not be written: {'; '.join(failures)}; "
            f"{write_remedy(failures, ' or lower trainer.checkpoint.keep')}. The checkpoint before it is still whole"
        )

    def _complete(self, folder: Path) -> str:
        """Mark the checkpoint as complete and remove old ones. Return the failure."""
        try:
            write_atomic(folder / "COMPLETE", b"")
        except OSError as error:
            return str(error)
        for old in self.run_dir.complete_checkpoints()[: -self.keep]:
            path = self.run_dir.checkpoint(old)
            (path / "COMPLETE").unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)
        return ""

    def _state(self, step: int) -> dict[str, Any]:
        model, moments = get_state_dict(self.policy, self.optimizer.parts)
        model = _without_frozen(self.policy, model)
        random = {f"{self.world.rank}-cpu": torch.get_rng_state()}
        if self.world.device.type == "cuda":
            random[f"{self.world.rank}-cuda"] = torch.cuda.get_rng_state(self.world.device)
        state = {"model": model, "optimizer": moments, "random": random, "meta": {"step": step, "format": FORMAT}}
        averages = self.teacher.averages()
        return state | ({"averages": averages} if averages else {})

    def _outer_file(self, folder: Path) -> Path:
        return folder / f"diloco-{self.world.rank}.safetensors"

    def _load_outer(self, folder: Path) -> None:
        if self.outer is None:
            return
        path = self._outer_file(folder)
        try:
            self.outer.load(path.read_bytes())
        except OSError as error:
            raise CheckpointError(
                f"the state of the loop across clusters cannot be read from {path}: {error.strerror}; resume without "
                "[diloco], or with as many trainer.ranks as wrote the checkpoint"
            ) from None


def write_checkpoint_model(run_dir: RunDir, step: int, target: Path) -> None:
    """Write the model of checkpoint `step` to the new folder `target`, adapters merged, as float32 and on the CPU.

    Runs outside a run, alone. Raises CheckpointError for a checkpoint that cannot be read.
    """
    config = read_config(run_dir.config)
    trainer = config.trainer.model_copy(update={"device": "cpu", "compute_dtype": "float32"})
    config = config.model_copy(update={"trainer": trainer})
    model_folder, folder = resolve_model(config.model.path), run_dir.checkpoint(step) / "trainer"
    try:
        alone = worlds.join(config.trainer)
        policy = build_policy(config, model_folder, alone)
        state = {"model": _without_frozen(policy, get_model_state_dict(policy))}
        try:
            dcp.load(state, checkpoint_id=folder)
        except (Exception, dcp.CheckpointException) as error:  # CheckpointException is a BaseException
            raise CheckpointError(f"checkpoint {folder} cannot be read: {_root_cause(error)}") from error
        set_model_state_dict(policy, state["model"], options=PARTIAL)
        export(policy, config, model_folder, target, alone, torch.float32)
    finally:
        worlds.leave()


def _prepare(folder: Path, step: int, client: StepClient) -> str:
    """Make the folder and have the orchestrator write its part. Return the failure."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        saved = client.checkpoint(step)
    except (OSError, ComposerError) as error:
        return str(error)
    return f"the orchestrator's part: {saved.error}" if saved.error else ""


def _without_frozen(policy: Policy, values: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is not trained, under every name that tied parameters have."""
    names = policy.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in names if not parameter.requires_grad}
    return {name: value for name, value in values.items() if name not in frozen}


def _drop_absent(state: dict[str, Any], written: Iterable[str]) -> list[str]:
    """Leave out of `state` what the checkpoint lacks (more ranks, another teacher, moments). Return absent averages."""
    names = list(written)

    def present(values: dict[str, Any], prefix: str, end: str = "") -> dict[str, Any]:
        starts = {key: f"{prefix}.{key}{end}" for key in values}
        return {key: value for key, value in values.items() if any(name.startswith(starts[key]) for name in names)}

    state["optimizer"]["state"] = present(state["optimizer"]["state"], "optimizer.state", ".")
    averages = state.get("averages", {})
    for part in ("averages", "random"):
        if kept := present(state.pop(part, {}), part):  # the loader would look for an empty dictionary too
            state[part] = kept
    return [key for key in averages if key not in state.get("averages", {})]


def _root_cause(error: BaseException) -> str:
    """Return the first failure inside DCP's wrapper, in one line."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    return f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"
