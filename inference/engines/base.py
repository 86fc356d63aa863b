"""The seam between a node and an engine. Both engines pass the same suite, tests/engines/contract.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from composer_prime.wire.node import Sampling
from composer_prime.wire.types import VersionSpan

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a request produced."""

    token_ids: list[int]
    """[T_new], a stop token that ended the turn included."""
    logprobs: list[float]
    """[T_new], under the sampling distribution (after temperature, top-k, top-p)."""
    version_spans: list[VersionSpan]
    """Cover [0, T_new) without gap or overlap, in order."""
    finish_reason: str
    """stop | length | cancelled."""
    prompt_cached: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    running: int
    waiting: int
    kv_used: float
    """0..1."""
    tokens_per_s: float
    """Sampled tokens a second since the last call."""


class Engine(Protocol):
    """Async surface of an engine. All methods are called from one event loop."""

    version: int
    """Policy version of the weights in use."""

    async def start(self) -> None:
        """Load the model folder and be ready to serve. Raises ModelNotFoundError or EngineError."""

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: Sampling, session: str) -> Completion:
        """Sample one continuation. Cancelling the awaiting task, or `cancel`, frees the request's place.

        Raises ContextOverflowError when the prompt leaves no room for a token.
        """
        ...

    async def cancel(self, request_id: str) -> None:
        """End a request early; its `generate` returns what it has with finish_reason `cancelled`."""

    async def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Swap weights between two tokens; running requests go on and their spans show the change exactly."""

    async def score(self, token_ids: list[int]) -> list[float]:
        """log p(token t+1 | tokens <= t) at temperature 1, [T - 1]: the canary."""
        ...

    async def drain(self) -> None:
        """Refuse new requests and return when the running ones have ended; the caller bounds the wait."""

    def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """Stop and free everything, child processes included; an engine that hangs is left after some seconds."""
