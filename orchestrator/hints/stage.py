"""Hints for a finished group: read this file first.

    rollouts --detectors--> error turns --layers--> texts --placer (thread)--> Sample.distillations
                  |             |             |             |
                  +-------------+-------------+-------------+--> counted by reason, never raised

The group waits here at most orchestrator.hints.timeout_s; the event loop never does: rules and tokens are worked on in
one thread, models are asked over HTTP. A turn is hinted at most once.

A HintStage from the configuration.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

import msgspec

from composer_prime.config import Config
from composer_prime.config.hints import EndpointConfig, HintsConfig
from composer_prime.errors import BudgetError, ComposerError, ConfigError, EmptyMaskError
from composer_prime.llm.endpoint import ChatEndpoint
from composer_prime.run.costs import CostLedger
from composer_prime.wire.types import HintedTurn, Sample
from orchestrator.hints.detect import FAILED, SCHEMA_KINDS, RuleDetector
from orchestrator.hints.error_turn import ErrorDetector, ErrorTurn, HintGenerator, HintRequest
from orchestrator.hints.generate import Introspection, ModelHint, RawError, SiblingDemonstration, WrongHints, cut
from orchestrator.hints.judge import JUDGED, JudgeDetector
from orchestrator.hints.placement import DocumentLimits, HintPlacer, place_hint, span_of
from orchestrator.hints.templates import Templates
from orchestrator.rollouts.groups import FinishedRollout
from orchestrator.workers.protocol import MessageRecord

logger = logging.getLogger(__name__)


Ended = tuple[FinishedRollout, list[Sample]]
_LOGGED_FIRST = 20
_EMPTY_LIMIT = 32


@dataclass(slots=True)
class _Work:
    """What is known of one rollout so far."""

    rollout: FinishedRollout
    samples: list[Sample]
    counts: Counter[str] = field(default_factory=Counter)
    turns: dict[int, MessageRecord] = field(default_factory=dict)
    """Messages that changed, by position."""

    def mark(self, error: ErrorTurn, hint: str | None) -> None:
        turn = self.rollout.turns[error.message]
        self.turns[error.message] = msgspec.structs.replace(turn, error=error.kind, hint=hint)

    def attach(self, made: HintedTurn) -> None:
        at = next(at for at, sample in enumerate(self.samples) if any(span.turn == made.turn for span in sample.turns))
        sample = self.samples[at]
        distillations = sorted([*sample.distillations, made], key=lambda each: each.start)
        self.samples[at] = msgspec.structs.replace(sample, distillations=distillations)

    def ended(self) -> Ended:
        turns = [self.turns.get(index, turn) for index, turn in enumerate(self.rollout.turns)]
        counts = {name: count for name, count in sorted(self.counts.items()) if count}
        return msgspec.structs.replace(self.rollout, turns=turns, hints=counts), self.samples


class HintStage:
    def __init__(
        self,
        config: HintsConfig,
        *,
        detectors: Sequence[ErrorDetector],
        layers: Sequence[HintGenerator],
        wrong: WrongHints | None,
        placer: HintPlacer,
        limits: DocumentLimits,
        threads: ThreadPoolExecutor,
        endpoints: Sequence[ChatEndpoint] = (),
        distil: bool = True,
    ) -> None:
        """`threads`: one thread, the renderer's. `distil`: off, hints are logged, but nothing learns from them."""
        self._config, self._detectors, self._layers, self._wrong = config, detectors, layers, wrong
        self._placer, self._limits, self._threads, self._endpoints = placer, limits, threads, endpoints
        self._distil = distil
        self._empty: list[str] = []
        """What is told of the first error turns without a token."""
        self._placed = self._logged = self._empties = 0

    async def close(self) -> None:
        await asyncio.gather(*(endpoint.close() for endpoint in self._endpoints))
        self._threads.shutdown(wait=True, cancel_futures=True)

    def metrics(self) -> dict[str, float]:
        """What the endpoints cost so far."""
        return {
            "hints/cost_usd": sum(endpoint.cost_usd for endpoint in self._endpoints),
            "hints/calls": float(sum(endpoint.calls for endpoint in self._endpoints)),
            "hints/cached": float(sum(endpoint.cached for endpoint in self._endpoints)),
        }

    async def attach(self, ended: Sequence[Ended]) -> list[Ended]:
        """The group with its hints, in the same order. What is not done in time is left out and counted.

        Raises EmptyMaskError when error turn after error turn holds no token: channel 2 would silently train nothing.
        """
        works = [_Work(rollout, list(samples)) for rollout, samples in ended]
        rollouts = [rollout for rollout, _ in ended]
        tasks = [asyncio.create_task(self._rollout(work, rollouts)) for work in works if work.samples]
        late: set[asyncio.Task[None]] = set()
        try:
            if tasks:
                _, late = await asyncio.wait(tasks, timeout=self._config.timeout_s)
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        if late:
            logger.warning("hints of %d rollouts were not done in %g s", len(late), self._config.timeout_s)
        for error in ends:
            if isinstance(error, Exception):
                raise error
        return [work.ended() for work in works]

    async def _rollout(self, work: _Work, rollouts: list[FinishedRollout]) -> None:
        siblings = [other for other in rollouts if other is not work.rollout]
        errors = await self._errors(work)
        for error in errors:
            work.mark(error, None)
            work.counts.update(("found", f"kind/{error.kind}", "skipped/late"))
        for error in errors:
            reason = await self._turn(work, error, siblings)
            work.counts["skipped/late"] -= 1
            work.counts["hinted" if reason is None else f"skipped/{reason}"] += 1

    async def _errors(self, work: _Work) -> list[ErrorTurn]:
        """In the order of turns; a turn that two detectors name counts once, as the first says."""
        found: dict[int, ErrorTurn] = {}
        for detector in self._detectors:
            try:
                errors = await detector.find(work.rollout)
            except Exception as error:
                self._note(work, f"failed/{detector.name}", error)
                continue
            for error in errors:
                if _trained(work.rollout, error):
                    found.setdefault(error.turn, error)
        return [found[turn] for turn in sorted(found)]

    async def _turn(self, work: _Work, error: ErrorTurn, siblings: list[FinishedRollout]) -> str | None:
        """Hint one turn. None when that worked, else the reason why not."""
        if work.rollout.turns[error.message].finish_reason == "length":
            return "cut"
        if self._config.weights.get(error.kind, 1.0) == 0:
            return "no_weight"
        if work.counts["hinted"] >= self._config.max_turns:
            return "max_turns"
        request = HintRequest(error=error, rollout=work.rollout, siblings=siblings)
        right = await self._right_hint(work, request)
        if right is None:
            return "no_hint"
        hint = right if self._wrong is None else self._wrong.instead_of(right, request)
        if hint is None:
            return "no_wrong_hint"
        loop = asyncio.get_running_loop()
        made = await loop.run_in_executor(self._threads, self._place, work, error, hint)
        if isinstance(made, str):
            return made
        work.mark(error, hint)
        if self._distil:
            work.attach(made)
        return None

    async def _right_hint(self, work: _Work, request: HintRequest) -> str | None:
        for layer in self._layers:
            try:
                hint = await layer.hint(request)
            except Exception as error:
                self._note(work, f"failed/{layer.name}", error)
                continue
            if hint is not None and hint.strip():
                work.counts[f"layer/{layer.name}"] += 1
                return cut(hint.strip(), self._config.max_hint_chars)
        return None

    def _place(self, work: _Work, error: ErrorTurn, hint: str) -> HintedTurn | str:
        """The turn after a context with the hint, or the reason why there is none."""
        found = span_of(work.samples, error.turn)
        turn = work.rollout.turns[error.message]
        if found is None:
            self._note_empty(
                f"rollout {work.rollout.rollout_id}, turn {error.turn} ({error.kind}): no token of it is in a sample "
                f"({turn.num_tokens} at the worker)"
            )
            return "empty_mask"
        made = place_hint(
            *found,
            placer=self._placer,
            role=_role_before(work.rollout, error.message),
            hint=hint,
            error=error,
            weight=self._config.weights.get(error.kind, 1.0),
            limits=self._limits,
        )
        self._placed += not isinstance(made, str)
        return made

    def _note_empty(self, what: str) -> None:
        self._empties += 1
        if self._empties <= _LOGGED_FIRST:
            self._empty.append(what)
            logger.error("channel 2: %s", what)
        if self._placed == 0 and self._empties >= _EMPTY_LIMIT:
            raise EmptyMaskError(
                f"none of {self._empties} error turns holds a token for channel 2, so it would train nothing: "
                f"{'; '.join(self._empty[:3])}. Every token of a turn belongs to it, thinking included: look at the "
                "environment's turns, or remove orchestrator.hints"
            )

    def _note(self, work: _Work, name: str, error: Exception) -> None:
        """A detector or generator failed: counted, and in the log the first times."""
        work.counts["over_budget" if isinstance(error, BudgetError) else name] += 1
        self._logged += 1
        if self._logged <= _LOGGED_FIRST:
            known = isinstance(error, ComposerError)
            logger.warning("hints, %s: %s", name, error if known else repr(error), exc_info=None if known else error)


