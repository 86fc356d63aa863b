"""final/: the trained policy as a Hugging Face folder that AutoModelForCausalLM.from_pretrained loads as it is.

The weights are those of the last published version, in the published type: what the nodes sampled from and what the
last evaluation measured. Everything but weights and config.json is taken over from the model folder.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor

from composer_prime.config import Config
from composer_prime.errors import CheckpointError
from trainer.gather import whole_tensors
from trainer.policy import Policy
from trainer.publish import plain_model
from trainer.world import World

_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".index.json", ".h5", ".msgpack", ".onnx")


def export(policy: Policy, config: Config, folder: Path, target: Path, world: World, dtype: torch.dtype) -> None:
    """Write `target` (replacing it whole) on rank 0. A collective. Raises CheckpointError when it cannot be written."""
    tensors = whole_tensors(policy, world, dtype)
    if tensors is None:
        return
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        _save(tensors, config, folder, partial, dtype)
        _copy_rest(config, folder, partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    except Exception as error:  # safetensors has its own type for a full disk
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"the final model cannot be written to {target}: {error}; free some space, then go on with --resume"
        ) from error


def _save(tensors: dict[str, Tensor], config: Config, folder: Path, target: Path, dtype: torch.dtype) -> None:
    lm = plain_model(config, folder)
    lm.load_state_dict(tensors, strict=False, assign=True)
    lm.tie_weights()
    lm.config.dtype = dtype
    lm.save_pretrained(target)


def _copy_rest(config: Config, folder: Path, target: Path) -> None:
    """Tokenizer, generation settings, chat template and licence as they are in `folder`; a configured template wins."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != "config.json" and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, target / path.name)
    if config.model.chat_template is not None:
        shutil.copyfile(config.model.chat_template, target / "chat_template.jinja")
