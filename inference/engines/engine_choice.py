"""Which engine a node runs: by its short name, or by the import path of one's own."""

from __future__ import annotations

from pathlib import Path

from composer_prime.config.inference import InferenceConfig
from composer_prime.import_path import build_part
from inference.engines.base import Engine

ENGINES = {
    "local": "inference.engines.local.local_engine:LocalEngine",
    "vllm": "inference.engines.vllm.vllm_engine:VllmEngine",
}


def build_engine(inference: InferenceConfig, model_folder: Path, max_context: int) -> Engine:
    """Return the engine that `inference.engine` names, not started.

    `max_context` bounds prompt and completion together, in tokens. Each engine is imported only when it is used: the
    libraries of the others may be missing. Raises ConfigError.
    """
    given = {"model_folder": model_folder, "inference": inference, "max_context": max_context}
    return build_part(inference.engine, inference.engine_settings, ENGINES, "inference.engine", given)
