"""[run]: what the run is called, how long it is, where it writes."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import Field, PrivateAttr, field_validator
from pydantic_config import BaseConfig


class RunConfig(BaseConfig):
    name: str
    """Name of the run and of its folder below output_dir; letters, digits, dot, dash, underscore."""
    output_dir: Path = Path("outputs")
    """Folder that holds run directories."""
    seed: int = Field(default=0, ge=0)
    """Every random draw of the run derives from it."""
    max_steps: int = Field(default=100, ge=0)
    """Optimizer steps; 0 evaluates the start model and stops."""
    resume: bool = False
    """Continue from the newest complete checkpoint of this run directory (`--resume` for short)."""
    overwrite: bool = False
    """Empty an existing run directory of this name instead of refusing to start."""
    stop_grace_s: float = Field(default=15.0, gt=0)
    """How long a role may take to end after SIGTERM, before it is killed."""

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(
                f"run.name is {name!r}; it names a folder, so use letters, digits, '.', '-' and '_' only "
                "(put folders into run.output_dir)"
            )
        return name

    _peer: str | None = PrivateAttr(default=None)
    """diloco.peer_id: clusters of a joint run that share a disk write to folders of their own."""

    @property
    def directory(self) -> Path:
        folder = self.output_dir / self.name
        return folder / self._peer if self._peer else folder
