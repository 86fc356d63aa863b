"""What several workers hold, as the parameters of one engine: each has a part of some, and a copy of others."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

Held = tuple[list[str], str, str, int]
"""Of a worker's parameter: published names, type, checksum in hexadecimal, and values without padding."""


def fold(ranks: Sequence[Sequence[Held]], shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[list[str], str, str]]:
    """Return names, type and checksum of each parameter whose parts or copies the workers hold.

    `shapes` are those of the published tensors. Parts have their size together: the sum is the parts'. Copies have it
    each: they count once, and copies that differ are returned one by one, so that a wrong one is found. What is
    neither is left out, such as key and value heads of which more workers than one hold the same. One worker holds all.
    """
    by_names: dict[tuple[str, ...], list[Held]] = defaultdict(list)
    for parameters in ranks:
        for held in parameters:
            by_names[tuple(held[0])].append(held)
    folded = []
    for names, parts in by_names.items():
        size, sizes = sum(math.prod(shapes[name]) for name in names), [part[3] for part in parts]
        dtype, sums = parts[0][1], [part[2] for part in parts]
        if len(ranks) == 1 or all(each == size for each in sizes):
            folded += [(list(names), dtype, total) for total in sorted(set(sums))]
        elif sum(sizes) == size:
            folded.append((list(names), dtype, f"{sum(int(part, 16) for part in sums) % (1 << 64):x}"))
    return folded
