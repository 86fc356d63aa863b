"""Time attention and training behind a shared prefix: with a dense mask, merged by log-sum-exp, and apart.

    python benchmarks/shared_prefix.py attention
    python benchmarks/shared_prefix.py attention --shapes 8192:8192 --heads 1 --size 64
    python benchmarks/shared_prefix.py rule --length 2048 --prefixes 32 64 128 256 512

`attention`: forward and backward pass of PREFIX:BRANCH tokens, two branches each; then of one document of as many
tokens as prefix and one branch, causal. Each in a process of its own, for its peak of resident memory.

`rule`: a whole training step of two documents that share a beginning, with it computed once and twice, and the choice
of the packer's rule (`pays`). The steps take turns, and the figure is the median processor time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from composer_prime.packing.prefixes import Tree, prefix_layout
from trainer.data.rows import Reading
from trainer.model.attention import PACKED, packed_attention, packing_arguments

WAYS = ("causal", "dense mask", "merged")
"""One document of prefix and branch; the branch behind the prefix as before, and as now."""


def dense_mask(query: Tensor, key: Tensor, value: Tensor, tree: Tree) -> Tensor:
    """Attend as the trainer did before: each branch with a boolean mask over the prefix and itself."""
    shared = slice(0, tree.run)
    outputs = [
        F.scaled_dot_product_attention(query[:, :, shared], key[:, :, shared], value[:, :, shared], is_causal=True)
    ]
    start = tree.run
    for branch in tree.branches:
        own = slice(start, start + branch.run)
        keys, values = (torch.cat([each[:, :, : tree.run], each[:, :, own]], dim=2) for each in (key, value))
        position = torch.arange(keys.shape[2])
        distance = position[tree.run :, None] - position[None, :]
        mask = (distance >= 0) & (distance < keys.shape[2])
        outputs.append(F.scaled_dot_product_attention(query[:, :, own], keys, values, attn_mask=mask))
        start += branch.run
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def one_way(way: str, prefix: int, branch: int, heads: int, size: int) -> tuple[float, float]:
    """Return processor seconds and MiB above the inputs of one forward and backward pass."""
    if way == "causal":
        tree = Tree(run=prefix + branch)
    else:
        tree = Tree(run=prefix, branches=(Tree(run=branch - 1), Tree(run=1)))
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, heads, tree.tokens, size, generator=generator, requires_grad=True) for _ in range(3)]
    attend: Callable[..., Tensor] = dense_mask
    if way != "dense mask":
        attend = lambda q, k, v, tree: packed_attention(torch.nn.Module(), q, k, v, None, packed_trees=(tree,))[0]
    small = Tree(run=16, branches=(Tree(run=16), Tree(run=1)))
    attend(*(each[:, :, : small.tokens] for each in inputs), small).sum().backward()  # warms up
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    attend(*inputs, tree).sum().backward()
    seconds = time.process_time() - begun
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def attention(shapes: list[str], heads: int, size: int, repeats: int) -> None:
    print(f"{heads} heads of {size}, float32, forward and backward, {torch.get_num_threads()} threads")
    print("| prefix + branch | " + " | ".join(f"{way}, CPU s | MiB" for way in WAYS) + " | before / now, s | MiB |")
    print("|---" * (2 * len(WAYS) + 3) + "|")
    for shape in shapes:
        prefix, branch = map(int, shape.split(":"))
        runs: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _ in range(repeats):
            for way in WAYS:
                with multiprocessing.get_context("fork").Pool(1) as child:
                    runs[way].append(child.apply(one_way, (way, prefix, branch, heads, size)))
        medians = {way: [statistics.median(column) for column in zip(*runs[way], strict=True)] for way in WAYS}
        cells = [f"{seconds:.2f} | {mib:.0f}" for seconds, mib in medians.values()]
        ratios = [one / other for one, other in zip(medians["dense mask"], medians["merged"], strict=True)]
        print(f"| {prefix} + {branch} | {' | '.join(cells)} | {ratios[0]:.1f} | {ratios[1]:.1f} |", flush=True)


def model_of(hidden: int, layers: int) -> transformers.PreTrainedModel:
    """A decoder of SmolLM2's shape with a small vocabulary: the output layer does not depend on sharing."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=hidden, intermediate_size=hidden * 8 // 3, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, max_position_embeddings=1 << 17,
    )  # fmt: skip
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation=PACKED)


