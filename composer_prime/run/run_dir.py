"""The run directory: the only place that knows its paths, and the run's identity.

    outputs/<run name>/
      config.json  metrics.jsonl  rollouts/step_000001.jsonl  logs/<role>.log
      journal/                     finished groups and formed batches, which a crash must not lose
      ledger.jsonl                 which samples each step trained
      licence.jsonl                what redraws and divergences say of each kind of hint
      checkpoints/step_000010/{trainer,orchestrator,COMPLETE}
      weights/                     the weight store
      keys/                        CURVE and signing keys, readable by the owner only
      reference/                   replay-DPO: log-probabilities of preference pairs under the frozen base
      final/                       Hugging Face format

The run's id is made once with the run directory, carried by every message, and kept over resumes.
"""

from __future__ import annotations

import os
import secrets
import threading
from pathlib import Path

from composer_prime.errors import CheckpointError, ConfigError

PAID_ENTRIES = frozenset(
    ("pairs.jsonl", "pairs.votes.jsonl", "pairs.costs.jsonl", "pairs.gate.json", "pairs.svg", "costs.jsonl", "hints",
     "reference", "rentals.jsonl")
)  # fmt: skip
"""Entries that stay valid for any training and may have cost money, those of earlier releases too."""

_PARTIAL = ".partial"


def write_atomic(path: Path, data: bytes | memoryview) -> None:
    """Write `data` to `path`. A reader sees the old content or all of the new, even after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{threading.get_native_id()}{_PARTIAL}")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_remedy(failure: object, more: str = "") -> str:
    """Return what to do about a failed write, by its text. `more`: another way to make room where the disk is full."""
    text = str(failure).lower()
    if "read-only file system" in text:
        return "the disk is mounted read-only: mount it for writing, or set run.output_dir to another one"
    if "permission denied" in text or "not permitted" in text:
        return "let this user write there, or set run.output_dir to another folder"
    if "no space left" in text or "quota" in text:
        return f"free some space{more}"
    return f"check that disk{more and ' or free some space'}{more}"


def append_line(path: Path, line: bytes, *, sync: bool = False) -> None:
    """Append `line`, below a torn last line. `sync` waits for the disk. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line + b"\n")
        if sync:
            file.flush()
            os.fsync(file.fileno())


def remove_partials(folder: Path) -> None:
    """Delete what a killed `write_atomic` left in `folder`, where nobody writes now."""
    for path in folder.glob(f".*{_PARTIAL}"):
        path.unlink(missing_ok=True)


class RunDir:
    """The paths of one run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.json"
        self.metrics = root / "metrics.jsonl"
        self.ledger = root / "ledger.jsonl"
        self.licence = root / "licence.jsonl"
        self.journal = root / "journal"
        self.weights = root / "weights"
        self.keys = root / "keys"
        self.final = root / "final"
        self.failed_rollouts = root / "rollouts" / "failed.jsonl"
        self.checkpoints = root / "checkpoints"
        self.endpoints = root / "endpoints.json"
        """Addresses that roles bound, as JSON, for processes on this machine."""

    def log(self, role: str) -> Path:
        return self.root / "logs" / f"{role}.log"

    def rollouts(self, step: int) -> Path:
        return self.root / "rollouts" / f"step_{step:06d}.jsonl"

    def eval_rollouts(self, step: int) -> Path:
        return self.root / "rollouts" / f"eval_{step:06d}.jsonl"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    def complete_checkpoints(self) -> list[int]:
        """Return the steps whose checkpoint has the COMPLETE marker, ascending."""
        names = (path.parent.name.removeprefix("step_") for path in self.checkpoints.glob("step_*/COMPLETE"))
        return sorted(int(name) for name in names if name.isdigit())

    def newest_checkpoint(self) -> int:
        """Return the step of the newest complete checkpoint. Raises CheckpointError without one."""
        steps = self.complete_checkpoints()
        if not steps:
            raise CheckpointError(
                f"--resume found no complete checkpoint below {self.checkpoints}: start without --resume, or "
                "set run.name and run.output_dir to the run that should continue"
            )
        return steps[-1]


def create_run_id(run_dir: RunDir, name: str) -> str:
    """Return the run's id, made by the first call."""
    path = run_dir.root / "run_id"
    if not path.exists():
        write_atomic(path, f"{name}-{secrets.token_hex(4)}\n".encode())
    return path.read_text().strip()


def read_run_id(run_dir: RunDir) -> str:
    """Return the run's id. Raises ConfigError when the directory was never prepared."""
    try:
        return (run_dir.root / "run_id").read_text().strip()
    except FileNotFoundError:
        raise ConfigError(f"{run_dir.root} is not a run directory: start the run with `trainer @ file.toml`") from None
