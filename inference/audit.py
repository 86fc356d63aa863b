"""An auditor: a node that samples nothing, and scores the answers of other nodes again.

    AuditRequest -> versions of its tokens -> receiver installs one after another -> engine.check_draws
                 -> judge: is each token the draw of its seed, are its logprobs right, does it end where it says,
                    and how many tokens lean to suspect weights
                 -> AuditVerdict | AuditFailed

Half of the answers are scored under suspect weights, too: those of the oldest version that the run keeps, or the named
version's in int8. Which half is random, so no node can know. An auditor that does not compute in float32 leaves this
out: its own rounding would make honest answers lean.

It holds one version at a time. The answer that waits for longest chooses it, and all that need that version share
passes: under load there are few swaps for each answer, and none waits for ever. It is trusted: it runs on the run's
host, or elsewhere with the trainer's token.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from composer_prime.config.inference import InferenceConfig
from composer_prime.errors import BadRequestError, ComposerError, EngineError, LostWeightsError
from composer_prime.run.weights import open_signed
from composer_prime.wire.audit import AuditFailed, AuditRequest, AuditVerdict, PartVerdict
from composer_prime.wire.node import ComputeDevice, NewVersion, NodeWelcome
from composer_prime.wire.types import VersionSpan, floats, ints
from inference.engines.base import Engine
from inference.engines.local.engine import LocalEngine
from inference.engines.local.loading import device_and_dtype
from inference.link import GatewayLink
from inference.node import InferenceNode
from inference.receiver import Receiver

logger = logging.getLogger(__name__)

_MEAN_GAP, _GREATEST_GAP = 1.5, 12.0
"""Nats by which logprobs may be off on average, and at most, for each unit of the tolerance."""
_MIXED_CACHE = 4.0
"""Factor on the tolerance behind a swap: the node's cache still holds keys and values of the weights before."""
_FEW_TOKENS = 8
"""With fewer tokens the mean error says little."""
_LEANING = 0.25
"""How far from the named version's logprob to the suspect one a claimed one lies at least to count, as a share."""
_COMPARED = 0.5
"""Share of answers compared with suspect weights, which costs as much as the audit itself."""
_MAX_VERSIONS = 64
"""Manifests that are remembered."""


