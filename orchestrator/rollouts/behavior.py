"""Rewards for how a task was done: Composer 2's nonlinear effort penalty and auxiliary scalars (arXiv 2603.24477).

    reward = the environment's reward - penalty * C(x) + sum of weight * scalar
    C(x)   = ((1 + k x)^(1 - q) - 1) / (k (1 - q)),   log(1 + k x) / k at q = 1
    x      = tokens that the policy sampled in the rollout

Published: the formula, with an x that also weighs tool output, calls and turns. Each term is a reward part
`behavior/<name>`, already weighted, so that the environment's reward can be told apart. Evaluation scores without these
terms.
"""

from __future__ import annotations

import math
import threading
from collections import Counter

import msgspec

from composer_prime.config.orchestrator import AuxiliaryConfig, BehaviorConfig
from composer_prime.errors import ConfigError, RolloutError
from orchestrator.rollouts.groups import BEHAVIOR_PART, failed_turns, tool_replies
from orchestrator.workers.protocol import RolloutReply

_LOG_WITHIN = 1e-9
_MISSING_LIMIT = 8
"""Rollouts without a scalar that none ever had, before its name counts as misspelled."""


def effort_cost(x: float, *, k: float, q: float) -> float:
    """Return C(x) for x >= 0, k > 0, q >= 0: slope 1 at 0, ever flatter after it, and continuous in q at 1."""
    log = math.log1p(k * x)
    return log / k if abs(1 - q) < _LOG_WITHIN else math.expm1((1 - q) * log) / (k * (1 - q))


class BehaviorRewards:
    """Adds the configured parts to replies. Thread-safe."""

    def __init__(self, config: BehaviorConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        """Scalars that some rollout had."""
        self._missing: Counter[str] = Counter()
        """Rollouts without a scalar, by its name."""

    def add_to(self, reply: RolloutReply) -> RolloutReply:
        """Return `reply` with its behavior parts and their sum added to its reward; unchanged without a reward.

        Raises RolloutError when the rollout lacks a scalar, ConfigError when many did and none ever had it.
        """
        if reply.reward is None:
            return reply
        config, parts = self._config, {}
        if config.penalty:
            x = float(sum(turn.num_tokens or 0 for turn in reply.turns if turn.role == "assistant"))
            parts[f"{BEHAVIOR_PART}effort"] = -config.penalty * effort_cost(x, k=config.k, q=config.q)
        for auxiliary in config.auxiliary:
            parts[BEHAVIOR_PART + auxiliary.name] = auxiliary.weight * self._scalar(reply, auxiliary)
        total = reply.reward + sum(parts.values())
        return msgspec.structs.replace(reply, reward=total, parts=reply.parts | parts)

    def _scalar(self, reply: RolloutReply, auxiliary: AuxiliaryConfig) -> float:
        scalars, name = _scalars(reply), auxiliary.scalar
        with self._lock:
            self._seen.update(scalars)
            self._missing[name] += name not in scalars
            is_misspelled = name not in self._seen and self._missing[name] >= _MISSING_LIMIT
        if name in scalars:
            return scalars[name]
        message = (
            f"orchestrator.behavior.auxiliary {auxiliary.name!r} asks for the scalar {name!r}, but rollout "
            f"{reply.rollout_id} has only {', '.join(sorted(scalars))}"
        )
        if is_misspelled:
            raise ConfigError(f"{message}; no rollout had it: name one of those")
        raise RolloutError(message)


def _scalars(reply: RolloutReply) -> dict[str, float]:
    answers_at = tool_replies(reply.turns)
    calls = sum(max(len(reply.turns[index].tool_calls), len(indices)) for index, indices in answers_at.items())
    return {
        **reply.metrics,
        **reply.parts,
        "tool_errors": float(sum(turn.role == "tool" and turn.error is not None for turn in reply.turns)),
        "turn_error_rate": failed_turns(reply.turns) / max(len(answers_at), 1),
        "calls": float(calls),
        "turns": float(len(answers_at)),
        "truncated": float(reply.truncated),
    }
