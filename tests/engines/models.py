"""Tiny random models that engines are tested with: made from a config in under a second, never downloaded.

Their weights are drawn wide, so that distributions are peaked and every position matters; a fault in masks, positions
or caches then moves logprobs by far more than the suite's tolerance.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCAB = 320
EOS = 2
MAX_CONTEXT = 256
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=MAX_CONTEXT,
    initializer_range=0.12,
    bos_token_id=1,
    eos_token_id=EOS,
    pad_token_id=0,
)


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte (ids 3 to 258), after <pad> <bos> <eos>; the rest of the vocabulary decodes to a letter pair."""
    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": EOS}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[letter] = len(vocab)
    first = ord("a")
    while len(vocab) < VOCAB:
        number = len(vocab)
        vocab[chr(first + number % 26) + chr(first + number // 26)] = number
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def make_model(folder: Path, *, tied: bool, seed: int = 0) -> Path:
    """Write a model folder: Qwen3 with tied embeddings, or Llama with an output head of its own."""
    torch.manual_seed(seed)
    if tied:
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, head_dim=32, tie_word_embeddings=False))
    model.save_pretrained(folder)
    _byte_tokenizer().save_pretrained(folder)
    return folder
