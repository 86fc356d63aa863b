"""Context parallelism: the ranks of a context group share each row (Ulysses, arXiv 2309.14509).

    tokens are cut      every rank: its part of the row's tokens, all heads       all layers but attention; the head
    heads are cut       every rank: the whole row, its part of the heads          attention: trees, windows, kernels
                        one all-to-all leads from each to the other

The loss head computes each rank's own rows of the R. A sum over the group then gives every rank all of them, so the
loss terms see whole rows; each rank takes the gradient of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


def by_heads(attend: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
    """Return `attend`, of transformers' signature, for tokens that are cut over `packed_context`, if one is given.

    Query [1, heads, N / ranks, D], key and value alike; returns [1, N / ranks, heads, D]. The ranks must divide the
    heads; they may be more than the key-value heads, which are then repeated.
    """

    def attended(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any,
        packed_context: DeviceMesh | None = None, **options: Any,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        if packed_context is None:
            return attend(module, query, key, value, *args, **options)
        times = _repeats(query.shape[1], key.shape[1], packed_context.size())
        key, value = (each.repeat_interleave(times, dim=1) for each in (key, value))
        heads = [_AllToAll.apply(each[0], packed_context)[None] for each in (query, key, value)]
        output, _ = attend(module, *heads, *args, **options)
        return _AllToAll.apply(output[0], packed_context)[None], None

    return attended


def _repeats(heads: int, key_value_heads: int, ranks: int) -> int:
    """Return how often to repeat key-value heads so that `ranks` cut them and the heads that read them alike."""
    wanted = range(1, heads // key_value_heads + 1)
    return next(n for n in wanted if n * key_value_heads % ranks == 0 and heads % (n * key_value_heads) == 0)


class _AllToAll(torch.autograd.Function):
    """[A, B / ranks, D] -> [A / ranks, B, D], or back: A and B are heads and tokens, as one wants."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, context: DeviceMesh) -> Tensor:
        ctx.context = context
        return _exchange(part, context)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grad.transpose(0, 1), ctx.context).transpose(0, 1), None


def _exchange(part: Tensor, context: DeviceMesh) -> Tensor:
    sent = part.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=context.get_group())
    of_ranks = received.unflatten(0, (context.size(), -1))
    return of_ranks.transpose(0, 1).flatten(1, 2)


def whole_rows(values: Tensor, places: Tensor, count: int, context: DeviceMesh) -> Tensor:
    """Return [count, ...], of which this rank holds `values` at `places`. A collective of the group.

    The gradient of a rank's own values is the one that comes to it: every rank computes the same loss.
    """
    return _Sum.apply(values.new_zeros(count, *values.shape[1:]).index_copy(0, places, values), context)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, context: DeviceMesh) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=context.get_group())
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None
