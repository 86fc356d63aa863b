"""Which engine a configuration asks for. Each is imported only when it is used: one may lack the other's libraries."""

from __future__ import annotations

from pathlib import Path

from composer_prime.config.inference import InferenceConfig
from inference.engines.base import Engine


def build_engine(inference: InferenceConfig, model_folder: Path, max_context: int) -> Engine:
    """The engine of `inference.engine`, not started. `max_context` bounds prompt and completion together, in tokens."""
    if inference.engine == "vllm":
        from inference.engines.vllm.engine import VllmEngine

        return VllmEngine(model_folder, inference, max_context)
    from inference.engines.local.engine import LocalEngine

    return LocalEngine(model_folder, inference, max_context)
