"""From samples to micro-batches: rows of bounded length, equal in number and in work on every rank.

    samples --siblings side by side--> bundles --first fit decreasing--> how many rows are needed
            --spread evenly by FLOPs--> rows --deal--> ranks

Ranks compute micro-batch k at the same time (each gathers the others' shards), so a step lasts as long as the slowest
rank of each round: rows of a round should cost the same. Siblings in one row let the trainer compute their common
prompt once (prefixes.py); where this makes ranks too uneven, samples are spread one by one: the plan that is estimated
to be faster wins. Torch-free and deterministic; the orchestrator calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from composer_prime.errors import ConfigError
from composer_prime.prefixes import layout
from composer_prime.wire.seal import sealed
from composer_prime.wire.types import MicroBatch, Sample, StepTotals, flags, ints, pack_flags, pack_floats, pack_ints

Bundle = list[Sample]
"""Samples that go into one row together."""


class _Cost:
    """FLOPs of samples that share a row, common beginnings counted once."""

    def __init__(self, per_token: float, per_pair: float) -> None:
        self._per_token, self._per_pair = per_token, per_pair

    def __call__(self, samples: Sequence[Sample]) -> float:
        trees = layout([ints(sample.input_ids) for sample in samples]).trees
        return sum(self._per_token * tree.tokens + self._per_pair * tree.pairs() for tree in trees)


class _Row:
    """A row while it is being filled."""

    def __init__(self) -> None:
        self.samples: Bundle = []
        self.tokens = 0
        self.flops = 0.0

    def put(self, bundle: Bundle, flops: float) -> None:
        self.samples += bundle
        self.tokens += _tokens(bundle)
        self.flops += flops


def pack(
    samples: Sequence[Sample],
    *,
    run_id: str,
    step: int,
    world_size: int,
    max_tokens: int,
    flops_per_token: float = 1.0,
    flops_per_pair: float = 0.0,
) -> list[list[MicroBatch]]:
    """Micro-batches of each rank: [world_size][same count], sealed; every sample is in exactly one.

    T tokens are taken to cost flops_per_token * T + flops_per_pair * T^2 (`model_flops` gives both). Ranks that would
    come short get dummy micro-batches of one masked token.

    Raises ConfigError when a sample is longer than `max_tokens`, appears twice or asks to train its first token.
    """
    _check(samples, max_tokens)
    cost = _Cost(flops_per_token, flops_per_pair)
    together = _rows(_siblings(samples, max_tokens), cost, world_size, max_tokens)
    apart = _rows([[sample] for sample in samples], cost, world_size, max_tokens) if world_size > 1 else together
    rows = min(together, apart, key=lambda rows: _duration(rows, world_size))
    ranks = _deal(rows, world_size)
    return [
        [_micro_batch(row.samples, run_id=run_id, step=step, rank=rank, index=index) for index, row in enumerate(own)]
        for rank, own in enumerate(ranks)
    ]


def totals(samples: Sequence[Sample]) -> StepTotals:
    """The losses' denominators of a step that trains `samples`."""
    trained = [sample for sample in samples if sample.num_trained > 0]
    return StepTotals(
        samples=len(trained),
        tokens=sum(sample.num_trained for sample in trained),
        groups=len({sample.group_id for sample in trained}),
    )


def model_flops(config: Mapping[str, Any]) -> tuple[float, float]:
    """(FLOPs a token, FLOPs a token pair) of a decoder's forward pass, from the values of its config.json.

    Two operations a weight and token; attention is causal: 2 products x 2 operations x half the pairs.
    """
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    key_value = config.get("num_key_value_heads") or heads
    mlp = config.get("moe_intermediate_size") or config.get("intermediate_size") or 4 * hidden
    experts = config.get("num_experts_per_tok") or 1
    block = hidden * head * (2 * heads + 2 * key_value) + 3 * hidden * mlp * experts
    return 2.0 * (layers * block + hidden * config["vocab_size"]), 2.0 * layers * heads * head


def _check(samples: Sequence[Sample], max_tokens: int) -> None:
    seen: set[str] = set()
    for sample in samples:
        if sample.num_tokens > max_tokens:
            raise ConfigError(
                f"sample {sample.sample_id} has {sample.num_tokens} tokens, but trainer.micro_batch_tokens is "
                f"{max_tokens}: raise trainer.micro_batch_tokens to at least the longest sample (model.max_context)"
            )
        if sample.sample_id in seen:
            raise ConfigError(f"sample {sample.sample_id} was given twice for one step")
        if sample.num_tokens and flags(sample.loss_mask)[0]:
            raise ConfigError(f"sample {sample.sample_id} trains its first token, which has no context to predict it")
        seen.add(sample.sample_id)


