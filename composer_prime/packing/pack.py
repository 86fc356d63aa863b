"""From samples to micro-batches: rows of bounded length, equal in number and in work on every rank.

    samples, pairs --siblings side by side--> bundles --first fit decreasing--> how many rows are needed
                   --spread evenly by FLOPs--> rows --deal--> ranks

Ranks compute micro-batch k at the same time, so a step lasts as long as the slowest rank of each round: rows of a round
should cost the same. Siblings in one row let the trainer compute their common prompt once. Where this makes ranks too
uneven, samples are spread one by one: the plan with the smaller estimate wins. Torch-free and deterministic.

    documents of a row      a b c d e | a b c d f | a b x | q r
    tree                    a b ── c d ── e
                             │      └──── f
                             └─── x                   q r
    computed tokens         a b c d e f x q r         9 instead of 15

A hidden state depends on the tokens up to it and their positions alone, so computing equal beginnings once changes no
result, and the gradients of all branches add up in the shared part.

What must share a row: a sample with its hinted turns, or a term's unit (TermUnit). Teacher documents take no room in
it: the trainer reads them in the row where they fit, and otherwise in passes of their own without a gradient.

    sample                    context ── turn ── tool ── turn
    teacher document          context ── hint ── turn           SDPO reads the turn in both, token by token
    replay-DPO's unit         context ── chosen                 the two answers are compared
                              context ── rejected
    SFT's unit                a recorded conversation           its assistant turns are imitated

    row     | sample | ... | documents of a unit | ...          + what each teacher document adds

    position     all documents end to end; the wire has those before the teachers'     ids_N, starts
    document     which of the documents                              position -> document: document_of
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

import msgspec
import numpy as np

from composer_prime.errors import ConfigError, RunMismatchError
from composer_prime.wire.types import (
    HintedTurn,
    HintedTurnInRow,
    MicroBatch,
    Sample,
    StepTotals,
    TermUnit,
    UnitInRow,
    flags,
    floats,
    ints,
    pack_flags,
    pack_floats,
    pack_ints,
    seal_batch,
)

MIN_SAVED = 16
"""Tokens that a fork must save: each costs one more call of the attention kernel in every layer."""
MERGED_COST = 0.04
"""Computed tokens that a fork costs for each token below it: its attention to the shared run is merged in every layer.
Measured as 0.011 to 0.043 at hidden size 576 (benchmarks/results/systems.md), less in wider models."""
MAX_NESTED = 64
"""Nesting depth of forks; what forks deeper is computed apart. It bounds the recursion here and in the trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A run of tokens and what follows it. Each token sees the runs above its own, and its own up to itself."""

    run: int
    """Tokens of this run, at least 1."""
    branches: tuple[Tree, ...] = ()
    """Empty at the end of a document, else at least two."""

    @property
    def tokens(self) -> int:
        return self.run + sum(branch.tokens for branch in self.branches)

    @property
    def longest(self) -> int:
        """Tokens of its longest document."""
        return self.run + max((branch.longest for branch in self.branches), default=0)

    def pairs(self, above: int = 0) -> int:
        """Return twice the (query, key) pairs of causal attention below `above` tokens: L^2 for a single document."""
        below = above + self.run
        return below**2 - above**2 + sum(branch.pairs(below) for branch in self.branches)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopCost:
    """FLOPs of reading trees: of a token, and of a pair; a document of L tokens has L^2 pairs."""

    per_token: float
    per_pair: float

    def __call__(self, trees: Iterable[Tree]) -> float:
        return sum(self.per_token * tree.tokens + self.per_pair * tree.pairs() for tree in trees)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLayout:
    """How a row of N tokens is computed as M <= N tokens."""

    trees: tuple[Tree, ...]
    """In order; a tree's tokens are its run, then its branches. They add up to M."""
    kept: np.ndarray
    """int64 [M]: tokens of the row, in order of computation."""
    where: np.ndarray
    """int64 [N]: for each token of the row, its index among the computed ones."""


