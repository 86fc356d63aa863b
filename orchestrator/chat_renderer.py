"""Which renderer turns a model folder's conversations into token ids.

Imported by environment workers only: renderers and transformers come with it.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pydantic
from renderers import RendererConfig, config_from_name, create_renderer
from renderers.base import MODEL_RENDERER_MAP, Renderer, load_tokenizer
from renderers.configs import CustomRendererConfig

from composer_prime.errors import ConfigError, ModelNotFoundError

logger = logging.getLogger(__name__)

_OURS = re.compile(r"orchestrator(\.\w+)+")
_VISIBLE_CALLS = {"qwen3": "orchestrator.environments.tool_loop.renderer.VisibleCallsQwen3Renderer"}
"""Stock renderers for which we have one that keeps broken tool calls in sight."""
_PROBES: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is 2 + 2?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say hello."},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "Again, please."},
    ],
]
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def build_renderer(model_path: str, choice: str | dict[str, Any] | None) -> tuple[RendererConfig, Renderer]:
    """The configuration and the renderer of a model folder.

    `choice` (a renderer's name or configuration) wins; else the folder's own renderer.json, which may name renderers of
    this package only, for a model folder must not bring code; else the folder's published name in renderers' own map;
    else a model-specific renderer of its architecture, if it renders the folder's chat template token for token; else
    the folder's chat template itself (`ChatTemplateRenderer`).

    Raises ModelNotFoundError for a folder without a tokenizer, ConfigError for an unknown renderer or a folder without
    a chat template.
    """
    tokenizer = read_tokenizer(model_path)
    config = _choose(model_path, tokenizer, choice)
    try:
        return config, create_renderer(tokenizer, config)
    except Exception as error:
        raise ConfigError(f"renderer {config.name!r} does not fit the model folder {model_path}: {error}") from error


def _choose(model_path: str, tokenizer: Any, choice: str | dict[str, Any] | None) -> RendererConfig:
    if choice not in (None, "auto"):
        return _explicit(choice)
    shipped = _read_json(Path(model_path) / "renderer.json")
    if shipped:
        path = shipped.get("import_path")
        if path is not None and not _OURS.fullmatch(str(path)):
            raise ConfigError(
                f"{model_path}/renderer.json names {path}: a model folder may only name orchestrator's own"
            )
        return _explicit(shipped)
    name = MODEL_RENDERER_MAP.get(published_name(model_path) or "") or _by_architecture(model_path, tokenizer)
    if name is not None:
        visible = _VISIBLE_CALLS.get(name)
        return config_from_name(name) if visible is None else _custom(visible)
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"{model_path} has no chat template: add chat_template.jinja to the folder, or name a renderer "
            "(renderer = …) that knows the model"
        )
    return _custom("orchestrator.chat_template.ChatTemplateRenderer")


def read_tokenizer(model_path: str) -> Any:
    """The folder's tokenizer. From tokenizer.json where it has one: AutoTokenizer would import torch.

    Raises ModelNotFoundError.
    """
    folder = Path(model_path)
    if not (folder / "tokenizer_config.json").exists():
        raise ModelNotFoundError(
            f"{model_path} holds no tokenizer_config.json: give the folder of a Hugging Face model"
        )
    if not (folder / "tokenizer.json").exists() or "auto_map" in _read_json(folder / "tokenizer_config.json"):
        return load_tokenizer(model_path)
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(model_path)


def published_name(model_path: str) -> str | None:
    """`org/name` of a model folder: from its configuration, or from its place in a Hugging Face cache."""
    folder = Path(model_path)
    for parent in folder.resolve().parents:
        if parent.name.startswith("models--"):
            return parent.name.removeprefix("models--").replace("--", "/", 1)
    name = _read_json(folder / "config.json").get("_name_or_path")
    return name if name in MODEL_RENDERER_MAP else None


def _explicit(choice: str | dict[str, Any] | None) -> RendererConfig:
    try:
        if isinstance(choice, str):
            return config_from_name(choice)
        return pydantic.TypeAdapter(RendererConfig).validate_python(choice)
    except (pydantic.ValidationError, ValueError, KeyError) as error:
        known = ", ".join(sorted(set(MODEL_RENDERER_MAP.values())))
        message = f"renderer {choice!r} is none that renderers knows ({known}, default, custom): {error}"
        raise ConfigError(message) from error


def _custom(import_path: str) -> RendererConfig:
    return CustomRendererConfig(name="custom", import_path=import_path)


def _by_architecture(model_path: str, tokenizer: Any) -> str | None:
    """A model-specific renderer that agrees with the folder's own template on every probe conversation."""
    model_type = str(_read_json(Path(model_path) / "config.json").get("model_type") or "")
    name = "qwen3" if model_type in ("qwen3", "qwen3_moe") else None
    if name is None or not getattr(tokenizer, "chat_template", None):
        return None
    try:
        renderer = create_renderer(tokenizer, config_from_name(name))
        agrees = all(
            renderer.render_ids(probe, tools=tools, add_generation_prompt=True)
            == list(tokenizer.apply_chat_template(probe, tools=tools, add_generation_prompt=True, return_dict=False))
            for probe in _PROBES
            for tools in (None, [_PROBE_TOOL])
        )
    except Exception as error:
        logger.info("renderer %s does not fit %s: %s", name, model_path, error)
        return None
    return name if agrees else None


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}
