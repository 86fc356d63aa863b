"""A tiny model folder, run directories and rank processes for trainer tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import VOCABULARY, Run, make_config

from composer_prime.run.keys import RunKeys
from composer_prime.run.run_dir import RunDir, create_run_id


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with tied embeddings, grouped keys and 2 blocks, float32, and a tokenizer of single bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    characters = {chr(32 + index): index for index in range(VOCABULARY - 1)} | {"<unk>": VOCABULARY - 1}
    tokenizer = Tokenizer(models.WordLevel(characters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", chat_template=template)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture
def make_run(tmp_path: Path, model_folder: Path):
    """make_run(name="run", **config sections) -> Run."""

    def make(name: str = "run", **sections: dict[str, Any]) -> Run:
        config = make_config(model_folder, tmp_path, **sections)
        run_dir = RunDir(tmp_path / name)
        create_run_id(run_dir, name)
        RunKeys.create(run_dir.keys)
        return Run(run_dir, config).write(config)

    return make


@pytest.fixture(scope="module")
def world():
    """This test process as the only rank. Not for the session: tests elsewhere become a rank of their own."""
    from composer_prime.config.trainer import TrainerConfig
    from trainer import world as worlds

    yield worlds.join(TrainerConfig(device="cpu"))
    worlds.leave()