def documents_of(prefix: int, length: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    common = rng.integers(0, 64, prefix)
    return [np.r_[common, first, rng.integers(0, 64, length - prefix - 1)] for first in (0, 1)]


def reading(documents: list[np.ndarray], trees: tuple[Tree, ...], kept: np.ndarray) -> Reading:
    ids = torch.from_numpy(np.concatenate(documents)[kept])[None]
    positions = torch.from_numpy(np.concatenate([np.arange(len(each)) for each in documents])[kept])[None]
    return Reading(input_ids=ids, position_ids=positions, trees=trees, source_R=torch.zeros(0, dtype=torch.int64))


def one_step(lm: transformers.PreTrainedModel, row: Reading) -> float:
    begun = time.process_time()
    hidden = lm.base_model(
        input_ids=row.input_ids, position_ids=row.position_ids, use_cache=False,
        **packing_arguments(PACKED, row.trees, row.input_ids.device),
    ).last_hidden_state  # fmt: skip
    hidden.sum().backward()
    return time.process_time() - begun


def rule(length: int, prefixes: list[int], hidden: int, layers: int, repeats: int) -> None:
    lm = model_of(hidden, layers)
    print(f"two documents of {length}, hidden size {hidden}, {layers} layers, float32, one step")
    print("| shared | once, CPU s | twice, CPU s | saves | the rule | break-even share |")
    print("|---|---|---|---|---|---|")
    for prefix in prefixes:
        documents = documents_of(prefix, length)
        apart = prefix_layout(documents, share=False)
        fork = Tree(run=prefix, branches=(Tree(run=length - prefix),) * 2)
        kept = np.r_[:length, length + prefix : 2 * length]
        rows = {"once": reading(documents, (fork,), kept), "twice": reading(documents, apart.trees, apart.kept)}
        times: dict[str, list[float]] = {name: [] for name in rows}
        for repeat in range(repeats + 1):
            for name, row in rows.items():
                seconds = one_step(lm, row)
                if repeat:  # the first warms up
                    times[name].append(seconds)
        once, twice = (statistics.median(values) for values in times.values())
        choice = "once" if prefix_layout(documents).trees == (fork,) else "twice"
        # A computed token costs twice / (2 length); what sharing does not save of the prefix is what merging costs.
        per_token = twice / (2 * length)
        merging = (prefix * per_token - (twice - once)) / per_token / (2 * (length - prefix))
        print(
            f"| {prefix} | {once:.3f} | {twice:.3f} | {1 - once / twice:.1%} | {choice} | {merging:.4f} |", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    of_attention = parts.add_parser("attention")
    of_attention.add_argument("--shapes", nargs="+", default=["1:8192", "1024:1024", "4096:4096"])
    of_attention.add_argument("--heads", type=int, default=1)
    of_attention.add_argument("--size", type=int, default=64)
    of_attention.add_argument("--repeats", type=int, default=3)
    of_rule = parts.add_parser("rule")
    of_rule.add_argument("--length", type=int, default=2048)
    of_rule.add_argument("--prefixes", type=int, nargs="+", default=[16, 32, 64, 128, 256, 1024])
    of_rule.add_argument("--hidden", type=int, default=576)
    of_rule.add_argument("--layers", type=int, default=2)
    of_rule.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part == "attention":
        attention(options.shapes, options.heads, options.size, options.repeats)
    else:
        rule(options.length, options.prefixes, options.hidden, options.layers, options.repeats)


if __name__ == "__main__":
    main()
