"""Checkpoints: model masters, optimizer moments, moving averages, random state; any number of ranks can load them.

    rank 0: CheckpointRequest ------> orchestrator writes orchestrator/ ... ------> CheckpointSaved
    ranks:  copy the state to the host, where it has the room
    ---- training continues; a thread of each rank does the rest, and the next step waits for it before it counts ----
    ranks:  torch.distributed.checkpoint writes trainer/, each rank its shards
    rank 0: when both are whole: COMPLETE (last), then older checkpoints are removed

A folder without COMPLETE never counts. After a failed write (a full disk) the unfinished folder is removed, and
training continues, unless it was the last of the run.
"""

from __future__ import annotations

import logging
import os
import shutil
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from composer_prime.errors import CheckpointError, ComposerError
from composer_prime.host import memory
from composer_prime.run.run_dir import RunDir, write_atomic, write_remedy
from diloco.fragments import local_shard
from diloco.streaming import StreamingDiLoCo
from trainer.data import StepClient, first_alone, wait_together
from trainer.model.policy_model import Policy, SelfTeacher
from trainer.optim import Optimizer
from trainer.world import Background, World, gather_texts, gather_words

logger = logging.getLogger(__name__)

FORMAT = 1
PARTIAL = StateDictOptions(strict=False)
"""The model folder has the frozen parameters. A parameter that never got a gradient has no moments in a checkpoint."""


