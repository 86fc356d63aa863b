"""Shared beginnings: sibling rollouts start with the same prompt, and a causal model needs to read it once.

    documents of a row      a b c d e | a b c x y | q r s
    kept tokens             a b c, d e, x y, q r s           trees: (prefix 3, branches 2 2), (prefix 3, no branch)

A hidden state depends on the tokens up to it and their positions alone, so equal beginnings have equal hidden states:
computing them once changes no result, and gradients of all branches add up in the shared part. Torch-free; the packer
estimates work with it, the trainer lays rows out by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_SHARED = 16
"""A shorter common beginning is not worth a branch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Documents of a row that share their first tokens. One document alone has no branches and is all prefix."""

    prefix: int
    """Tokens that are computed once."""
    branches: tuple[int, ...] = ()
    """Tokens of each document after the prefix; each sees the prefix and itself."""

    @property
    def tokens(self) -> int:
        return self.prefix + sum(self.branches)

    def pairs(self) -> int:
        """Twice the (query, key) pairs of causal attention: L^2 of a single document."""
        return self.prefix**2 + sum((self.prefix + branch) ** 2 - self.prefix**2 for branch in self.branches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a row of N tokens is computed as M <= N tokens."""

    trees: tuple[Tree, ...]
    """In order; their tokens add up to M."""
    kept: np.ndarray
    """int64 [M]: which tokens of the row are computed, in order of computation."""
    where: np.ndarray
    """int64 [N]: index among the computed tokens of the one that stands for each token of the row."""


def layout(documents: Sequence[np.ndarray], *, share: bool = True) -> Layout:
    """Group neighbouring documents (token ids, each [T_i]) with a common beginning; `share` off keeps each alone."""
    trees, kept, where = [], [], []
    start = computed = 0
    for members, prefix in _groups(documents) if share else ((([document]), 0) for document in documents):
        lengths = [len(member) for member in members]
        tree = Tree(prefix=prefix, branches=tuple(n - prefix for n in lengths)) if prefix else Tree(prefix=lengths[0])
        shared = np.arange(prefix)
        kept.append(start + shared)
        begin, offset = start, computed + prefix
        for length in lengths:
            kept.append(begin + np.arange(prefix, length))
            where.append(np.concatenate([computed + shared, offset + np.arange(length - prefix)]))
            begin, offset = begin + length, offset + length - prefix
        trees.append(tree)
        start, computed = begin, computed + tree.tokens
    join = lambda parts: np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
    return Layout(trees=tuple(trees), kept=join(kept), where=join(where))


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """Equal leading tokens, at most all but one of the shorter, so that each document keeps a token of its own."""
    shorter = min(len(one), len(other)) - 1
    differs = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differs[0]) if differs.size else max(shorter, 0)


def _groups(documents: Sequence[np.ndarray]) -> list[tuple[list[np.ndarray], int]]:
    """Runs of neighbours with their shared prefix; a document joins a run only if this saves tokens."""
    groups: list[tuple[list[np.ndarray], int]] = []
    for document in documents:
        if groups:
            members, prefix = groups[-1]
            common = common_prefix(members[0][: prefix + 1] if prefix else members[0], document)
            if common >= MIN_SHARED and common * len(members) > prefix * (len(members) - 1):
                groups[-1] = ([*members, document], common)
                continue
        groups.append(([document], 0))
    return groups
