"""Rewards for how a task was done: Composer 2's nonlinear effort penalty and auxiliary scalars (arXiv 2603.24477).

    reward = the environment's reward - penalty * C(x) + sum of weight * scalar
    C(x)   = ((1 + k x)^(1 - q) - 1) / (k (1 - q)),   log(1 + k x) / k at q = 1
    x      = weighted sum of thinking, tool-call, tool-output and final-message tokens, calls and turns

Published: the formula and the quantities in x. Inferred: their counting here. A turn's sampled tokens are thinking (its
reasoning text, tokenised), else tool-call tokens where it calls a tool or a tool answers it, else final-message tokens.
Each term is a reward part `behaviour/<name>`, already weighted, so that what the environment gave can be told apart.
Evaluation scores without it.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from composer_prime.config.orchestrator import AuxiliaryConfig, BehaviourConfig, EffortWeights
from composer_prime.errors import ConfigError, RolloutError
from orchestrator.rollouts.groups import BEHAVIOUR_PART, answers, failed_turns
from orchestrator.workers.protocol import RolloutReply

_LOG_WITHIN = 1e-9
_LACKING = 8
"""Rollouts in a row without a scalar that none of them ever had, before it counts as misspelt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What a rollout spent, in tokens and counts."""

    thinking_tokens: int = 0
    tool_call_tokens: int = 0
    tool_output_tokens: int = 0
    final_message_tokens: int = 0
    calls: int = 0
    turns: int = 0

    def weighted(self, weights: EffortWeights) -> float:
        """x."""
        return (
            weights.thinking_tokens * self.thinking_tokens
            + weights.tool_call_tokens * self.tool_call_tokens
            + weights.tool_output_tokens * self.tool_output_tokens
            + weights.final_message_tokens * self.final_message_tokens
            + weights.calls * self.calls
            + weights.turns * self.turns
        )


def effort_cost(x: float, *, k: float, q: float) -> float:
    """C(x) for x >= 0, k > 0, q >= 0: slope 1 at 0, ever flatter after it, and continuous in q at 1."""
    log = math.log1p(k * x)
    return log / k if abs(1 - q) < _LOG_WITHIN else math.expm1((1 - q) * log) / (k * (1 - q))


class Behaviour:
    """Adds the configured parts to replies. Thread-safe."""

    def __init__(self, config: BehaviourConfig, count_tokens: Callable[[str], int]) -> None:
        """`count_tokens`: of a text, by the policy's tokenizer."""
        self._config, self._count = config, count_tokens
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        """Scalars that some rollout had."""
        self._lacking: Counter[str] = Counter()
        """Rollouts that lacked a scalar, by its name."""

    def shaped(self, reply: RolloutReply) -> RolloutReply:
        """`reply` with its behaviour parts and their sum added to its reward; unchanged without a reward.

        Raises RolloutError when the rollout lacks a scalar, ConfigError when many did and none ever had it.
        """
        if reply.reward is None:
            return reply
        config, parts = self._config, {}
        if config.penalty and (config.applies_to == "all" or reply.reward > 0):
            x = self.effort(reply).weighted(config.effort)
            parts[f"{BEHAVIOUR_PART}effort"] = -config.penalty * effort_cost(x, k=config.k, q=config.q)
        for auxiliary in config.auxiliary:
            parts[BEHAVIOUR_PART + auxiliary.name] = auxiliary.weight * self._scalar(reply, auxiliary)
        total = reply.reward + sum(parts.values())
        return msgspec.structs.replace(reply, reward=total, parts=reply.parts | parts)

    def effort(self, reply: RolloutReply) -> Effort:
        thinking = calling = final = output = calls = turns = 0
        told = answers(reply.turns)
        for index, turn in enumerate(reply.turns):
            tokens = turn.num_tokens or 0
            if turn.role == "tool":
                output += tokens
            if turn.role != "assistant":
                continue
            turns += 1
            calls += max(len(turn.tool_calls), len(told[index]))
            thought = min(tokens, self._tokens(turn.reasoning))
            thinking += thought
            if turn.tool_calls or told[index]:
                calling += tokens - thought
            else:
                final += tokens - thought
        return Effort(thinking_tokens=thinking, tool_call_tokens=calling, tool_output_tokens=output,
                      final_message_tokens=final, calls=calls, turns=turns)  # fmt: skip

    def _tokens(self, text: str | None) -> int:
        if not text:
            return 0
        with self._lock:
            return self._count(text)

    def _scalar(self, reply: RolloutReply, auxiliary: AuxiliaryConfig) -> float:
        known, wanted = _scalars(reply), auxiliary.scalar
        with self._lock:
            self._seen.update(known)
            self._lacking[wanted] += wanted not in known
            misspelt = wanted not in self._seen and self._lacking[wanted] >= _LACKING
        if wanted in known:
            return known[wanted]
        told = (
            f"orchestrator.behaviour.auxiliary {auxiliary.name!r} asks for the scalar {wanted!r}, but rollout "
            f"{reply.rollout_id} has only {', '.join(sorted(known))}"
        )
        if misspelt:
            raise ConfigError(f"{told}; no rollout had it: name one of those")
        raise RolloutError(told)


def _scalars(reply: RolloutReply) -> dict[str, float]:
    told = answers(reply.turns)
    own = {
        "tool_errors": float(sum(turn.role == "tool" and turn.error is not None for turn in reply.turns)),
        "turn_error_rate": failed_turns(reply.turns) / max(len(told), 1),
        "calls": float(sum(max(len(reply.turns[index].tool_calls), len(found)) for index, found in told.items())),
        "turns": float(len(told)),
        "truncated": float(reply.truncated),
    }
    return {**reply.metrics, **reply.parts, **own}


def build_behaviour(config: BehaviourConfig, chat_folder: Path) -> Behaviour | None:
    """None where nothing is configured. Loads the tokenizer: call it from a thread."""
    if not config.active:
        return None
    from orchestrator.chat_renderer import read_tokenizer

    tokenizer = read_tokenizer(str(chat_folder))
    return Behaviour(config, lambda text: len(tokenizer.encode(text, add_special_tokens=False)))
