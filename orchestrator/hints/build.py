"""A HintStage from the configuration."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from pathlib import Path

from composer_prime.config import Config
from composer_prime.config.hints import EndpointConfig, HintsConfig
from composer_prime.costs import CostLedger
from composer_prime.errors import ConfigError
from orchestrator.hints.detect import FAILED, RuleDetector
from orchestrator.hints.distil import DocumentLimits
from orchestrator.hints.endpoint import ChatEndpoint
from orchestrator.hints.error_turn import ErrorDetector, HintGenerator
from orchestrator.hints.generate import Introspection, ModelHint, RawError, SiblingDemonstration, WrongHints
from orchestrator.hints.judge import JUDGED, JudgeDetector
from orchestrator.hints.placement import HintPlacer
from orchestrator.hints.schema import SCHEMA_KINDS
from orchestrator.hints.stage import HintStage
from orchestrator.hints.templates import Templates

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
