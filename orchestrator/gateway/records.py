"""Records of what each rollout sampled: the source of truth for training tokens.

The gateway writes a record for every answered generate request of a rollout that the orchestrator opened. Requests of
other rollouts leave nothing behind, so memory is bounded by the rollouts in flight. The prompts of a conversation
repeat one another, so turns that continue one another share one array of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from composer_prime.wire.node import Sampling
from composer_prime.wire.types import VersionSpan

_AGENT = re.compile(r"#\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRecord:
    """One answered request: an assistant turn."""

    session: str
    """The X-Session-ID it came with: the rollout's id, or `<rollout id>#N` for the rollout's further agents."""
    prompt_ids: np.ndarray
    """int32 [T_prompt]."""
    completion_ids: np.ndarray
    """int32 [T_new], the stop token included when one ended the turn."""
    logprobs: np.ndarray
    """float32 [T_new], under the sampling distribution."""
    version_spans: tuple[VersionSpan, ...]
    """Positions in the completion: cover [0, T_new) without gap or overlap."""
    finish_reason: str
    """stop | length."""
    sampling: Sampling
    node_id: str
    time: float
    """When the answer came, Unix seconds."""


@dataclass(slots=True)
class _Chain:
    """Turns that each continue the one before: one sequence holds the tokens of all."""

    tokens: np.ndarray
    """int32 [T], prompt and completion of the newest turn."""


@dataclass(slots=True)
class _Turn:
    order: int
    chain: _Chain
    num_prompt: int
    num_new: int
    rest: GenerationRecord
    """The record without its ids, which are the chain's first `num_prompt` and the `num_new` after them."""

    def record(self) -> GenerationRecord:
        """Return the record with its ids as views of the chain."""
        end = self.num_prompt + self.num_new
        tokens = self.chain.tokens
        return replace(self.rest, prompt_ids=tokens[: self.num_prompt], completion_ids=tokens[self.num_prompt : end])


_EMPTY = np.empty(0, np.int32)


class RolloutRecords:
    """Sessions of open rollouts, by rollout id."""

    def __init__(self, on_taken: Callable[[str], None] = lambda session: None) -> None:
        """`on_taken(session)` is called for each session when its rollout is taken."""
        self._on_taken = on_taken
        self._open: dict[str, dict[str, list[_Turn]]] = {}
        self.num_bytes = 0
        """Bytes of token ids and logprobs held."""

    def __len__(self) -> int:
        return len(self._open)

    def open(self, rollout_id: str) -> None:
        """Record this rollout's generations from now on. Raises ValueError when it is open already."""
        if rollout_id in self._open:
            raise ValueError(f"rollout {rollout_id!r} is open already: every attempt at a rollout needs its own id")
        self._open[rollout_id] = {}

    def take(self, rollout_id: str) -> list[GenerationRecord]:
        """Close a rollout, and return its records in the order in which its requests began.

        Records of several agents come together; `session` separates them. A rollout that is not open has none.
        """
        sessions = self._open.pop(rollout_id, {})
        for session in sessions:
            self._on_taken(session)
        turns = sorted((turn for turns in sessions.values() for turn in turns), key=lambda turn: turn.order)
        chains = {id(turn.chain): turn.chain for turn in turns}
        self.num_bytes -= sum(chain.tokens.nbytes for chain in chains.values())
        self.num_bytes -= sum(turn.rest.logprobs.nbytes for turn in turns)
        return [turn.record() for turn in turns]

    def rollout_of(self, session: str) -> str | None:
        """Return the open rollout that `session` belongs to, or None."""
        if session in self._open:
            return session
        rollout_id = _AGENT.sub("", session)
        return rollout_id if rollout_id in self._open else None

    def answered(self, session: str) -> int:
        """Return how many generations are recorded for this session."""
        rollout_id = self.rollout_of(session)
        return 0 if rollout_id is None else len(self._open[rollout_id].get(session, ()))

    def append(self, record: GenerationRecord, order: int) -> bool:
        """Keep `record`, or return False when its rollout is not open. `order` tells when its request began."""
        rollout_id = self.rollout_of(record.session)
        if rollout_id is None:
            return False
        turns = self._open[rollout_id].setdefault(record.session, [])
        tokens = np.concatenate([record.prompt_ids, record.completion_ids])
        chain = turns[-1].chain if turns else None
        if chain is not None and _continues(chain.tokens, record.prompt_ids):
            self.num_bytes -= chain.tokens.nbytes
            chain.tokens = tokens
        else:
            chain = _Chain(tokens)
        rest = replace(record, prompt_ids=_EMPTY, completion_ids=_EMPTY)
        turns.append(_Turn(order, chain, len(record.prompt_ids), len(record.completion_ids), rest))
        self.num_bytes += tokens.nbytes + record.logprobs.nbytes
        return True


def _continues(tokens: np.ndarray, prompt_ids: np.ndarray) -> bool:
    return len(prompt_ids) >= len(tokens) and np.array_equal(prompt_ids[: len(tokens)], tokens)
