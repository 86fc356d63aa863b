"""An auditor: a node that samples nothing, and scores the answers of other nodes again.

    AuditRequest -> versions of its tokens -> receiver installs one after another -> engine.check_draws
                 -> judge: is each token the draw of its seed, are its logprobs right, does it end where it says
                 -> AuditVerdict

The answer that waits for longest chooses the version; all that need it share passes.
It is trusted: it holds the trainer's token.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from composer_prime.errors import BadRequestError, ComposerError, EngineError, LostWeightsError
from composer_prime.run.weights import open_signed
from composer_prime.wire.node_messages import AuditRequest, AuditVerdict, NodeWelcome, PartVerdict
from composer_prime.wire.types import ints
from inference.engines.local.local_engine import LocalEngine
from inference.node import InferenceNode

logger = logging.getLogger(__name__)

_MEAN_GAP, _GREATEST_GAP = 1.5, 12.0
_MIXED_CACHE = 4.0
_FEW_TOKENS = 8
_MAX_VERSIONS = 64


@dataclass(slots=True, eq=False)
class OpenAudit:
    """An answer, and what is known of its tokens so far."""

    request: AuditRequest
    misses: np.ndarray = field(init=False)
    """float64 [T_new]."""
    logprobs: np.ndarray = field(init=False)
    """float32 [T_new], this auditor's own."""
    missing: set[int] = field(init=False)
    seconds: float = 0.0
    arrived: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        count = len(self.request)
        self.misses, self.logprobs = np.zeros(count), np.zeros(count, np.float32)
        self.missing = {span.version for span in self.request.version_spans}

    async def score(self, engine: LocalEngine, version: int) -> None:
        request, prompt = self.request, ints(self.request.prompt_ids)
        for span in request.version_spans:
            if span.version == version:
                tokens, first = np.concatenate([prompt, request.ids[: span.end]]), len(prompt) + span.start
                scored = await engine.check_draws(tokens, first, request.sampling, request.tolerance)
                self.misses[span.start : span.end], self.logprobs[span.start : span.end] = scored
        self.missing.discard(version)


def judge(audit: OpenAudit, stop: int | None) -> AuditVerdict:
    """Return the verdict on a scored answer. `stop`: after how many tokens a stop rule ends it, if one does.

    Each part is judged alone. A logprob of -inf of its own is rounding at the edge of top-k or top-p: the draw counts.
    """
    request, claimed = audit.request, audit.request.token_logprobs
    bounds = np.full(len(claimed), request.tolerance)
    spans = request.version_spans
    swap = next((span.start for span in spans if span.version != spans[0].version), len(claimed))
    bounds[swap:] *= _MIXED_CACHE
    gaps = np.abs(np.where(np.isfinite(audit.logprobs), claimed - audit.logprobs, 0.0))
    wrong = (audit.misses > bounds) | (gaps > _GREATEST_GAP * bounds)
    end_fault = _end_fault(request, len(claimed), stop, bool(wrong[-1]))
    should_end = len(claimed) if stop is None else stop
    parts = []
    counts = [count for _, count in request.sampled_by]
    for count, end in zip(counts, accumulate(counts), strict=True):
        part = slice(end - count, end)
        fault = end_fault if part.start < should_end <= end else None
        one = PartVerdict(
            tokens=count,
            wrong=np.flatnonzero(wrong[part]).tolist(),
            fault=fault or _mean_fault((gaps / bounds)[part], request.tolerance),
            gap_mean=float(gaps[part].mean()),
            gap_max=float(gaps[part].max()),
        )
        parts.append(one)
    return AuditVerdict(audit=request.audit, parts=parts, seconds=audit.seconds)


def _end_fault(request: AuditRequest, tokens: int, stop: int | None, last_is_wrong: bool) -> str | None:
    if stop is not None and stop < tokens:
        return f"it continues for {tokens - stop} tokens after a stop"
    if request.finish_reason == "stop" and stop is None:
        return f"it says that a stop ended it, but none of its {tokens} tokens is one"
    if request.finish_reason == "stop" and last_is_wrong:
        return "its stop is not what its seed draws"
    return None


