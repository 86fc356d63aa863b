"""A started engine under test, and what its answers are compared with."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import torch

from composer_prime.wire.node_messages import Answer, Sampling
from composer_prime.wire.types import VersionSpan
from inference.engines.base import Engine
from tests.engines.reference import Reference

TOLERANCE = 1e-4
DEADLINE_S = 60.0


@dataclass(slots=True)
class Subject:
    """An engine under test and what to compare it with."""

    engine: Engine
    reference: Reference
    preempts: bool = False
    """Whether it may drop a request's cache and compute it again, with the weights of then."""
    _requests: int = field(default=0)

    def prompt(self, seed: int, length: int) -> list[int]:
        """[length] random ids above the special tokens."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, self.reference.vocab, (length,), generator=generator).tolist()

    async def generate(self, prompt: list[int], sampling: Sampling, session: str | None = None) -> Answer:
        self._requests += 1
        name = f"request-{self._requests}"
        return await asyncio.wait_for(
            self.engine.generate(name, prompt, sampling, session or f"session-{self._requests}"), DEADLINE_S
        )

    async def load(self, version: int) -> None:
        await asyncio.wait_for(self.engine.load_weights(version, self.reference.weights(version)), DEADLINE_S)

    async def next_version(self) -> int:
        """Load weights that the engine has not had, so that a check does not depend on those before it."""
        version = self.engine.version + 1
        await self.load(version)
        return version

    def verify(self, prompt: list[int], sampling: Sampling, done: Answer) -> None:
        """Lengths agree, spans cover the completion, and every logprob is the reference's within TOLERANCE."""
        count = len(done)
        assert count == len(done.token_logprobs) and 1 <= count <= sampling.max_tokens
        assert all(0 <= token < self.reference.vocab for token in done.ids.tolist())
        edges = [0] + [span.end for span in done.version_spans]
        assert [span.start for span in done.version_spans] == edges[:-1] and edges[-1] == count
        expected = self.reference.rescore(prompt, done.ids.tolist(), done.version_spans, sampling)
        if self.preempts and len(done.version_spans) > 1:
            start, version = edges[-2], done.version_spans[-1].version
            again = self.reference.rescore(prompt, done.ids.tolist(), [VersionSpan(0, count, version)], sampling)
            again[:, :start] = expected[:, :start]
            expected = torch.cat([expected, again])
        error = (expected - torch.tensor(done.token_logprobs.tolist())).abs().amin(0).max().item()
        assert error < TOLERANCE, f"logprobs differ by {error:.2e}; spans {done.version_spans}"

    async def settled(self) -> None:
        """Wait until nothing runs or waits in the engine."""
        until = time.monotonic() + DEADLINE_S
        while (stats := self.engine.stats()).running or stats.waiting:
            assert time.monotonic() < until, f"still busy after {DEADLINE_S:.0f} s: {stats}"
            await asyncio.sleep(0.02)


def sampling(max_tokens: int = 24, **options) -> Sampling:
    options.setdefault("ignore_eos", True)
    return Sampling(max_tokens=max_tokens, **options)
