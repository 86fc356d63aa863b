"""[monitor]: trackers besides metrics.jsonl, which is always written."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_config import BaseConfig


class MonitorConfig(BaseConfig):
    trackers: list[Literal["trackio", "wandb", "tensorboard"]] = []
    """Trackers to feed; each needs the extra of the same name. A tracker that fails is switched off, not the run."""
    project: str = "composer-prime"
    """Project name in trackio and wandb."""
    wandb_mode: Literal["online", "offline"] = "offline"
    """wandb without or with its server."""
    view: Literal["auto", "live", "plain"] = "auto"
    """The launcher's view: live panel on a terminal, plain lines elsewhere."""
    refresh_s: float = Field(default=1.0, gt=0)
    """How often the live view is drawn."""
