"""Shared beginnings: sibling rollouts start alike, and a causal model needs to read what they share only once.

    documents of a row      a b c d e | a b c d f | a b x | q r
    tree                    a b ── c d ── e
                             │      └──── f
                             └─── x                   q r
    computed tokens         a b c d e f x q r         9 instead of 15

A hidden state depends on the tokens up to it and their positions alone, so equal beginnings have equal hidden states.
Computing them once changes no result, and the gradients of all branches add up in the shared part. Torch-free; the
packer estimates work with it, the trainer lays rows out by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

MIN_SAVED = 16
"""A fork must save at least this many tokens: each costs one more call of the attention kernel in every layer."""
MERGED_COST = 0.04
"""What a fork costs for each token below it, in computed tokens: its attention to the shared run is a part of its own,
merged in every layer. Measured as 0.011 to 0.043 at hidden size 576 (benchmarks/results/systems.md); wider models
spend less on it."""
MAX_NESTED = 64
"""Nesting depth of forks; what forks deeper is computed apart. It bounds the recursion here and in the trainer, which
would fail at about 300 in the rare row of hundreds of documents that each leave the others a little later."""


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
    """int64 [M]: which tokens of the row are computed, in order of computation."""
    where: np.ndarray
    """int64 [N]: index among the computed tokens of the one that stands for each token of the row."""


def prefix_layout(documents: Sequence[np.ndarray], *, share: bool = True) -> PrefixLayout:
    """Lay out `documents` (token ids, each [T_i], T_i >= 1) as trees; without `share` each document stays alone."""
    builder = _Builder(documents)
    members = list(range(len(documents)))
    trees = builder.forest(members, 0, MAX_NESTED if share else 0)
    return PrefixLayout(trees=tuple(trees), kept=joined(builder.kept), where=joined(builder.where))


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """Count equal leading tokens, at most all but one of the shorter: each document keeps a token of its own."""
    shorter = min(len(one), len(other)) - 1
    differs = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differs[0]) if differs.size else shorter


class _Builder:
    """Grows trees depth first and records for each token where it is computed."""

    def __init__(self, documents: Sequence[np.ndarray]) -> None:
        self._documents = documents
        self._starts = np.cumsum([0, *map(len, documents)])
        order = sorted(range(len(documents)), key=lambda member: documents[member].astype(">u4").tobytes())
        self._ranks = {member: rank for rank, member in enumerate(order)}
        self._common = [common_prefix(documents[one], documents[other]) for one, other in pairwise(order)]
        """Of each document and the next one in sorted order, which no other document has more in common with."""
        self._computed = 0
        self.kept: list[np.ndarray] = []
        self.where = [np.zeros(len(document), dtype=np.int64) for document in documents]

    def forest(self, members: list[int], depth: int, levels: int) -> list[Tree]:
        """Return trees of documents that are equal up to `depth`, from there on, with at most `levels` nested forks."""
        if levels == 0:
            return [self._document(member, depth) for member in members]
        return [tree for part in self._parts(members, depth) for tree in self._grow(part, depth, levels)]

    def _document(self, member: int, depth: int) -> Tree:
        """Return the rest of one document as an end."""
        end = len(self._documents[member])
        self._compute([member], depth, end)
        return Tree(run=end - depth)

    def _grow(self, members: list[int], depth: int, levels: int) -> list[Tree]:
        if len(members) == 1 or levels == 0:
            return [self._document(member, depth) for member in members]
        first = self._documents[members[0]]
        fork = min(common_prefix(first, self._documents[member]) for member in members[1:])
        if not self._pays(members, depth, fork):  # too little in common for all; smaller parts may have more
            return [tree for part in self._parts(members, fork) for tree in self._grow(part, depth, levels - 1)]
        self._compute(members, depth, fork)
        return [Tree(run=fork - depth, branches=tuple(self.forest(members, fork, levels - 1)))]

    def _pays(self, members: list[int], depth: int, fork: int) -> bool:
        """Return whether computing tokens [depth, fork) of `members` once saves more than it costs below."""
        saved = (fork - depth) * (len(members) - 1)
        below = sum(len(self._documents[member]) - fork for member in members)
        ranks = sorted(self._ranks[member] for member in members)
        below -= sum(max(0, self._common[rank] - fork) for rank in ranks[:-1])  # what forks further down save
        return saved >= MIN_SAVED + MERGED_COST * below

    def _parts(self, members: list[int], at: int) -> list[list[int]]:
        """Group documents by their token at `at`; one that ends there stays alone."""
        parts: dict[tuple[int, int], list[int]] = {}
        for member in members:
            document = self._documents[member]
            key = (int(document[at]), -1) if len(document) > at + 1 else (0, member)
            parts.setdefault(key, []).append(member)
        return list(parts.values())

    def _compute(self, members: list[int], start: int, end: int) -> None:
        """Compute tokens [start, end) once for all of `members`."""
        self.kept.append(self._starts[members[0]] + np.arange(start, end))
        for member in members:
            self.where[member][start:end] = self._computed + np.arange(end - start)
        self._computed += end - start


def joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Join all parts end to end, as int64."""
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])