@dataclass(slots=True, kw_only=True)
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
    _failure: CheckpointError | None = None
    background: Background = field(default_factory=partial(Background, 1))
    _group: Any = field(default_factory=partial(dist.new_group, backend="gloo"))
    """In it the threads of all ranks agree, beside the collectives of training."""

    def save(self, step: int, client: StepClient) -> None:
        """Write checkpoint `step` with the orchestrator. A collective.

        Raises CheckpointError on every rank when any part fails. The folder is then gone, and older ones are intact.
        """
        self._start(step, client, self._state(step))
        if (failure := self.settle()) is not None:
            raise failure

    def begin(self, step: int, client: StepClient) -> None:
        """Write checkpoint `step` as `save` does, from a copy and beside training: `settle` waits. A collective.

        Where the memory of a machine has no room for the copy, training waits here.
        """
        state, has_room = self._state(step), self._has_room()
        if has_room:
            state = DefaultStager(StagingOptions(False, False, False, False)).stage(state)
        self._start(step, client, state)
        if not has_room:
            self.settle()

    def settle(self) -> CheckpointError | None:
        """Wait until no checkpoint is under way. Return what the last one failed of. A collective."""
        wait_together("training", "the checkpoint that is under way", self.background.is_idle)
        return self._failure

    def _has_room(self) -> bool:
        """Return whether each machine has twice the memory that a copy takes. A collective."""
        trained = sum(local_shard(each).nbytes for each in self.policy.parameters() if each.requires_grad)
        needed = 2 * 3 * trained * int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return all(room for (room,) in gather_words([int(memory()[1] > needed)]))

    def _start(self, step: int, client: StepClient, state: Any) -> None:
        self.settle()
        self._failure, what = None, f"checkpoint {step}"
        work = partial(_prepare, self.run_dir.checkpoint(step), step, client)
        prepared = first_alone(self.world, "training", f"rank 0's part of {what}", work) or ""
        outer = None if self.outer is None else self.outer.state()
        self.background.start(what, partial(self._write, step, state, outer, prepared))

    def _write(self, step: int, state: dict[str, Any], outer: memoryview | None, failure: str) -> None:
        """Write this rank's part and complete the checkpoint, on the thread."""
        folder = self.run_dir.checkpoint(step)
        torch.get_device_module(self.world.device).set_device(self.world.device)  # A thread begins with GPU 0.
        try:
            self._agree(folder, failure)
            try:
                dcp.save(state, checkpoint_id=folder / "trainer", process_group=self._group)
                if outer is not None:
                    write_atomic(self._outer_file(folder / "trainer"), outer)
            except (Exception, dcp.CheckpointException) as error:  # CheckpointException is a BaseException
                failure = f"rank {self.world.rank}: {_root_cause(error)}"
            self._agree(folder, failure)
            sums = self._sums(folder, self._group)
            self._agree(folder, self._complete(folder, sums) if self.world.first else "")
        except CheckpointError as error:
            logger.warning("no checkpoint of step %d: %s", step, error)
            self._failure = error

    def load(self, step: int) -> None:
        """Restore checkpoint `step`, whatever number of ranks wrote it. A collective.

        Raises CheckpointError when it does not fit this model and optimizer or cannot be read.
        """
        folder = self.run_dir.checkpoint(step) / "trainer"
        state = self._state(step)
        settings = state["optimizer"].pop("param_groups")  # A resumed run may have other ones.
        try:
            complete, now = folder.parent / "COMPLETE", self._sums(folder.parent)
            seen = complete.read_text() if self.world.first and complete.is_file() else ""  # Others may see it late.
            written = gather_texts(seen)[0]
            if written and (changed := now.difference(written.split("\n"))):  # Earlier releases wrote nothing there.
                raise ValueError(f"{min(changed)[9:]} changed since it was written")
            absent = _drop_absent(state, dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)
            dcp.load(state, checkpoint_id=folder)
        except (Exception, dcp.CheckpointException) as error:  # CheckpointException is a BaseException
            raise CheckpointError(
                f"checkpoint {folder} cannot be loaded: {_root_cause(error)}; was model.path, trainer.lora or "
                "trainer.optim.type changed since? Remove that folder to resume from the one before it"
            ) from error
        if state["meta"] != {"step": step, "format": FORMAT}:
            raise CheckpointError(f"checkpoint {folder} says {state['meta']}, expected step {step}, format {FORMAT}")
        moments = state["optimizer"] | {"param_groups": settings}
        set_state_dict(self.policy, self.optimizer.parts, model_state_dict=state["model"],
                       optim_state_dict=moments, options=PARTIAL)  # fmt: skip
        for name in absent:
            self.teacher.begin(name)
        for key, value in state.get("random", {}).items():
            if key.endswith("-cuda"):
                torch.cuda.set_rng_state(value.cpu(), torch.cuda.current_device())
            else:
                torch.set_rng_state(value)
        self._load_outer(folder)

    def _agree(self, folder: Path, failure: str) -> None:
        """Raise CheckpointError on every rank when `failure` is not empty on any. A collective of the threads."""
        failures = [text for text in gather_texts(failure, self._group) if text]
        if not failures:
            return
        if self.world.first:
            shutil.rmtree(folder, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint {folder} could not be written: {'; '.join(failures)}; "
            f"{write_remedy(failures, ' or lower trainer.checkpoint.keep')}. The checkpoint before it is still whole"
        )

    def _sums(self, folder: Path, group: dist.ProcessGroup | None = None) -> set[str]:
        """Return `CRC-32 file` of the files that rank 0 sees, of which each rank reads a share. A collective."""
        files = sorted(file for part in ("orchestrator", "trainer") for file in (folder / part).rglob("*.*"))
        listed = "\n".join(str(file.relative_to(folder)) for file in files) if self.world.first else ""
        names = gather_texts(listed, group)[0].splitlines()
        lines = [f"{_sum(folder / name)} {name}" for name in names[self.world.rank :: self.world.size]]
        return {*"\n".join(gather_texts("\n".join(lines), group)).split("\n")} - {""}

    def _complete(self, folder: Path, sums: set[str]) -> str:
        """Mark the checkpoint complete, remove old ones. Return the failure."""
        try:
            write_atomic(folder / "COMPLETE", "\n".join(sorted(sums)).encode())
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


def _prepare(folder: Path, step: int, client: StepClient) -> str:
    """Make the folder, with the orchestrator's part. Return the failure."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        saved = client.checkpoint(step)
    except (OSError, ComposerError) as error:
        return str(error)
    return f"the orchestrator's part: {saved.error}" if saved.error else ""


def _without_frozen(policy: Policy, values: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is not trained, under all names of tied parameters."""
    names = policy.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in names if not parameter.requires_grad}
    return {name: value for name, value in values.items() if name not in frozen}


def _drop_absent(state: dict[str, Any], written: Iterable[str]) -> list[str]:
    """Leave out of `state` what the checkpoint lacks. Return the absent averages."""
    names = list(written)

    def present(values: dict[str, Any], prefix: str, end: str = "") -> dict[str, Any]:
        def is_written(key: str) -> bool:
            return any(name.startswith(f"{prefix}.{key}{end}") for name in names)

        return {key: value for key, value in values.items() if is_written(key)}

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
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


def _sum(file: Path) -> str:
    """Return the CRC-32 of a file, in eight digits; what is wrong with one that cannot be read."""
    try:
        return f"{zlib.crc32(np.memmap(file, mode='r').data):08x}"
    except (OSError, ValueError) as error:  # An empty file has no map.
        return f"{type(error).__name__:8.8}"