def _tokens(bundle: Bundle) -> int:
    return sum(sample.num_tokens for sample in bundle)


def _siblings(samples: Sequence[Sample], max_tokens: int) -> list[Bundle]:
    """The samples of each group, those with like beginnings side by side, cut where they outgrow a row."""
    bundles: list[Bundle] = []
    ordered = sorted(samples, key=lambda sample: (sample.group_id, sample.input_ids, sample.sample_id))
    for _, group in groupby(ordered, key=lambda sample: sample.group_id):
        bundle: Bundle = []
        for sample in group:
            if bundle and _tokens(bundle) + sample.num_tokens > max_tokens:
                bundles.append(bundle)
                bundle = []
            bundle.append(sample)
        bundles.append(bundle)
    return bundles


def _rows(bundles: list[Bundle], cost: _Cost, world_size: int, max_tokens: int) -> list[_Row]:
    """Rows that hold all bundles, a multiple of `world_size` in number."""
    weighed = sorted(((cost(bundle), bundle) for bundle in bundles), key=lambda pair: (-pair[0], pair[1][0].sample_id))
    rows = _first_fit(weighed, max_tokens)
    wanted = -(-max(len(rows), 1) // world_size) * world_size
    return _spread(weighed, wanted, max_tokens) or rows + [_Row() for _ in range(wanted - len(rows))]


def _first_fit(weighed: list[tuple[float, Bundle]], max_tokens: int) -> list[_Row]:
    """Each bundle, dearest first, into the first row that has room; gives few rows."""
    rows: list[_Row] = []
    for flops, bundle in weighed:
        row = next((row for row in rows if row.tokens + _tokens(bundle) <= max_tokens), None)
        if row is None:
            rows.append(row := _Row())
        row.put(bundle, flops)
    return rows


def _spread(weighed: list[tuple[float, Bundle]], count: int, max_tokens: int) -> list[_Row] | None:
    """Each bundle, dearest first, into the cheapest of `count` rows that has room; None when that does not fit."""
    rows = [_Row() for _ in range(count)]
    for flops, bundle in weighed:
        fitting = [row for row in rows if row.tokens + _tokens(bundle) <= max_tokens]
        if not fitting:
            return None
        min(fitting, key=lambda row: row.flops).put(bundle, flops)
    return rows


def _duration(rows: list[_Row], world_size: int) -> float:
    """FLOPs of the slowest rank of each round, added up."""
    ranks = _deal(rows, world_size)
    return sum(max(row.flops for row in round_) for round_ in zip(*ranks, strict=True))


def _deal(rows: list[_Row], world_size: int) -> list[list[_Row]]:
    """Rounds of rows of like cost; within a round the dearest row goes to the rank with least work so far."""
    ranks: list[list[_Row]] = [[] for _ in range(world_size)]
    work = [0.0] * world_size
    dearest_first = sorted(rows, key=lambda row: -row.flops)
    for start in range(0, len(rows), world_size):
        order = sorted(range(world_size), key=lambda rank: (work[rank], rank))
        for rank, row in zip(order, dearest_first[start : start + world_size], strict=True):
            ranks[rank].append(row)
            work[rank] += row.flops
    return ranks


def _micro_batch(samples: Sequence[Sample], *, run_id: str, step: int, rank: int, index: int) -> MicroBatch:
    if not samples:
        return _dummy(run_id=run_id, step=step, rank=rank, index=index)
    lengths = [sample.num_tokens for sample in samples]
    return sealed(
        MicroBatch(
            run_id=run_id,
            step=step,
            rank=rank,
            index=index,
            version_min=min(sample.version_min for sample in samples),
            version_max=max(sample.version_max for sample in samples),
            input_ids=b"".join(sample.input_ids for sample in samples),
            position_ids=pack_ints(np.concatenate([np.arange(length) for length in lengths])),
            lengths=lengths,
            loss_mask=b"".join(sample.loss_mask for sample in samples),
            logprobs=b"".join(sample.logprobs for sample in samples),
            advantages=b"".join(sample.advantages for sample in samples),
            temperatures=[sample.temperature for sample in samples],
            sample_ids=[sample.sample_id for sample in samples],
        )
    )


def _dummy(*, run_id: str, step: int, rank: int, index: int) -> MicroBatch:
    """One masked token: nothing to learn, but the rank takes part in every collective."""
    return sealed(
        MicroBatch(
            run_id=run_id,
            step=step,
            rank=rank,
            index=index,
            version_min=step - 1,
            version_max=step - 1,
            input_ids=pack_ints([0]),
            position_ids=pack_ints([0]),
            lengths=[1],
            loss_mask=pack_flags([0]),
            logprobs=pack_floats([0.0]),
            advantages=pack_floats([0.0]),
            temperatures=[1.0],
            sample_ids=[],
        )
    )
