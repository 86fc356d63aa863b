"""Messages between a node and its vLLM child: msgpack with a length in front, over a socket pair.

    node --Setup--> child --EngineReady--> node
    node --Ask--> child --Reply|Failed--> node        one reply to each, by its number
    node --Abort--> child                             the Ask that it names is answered with what there is
    child --EngineProgress|Broken--> node

An answer to an unknown call is dropped.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgspec

from composer_prime.wire.node_messages import Sampling

LENGTH = struct.Struct("<I")


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag="setup"):
    model: str
    """Folder."""
    max_context: int
    inference: str
    """The [inference] section as JSON."""


class GenerateTokens(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """Reply: an Answer."""

    prompt_ids: list[int]
    """[T]."""
    sampling: Sampling


class Score(msgspec.Struct, frozen=True, kw_only=True, tag="score"):
    """Reply: logprobs [T - 1]."""

    token_ids: list[int]
    """[T]."""


class Load(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Reply: None once the version is in use."""

    version: int
    path: str
    """A safetensors file of whole tensors."""


class ReadParameters(msgspec.Struct, frozen=True, kw_only=True, tag="read_back"):
    """Reply: names, type and checksum of each parameter. The checksum is hexadecimal: it has 64 bits without a sign."""

    names: list[str]
    """Of published tensors."""


class ReadAnswers(msgspec.Struct, frozen=True, kw_only=True, tag="read_answers"):
    """Reply: by call, an Answer with what it has beyond the tokens that the node has. Of calls without more, none."""

    sent: dict[int, int]
    """How many tokens of each GenerateTokens the node has."""


Question = GenerateTokens | Score | Load | ReadParameters | ReadAnswers


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag="ask"):
    call: int
    """Numbers it within the connection."""
    question: Question


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    call: int


class EngineReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """vLLM serves."""


class Broken(msgspec.Struct, frozen=True, kw_only=True, tag="broken"):
    """vLLM could not start or failed for good; the child ends."""

    error: str


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag="reply"):
    call: int
    value: msgspec.Raw


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    call: int
    error: str


class EngineProgress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    running: int
    kv_used: float
    kv_tokens: int
    """Tokens that the KV cache holds."""
    sampled: int
    """Tokens sampled since the start."""


ToChild = Setup | Ask | Abort
FromChild = EngineReady | Broken | Reply | Failed | EngineProgress

encode = msgspec.msgpack.Encoder().encode
to_child: Callable[[bytes], ToChild] = msgspec.msgpack.Decoder(ToChild).decode


def frame(message: FromChild) -> bytes:
    body = encode(message)
    return LENGTH.pack(len(body)) + body