def _trained(rollout: FinishedRollout, error: ErrorTurn) -> bool:
    """Whether the turn is the policy's to learn: not that of a simulated user or a judge."""
    session = rollout.turns[error.message].session
    return session >= len(rollout.sessions) or rollout.sessions[session].trainable


def _role_before(rollout: FinishedRollout, message: int) -> str:
    parent = rollout.turns[message].parent
    return "user" if parent is None else rollout.turns[parent].role


_POLICY_CALLS = 4
"""Introspection's calls in flight: they share the nodes with rollouts."""


def build_hints(
    config: Config, *, chat_folder: Path, gateway_url: str, gateway_token: str | None, run_root: Path, distil: bool
) -> HintStage | None:
    """None without [orchestrator.hints]. Loads the renderer, so call it from a thread.

    `chat_folder`: tokenizer and chat template. `gateway_url`: http://host:port/v1. `run_root`: the run
    directory, for answers that were paid for and what they cost. Raises ConfigError.
    """
    hints = config.orchestrator.hints
    if hints is None:
        return None
    from orchestrator.chat_renderer import build_renderer, read_tokenizer

    templates = Templates.load(hints.templates_file)
    check_kinds(hints, templates)
    _, renderer = build_renderer(str(chat_folder), config.model.renderer)
    placer = HintPlacer(renderer, read_tokenizer(str(chat_folder)), hints.placement)
    threads = ThreadPoolExecutor(1, thread_name_prefix="hints")
    endpoints = _endpoints(hints, gateway_url, gateway_token, run_root)
    detectors: list[ErrorDetector] = [RuleDetector(templates, hints.detect, threads)]
    detectors += [JudgeDetector(endpoints["judge"])] if "judge" in endpoints else []
    return HintStage(
        hints,
        detectors=detectors,
        layers=[_layer(name, templates, endpoints) for name in hints.layers],
        wrong=None if hints.control == "none" else WrongHints(hints.control, config.run.seed),
        placer=placer,
        limits=DocumentLimits(max_context=config.model.max_context, row_tokens=config.trainer.micro_batch_tokens),
        threads=threads,
        endpoints=list(endpoints.values()),
        distil=distil,
    )


