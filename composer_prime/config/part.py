"""A part that users may replace: its short name, or the import path of their own, with settings.

curriculum = "frontier"
curriculum = { name = "my_module:MyCurriculum", settings = { window = 4 } }
"""

from __future__ import annotations

from typing import Any

from pydantic import model_validator
from pydantic_config import BaseConfig


class PartConfig(BaseConfig):
    """A short name or `module:Class`, with settings. A plain text is a name without settings."""

    name: str
    """A short name, or `module:Class` of your own."""
    settings: dict[str, Any] = {}
    """Keyword arguments of the class."""

    @model_validator(mode="before")
    @classmethod
    def _plain_name(cls, values: Any) -> Any:
        return {"name": values} if isinstance(values, str) else values
