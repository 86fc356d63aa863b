"""Write a Hugging Face folder as one GGUF file, with the package gguf (extra gguf).

The architectures are those whose tensors llama.cpp and Hugging Face hold alike: Qwen2 and Qwen3, dense. Others permute
or fuse tensors, so they are refused: llama.cpp's own converter has the rules for each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from composer_prime.errors import ConfigError
from composer_prime.model_source import weight_files
from composer_prime.plan.machine import install_command, module_file

ARCHITECTURES = {"Qwen2ForCausalLM": "QWEN2", "Qwen3ForCausalLM": "QWEN3"}
DTYPES = ("float32", "float16", "bfloat16")
_QWEN_SPLIT = r"\p{L}+|\p{N}|"
"""Part of the regular expression by which Qwen's tokenizers split text."""


def write_gguf(folder: Path, target: Path, dtype: str = "float16") -> list[str]:
    """Write the model in `folder` to `target`, matrices in `dtype`. Return notes for the user.

    Raises ConfigError for another architecture, a tokenizer other than byte-level BPE, or without the package gguf.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = (config.get("architectures") or ["no architecture"])[0]
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{folder} is a {architecture}, and GGUF export knows {', '.join(ARCHITECTURES)} only: export it without "
            "--gguf and run convert_hf_to_gguf.py of llama.cpp on the folder"
        )
    if module_file("gguf") is None:
        raise ConfigError(f"GGUF needs the package gguf: run {install_command('gguf')}")
    import gguf

    arch = gguf.MODEL_ARCH[ARCHITECTURES[architecture]]
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[arch])
    try:
        _add_config(writer, config, dtype)
        notes = _add_tokenizer(writer, folder, config["vocab_size"])
        _add_tensors(writer, folder, gguf.get_tensor_name_map(arch, config["num_hidden_layers"]), dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    return notes


def _add_config(writer: Any, config: dict[str, Any], dtype: str) -> None:
    import gguf

    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise ConfigError(f"rope_type {rope['rope_type']!r} is not exported: use llama.cpp's convert_hf_to_gguf.py")
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    file_types = {"float32": "ALL_F32", "float16": "MOSTLY_F16", "bfloat16": "MOSTLY_BF16"}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta", 10000.0))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType[file_types[dtype]])


def _add_tokenizer(writer: Any, folder: Path, size: int) -> list[str]:
    """Add tokens, merges, special tokens and chat template. Rows without a token become unused ones."""
    import gguf

    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    if tokenizer["model"]["type"] != "BPE" or "ByteLevel" not in json.dumps(tokenizer["pre_tokenizer"]):
        raise ConfigError(f"{folder}/tokenizer.json is not a byte-level BPE: use llama.cpp's convert_hf_to_gguf.py")
    names = {index: name for name, index in tokenizer["model"]["vocab"].items()}
    kinds = dict.fromkeys(names, gguf.TokenType.NORMAL)
    for token in tokenizer.get("added_tokens", []):
        names[token["id"]] = token["content"]
        kinds[token["id"]] = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    is_qwen = _QWEN_SPLIT in json.dumps(tokenizer["pre_tokenizer"]).replace("\\\\", "\\")
    writer.add_tokenizer_pre("qwen2" if is_qwen else "default")
    writer.add_token_list([names.get(index, f"[PAD{index}]") for index in range(size)])
    writer.add_token_types([kinds.get(index, gguf.TokenType.UNUSED) for index in range(size)])
    gguf.SpecialVocab(folder, load_merges=True, n_vocab=size).add_to_gguf(writer)
    if is_qwen:
        return []
    return ["llama.cpp does not know how this tokenizer splits text, and may tokenize otherwise: compare token ids"]


def _add_tensors(writer: Any, folder: Path, names: Any, dtype: str) -> None:
    """Add every tensor. Vectors stay float32, as llama.cpp expects."""
    import gguf
    import torch
    from safetensors import safe_open

    for file in weight_files(folder):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                target = names.get_name(name, try_suffixes=(".weight", ".bias"))
                if target is None:
                    raise ConfigError(f"{file} has the tensor {name}, which this architecture has no place for")
                tensor = tensors.get_tensor(name)
                if tensor.ndim == 1 or dtype == "float32":
                    writer.add_tensor(target, tensor.float().numpy())
                elif dtype == "float16":
                    writer.add_tensor(target, tensor.to(torch.float16).numpy())
                else:
                    raw = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
                    writer.add_tensor(target, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