def check_kinds(hints: HintsConfig, templates: Templates) -> None:
    """Raises ConfigError when orchestrator.hints.weights names a kind of error that nothing finds."""
    known = templates.kinds | SCHEMA_KINDS | {FAILED, JUDGED}
    unknown = sorted(set(hints.weights) - known)
    if unknown:
        near = get_close_matches(unknown[0], known, n=1)
        raise ConfigError(
            f"orchestrator.hints.weights names {unknown}, which is no kind of error"
            f"{f'; did you mean {near[0]!r}?' if near else ''} There are {', '.join(sorted(known))}"
        )


def _endpoints(
    hints: HintsConfig, gateway_url: str, gateway_token: str | None, run_root: Path
) -> dict[str, ChatEndpoint]:
    built, cache, ledger = {}, run_root / "hints", CostLedger(run_root / "costs.jsonl")
    for name, config in (("judge", hints.judge), ("llm", hints.llm if "llm" in hints.layers else None)):
        if config is not None:
            built[name] = ChatEndpoint(
                config, name=f"orchestrator.hints.{name}", cache=cache / f"{name}.jsonl", ledger=ledger
            )
    if "introspection" in hints.layers:
        policy = EndpointConfig(
            base_url=gateway_url,
            model="policy",
            max_tokens=hints.introspection_max_tokens,
            max_concurrent=_POLICY_CALLS,
            timeout_s=hints.timeout_s,
        )
        built["introspection"] = ChatEndpoint(policy, name="orchestrator.hints.introspection", key=gateway_token)
    return built


def _layer(name: str, templates: Templates, endpoints: dict[str, ChatEndpoint]) -> HintGenerator:
    match name:
        case "template":
            return templates
        case "raw_error":
            return RawError()
        case "llm":
            return ModelHint(endpoints["llm"])
        case "introspection":
            return Introspection(endpoints["introspection"])
        case _:
            return SiblingDemonstration()