@dataclass(slots=True, eq=False)
class OpenAudit:
    """An answer, and what is known of its tokens so far."""

    request: AuditRequest
    older: int | None = None
    """A version before all that the answer names, which scores its first span too; None for none."""
    in_int8: bool = False
    """Whether the named version in int8 scores its first span too."""
    misses: np.ndarray = field(init=False)
    """float64 [T_new]."""
    logprobs: np.ndarray = field(init=False)
    """float32 [T_new], this auditor's own."""
    suspect_scores: tuple[np.ndarray, np.ndarray] | None = None
    """Misses and logprobs of the first span, by the suspect weights."""
    missing: set[int] = field(init=False)
    """Versions whose tokens are not scored yet."""
    seconds: float = 0.0
    arrived: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        count = len(ints(self.request.token_ids))
        self.misses, self.logprobs = np.zeros(count), np.zeros(count, np.float32)
        self.missing = {span.version for span in self.request.version_spans}
        self.compare_with(self.older)

    def compare_with(self, older: int | None) -> None:
        """Compare with another older version, because the previous one is unavailable."""
        self.missing -= {self.older}
        self.older = older
        self.missing |= set() if older is None else {older}

    async def score(self, engine: LocalEngine, version: int) -> None:
        """Score the tokens of `version`, which the engine holds. Raises what check_draws raises."""
        spans = self.request.version_spans
        for span in spans:
            if span.version == version:
                scored = await self._check(engine, span)
                self.misses[span.start : span.end], self.logprobs[span.start : span.end] = scored
        if version == self.older or (self.in_int8 and version == spans[0].version):
            self.suspect_scores = await self._check(engine, spans[0], in_int8=self.in_int8)
        self.missing.discard(version)

    async def _check(
        self, engine: LocalEngine, span: VersionSpan, *, in_int8: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        request, prompt = self.request, ints(self.request.prompt_ids)
        tokens = np.concatenate([prompt, ints(request.token_ids)[: span.end]])
        return await engine.check_draws(
            tokens, len(prompt) + span.start, len(tokens), request.sampling, request.tolerance, in_int8=in_int8
        )


def judge(audit: OpenAudit, stop: int | None) -> AuditVerdict:
    """Return the verdict on a scored answer. `stop`: after how many tokens a stop rule ends it; None where none does.

    Each part is judged alone. A wrong end is the fault of the part that should have ended it.

    A logprob of -inf of its own says that top-k or top-p removes the token: rounding may decide that at the edge, so
    its draw alone counts.
    """
    request, claimed = audit.request, floats(audit.request.logprobs)
    bounds = np.full(len(claimed), request.tolerance)
    spans = request.version_spans
    swap = next((span.start for span in spans if span.version != spans[0].version), len(claimed))
    bounds[swap:] *= _MIXED_CACHE
    gaps = np.abs(np.where(np.isfinite(audit.logprobs), claimed - audit.logprobs, 0.0))
    wrong = (audit.misses > bounds) | (gaps > _GREATEST_GAP * bounds)
    end_fault = _end_fault(request, len(claimed), stop, bool(wrong[-1]))
    should_end = len(claimed) if stop is None else stop
    parts = []
    for count, end in zip(request.parts, accumulate(request.parts), strict=True):
        part = slice(end - count, end)
        by_logprob, by_draw = _leaning(audit, claimed, part)
        fault = end_fault if part.start < should_end <= end else None
        one = PartVerdict(
            tokens=count,
            wrong=np.flatnonzero(wrong[part]).tolist(),
            fault=fault or _mean_fault((gaps / bounds)[part], request.tolerance),
            gap_mean=float(gaps[part].mean()),
            gap_max=float(gaps[part].max()),
            suspect="int8" if audit.in_int8 else "older",
            by_logprob=by_logprob,
            by_draw=by_draw,
        )
        parts.append(one)
    return AuditVerdict(audit=request.audit, parts=parts, seconds=audit.seconds)


def _leaning(audit: OpenAudit, claimed: np.ndarray, part: slice) -> tuple[tuple[int, int], tuple[int, int]]:
    """Count a part's tokens before any swap that lean to the suspect weights, and those compared: PartVerdict.by_*.

    A draw that only one of the two makes is decided by that alone. Behind a swap an honest node's cache makes its
    tokens look older.
    """
    if audit.suspect_scores is None:
        return (0, 0), (0, 0)
    suspect_misses, suspect = (scores[part] for scores in audit.suspect_scores)
    part = slice(part.start, part.start + len(suspect))
    misses, own, claimed = audit.misses[part], audit.logprobs[part], claimed[part]
    by_draw = (misses > 0.0) != (suspect_misses > 0.0)
    compared = ~by_draw & np.isfinite(own) & np.isfinite(suspect) & (own != suspect)
    shift, way = (claimed - own)[compared], (suspect - own)[compared]
    leaning = int((shift * np.sign(way) > _LEANING * np.abs(way)).sum())
    return (leaning, int(compared.sum())), (int((misses > 0.0)[by_draw].sum()), int(by_draw.sum()))


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
    """Checks answers until it is drained, refused, or without an orchestrator for too long. Use once."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        link: GatewayLink,
        receiver: Receiver,
        config: InferenceConfig,
        *,
        max_context: int | None = None,
        device: ComputeDevice | None = None,
        chance: Callable[[], float] = random.SystemRandom().random,
    ) -> None:
        """Raises EngineError unless `engine` is a local one: no other says what it would draw.

        `chance()` returns a number in [0, 1) that no node can know.
        """
        if not isinstance(engine, LocalEngine):
            raise EngineError(f"an auditor runs the local engine, got {type(engine).__name__}: set inference.engine")
        super().__init__(name, engine, link, receiver, config, max_context=max_context, device=device)
        self._local = engine
        self._chance = chance
        _, dtype = device_and_dtype(config)
        self._share = _COMPARED if dtype == torch.float32 else 0.0
        """Of answers to compare with suspect weights."""
        if not self._share:
            logger.warning("in %s this auditor finds no old or rounded weights: use --dtype float32", dtype)
        self._audits: list[OpenAudit] = []
        self._arrived = asyncio.Event()
        self._manifests: dict[int, bytes] = {}
        """Signed, by version."""
        self._unavailable: set[int] = set()
        """Versions that could not be pulled, which no answer is compared with."""

    def _handle(self, message) -> None:
        if isinstance(message, AuditRequest):
            self._audits.append(self._opened(message))
            self._arrived.set()
        else:
            super()._handle(message)

    def _drop_requests(self) -> None:
        self._audits.clear()

    def _learn(self, message: NodeWelcome | NewVersion) -> None:
        """Remember a version. It is installed when an answer was sampled from it."""
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
        self._unavailable.discard(version)
        while len(self._manifests) > _MAX_VERSIONS:
            del self._manifests[min(self._manifests)]
        self._unavailable &= self._manifests.keys()

    async def _follow_weights(self) -> None:
        """Check answers, all that wait for one version after another."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._audits:
                await self._check_version(self._next_version())

    def _opened(self, request: AuditRequest) -> OpenAudit:
        """Choose what an answer is compared with."""
        chance = self._chance()
        if chance >= self._share:
            return OpenAudit(request)
        oldest = self._oldest(request) if chance < self._share / 2 else None
        return OpenAudit(request, oldest, in_int8=oldest is None)

    def _oldest(self, request: AuditRequest) -> int | None:
        """Return the oldest available version; None unless it is older than all that the answer names."""
        named = min((span.version for span in request.version_spans), default=0)
        return min((v for v in self._manifests.keys() - self._unavailable if v < named), default=None)

    def _next_version(self) -> int:
        """Return what the answer that waits for longest needs, the version in use first."""
        in_use, missing = self._receiver.version, self._audits[0].missing
        return in_use if in_use in missing else min(missing)

    async def _check_version(self, version: int) -> None:
        try:
            await self._install(version)
        except LostWeightsError:
            raise
        except (ComposerError, OSError) as error:
            for audit in self._waiting_for(version):
                await self._go_without(audit, version, error)
            return
        self._unavailable.discard(version)
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
        """Spend no time on what nobody waits for any more."""
        for audit in [one for one in self._audits if time.monotonic() > one.arrived + one.request.timeout_s]:
            limit = f"{audit.request.timeout_s:g} s (orchestrator.audit.timeout_s)"
            self._end(audit, AuditFailed(audit=audit.request.audit, error=f"it was not checked within {limit}"))

    def _waiting_for(self, version: int) -> list[OpenAudit]:
        return [audit for audit in self._audits if version in audit.missing]

    async def _go_without(self, audit: OpenAudit, version: int, error: Exception) -> None:
        """Compare an answer with another version than an unavailable one. Fail it if it names that one."""
        if version != audit.older:
            await self._fail(audit, error, f"version {version} is not available: ")
            return
        self._unavailable.add(version)  # Pruned, or its source is busy: answers that name it still ask for it.
        audit.compare_with(self._oldest(audit.request))
        if not audit.missing:
            await self._judge(audit)

    async def _judge(self, audit: OpenAudit) -> None:
        try:
            stop = await self._local.find_stop(ints(audit.request.token_ids), audit.request.sampling)
            self._end(audit, judge(audit, stop))
        except (ComposerError, ValueError) as error:
            await self._fail(audit, error)

    async def _install(self, version: int) -> None:
        """Raises what Receiver.install raises, and ComposerError for a version that was never announced."""
        manifest, welcome = self._manifests.get(version), self._welcome
        if manifest is not None and welcome is not None:
            await self._receiver.install(manifest, welcome.verify_key, welcome.run_id)
        elif version != self._receiver.version:
            known = ", ".join(map(str, sorted(self._manifests))) or "none"
            raise ComposerError(f"it is not one of those that the run keeps ({known})")

    async def _fail(self, audit: OpenAudit, error: Exception, what: str = "") -> None:
        """Give an answer up. Raises EngineError when the engine is dead, so that other auditors get all answers."""
        if isinstance(error, EngineError) and not isinstance(error, BadRequestError):
            await self._local.score([0, 0])
        retryable = isinstance(error, OSError)
        self._end(audit, AuditFailed(audit=audit.request.audit, error=f"{what}{error}", retryable=retryable))

    def _end(self, audit: OpenAudit, answer: AuditVerdict | AuditFailed) -> None:
        """Send an outcome, unless the connection was lost meanwhile: the orchestrator then asks again."""
        if audit in self._audits:
            self._audits.remove(audit)
            self._link.send(answer)
