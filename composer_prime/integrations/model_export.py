"""Write a trained model as a Hugging Face folder in another type or in shards of another size. Imports torch."""

from __future__ import annotations

import shutil
from pathlib import Path

from composer_prime.run.run_dir import RunDir

_BESIDE = ("chat_template.jinja", "generation_config.json", "README.md", "LICENSE")
"""Files of a model folder that loading and saving may not carry over."""


def write_model(folder: Path, target: Path, *, dtype: str | None, shard_size: str) -> None:
    """Write the model and tokenizer of `folder` to `target`. `dtype`: None keeps the stored one."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    stored = getattr(torch, dtype) if dtype else "auto"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=stored, local_files_only=True)
    model.save_pretrained(target, max_shard_size=shard_size)
    AutoTokenizer.from_pretrained(folder, local_files_only=True).save_pretrained(target)
    for name in _BESIDE:
        if (folder / name).is_file() and not (target / name).exists():
            shutil.copyfile(folder / name, target / name)


def exported_from(folder: Path) -> str:
    """Return what the model came from, for the message."""
    run = RunDir(folder.parent)
    return f"the final model of {run.root} (adapters merged)" if run.config.is_file() else str(folder)
