"""The two engines, `local` and `vllm`, behind the interface in base.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from composer_prime.config.inference import InferenceConfig

if TYPE_CHECKING:
    from inference.engines.base import Engine


def build_engine(inference: InferenceConfig, model_folder: Path, max_context: int) -> Engine:
    """Return the engine that `inference.engine` names, not started.

    `max_context` bounds prompt and completion together, in tokens. Each engine is imported only when it is used: the
    libraries of the other may be missing.
    """
    if inference.engine == "vllm":
        from inference.engines.vllm.engine import VllmEngine

        return VllmEngine(model_folder, inference, max_context)
    from inference.engines.local.engine import LocalEngine

    return LocalEngine(model_folder, inference, max_context)
