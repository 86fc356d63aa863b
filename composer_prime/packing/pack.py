"""From samples to micro-batches: rows of bounded length, equal in number and in work on every rank.

    samples, pairs --siblings side by side--> bundles --first fit decreasing--> how many rows are needed
                   --spread evenly by FLOPs--> rows --deal--> ranks

Ranks compute micro-batch k at the same time (each gathers the others' shards), so a step lasts as long as the slowest
rank of each round: rows of a round should cost the same. Siblings in one row let the trainer compute their common
prompt once (prefixes.py). Where this makes ranks too uneven, samples are spread one by one: the plan with the smaller
estimate wins. A sample stays with its teacher documents, a chosen answer with its rejected one (micro_batch.py).
Torch-free and deterministic; the orchestrator calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from composer_prime.packing.micro_batch import RowPlace, Unit, micro_batch, tokens_of, units
from composer_prime.packing.prefixes import FlopCost, prefix_layout
from composer_prime.wire.types import MicroBatch, Preference, Sample, StepTotals

Bundle = list[Unit]
"""Units that go into one row together."""


class _Row:
    """A row that is being filled."""

    def __init__(self) -> None:
        self.units: Bundle = []
        self.tokens = 0
        self.flops = 0.0

    def put(self, bundle: Bundle, flops: float) -> None:
        self.units += bundle
        self.tokens += tokens_of(bundle)
        self.flops += flops


def pack(
    samples: Sequence[Sample],
    preferences: Sequence[Preference] = (),
    *,
    run_id: str,
    step: int,
    world_size: int,
    max_tokens: int,
    distil: bool = True,
    flops_per_token: float = 1.0,
    flops_per_pair: float = 0.0,
) -> list[list[MicroBatch]]:
    """Return the micro-batches of each rank: [world_size][same count], sealed; each sample and pair is in exactly one.

    Pass no `preferences` in a step where replay-DPO has weight 0, and `distil` False where SDPO has it: the rows are
    then those of the policy loss alone. T tokens cost flops_per_token * T + flops_per_pair * T^2 (`model_flops` gives
    both). Ranks without enough rows get dummy micro-batches of one masked token.

    Raises ConfigError (longer than `max_tokens`, given twice, a first token that is trained) or RunMismatchError (a
    hinted turn or a pair that is cut or does not match), each naming the sample or pair.
    """
    row_units = units(samples, preferences, distil=distil, max_tokens=max_tokens)
    cost = FlopCost(per_token=flops_per_token, per_pair=flops_per_pair)
    together = _rows(_siblings(row_units, max_tokens), cost, world_size, max_tokens)
    apart = _rows([[unit] for unit in row_units], cost, world_size, max_tokens) if world_size > 1 else together
    rows = min(together, apart, key=lambda rows: _duration(rows, world_size))
    return [
        [
            micro_batch(row.units, RowPlace(run_id=run_id, step=step, rank=rank, index=index))
            for index, row in enumerate(rank_rows)
        ]
        for rank, rank_rows in enumerate(_deal(rows, world_size))
    ]


def totals(
    samples: Sequence[Sample],
    preferences: Sequence[Preference] = (),
    *,
    distil: bool = True,
    micro_batches: int = 1,
) -> StepTotals:
    """Return the losses' denominators of a step that trains `samples` and `preferences`; `distil` as for `pack`.

    `micro_batches` counts those that hold samples, over all ranks.
    """
    trained = [sample for sample in samples if sample.num_trained > 0]
    turns = [turn for sample in samples for turn in sample.distillations] if distil else []
    return StepTotals(
        samples=len(trained),
        tokens=sum(sample.num_trained for sample in trained),
        distilled_tokens=sum(turn.end - turn.start for turn in turns),
        distilled_turns=len(turns),
        pairs=len(preferences),
        micro_batches=micro_batches,
    )


def model_flops(config: Mapping[str, Any]) -> tuple[float, float]:
    """Return (FLOPs a token, FLOPs a token pair) of a decoder's forward pass, from the values of its config.json.

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


def _siblings(row_units: Sequence[Unit], max_tokens: int) -> list[Bundle]:
    """Bundle the units of each group, like beginnings side by side; cut where they outgrow a row."""
    bundles: list[Bundle] = []
    ordered = sorted(row_units, key=lambda unit: (unit.group, unit.documents[0].tobytes(), unit.name))
    for _, group in groupby(ordered, key=lambda unit: unit.group):
        bundle: Bundle = []
        for unit in group:
            if bundle and tokens_of(bundle) + unit.tokens > max_tokens:
                bundles.append(bundle)
                bundle = []
            bundle.append(unit)
        bundles.append(bundle)
    return bundles


def _rows(bundles: list[Bundle], cost: FlopCost, world_size: int, max_tokens: int) -> list[_Row]:
    """Put all bundles into rows, a multiple of `world_size` in number."""
    by_cost = sorted(
        ((_flops(bundle, cost), bundle) for bundle in bundles), key=lambda pair: (-pair[0], pair[1][0].name)
    )
    rows = _first_fit(by_cost, max_tokens)
    count = -(-max(len(rows), 1) // world_size) * world_size
    return _spread(by_cost, count, max_tokens) or rows + [_Row() for _ in range(count - len(rows))]


def _flops(bundle: Bundle, cost: FlopCost) -> float:
    """Count the FLOPs of units that share a row; common beginnings count once."""
    return cost(prefix_layout([document for unit in bundle for document in unit.documents]).trees)


def _first_fit(by_cost: list[tuple[float, Bundle]], max_tokens: int) -> list[_Row]:
    """Put each bundle, most expensive first, into the first row that has room; needs few rows."""
    rows: list[_Row] = []
    for flops, bundle in by_cost:
        row = next((row for row in rows if row.tokens + tokens_of(bundle) <= max_tokens), None)
        if row is None:
            rows.append(row := _Row())
        row.put(bundle, flops)
    return rows


def _spread(by_cost: list[tuple[float, Bundle]], count: int, max_tokens: int) -> list[_Row] | None:
    """Put each bundle, most expensive first, into the cheapest of `count` rows with room; None when it does not fit."""
    rows = [_Row() for _ in range(count)]
    for flops, bundle in by_cost:
        fitting = [row for row in rows if row.tokens + tokens_of(bundle) <= max_tokens]
        if not fitting:
            return None
        min(fitting, key=lambda row: row.flops).put(bundle, flops)
    return rows


def _duration(rows: list[_Row], world_size: int) -> float:
    """Add up the FLOPs of the slowest rank of each round."""
    ranks = _deal(rows, world_size)
    return sum(max(row.flops for row in round_) for round_ in zip(*ranks, strict=True))


def _deal(rows: list[_Row], world_size: int) -> list[list[_Row]]:
    """Deal rounds of rows of like cost; in a round the most expensive row goes to the rank with the least work."""
    ranks: list[list[_Row]] = [[] for _ in range(world_size)]
    work = [0.0] * world_size
    by_cost = sorted(rows, key=lambda row: -row.flops)
    for start in range(0, len(rows), world_size):
        order = sorted(range(world_size), key=lambda rank: (work[rank], rank))
        for rank, row in zip(order, by_cost[start : start + world_size], strict=True):
            ranks[rank].append(row)
            work[rank] += row.flops
    return ranks
