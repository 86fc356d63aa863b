"""Attention over trees of documents: equal to a dense mask, and nothing in it is as large as the mask would be."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from composer_prime.packing.pack import Tree
from trainer.model.policy_model import FLASH, packed_attention, packing_arguments

CPU = torch.device("cpu")
FORK = Tree(run=7, branches=(Tree(run=1), Tree(run=5, branches=(Tree(run=3), Tree(run=9), Tree(run=2))), Tree(run=4)))
TREES = (Tree(run=6), FORK, Tree(run=2, branches=(Tree(run=1), Tree(run=1))))


def seen(trees: tuple[Tree, ...], window: int | None = None) -> torch.Tensor:
    """bool [N, N]: which tokens each token sees, written from the definition of a tree."""
    rows: list[list[int]] = []

    def visit(tree: Tree, above: list[int]) -> None:
        for _ in range(tree.run):
            above = [*above, len(rows)]
            rows.append(above[-window:] if window else above)
        for branch in tree.branches:
            visit(branch, above)

    for tree in trees:
        visit(tree, [])
    mask = torch.zeros(len(rows), len(rows), dtype=torch.bool)
    for index, row in enumerate(rows):
        mask[index, row] = True
    return mask


def draw(trees: tuple[Tree, ...], dtype: torch.dtype, heads: tuple[int, int, int] = (4, 2, 2), size: int = 8):
    """Query, key and value [1, heads, N, size] with gradients."""
    generator, tokens = torch.Generator().manual_seed(0), sum(tree.tokens for tree in trees)
    made = [torch.randn(1, count, tokens, size, generator=generator, dtype=torch.float64).to(dtype) for count in heads]
    return [each.requires_grad_() for each in made]


def with_gradients(attend, inputs) -> list[torch.Tensor]:
    """The output [1, N, heads, D] and the gradients of a weighted sum of it."""
    out = attend(*inputs)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]


def ours(trees, **options):
    return lambda *inputs: packed_attention(
        torch.nn.Module(), *inputs, attention_mask=None, packed_trees=SimpleNamespace(trees=trees), **options
    )[0]


def dense(trees, window=None, scaling=None):
    return lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen(trees, window), scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
    ).transpose(1, 2)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("options", [{}, {"scaling": 0.7}, {"sliding_window": 6}, {"sliding_window": 100}])
def test_trees_equal_a_dense_mask_in_values_and_gradients(dtype, tolerance, options):
    # Forks within forks, grouped heads, scales and windows: output and all three gradients are those of a dense mask.
    inputs = draw(TREES, dtype)
    expected = with_gradients(dense(TREES, options.get("sliding_window"), options.get("scaling")), inputs)
    for one, other in zip(with_gradients(ours(TREES, **options), inputs), expected, strict=True):
        assert one.dtype == dtype and (one - other).abs().max() < tolerance


def test_long_branches_equal_a_dense_mask():
    # Runs beyond the kernel's blocks, without a common divisor, with hundreds of keys above; a window that binds.
    trees = (
        Tree(run=701, branches=(Tree(run=530), Tree(run=1), Tree(run=203, branches=(Tree(run=77), Tree(run=600))))),
    )
    inputs = draw(trees, torch.float64, (2, 1, 1))
    for window in (None, 150):
        expected = with_gradients(dense(trees, window), inputs)
        for one, other in zip(with_gradients(ours(trees, sliding_window=window), inputs), expected, strict=True):
            assert (one - other).abs().max() < 1e-10


def test_scores_far_apart_merge_without_overflow():
    # A branch that ignores its prefix, and one that sees nothing but it: scores of +-1000 give finite, equal results.
    for sign in (-1.0, 1.0):
        query, key, value = (each.detach() for each in draw((FORK,), torch.float64))
        query, key = torch.ones_like(query), torch.zeros_like(key)
        key[:, :, : FORK.run] = sign * 1000.0
        inputs = [each.requires_grad_() for each in (query, key, value)]
        expected = with_gradients(dense((FORK,)), inputs)
        for one, other in zip(with_gradients(ours((FORK,)), inputs), expected, strict=True):
            assert torch.isfinite(one).all() and (one - other).abs().max() < 1e-10


def test_gradients_are_those_of_finite_differences():
    # The merged parts' backward pass against numbers, grouped heads included.
    tree = Tree(run=3, branches=(Tree(run=2), Tree(run=1, branches=(Tree(run=1), Tree(run=2)))))
    assert torch.autograd.gradcheck(ours((tree,)), draw((tree,), torch.float64, (2, 1, 1), 3))


class Largest(TorchDispatchMode):
    """Remembers the most elements of any tensor that an operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return made


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize(("run", "branches"), [(1, (2048, 1)), (1024, (1024, 1024))])
def test_no_tensor_grows_with_the_pairs_of_tokens(run, branches, window):
    # Forward and backward pass of branches of 1024 or 2048 tokens: nothing is half as large as the mask of 1024.
    tree = Tree(run=run, branches=tuple(Tree(run=tokens) for tokens in branches))
    inputs = draw((tree,), torch.float32, (1, 1, 1), 4)
    with Largest() as largest:
        with_gradients(ours((tree,), sliding_window=window), inputs)
    assert largest.elements < 1024 * 1024 / 2


@pytest.mark.parametrize("trees", [TREES, (Tree(run=6), Tree(run=4))])
def test_flash_attention_gets_the_keys_of_each_run(trees):
    # What flash-attn's varlen kernel would compute from our arguments (each sequence causal, queries aligned with the
    # last keys) equals the dense mask, values and gradients; rows without forks have no keys to gather.
    arguments = packing_arguments(FLASH, trees, CPU)
    assert ("packed_keys" in arguments) == any(tree.branches for tree in trees)
    inputs = draw(trees, torch.float64, (2, 2, 2))
    results = with_gradients(lambda *each: varlen(*each, **arguments), inputs)
    for one, other in zip(results, with_gradients(dense(trees), inputs), strict=True):
        assert (one - other).abs().max() < 1e-10


def varlen(q, k, v, *, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, packed_keys=None):
    """The definition of flash_attn_varlen_func(causal=True), sequence by sequence."""
    if packed_keys is not None:
        k, v = k.index_select(2, packed_keys), v.index_select(2, packed_keys)
    assert cu_seq_lens_q.dtype == cu_seq_lens_k.dtype == torch.int32
    lengths_q, lengths_k = cu_seq_lens_q.diff().tolist(), cu_seq_lens_k.diff().tolist()
    assert (max(lengths_q), max(lengths_k)) == (max_length_q, max_length_k)
    outputs = []
    for one, *others in zip(q.split(lengths_q, 2), k.split(lengths_k, 2), v.split(lengths_k, 2), strict=True):
        scores = one @ others[0].transpose(-1, -2) / math.sqrt(q.shape[-1])
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + scores.shape[-1] - scores.shape[-2])
        outputs.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ others[1])
    return torch.cat(outputs, dim=2).transpose(1, 2)