def prefix_layout(documents: Sequence[np.ndarray], *, share: bool = True) -> PrefixLayout:
    """Lay out `documents` (token ids, [T_i] each, T_i >= 1) as trees; without `share` each stays alone."""
    prefixes = Prefixes(documents)
    trees = prefixes.trees(range(len(documents)), share=share)
    starts, computed = np.cumsum([0, *map(len, documents)]), 0
    kept, where = [], [np.zeros(len(document), dtype=np.int64) for document in documents]
    for members, start, end in prefixes.runs:
        kept.append(starts[min(members)] + np.arange(start, end))
        for member in members:
            where[member][start:end] = computed + np.arange(end - start)
        computed += end - start
    return PrefixLayout(trees=tuple(trees), kept=joined(kept), where=joined(where))


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """Count equal leading tokens, at most all but one of the shorter: each document keeps a token of its own."""
    shorter = min(len(one), len(other)) - 1
    differs = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differs[0]) if differs.size else shorter


Members = tuple[list[int], list[int]]
"""Documents in the order of their tokens, and what each has in common with the next."""


class Prefixes:
    """What documents have in common. Tokens are compared once; trees follow from counts."""

    def __init__(self, documents: Sequence[np.ndarray]) -> None:
        self._lengths = [*map(len, documents)]
        order = sorted(range(len(documents)), key=lambda member: documents[member].astype(">u4").tobytes())
        self._ranks = {member: rank for rank, member in enumerate(order)}
        self._common = [common_prefix(documents[one], documents[other]) for one, other in pairwise(order)]
        """Of neighbors in sorted order; two others have the least of what lies between."""
        self.runs: list[tuple[list[int], int, int]] = []
        """(documents, start, end) of each run of the last trees, computed once."""

    def trees(self, documents: Iterable[int], *, share: bool = True) -> list[Tree]:
        """Return the trees of some documents, grown depth first."""
        self.runs = []
        order = sorted(documents, key=self._ranks.__getitem__)
        ranks = [self._ranks[member] for member in order]
        common = [min(self._common[one:other]) for one, other in pairwise(ranks)]
        return self._forest((order, common), 0, MAX_NESTED if share else 0)

    def _forest(self, members: Members, depth: int, levels: int) -> list[Tree]:
        """Return trees of documents that are equal up to `depth`, with at most `levels` nested forks."""
        if levels == 0:
            return self._apart(members, depth)
        return [tree for part in _split(members, depth) for tree in self._grow(part, depth, levels)]

    def _apart(self, members: Members, depth: int) -> list[Tree]:
        order = sorted(members[0])
        self.runs += [([member], depth, self._lengths[member]) for member in order]
        return [Tree(run=self._lengths[member] - depth) for member in order]

    def _grow(self, members: Members, depth: int, levels: int) -> list[Tree]:
        order, common = members
        if not common or levels == 0:
            return self._apart(members, depth)
        fork = min(common)
        if not self._pays(members, depth, fork):  # smaller parts may have more in common
            return [tree for part in _split(members, fork) for tree in self._grow(part, depth, levels - 1)]
        self.runs.append((order, depth, fork))
        return [Tree(run=fork - depth, branches=tuple(self._forest(members, fork, levels - 1)))]

    def _pays(self, members: Members, depth: int, fork: int) -> bool:
        """Return whether computing tokens [depth, fork) once saves more than it costs below."""
        order, common = members
        saved = (fork - depth) * len(common)
        below = sum(self._lengths[member] for member in order) - fork
        below -= sum(common)  # what forks further down save
        return saved >= MIN_SAVED + MERGED_COST * below


def _split(members: Members, at: int) -> list[Members]:
    """Group documents by their token at `at`."""
    order, common = members
    cuts = [0, *(index for index, shared in enumerate(common, 1) if shared <= at), len(order)]
    parts = [(order[start:end], common[start : end - 1]) for start, end in pairwise(cuts)]
    return sorted(parts, key=lambda part: min(part[0]))


def joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Join all parts end to end, as int64."""
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


TOKENS_ALONE = FlopCost(per_token=1.0, per_pair=0.0)
"""For a model of unknown shape: rows are balanced by tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What shares a row; exactly one of `sample` and `unit` is set."""

    name: str
    documents: tuple[np.ndarray, ...]
    """Token ids, int32 [T_i] each: the sample and its teacher documents, or the unit's."""
    sample: Sample | None = None
    hinted_turns: tuple[HintedTurn, ...] = ()
    """One for each document but the first."""
    unit: TermUnit | None = None

    @property
    def tokens(self) -> int:
        """Tokens in the row, without teacher documents."""
        return sum(map(len, self.documents)) if self.unit else len(self.documents[0])

    @property
    def group(self) -> str:
        """The group of rollouts, whose samples start alike."""
        return self.sample.group_id if self.sample else self.name


