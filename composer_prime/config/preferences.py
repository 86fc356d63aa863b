"""[orchestrator.preferences]: pairs of answers that are mixed into the steps (channel 3)."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_config import BaseConfig


class PreferencesConfig(BaseConfig):
    pairs: Path | None = None
    """A pairs.jsonl; `tiny` is the embedded one, made from toolsmith. None takes the run directory's own, which a
    replay may still be writing: pairs that appear join the next pass."""
    pairs_per_step: int = Field(default=0, ge=0)
    """Pairs in each optimizer step; 0 mixes none in."""
    max_epsilon: float = Field(default=0.5, ge=0, le=0.5)
    """Pairs whose label is wrong with a higher probability are left out."""
