"""The canary: what the published weights give for a fixed prompt, computed from those very tensors in float32.

A second model without storage runs on the published tensors: each layer's weights are cast to float32 just before the
layer runs and dropped right after, so a 16-bit model of any size needs one float32 layer at a time. Nothing of the
training setup (shards, packing, precision policy) takes part, so a fault there shows as a difference at the nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from composer_prime.weights.manifest import Canary

TEXT = "The quick brown fox jumps over the lazy dog. 3 + 4 = 7, and 12 * 12 = 144."
MAX_TOKENS = 32


def prompt_ids(folder: Path, vocabulary: int) -> list[int]:
    """The fixed prompt in the model's own tokens, at most 32; evenly spread ids for a folder without a tokenizer."""
    try:
        ids = AutoTokenizer.from_pretrained(folder, local_files_only=True).encode(TEXT, add_special_tokens=False)
    except (OSError, ValueError):
        ids = []
    usable = [token for token in ids if token < vocabulary][:MAX_TOKENS]
    return usable if len(usable) >= 2 else [(1 + 7 * index) % vocabulary for index in range(MAX_TOKENS)]


class CanaryScorer:
    """Scores the prompt with any set of tensors that fits the architecture."""

    def __init__(self, lm: PreTrainedModel, token_ids: list[int], device: torch.device) -> None:
        """`lm` holds parameters on the meta device and real buffers; it is used up by this object."""
        self._lm = lm.eval()
        self._ids = torch.tensor([token_ids], device=device)
        self._device = device
        for module in lm.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))

    @torch.no_grad()
    def score(self, tensors: Mapping[str, Tensor]) -> Canary:
        """log p(token t+1 | tokens <= t) at temperature 1 under `tensors` (by parameter name, tied ones once)."""
        with self._lent(tensors):
            logits_TV = self._lm(input_ids=self._ids, use_cache=False).logits[0, :-1].float()
        logprobs_T = logits_TV.log_softmax(-1).gather(1, self._ids[0, 1:, None]).squeeze(1)
        return Canary(token_ids=self._ids[0].tolist(), logprobs=logprobs_T.tolist())

    @contextmanager
    def _lent(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """While inside, each module has its weights during its own forward pass only."""
        tied = {target: source for target, source in self._lm.all_tied_weights_keys.items()}
        handles = []
        for path, module in self._lm.named_modules():
            own = {name: f"{path}.{name}" if path else name for name, _ in module.named_parameters(recurse=False)}
            if own:
                values = {name: tensors[full] if full in tensors else tensors[tied[full]] for name, full in own.items()}
                handles += _lend(module, values, self._device)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _lend(module: nn.Module, values: Mapping[str, Tensor], device: torch.device) -> list:
    empty = dict(module.named_parameters(recurse=False))

    def fill(*_: object) -> None:
        for name, value in values.items():
            filled = nn.Parameter(value.to(device=device, dtype=torch.float32), requires_grad=False)
            setattr(module, name, filled)

    def drop(*_: object) -> None:
        for name, parameter in empty.items():
            setattr(module, name, parameter)

    return [module.register_forward_pre_hook(fill), module.register_forward_hook(drop, always_call=True)]