Bundle = list[Part]
"""What goes into one row together."""


@dataclass(slots=True)
class _Row:
    parts: Bundle = field(default_factory=list)
    tokens: int = 0
    flops: float = 0.0

    def put(self, bundle: Bundle, flops: float) -> None:
        self.parts += bundle
        self.tokens += _tokens(bundle)
        self.flops += flops


def pack(
    samples: Sequence[Sample],
    units: Sequence[TermUnit] = (),
    *,
    run_id: str,
    step: int,
    world_size: int,
    max_tokens: int,
    cost: FlopCost = TOKENS_ALONE,
) -> list[list[MicroBatch]]:
    """Return the micro-batches of each rank, sealed, equally many for each; each sample and unit is in exactly one.

    Pass no units of a term with weight 0, and samples `without_hints` where SDPO has it: the rows are then those of the
    policy loss alone. `model_flops` gives a model's `cost`. Ranks without enough rows get dummies of one masked token.
    Rows, teacher documents and units have at most `max_tokens` each.

    Raises ConfigError (a sample, hinted turn or unit of more than `max_tokens`, one given twice, a first token that is
    trained) or RunMismatchError (a hinted turn or unit that is cut or does not match), each naming the sample or unit.
    """
    parts = _parts(samples, units, max_tokens)
    together = _rows(_siblings(parts, max_tokens), cost, world_size, max_tokens)
    apart = _rows([[part] for part in parts], cost, world_size, max_tokens) if world_size > 1 else together
    rows = min(together, apart, key=lambda rows: _duration(rows, world_size))
    return [
        [_micro_batch(row.parts, run_id, step, rank, index) for index, row in enumerate(rank_rows)]
        for rank, rank_rows in enumerate(_deal(rows, world_size))
    ]


def totals(samples: Sequence[Sample], units: Sequence[TermUnit] = (), *, micro_batches: int = 1) -> StepTotals:
    """Return the losses' denominators of a step that trains these.

    `micro_batches`: those that hold samples, over all ranks.
    """
    trained = [sample for sample in samples if sample.num_trained > 0]
    turns = [turn for sample in samples for turn in sample.distillations]
    unit_counts: Counter[str] = Counter()
    unit_tokens: Counter[str] = Counter()
    for unit in units:
        unit_counts[unit.term] += 1
        unit_tokens[unit.term] += unit.num_trained
    return StepTotals(
        samples=len(trained),
        tokens=sum(sample.num_trained for sample in trained),
        distilled_tokens=sum(turn.end - turn.start for turn in turns),
        distilled_turns=len(turns),
        hint_kinds=tuple(sorted({turn.error for turn in turns})),
        units=dict(unit_counts),
        unit_tokens=dict(unit_tokens),
        micro_batches=micro_batches,
    )


def without_hints(samples: Iterable[Sample]) -> list[Sample]:
    """Return `samples` for a step where SDPO has weight 0."""
    return [msgspec.structs.replace(sample, distillations=[]) for sample in samples]


def model_flops(config: Mapping[str, Any]) -> FlopCost:
    """Return what a decoder's forward pass costs, from the values of its config.json.

    Two operations a weight and token; causal attention: 2 products x 2 operations x half the pairs.
    """
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    key_value = config.get("num_key_value_heads") or heads
    mlp = config.get("moe_intermediate_size") or config.get("intermediate_size") or 4 * hidden
    experts = config.get("num_experts_per_tok") or 1
    block = hidden * head * (2 * heads + 2 * key_value) + 3 * hidden * mlp * experts
    per_token = 2.0 * (layers * block + hidden * config["vocab_size"])
    return FlopCost(per_token=per_token, per_pair=2.0 * layers * heads * head)


def _parts(samples: Iterable[Sample], units: Iterable[TermUnit], max_tokens: int) -> list[Part]:
    parts = [_of_sample(sample) for sample in samples] + [_of_unit(unit) for unit in units]
    seen: set[str] = set()
    for part in parts:
        if part.name in seen:
            raise ConfigError(f"{part.name} was given twice for one step")
        seen.add(part.name)
        _check_room(part, max_tokens)
    return parts


