"""A started engine under test, and what its answers are compared with: a plain forward in float32."""

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from composer_prime.wire.node_messages import Answer, Sampling
from composer_prime.wire.types import VersionSpan
from inference.engines.base import Engine

TOLERANCE = 1e-4
DEADLINE_S = 60.0
_HAIR = 1e-5
"""Probability mass within which two float32 computations may disagree about the edge of a nucleus."""


class Reference:
    """A model folder's weights and made-up later versions of them."""

    def __init__(self, folder: Path, scale: float = 0.03) -> None:
        """`scale` is by how much later versions differ from the first."""
        self.folder, self.scale = folder, scale
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._start = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self._loaded = 0

    @property
    def tied(self) -> bool:
        return bool(self.model.config.tie_word_embeddings)

    @property
    def vocab(self) -> int:
        return self.model.config.vocab_size

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        """Version 0 is the folder; a later one adds seeded noise to every tensor. A tied head is left out."""
        generator = torch.Generator().manual_seed(1000 + version)
        names = [name for name in self._start if not (self.tied and name == "lm_head.weight")]
        noise = {name: torch.randn(self._start[name].shape, generator=generator) for name in names}
        scale = 0.0 if version == 0 else self.scale
        return {name: self._start[name] + scale * noise[name] for name in names}

    @torch.no_grad()
    def _load(self, version: int) -> None:
        if version != self._loaded:
            self.model.load_state_dict(self.weights(version), strict=False)
            self._loaded = version

    @torch.no_grad()
    def logits(self, token_ids: list[int], version: int) -> torch.Tensor:
        """[T, V]."""
        self._load(version)
        return self.model(torch.tensor([token_ids])).logits[0]

    def score(self, token_ids: list[int], version: int) -> torch.Tensor:
        """log p(token t+1 | tokens <= t), [T - 1]."""
        logp = self.logits(token_ids, version).log_softmax(-1)
        return logp[:-1].gather(-1, torch.tensor(token_ids[1:])[:, None])[:, 0]

    def score_of(self, tensors: dict[str, torch.Tensor], token_ids: list[int]) -> torch.Tensor:
        """`score` under any other weights."""
        self.model.load_state_dict(tensors, strict=False)
        with torch.no_grad():
            logp = self.model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
        self._loaded = -1
        return logp[:-1].gather(-1, torch.tensor(token_ids[1:])[:, None])[:, 0]

    @torch.no_grad()
    def rescore(
        self, prompt: list[int], completion: list[int], spans: list[VersionSpan], sampling: Sampling
    ) -> torch.Tensor:
        """Logprobs [1 or 3, T_new] of `completion` under `sampling`, each token by its span's version.

        Row 0 is for top_p itself. Rows 1 and 2 are for nuclei a hair smaller and larger: where the running mass meets
        top_p within rounding, the last token of the nucleus is in or out by chance, on either side.

        A swap keeps the cache of the tokens before it, so the forward goes span by span over one growing cache.
        """
        tokens, cache, rows = prompt + completion, DynamicCache(config=self.model.config), []
        fed = 0
        for span in spans:
            self._load(span.version)
            upto = len(prompt) + span.end - 1
            out = self.model(torch.tensor([tokens[fed:upto]]), past_key_values=cache, use_cache=True)
            rows.append(out.logits[0, -(span.end - span.start) :])
            fed = upto
        logits, chosen = torch.cat(rows), torch.tensor(completion)[:, None]
        nuclei = [sampling.top_p] + [sampling.top_p + hair for hair in (-_HAIR, _HAIR) if sampling.top_p < 1.0]
        warped = [warp(logits, msgspec.structs.replace(sampling, top_p=top_p)) for top_p in nuclei]
        return torch.stack([each.log_softmax(-1).gather(-1, chosen)[:, 0] for each in warped])


def warp(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Logits [T, V] after temperature, top-k and top-p by transformers' own warpers."""
    ids = torch.zeros(logits.shape[0], 1, dtype=torch.long)
    if sampling.temperature not in (0.0, 1.0):
        logits = TemperatureLogitsWarper(sampling.temperature)(ids, logits)
    if sampling.top_k:
        logits = TopKLogitsWarper(sampling.top_k)(ids, logits)
    if sampling.top_p < 1.0:
        logits = TopPLogitsWarper(sampling.top_p)(ids, logits)
    return logits


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
