"""Checkpoints: model masters, optimizer moments, moving averages, random state; any number of ranks can load them.

    rank 0: CheckpointRequest ------> orchestrator writes orchestrator/ ... ------> CheckpointSaved
    ranks:  torch.distributed.checkpoint writes trainer/, each rank its shards
    rank 0: once both are whole: COMPLETE (last), then older checkpoints go

A folder without COMPLETE never counts. When a write fails (a full disk), the unfinished folder is removed and the
checkpoint before it stays as it was; training goes on and the next one is tried, unless it was the last of the run.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from composer_prime.errors import CheckpointError, ComposerError
from composer_prime.run.run_dir import RunDir, write_atomic
from diloco.streaming import StreamingDiLoCo
from trainer.data.step_client import StepClient
from trainer.model.policy import Policy
from trainer.optim import Optimizer
from trainer.teacher.self_teacher import SelfTeacher
from trainer.world import World, gather_texts, gather_words

logger = logging.getLogger(__name__)
FORMAT = 1


class Checkpoints:
    """Writes and reads the checkpoints of one run on all ranks together."""

    def __init__(self, run_dir: RunDir, world: World, keep: int, outer: StreamingDiLoCo | None = None) -> None:
        """`outer`: the loop across clusters, whose state is a file of each rank."""
        self._run_dir, self._world, self._keep, self._outer = run_dir, world, keep, outer

    def save(self, step: int, policy: Policy, optimizer: Optimizer, teacher: SelfTeacher, client: StepClient) -> None:
        """Write checkpoint `step` with the orchestrator. A collective.

        Raises CheckpointError on every rank when any part fails; the folder is then gone and older ones are intact.
        """
        folder = self._run_dir.checkpoint(step)
        state = _state(policy, optimizer, teacher, self._world, step)
        failure = self._write(step, state, client)
        failures = [text for text in gather_texts(failure) if text]
        if not failures:
            return
        if self._world.first:
            shutil.rmtree(folder, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint {folder} could not be written: {'; '.join(failures)}. Free some space there or lower "
            "trainer.checkpoint.keep; the checkpoint before it is still whole"
        )

    def _write(self, step: int, state: dict[str, Any], client: StepClient) -> str:
        """This rank's failure in words; empty when all went well."""
        folder = self._run_dir.checkpoint(step)
        failure = self._prepare(folder, step, client) if self._world.first else ""
        if any(row[0] for row in gather_words([bool(failure)])):
            return failure
        try:
            dcp.save(state, checkpoint_id=folder / "trainer")
            if self._outer is not None:
                write_atomic(self._outer_file(folder / "trainer"), self._outer.state())
        except (Exception, dcp.CheckpointException) as error:  # the latter, no Exception, wraps what any rank met
            failure = f"rank {self._world.rank}: {_root_cause(error)}"
        if any(row[0] for row in gather_words([bool(failure)])):
            return failure
        return self._complete(folder) if self._world.first else ""

    def _outer_file(self, folder: Path) -> Path:
        return folder / f"diloco-{self._world.rank}.safetensors"

    def _load_outer(self, folder: Path) -> None:
        if self._outer is None:
            return
        path = self._outer_file(folder)
        try:
            self._outer.load(path.read_bytes())
        except OSError as error:
            raise CheckpointError(
                f"the state of the loop across clusters cannot be read from {path}: {error.strerror}; resume without "
                "[diloco], or with as many trainer.ranks as wrote the checkpoint"
            ) from None

    def _prepare(self, folder: Path, step: int, client: StepClient) -> str:
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
            saved = client.checkpoint(step)
        except (OSError, ComposerError) as error:
            return str(error)
        return f"the orchestrator's part: {saved.error}" if saved.error else ""

    def _complete(self, folder: Path) -> str:
        try:
            write_atomic(folder / "COMPLETE", b"")
        except OSError as error:
            return str(error)
        for old in self._run_dir.complete_checkpoints()[: -self._keep]:
            path = self._run_dir.checkpoint(old)
            (path / "COMPLETE").unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)
        return ""

    def load(self, step: int, policy: Policy, optimizer: Optimizer, teacher: SelfTeacher) -> None:
        """Restore checkpoint `step`, whatever number of ranks wrote it. A collective.

        Raises CheckpointError when it does not fit this model and optimizer or cannot be read.
        """
        folder = self._run_dir.checkpoint(step) / "trainer"
        state = _state(policy, optimizer, teacher, self._world, step)
        try:
            absent = _drop_absent(state, dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)
            dcp.load(state, checkpoint_id=folder)
        except (Exception, dcp.CheckpointException) as error:  # the latter, no Exception, wraps what any rank met
            raise CheckpointError(
                f"checkpoint {folder} cannot be loaded: {_root_cause(error)}; was model.path, trainer.lora or "
                "trainer.optim.type changed since? Remove that folder to resume from the one before it"
            ) from error
        if state["meta"] != {"step": step, "format": FORMAT}:
            raise CheckpointError(f"checkpoint {folder} says {state['meta']}, expected step {step}, format {FORMAT}")
        # Moments come from the checkpoint, hyper-parameters from the configuration: a resumed run may change them.
        settings = [[_settings(group) for group in part.param_groups] for part in optimizer.parts]
        set_state_dict(policy, optimizer.parts, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        for part, groups in zip(optimizer.parts, settings, strict=True):
            for group, kept in zip(part.param_groups, groups, strict=True):
                group.update(kept)
        for name in absent:
            teacher.begin(name)
        _set_random(state.get("random", {}))
        self._load_outer(folder)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names", "lr")}


def _state(policy: Policy, optimizer: Optimizer, teacher: SelfTeacher, world: World, step: int) -> dict[str, Any]:
    model, moments = get_state_dict(policy, optimizer.parts)
    random = {f"{world.rank}-cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        random[f"{world.rank}-cuda"] = torch.cuda.get_rng_state(world.device)
    averages = teacher.averages()
    return {
        "model": model,
        "optimizer": moments,
        "random": random,
        "meta": {"step": step, "format": FORMAT},
        **({"averages": averages} if averages else {}),
    }


def _drop_absent(state: dict[str, Any], written: Iterable[str]) -> list[str]:
    """Leave out of `state` what the checkpoint does not hold (more ranks, another teacher): names of such averages."""
    names = set(written)
    absent: list[str] = []
    for part in ("averages", "random"):
        values = state.pop(part, {})
        kept = {key: value for key, value in values.items() if any(n.startswith(f"{part}.{key}") for n in names)}
        absent += [key for key in values if part == "averages" and key not in kept]
        if kept:  # an empty dictionary would be looked for too
            state[part] = kept
    return absent


def _set_random(states: dict[str, torch.Tensor]) -> None:
    for key, value in states.items():
        if key.endswith("-cuda"):
            torch.cuda.set_rng_state(value.cpu(), torch.cuda.current_device())
        else:
            torch.set_rng_state(value)


def _root_cause(error: BaseException) -> str:
    """The first failure inside DCP's wrapper, in one line."""
    inner = getattr(error, "failures", None)
    if inner:
        error = next(iter(inner.values()))[0]
    return f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"