def _check_same_turn(where: str, turn: str, student: np.ndarray, teacher: np.ndarray) -> None:
    """Raise RunMismatchError with the first difference between token ids."""
    if len(student) == len(teacher) and np.array_equal(student, teacher):
        return
    if len(student) != len(teacher):
        detail = f"{len(student)} tokens in the sample and {len(teacher)} in the teacher document: was it cut?"
    else:
        first = int(np.flatnonzero(student != teacher)[0])
        detail = f"id {student[first]} in the sample and {teacher[first]} in the teacher document at its token {first}"
    raise RunMismatchError(f"{where}: {turn} has {detail} (a teacher document must repeat the turn's token ids)")


def _of_sample(sample: Sample) -> Part:
    ids = ints(sample.input_ids)
    if len(ids) and flags(sample.loss_mask)[0]:
        raise ConfigError(f"sample {sample.sample_id} trains its first token, which has no context to predict it")
    hinted_turns = tuple(sample.distillations)
    for turn in hinted_turns:
        _check_hinted_turn(sample.sample_id, ids, turn)
    by_start = sorted(hinted_turns, key=lambda turn: turn.start)
    for turn, after in pairwise(by_start):
        if after.start < turn.end:
            raise RunMismatchError(f"sample {sample.sample_id}: turn {after.turn} overlaps another hinted turn")
    documents = (ids, *(ints(turn.teacher_ids) for turn in hinted_turns))
    return Part(name=f"sample {sample.sample_id}", documents=documents, sample=sample, hinted_turns=hinted_turns)


def _check_hinted_turn(sample_id: str, ids: np.ndarray, turn: HintedTurn) -> None:
    where, name = f"sample {sample_id}", f"turn {turn.turn}"
    if not 1 <= turn.start < turn.end <= len(ids) or turn.teacher_start < 1:
        raise RunMismatchError(
            f"{where}: {name} is tokens {turn.start}..{turn.end} of {len(ids)}, from token {turn.teacher_start} "
            "of its teacher document: a turn needs a token and a context on both sides"
        )
    _check_same_turn(where, name, ids[turn.start : turn.end], ints(turn.teacher_ids)[turn.teacher_start :])


def _of_unit(unit: TermUnit) -> Part:
    for raw_ids, raw_mask in zip(unit.documents, unit.masks, strict=True):
        ids, mask = ints(raw_ids), flags(raw_mask)
        if len(ids) != len(mask) or not mask.any() or mask[0]:
            raise RunMismatchError(
                f"{unit.name}: {len(ids)} tokens with a mask of {len(mask)}, {int(mask.sum())} of them trained: "
                "a document trains one or more, and not its first, which has no context to predict it"
            )
    return Part(name=unit.name, documents=tuple(map(ints, unit.documents)), unit=unit)


def _check_room(part: Part, max_tokens: int) -> None:
    first, longest = len(part.documents[0]), max(map(len, part.documents))
    if max(part.tokens, longest) <= max_tokens:
        return
    limit = f"but trainer.micro_batch_tokens is {max_tokens}: raise trainer.micro_batch_tokens to at least"
    if len(part.documents) > 1 and part.unit is not None:
        raise ConfigError(f"{part.name} has {part.tokens} tokens in its documents, {limit} {part.tokens}")
    if first > max_tokens:
        raise ConfigError(f"{part.name} has {first} tokens, {limit} the longest sample (model.max_context)")
    text = f"{part.name} has a hinted turn with {longest} tokens of context and turn"
    raise ConfigError(f"{text}, {limit} {longest}, or shorten hints")


def _siblings(parts: Sequence[Part], max_tokens: int) -> list[Bundle]:
    """Bundle the parts of each group, cut where they outgrow a row."""
    bundles: list[Bundle] = []
    ordered = sorted(parts, key=lambda part: (part.group, part.documents[0].tobytes(), part.name))
    for _, group in groupby(ordered, key=lambda part: part.group):
        bundle: Bundle = []
        for part in group:
            if bundle and _tokens(bundle) + part.tokens > max_tokens:
                bundles.append(bundle)
                bundle = []
            bundle.append(part)
        bundles.append(bundle)
    return bundles


