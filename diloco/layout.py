"""What peers tell one another about their parameters; no torch here, for the rendezvous has none."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import msgspec

_DELTA_BYTES, _STATE_BYTES, _MORE_BYTES = 5, 13, 1 << 21
"""At most, of a parameter: fp32 has 4; master, momentum and swept values 12. And beside them: a last block, names."""


class TensorLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Where one parameter lies, as far as peers must agree on it."""

    name: str
    shape: list[int]
    """Of the whole parameter."""
    local_shape: list[int]
    """Of this rank's shard; equal to `shape` without sharding."""
    fragment: int


def largest_body(tensors: Sequence[TensorLayout], fragment: int | None) -> int:
    """Bytes that no delta of this fragment exceeds; None: no state."""
    count = sum(math.prod(each.local_shape) for each in tensors if fragment in (None, each.fragment))
    return _MORE_BYTES + count * (_STATE_BYTES if fragment is None else _DELTA_BYTES)


def layout_hash(tensors: Sequence[TensorLayout]) -> str:
    """blake2b-128, hexadecimal."""
    return hashlib.blake2b(msgspec.json.encode(list(tensors)), digest_size=16).hexdigest()


def difference(ours: Sequence[TensorLayout], theirs: Sequence[TensorLayout]) -> str:
    """The first thing that differs, in words that give both sides; empty when nothing does."""
    mine, other = {each.name: each for each in ours}, {each.name: each for each in theirs}
    differing = [name for name in mine.keys() | other.keys() if mine.get(name) != other.get(name)]
    if not differing:
        return ""
    name = min(differing, key=lambda name: (name in mine and name in other, name))
    return f"parameter {name}: {_words(mine.get(name))} here, {_words(other.get(name))} there"


def _words(tensor: TensorLayout | None) -> str:
    if tensor is None:
        return "not trained"
    return f"shape {tensor.shape}, shard {tensor.local_shape}, fragment {tensor.fragment}"
