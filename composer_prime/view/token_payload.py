"""Tokens of a rollout with their figures, where the run recorded them (monitor.tokens)."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from composer_prime.run.run_dir import RunDir


def rollout_tokens(run_dir: RunDir, entry: dict[str, Any], settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the recorded samples of a rollout: token texts with log-probabilities and advantages; empty without."""
    if entry["kind"] != "step" or not isinstance(entry["step"], int):
        return []
    step = entry["step"]
    samples = _lines(run_dir.rollout_tokens(step), "rollout_id", str(entry["rollout_id"]))
    trained = sorted(run_dir.rollouts(step).parent.glob(run_dir.trained_tokens(step, "*").name))
    model = settings.get("model")
    path = model.get("path") if isinstance(model, dict) else None
    for sample in samples:
        sample["texts"] = _texts(str(path), sample.pop("token_ids"))
        for figures in (found for file in trained for found in _lines(file, "sample_id", str(sample["sample_id"]))):
            sample |= _of_tokens(figures, sample["mask"])
    return samples


def _of_tokens(figures: dict[str, Any], mask: list[int]) -> dict[str, list[float]]:
    """Return the trainer's figures by token, 0 for tokens without one; no divergence without a hinted turn."""
    mismatch = iter(figures["mismatch"])
    found = {"mismatch": [next(mismatch, 0.0) if trained else 0.0 for trained in mask]}
    if figures["divergence"]:
        found["divergence"] = [0.0] * len(mask)
    for start, values in figures["divergence"]:
        found["divergence"][start : start + len(values)] = values
    return found


def _lines(path: Path, key: str, name: str) -> list[dict[str, Any]]:
    """Return the lines that begin with this key and name; the others are not decoded."""
    start = b'{"' + key.encode() + b'":' + msgspec.json.encode(name) + b","
    try:
        with path.open("rb") as file:
            return [msgspec.json.decode(raw) for raw in file if raw.startswith(start)]
    except (OSError, msgspec.DecodeError):
        return []


def _texts(model: str, ids: list[int]) -> list[str]:
    """Return each token's text; `#id` where the model's tokenizer cannot be read."""
    tokenizer = _tokenizer(model)
    return [f"#{token}" if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False) for token in ids]


@lru_cache(maxsize=8)
def _tokenizer(model: str) -> Any:
    from tokenizers import Tokenizer

    from composer_prime.model_source import present_model

    folder = present_model(model)
    if folder is None:
        return None
    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # tokenizers raises no other class for a file that it cannot read
        return None