def _rows(bundles: list[Bundle], cost: FlopCost, world_size: int, max_tokens: int) -> list[_Row]:
    """Put all bundles into rows, a multiple of `world_size` in number. Common beginnings count once."""
    layouts = [prefix_layout([document for part in bundle for document in part.documents]) for bundle in bundles]
    by_cost = [(cost(layout.trees), bundle) for layout, bundle in zip(layouts, bundles, strict=True)]
    by_cost.sort(key=lambda pair: (-pair[0], pair[1][0].name))
    rows = _first_fit(by_cost, max_tokens)
    count = -(-max(len(rows), 1) // world_size) * world_size
    return _spread(by_cost, count, max_tokens) or rows + [_Row() for _ in range(count - len(rows))]


def _tokens(bundle: Bundle) -> int:
    return sum(part.tokens for part in bundle)


def _first_fit(by_cost: list[tuple[float, Bundle]], max_tokens: int) -> list[_Row]:
    """Put each bundle, most expensive first, into the first row with room."""
    rows: list[_Row] = []
    for flops, bundle in by_cost:
        row = next((row for row in rows if row.tokens + _tokens(bundle) <= max_tokens), None)
        if row is None:
            rows.append(row := _Row())
        row.put(bundle, flops)
    return rows


def _spread(by_cost: list[tuple[float, Bundle]], count: int, max_tokens: int) -> list[_Row] | None:
    """Put each bundle, most expensive first, into the cheapest of `count` rows with room, if all fit."""
    rows = [_Row() for _ in range(count)]
    for flops, bundle in by_cost:
        fitting = [row for row in rows if row.tokens + _tokens(bundle) <= max_tokens]
        if not fitting:
            return None
        min(fitting, key=lambda row: row.flops).put(bundle, flops)
    return rows


def _duration(rows: list[_Row], world_size: int) -> float:
    """Add up the FLOPs of each round's slowest rank."""
    ranks = _deal(rows, world_size)
    return sum(max(row.flops for row in round_) for round_ in zip(*ranks, strict=True))


def _deal(rows: list[_Row], world_size: int) -> list[list[_Row]]:
    """Deal rounds of like rows; the most expensive goes to the rank with the least work."""
    ranks: list[list[_Row]] = [[] for _ in range(world_size)]
    work = [0.0] * world_size
    by_cost = sorted(rows, key=lambda row: -row.flops)
    for start in range(0, len(rows), world_size):
        order = sorted(range(world_size), key=lambda rank: (work[rank], rank))
        for rank, row in zip(order, by_cost[start : start + world_size], strict=True):
            ranks[rank].append(row)
            work[rank] += row.flops
    return ranks


def _micro_batch(parts: Sequence[Part], run_id: str, step: int, rank: int, index: int) -> MicroBatch:
    """Return the sealed micro-batch of a row's parts, or of one masked token."""
    samples = [part.sample for part in parts if part.sample is not None]
    documents, turns, units = _lay_out(parts)
    lengths = [len(document) for document in documents]
    rest = sum(lengths) - sum(sample.num_tokens for sample in samples)
    temperatures = [sample.temperature for sample in samples]
    temperatures += [1.0] * (len(documents) - len(temperatures))
    return seal_batch(
        MicroBatch(
            run_id=run_id,
            step=step,
            rank=rank,
            index=index,
            versions=(
                min((sample.version_min for sample in samples), default=step - 1),
                max((sample.version_max for sample in samples), default=step - 1),
            ),
            input_ids=pack_ints(np.concatenate(documents)),
            lengths=lengths,
            loss_mask=b"".join(sample.loss_mask for sample in samples) + pack_flags(np.zeros(rest)),
            logprobs=b"".join(sample.logprobs for sample in samples) + pack_floats(np.zeros(rest)),
            advantages=b"".join(sample.advantages for sample in samples) + pack_floats(np.zeros(rest)),
            temperatures=temperatures,
            sample_ids=[sample.sample_id for sample in samples],
            task_ids=[sample.task_id for sample in samples],
            turns=turns,
            units=units,
        )
    )


def _lay_out(parts: Sequence[Part]) -> tuple[list[np.ndarray], list[HintedTurnInRow], list[UnitInRow]]:
    """Return the documents in order, and where hinted turns and units' tokens are."""
    documents: list[np.ndarray] = []
    turns, units, end = [], [], 0
    for part in parts:
        if part.sample is None:
            continue
        ids = part.documents[0]
        for turn, teacher in zip(part.hinted_turns, part.documents[1:], strict=True):
            shared = common_prefix(ids[: turn.start + 1], teacher[: turn.teacher_start + 1])
            tail = pack_ints(teacher[shared:])
            turns.append(
                HintedTurnInRow(end + turn.start, turn.end - turn.start, turn.weight, shared, tail, turn.error)
            )
        documents.append(ids)
        end += len(ids)
    with_units = [part.unit for part in parts if part.unit is not None]
    for unit in sorted(with_units, key=lambda unit: unit.term):  # one term's after another's
        first, spans = len(documents), []
        for ids, mask in zip(map(ints, unit.documents), map(flags, unit.masks), strict=True):
            spans.append(_spans(mask, end))
            documents.append(ids)
            end += len(ids)
        units.append(UnitInRow(unit.term, unit.name, first, spans, unit.value))
    return documents or [np.zeros(1, dtype=np.int32)], turns, units


def _spans(mask: np.ndarray, offset: int) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]).astype(np.int8)))
    return [(int(start), int(end)) for start, end in (offset + edges).reshape(-1, 2)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A micro-batch, cut into its documents, N tokens in all."""

    batch: MicroBatch
    ids_N: np.ndarray
    starts: np.ndarray
    """int64 [documents + 1]: where each begins, and N."""
    samples: int
    """How many documents are samples (1 for a dummy, which holds a masked token)."""

    @classmethod
    def of(cls, batch: MicroBatch) -> Row:
        """Cut `batch` at its borders, and append the teacher documents."""
        ids = ints(batch.input_ids)
        starts = np.cumsum([0, *batch.lengths])
        samples = len(batch.lengths) - sum(len(unit.spans) for unit in batch.units)
        homes = [int(np.searchsorted(starts, turn.student, "right")) - 1 for turn in batch.turns]
        teachers = [
            np.concatenate([ids[starts[home] : starts[home] + turn.shared], ints(turn.tail)])
            for home, turn in zip(homes, batch.turns, strict=True)
        ]
        return cls(
            batch=batch,
            ids_N=np.concatenate([ids, *teachers]),
            starts=np.cumsum([0, *batch.lengths, *map(len, teachers)]),
            samples=samples,
        )

    @property
    def first_teacher(self) -> int:
        """The first teacher document, after all others."""
        return len(self.batch.lengths)

    @property
    def depth_N(self) -> np.ndarray:
        """int64 [N]: position within the document."""
        return np.arange(len(self.ids_N)) - np.repeat(self.starts[:-1], np.diff(self.starts))

    @property
    def trained(self) -> np.ndarray:
        """int64 [T]: positions of the samples' trained tokens."""
        return np.flatnonzero(flags(self.batch.loss_mask))

    @property
    def sampler_logprobs(self) -> np.ndarray:
        """float32: by position, the log-probability under the sampling distribution."""
        return floats(self.batch.logprobs)

    @property
    def advantages(self) -> np.ndarray:
        """float32: by position, 0 where the token is not trained."""
        return floats(self.batch.advantages)

    def document_of(self, positions: np.ndarray | int) -> np.ndarray:
        """Return the documents that hold these positions."""
        return np.searchsorted(self.starts, positions, "right") - 1

    def tokens(self, document: int) -> np.ndarray:
        """Return a document's token ids."""
        return self.ids_N[self.starts[document] : self.starts[document + 1]]

    def teachers(self) -> range:
        """Return the teacher documents, one for each of the batch's `turns`."""
        return range(self.first_teacher, len(self.starts) - 1)

    def units(self, term: str) -> list[UnitInRow]:
        """Return the units of `term`, in order."""
        return [unit for unit in self.batch.units if unit.term == term]

    def documents(self, terms: Iterable[str]) -> list[int]:
        """Return the documents of the units of `terms`, in order."""
        names = set(terms)
        chosen = [unit for unit in self.batch.units if unit.term in names]
        return [unit.document + index for unit in chosen for index in range(len(unit.spans))]

    def name(self, document: int) -> str:
        """Return the sample or unit that a document belongs to."""
        if document >= self.first_teacher:
            document = int(self.document_of(self.batch.turns[document - self.first_teacher].student))
        if document >= self.samples:
            owners = [unit.name for unit in self.batch.units for _ in unit.spans]
            return owners[document - self.samples]
        return self.batch.sample_ids[document] if self.batch.sample_ids else "none"


def span_positions(unit: UnitInRow) -> np.ndarray:
    """Return the positions that a unit trains, document by document."""
    return joined(np.arange(start, end) for spans in unit.spans for start, end in spans)
