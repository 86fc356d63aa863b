"""Renderers of three chat templates, as rollouts use them: the tiny model's, SmolLM2's, and Qwen3's with thinking."""

import functools
import tempfile
from pathlib import Path
from typing import Any

from orchestrator.chat_renderer import build_renderer, read_tokenizer

ROOT = Path(__file__).parents[1]
TINY = ROOT / "composer_prime/assets/tiny/policy"
_SMOLLM2_TEMPLATE = ROOT / "composer_prime/integrations/smollm2_chat_template.jinja"
_QWEN_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Qwen's pre-tokeniser: punctuation takes the line break after it into its token."""
NAMES = ("tiny", "smollm2", "qwen3")


@functools.cache
def chat(name: str) -> tuple[Any, Any]:
    """Renderer and tokenizer."""
    choice = "qwen3" if name == "qwen3" else None
    if name == "tiny":
        return build_renderer(str(TINY), choice)[1], read_tokenizer(str(TINY))
    with tempfile.TemporaryDirectory() as folder:  # both are read whole
        _write(name, folder)
        return build_renderer(folder, choice)[1], read_tokenizer(folder)


def _write(name: str, folder: str) -> None:
    """A byte-level tokenizer that has merges, and the template."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    words = _QWEN_WORDS if name == "qwen3" else r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(words), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    corpus = "Tool not found: plus.\nReminder: Available tools are: add.\nuser\nassistant\n</tool_response> {}\n"
    core.train_from_iterator([corpus] * 8, trainer)
    if name == "qwen3":
        marks = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
        core.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = _SMOLLM2_TEMPLATE.read_text()
    tokenizer.save_pretrained(folder)
