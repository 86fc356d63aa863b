"""A mixin for vLLM's worker class that loads new weights without a restart. Imports vllm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from safetensors import safe_open
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from inference.snapshot import checksum

_PLAIN = (torch.float32, torch.bfloat16, torch.float16)
"""Types that published values are cast to; narrower ones hold scaled values."""


def _tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


class WeightLoader:
    """Methods that every worker offers to the engine's collective_rpc."""

    model_runner: Any

    def load_from_file(self, path: str) -> None:
        """Replace the weights with those of the safetensors file at `path`, named as in the Hugging Face model."""
        self.model_runner.reload_weights(weights_iterator=_tensors(path))
        self._repack_tied_heads()

    def read_parameters(self, names: list[str]) -> list[tuple[list[str], str, str]]:
        """Return published names, type and checksum of each parameter that can be read.

        Left out are parameters that vLLM packed away (linear layers on a CPU), quantized, or that go by other names.
        """
        model, published = self.model_runner.get_model(), set(names)
        fused = getattr(model, "packed_modules_mapping", {})
        parts = []
        for name, parameter in model.named_parameters():
            module = next((key for key in fused if f".{key}." in name), None)
            sources = [name.replace(f".{module}.", f".{part}.") for part in fused[module]] if module else [name]
            if published.issuperset(sources) and parameter.numel() > 0 and parameter.dtype in _PLAIN:
                dtype = str(parameter.dtype).removeprefix("torch.")
                parts.append((sources, dtype, f"{checksum(parameter):x}"))
        return parts

    def _repack_tied_heads(self) -> None:
        # On CPU a linear layer computes with a packed copy of its weight. The reload packs linear layers again, but
        # not an embedding that serves as output head: without this it keeps answering with the old weights.
        for module in self.model_runner.get_model().modules():
            if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)
