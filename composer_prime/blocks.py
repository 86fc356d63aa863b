"""Transformer blocks by the names of their parameters: model.layers.3.mlp.up_proj.weight is of block 3. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable

_BLOCK = re.compile(r"(.*?(?:^|\.)(\d+))\.")
"""Of a parameter's name: its block and the block's number."""


def block_of(name: str) -> tuple[str, int] | None:
    """(block, its number) of a parameter; None for one that stands outside, as embeddings and the head."""
    match = _BLOCK.match(name)
    return None if match is None else (match[1], int(match[2]))


def count_parts(names: Iterable[str]) -> int:
    """Blocks and single tensors outside them: what a model can be divided into at most."""
    return len({name if (block := block_of(name)) is None else block for name in names})