def _mean_fault(gaps_in_bounds: np.ndarray, tolerance: float) -> str | None:
    mean = float(gaps_in_bounds.mean())
    if len(gaps_in_bounds) < _FEW_TOKENS or mean <= _MEAN_GAP:
        return None
    return f"its logprobs are off by {mean * tolerance:.2g} nats on average, at most {_MEAN_GAP * tolerance:.2g} may be"


class Auditor(InferenceNode):
    """Checks answers. Use once."""

    def __init__(self, *node: Any, **options: Any) -> None:
        super().__init__(*node, **options)
        if not isinstance(self._engine, LocalEngine):
            kind = type(self._engine).__name__
            raise EngineError(f"an auditor runs the local engine, got {kind}: set inference.engine")
        self._local = self._engine
        self._audits: list[OpenAudit] = []
        self._arrived = asyncio.Event()
        self._manifests: dict[int, bytes] = {}
        """Signed, by version."""

    def _handle(self, message) -> None:
        if isinstance(message, AuditRequest):
            self._audits.append(OpenAudit(message))
            self._arrived.set()
        else:
            super()._handle(message)

    def _drop_requests(self) -> None:
        self._audits.clear()

    def _learn(self, message: NodeWelcome) -> None:
        """Remember a version. It is installed when an answer needs it."""
        super()._learn(message)
        welcome, manifest = self._welcome, message.manifest
        if welcome is None or not manifest:
            return
        key = Ed25519PublicKey.from_public_bytes(welcome.verify_key)
        try:
            version = open_signed(manifest, key, run_id=welcome.run_id).version
        except ComposerError as error:
            logger.error("a version is not used: %s", error)
            return
        self._manifests[version] = manifest
        while len(self._manifests) > _MAX_VERSIONS:
            del self._manifests[min(self._manifests)]

    async def _follow_weights(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._audits:
                await self._check_version(self._next_version())

    def _next_version(self) -> int:
        in_use, missing = self._receiver.version, self._audits[0].missing
        return in_use if in_use in missing else min(missing)

    async def _check_version(self, version: int) -> None:
        try:
            await self._install(version)
        except LostWeightsError:
            raise
        except (ComposerError, OSError) as error:
            for audit in self._waiting_for(version):
                await self._fail(audit, error, f"version {version} is not available: ")
            return
        self._drop_late()
        audits = self._waiting_for(version)
        start = time.monotonic()
        outcomes = await asyncio.gather(
            *(audit.score(self._local, version) for audit in audits), return_exceptions=True
        )
        for audit, outcome in zip(audits, outcomes, strict=True):
            audit.seconds += (time.monotonic() - start) / len(audits)
            if isinstance(outcome, (ComposerError, ValueError)):
                await self._fail(audit, outcome)
            elif outcome is not None:
                raise outcome
            elif not audit.missing:
                await self._judge(audit)

    def _drop_late(self) -> None:
        for audit in [one for one in self._audits if time.monotonic() > one.arrived + one.request.timeout_s]:
            limit = f"{audit.request.timeout_s:g} s"
            self._end(audit, AuditVerdict(audit=audit.request.audit, error=f"it was not checked within {limit}"))

    def _waiting_for(self, version: int) -> list[OpenAudit]:
        return [audit for audit in self._audits if version in audit.missing]

    async def _judge(self, audit: OpenAudit) -> None:
        try:
            stop = await self._local.find_stop(audit.request.ids, audit.request.sampling)
            self._end(audit, judge(audit, stop))
        except (ComposerError, ValueError) as error:
            await self._fail(audit, error)

    async def _install(self, version: int) -> None:
        manifest, welcome = self._manifests.get(version), self._welcome
        if manifest is not None and welcome is not None:
            await self._receiver.install(manifest, welcome.verify_key, welcome.run_id)
        elif version != self._receiver.version:
            known = ", ".join(map(str, sorted(self._manifests))) or "none"
            raise ComposerError(f"it is not one of those that the run keeps ({known})")

    async def _fail(self, audit: OpenAudit, error: Exception, what: str = "") -> None:
        if isinstance(error, EngineError) and not isinstance(error, BadRequestError):
            await self._local.score([0, 0])
        retryable = isinstance(error, OSError)
        self._end(audit, AuditVerdict(audit=audit.request.audit, error=f"{what}{error}", retryable=retryable))

    def _end(self, audit: OpenAudit, answer: AuditVerdict) -> None:
        if audit in self._audits:
            self._audits.remove(audit)
            self._link.send(answer)
