"""Messages between a node and its vLLM child: msgpack with a length in front, over a socket pair.

    node --Setup--> child --Ready--> node
    node --Generate|Abort|Score|Load|Read--> child --Generated|Scored|Loaded|Parameters|Failed|Progress|Broken--> node
    node --ReadAnswers--> child --Answers--> node        what running requests have so far

`call` numbers a request within the connection. An answer to an unknown call is dropped.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgspec

from composer_prime.wire.node import Sampling
from composer_prime.wire.types import VersionSpan

LENGTH = struct.Struct("<I")
MAX_BYTES = 256 << 20
"""Limit of one message. A longer one means that the stream holds something else."""


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag="setup"):
    model: str
    """Folder."""
    max_context: int
    inference: str
    """The [inference] section as JSON."""


class VllmGenerate(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    call: int
    session: str
    """Names the conversation."""
    prompt_ids: list[int]
    """[T]."""
    sampling: Sampling


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """End a generate call early. It answers with the tokens it has."""

    call: int


class VllmScore(msgspec.Struct, frozen=True, kw_only=True, tag="score"):
    call: int
    token_ids: list[int]
    """[T]."""


class LoadWeights(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    call: int
    version: int
    path: str
    """A safetensors file of whole tensors, or one of patch_file.py."""
    patched: dict[str, list[int]] | None = None
    """The shapes of the tensors that it patches; None: it has them whole."""


class ReadParameters(msgspec.Struct, frozen=True, kw_only=True, tag="read_parameters"):
    call: int
    names: list[str]
    """Of published tensors."""


class ReadAnswers(msgspec.Struct, frozen=True, kw_only=True, tag="read_answers"):
    call: int
    sent: dict[int, int]
    """How many tokens of each generate call the node has."""


class EngineReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """vLLM serves."""

    takes_patches: bool = False
    """Whether versions may be loaded as patches of the one in use."""


class Broken(msgspec.Struct, frozen=True, kw_only=True, tag="broken"):
    """vLLM could not start or failed for good; the child ends."""

    error: str


class VllmGenerated(msgspec.Struct, frozen=True, kw_only=True, tag="generated"):
    call: int
    token_ids: list[int]
    """[T_new]."""
    logprobs: list[float]
    """[T_new]."""
    version_spans: list[VersionSpan]
    finish_reason: str
    """`running` in a part of an answer."""
    prompt_cached: int


class Scored(msgspec.Struct, frozen=True, kw_only=True, tag="scored"):
    call: int
    logprobs: list[float]
    """[T - 1]."""


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    call: int


class Parameters(msgspec.Struct, frozen=True, kw_only=True, tag="parameters"):
    call: int
    parts: list[tuple[list[str], str, str]]
    """Names, type and checksum (hexadecimal: it has 64 bits without a sign) of each."""


class Answers(msgspec.Struct, frozen=True, kw_only=True, tag="answers"):
    call: int
    parts: list[VllmGenerated]
    """Beyond the tokens that the node has; of calls that have no more, none."""


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


ToChild = Setup | VllmGenerate | Abort | VllmScore | LoadWeights | ReadParameters | ReadAnswers
FromChild = EngineReady | Broken | VllmGenerated | Scored | Loaded | Parameters | Answers | Failed | EngineProgress

_encoder = msgspec.msgpack.Encoder()
to_child: Callable[[bytes], ToChild] = msgspec.msgpack.Decoder(ToChild).decode
from_child: Callable[[bytes], FromChild] = msgspec.msgpack.Decoder(FromChild).decode


def frame(message: ToChild | FromChild) -> bytes:
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body
