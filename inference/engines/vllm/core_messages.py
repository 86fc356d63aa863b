"""Messages between a node and its vLLM child: msgpack with a length in front, over a socket pair.

    node --Ask--> child --Reply--> node       one reply to each, by its number; the first Ask starts vLLM
    child --EngineProgress--> node

A reply that nobody waits for is dropped. After the start, an error in reply to the first Ask says that vLLM failed for
good; the child ends.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from composer_prime.wire.node_messages import Sampling

LENGTH = struct.Struct("<I")
START = 0
"""Number of the first Ask."""
ARGUMENTS: dict[str, Any] = {
    "start": tuple[str, int, str],  # model folder, most tokens of a context, the [inference] section as JSON -> None
    "generate": tuple[list[int], Sampling],  # prompt [T] -> Answer
    "score": tuple[list[int]],  # tokens [T] -> logprobs [T - 1]
    "abort": tuple[int],  # the Ask that is to be answered with what there is -> None
    "load": tuple[int, str],  # version, safetensors file of whole tensors -> None once it is in use
    "read_back": tuple[list[str]],  # published tensors -> names, type and checksum of each parameter
    "parts": tuple[dict[int, int]],  # by Ask, how many tokens the node has -> by Ask, an Answer with what is more
}
"""What a method of Core takes -> what the node gets. A checksum is hexadecimal: it has 64 bits without a sign."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    call: int
    method: str
    arguments: msgspec.Raw


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag="reply"):
    call: int
    value: msgspec.Raw
    error: str | None = None


class EngineProgress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    running: int = 0
    kv_used: float = 0.0
    kv_tokens: int = 0
    """Tokens that the KV cache holds."""
    sampled: int = 0
    """Tokens sampled since the start."""


FromChild = Reply | EngineProgress


def packed(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(value))
