"""Mutated traces with a fixed seed: what a crash, an editor or another version may make of a record."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

WRONG: list[Any] = [
    None,
    0,
    -1,
    1.5,
    True,
    "",
    "x",
    "\x00",
    "é" * 30,
    [],
    {},
    [[]],
    [None],
    {"type": "text"},
    "2" * 400,
    10**30,
    "half \ud83d",
    {"\udc00": ["\ud83d"]},
    DEEP := "nested deeply",
]
REPEATED = [
    "<think>",
    "</think>",
    "<think>\n</think>",
    "password=",
    "--token ",
    "cookie: a=",
    "-----BEGIN ",
    "eyJ",
    "```",
]
"""What a reader or a pattern may look for, thousands of times."""
DEPTHS = (50, 100, 101, 480, 2_000)


def mutated(rng: random.Random, record: Any, keys: list[str]) -> bytes:
    """One line, without its end: `record` changed in its structure, its text or its bytes, or not at all."""
    value = copy.deepcopy(record)
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        value = _changed(rng, value, keys)
    depth = rng.choice(DEPTHS)
    raw = json.dumps(value).replace(f'"{DEEP}"', "[" * depth + "]" * depth).encode()
    if rng.random() < 0.15 and raw:
        start = rng.randrange(len(raw))
        raw = rng.choice(
            [
                raw[:start],
                raw[:start] + bytes([rng.randrange(256)]) + raw[start + 1 :],
                raw[start:],
                raw[:start] + raw,
                raw[:start] + b'"' + raw[start:],
            ]
        )
    return raw.replace(b"\n", b" ")


def _changed(rng: random.Random, value: Any, keys: list[str]) -> Any:
    """`value` with one place changed, wherever in it."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        move = rng.randrange(5)
        if move == 0:
            del value[key]
        elif move == 1:
            value[rng.choice(keys)] = value[key]
        else:
            value[key] = _changed(rng, value[key], keys)
        return value
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        if rng.random() < 0.3:
            value.insert(index, copy.deepcopy(rng.choice(value)))
        else:
            value[index] = _changed(rng, value[index], keys)
        return value
    return rng.choice(REPEATED) * 2_000 if rng.random() < 0.02 else copy.deepcopy(rng.choice(WRONG))


def keys_of(value: Any) -> list[str]:
    """Every key of a JSON value."""
    if isinstance(value, dict):
        return [*value, *(key for item in value.values() for key in keys_of(item))]
    return [key for item in value for key in keys_of(item)] if isinstance(value, list) else []
