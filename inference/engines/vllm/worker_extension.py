"""A mixin for vLLM's worker: draw by the published rule, load weights without a restart. Imports vllm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.sampler import Sampler

from composer_prime.wire.node_messages import Sampling
from inference.engines.sampling import SamplingRows, rule_of, sample
from inference.snapshot import Held, word_sum

_RULE = "draw"
_ANY_DRAW = (1.0, 0, 1.0, 0)
_SAMPLED_BYTES = 256 << 20
"""Of float work at a time: vLLM has not left memory for more."""

_PLAIN = (torch.float32, torch.bfloat16, torch.float16)


def _tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


def rule_arguments(sampling: Sampling, seed: int) -> dict[str, Any]:
    return {_RULE: rule_of(sampling, seed)}


class RuleSampler(Sampler):
    """Draws by inference.engines.sampling: by the request's seed and the token's position alone."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._runner = runner

    def forward(self, logits: torch.Tensor, *_: Any, **__: Any) -> SamplerOutput:
        """logits [R, V] -> token ids and log-probabilities, [R, 1] each."""
        rows = self._rows()
        at_once = max(1, _SAMPLED_BYTES // (32 * logits.shape[1]))
        parts = [slice(first, first + at_once) for first in range(0, len(logits), at_once)]
        drawn = [sample(logits[part], rows.chosen(part)) for part in parts]
        tokens, logprobs = (
            torch.from_numpy(np.concatenate(column)).to(logits.device)[:, None] for column in zip(*drawn, strict=True)
        )
        # Of several GPUs each draws. Sums may differ in the last bit; tokens must not.
        tokens = get_tp_group().broadcast(tokens.int())
        return SamplerOutput(tokens, LogprobsTensors(tokens, logprobs, torch.zeros_like(tokens[:, 0])))

    @staticmethod
    def gather_logprobs(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> LogprobsTensors:
        """Return those of `token_ids` [T], without ranks: vLLM would compile a kernel."""
        ids = token_ids[:, None]
        return LogprobsTensors(ids.int(), logprobs.gather(-1, ids), torch.zeros_like(token_ids))

    def _rows(self) -> SamplingRows:
        batch, requests = self._runner.input_batch, self._runner.requests
        extra = [requests[name].sampling_params.extra_args or {} for name in batch.req_ids]
        rules = [one.get(_RULE, _ANY_DRAW) for one in extra]
        return SamplingRows.of(rules, batch.num_tokens_no_spec[: len(rules)])


class NodeWorker:
    """Methods that every worker offers to the engine's collective_rpc."""

    model_runner: Any

    def draw_by_rule(self) -> None:
        self.model_runner.sampler = RuleSampler(self.model_runner)

    def load_from_file(self, path: str) -> None:
        self.model_runner.reload_weights(weights_iterator=_tensors(path))
        self._repack_tied_heads()

    def read_parameters(self, names: list[str]) -> list[Held]:
        padding = self._padding()
        return [
            (
                sources,
                str(parameter.dtype).removeprefix("torch."),
                f"{word_sum(parameter):x}",
                parameter.numel() - padding.get(id(parameter), 0),
            )
            for sources, parameter in self._readable(names)
        ]

    def _padding(self) -> dict[int, int]:
        """Return how many values of an embedding fill it up, by the parameter's id."""
        return {
            id(module.weight): (len(module.weight) - module.shard_indices.num_org_elements) * module.weight.shape[1]
            for module in self.model_runner.get_model().modules()
            if isinstance(module, VocabParallelEmbedding) and getattr(module, "weight", None) is not None
        }

    def _readable(self, names: list[str]) -> Iterator[tuple[list[str], torch.Tensor]]:
        """Yield published tensors and their parameter, but what vLLM packs, quantizes or renames."""
        model, published = self.model_runner.get_model(), set(names)
        fused = getattr(model, "packed_modules_mapping", {})
        for name, parameter in model.named_parameters():
            module = next((key for key in fused if f".{key}." in name), None)
            sources = [name.replace(f".{module}.", f".{part}.") for part in fused[module]] if module else [name]
            if published.issuperset(sources) and parameter.numel() > 0 and parameter.dtype in _PLAIN:
                yield sources, parameter

    def _repack_tied_heads(self) -> None:
        # On CPU a linear layer computes with a packed copy of its weight. The reload packs those again, but not an
        # embedding that serves as output head: it would keep the old weights.
        for module in self.model_runner.get_model().modules():
            if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)
