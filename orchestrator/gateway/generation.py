"""One generation request: check, seed, route and record it, whichever HTTP route it came by.

A sampling parameter that would change the distribution, but that our engines do not have, is refused and not ignored.
Otherwise the recorded logprobs would belong to another distribution than the one requested.

`RolloutRecords` holds what each rollout sampled: the source of truth for training tokens. Requests of rollouts that the
orchestrator did not open leave nothing behind, so memory is bounded by the rollouts in flight. The prompts of a
conversation repeat one another, so turns that continue one another share one array of tokens.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import secrets
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from composer_prime.errors import RequestError
from composer_prime.wire.answer import Answer, context_overflow
from composer_prime.wire.node_messages import Sampling
from composer_prime.wire.types import ints
from orchestrator.gateway.routing import Router

if TYPE_CHECKING:
    from orchestrator.swarm import Audits

TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""Larger integers have no msgpack form, in which requests go to nodes."""
_MAX_STOPS = 64


class SamplingFields(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sampling parameters of a request; None where it names none."""

    max_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    """0 is greedy."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    """-1 and 0 keep every token."""
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    n: Int64 | None = None
    min_p: float | None = None
    min_tokens: Int64 | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None


_NEUTRAL: dict[str, Any] = {
    "n": 1,
    "min_p": 0,
    "min_tokens": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
}
"""Parameters that our engines do not have, with the value that switches each off."""


def to_sampling(fields: SamplingFields, *, num_prompt: int, max_context: int) -> Sampling:
    """Return the sampling parameters for a node. The reply is cut where the context ends.

    Raises RequestError for a parameter that is not supported and for a prompt that leaves no room.
    """
    for name, neutral in _NEUTRAL.items():
        value = getattr(fields, name)
        if value is not None and value != neutral:
            message = f"{name} is {value!r}, which is not supported: leave it out or send {neutral!r}"
            raise RequestError(message, param=name)
    room = max_context - num_prompt
    if room < 1:
        raise RequestError(
            f"{context_overflow(num_prompt, max_context)}: shorten the conversation or raise model.max_context",
            code="context_length_exceeded",
            param="token_ids",
        )
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    if len(stop) > _MAX_STOPS or "" in stop:
        raise RequestError(f"stop has {len(stop)} strings; send at most {_MAX_STOPS}, none of them empty", param="stop")
    return Sampling(
        max_tokens=min(fields.max_tokens or room, room),
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        top_k=max(0, fields.top_k or 0),
        seed=fields.seed,
        stop=stop,
        stop_token_ids=fields.stop_token_ids or [],
        ignore_eos=bool(fields.ignore_eos),
    )


class Generator:
    """Turns token ids and sampling parameters into a checked answer, and records it."""

    def __init__(
        self,
        router: Router,
        records: RolloutRecords,
        *,
        vocab_size: int,
        max_context: int,
        run_id: str = "",
    ) -> None:
        """`max_context`: prompt and reply together, in tokens."""
        self._seed_text = f"{run_id}/{secrets.token_hex(8)}"  # Random: a restart counts requests from 0 again.
        self._max_context = max_context
        self._vocab_size = vocab_size
        self._router = router
        self._records = records
        self._order = itertools.count()
        self._under_way: Counter[str] = Counter()
        """Requests without an answer yet, by session."""

    async def answer(self, session: str | None, prompt: bytes, fields: SamplingFields) -> Answer:
        """Return the answer to `prompt`, int32 [T], recorded when `session` belongs to an open rollout.

        Raises RequestError, and what Router.generate raises.
        """
        order = next(self._order)
        request_id = f"g{order}"
        token_ids = self._checked_ids(prompt)
        sampling = to_sampling(fields, num_prompt=len(token_ids), max_context=self._max_context)
        if sampling.seed is None:  # An audit must know what a node had to draw.
            sampling = msgspec.structs.replace(sampling, seed=_hashed_seed(f"{self._seed_text}/{request_id}"))
        if session is None:
            answer = await self._router.generate(request_id, request_id, prompt, sampling)
            return msgspec.structs.replace(answer, record_id=request_id)
        if fields.seed is not None:  # Parallel requests of one session draw different noise.
            turn = self._records.answered(session) + self._under_way[session]
            sampling = msgspec.structs.replace(sampling, seed=turn_seed(fields.seed, turn))
        self._under_way[session] += 1
        try:
            oldest = self._records.oldest_version(session)
            answer = await self._router.generate(request_id, session, prompt, sampling, oldest_version=oldest)
            answer = msgspec.structs.replace(answer, record_id=request_id)
            record = GenerationRecord(session=session, prompt_ids=token_ids, answer=answer, sampling=sampling)
            self._records.append(record, order)
        finally:
            self._under_way[session] -= 1
            if not self._under_way[session]:
                del self._under_way[session]
        return answer

    def _checked_ids(self, prompt: bytes) -> np.ndarray:
        """Return the ids of a prompt. Raises RequestError for none, and for one outside of the vocabulary."""
        token_ids = ints(prompt)
        valid_ids = f"send at least one id in 0..{self._vocab_size - 1}"
        if not len(token_ids):
            raise RequestError(f"the prompt is empty: {valid_ids}", param="token_ids")
        lowest, highest = int(token_ids.min()), int(token_ids.max())
        if not 0 <= lowest <= highest < self._vocab_size:
            outside = lowest if lowest < 0 else highest
            raise RequestError(f"token id {outside} is outside the vocabulary: {valid_ids}", param="token_ids")
        return token_ids


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a session's turn, counted from 0.

    A rollout's seed is the same in all its turns, but the noise must not be.
    """
    if turn == 0:
        return seed
    return _hashed_seed(f"{seed}/{turn}")


def _hashed_seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 11


# -- records -------------------------------------------------------------------------------------------------------

_AGENT = re.compile(r"#\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRecord:
    """One answered request: an assistant turn."""

    session: str
    """The X-Session-ID it came with: the rollout's id, or `<rollout id>#N` for the rollout's further agents."""
    prompt_ids: np.ndarray
    """int32 [T_prompt]."""
    answer: Answer
    sampling: Sampling


@dataclass(slots=True)
class _Chain:
    tokens: np.ndarray
    """int32 [T]: prompt and answer of the newest of several turns that each continue the one before."""


@dataclass(slots=True)
class _Turn:
    order: int
    chain: _Chain
    num_prompt: int
    num_new: int
    rest: GenerationRecord
    """The record without its ids, which are the chain's first `num_prompt` and the `num_new` after them."""

    def record(self) -> GenerationRecord:
        """Return the record with its prompt as a view of the chain."""
        tokens, end = self.chain.tokens, self.num_prompt + self.num_new
        answer = msgspec.structs.replace(self.rest.answer, token_ids=tokens[self.num_prompt : end].tobytes())
        return replace(self.rest, prompt_ids=tokens[: self.num_prompt], answer=answer)


_EMPTY = np.empty(0, np.int32)


class RolloutRecords:
    """Sessions of open rollouts, by rollout id."""

    def __init__(self, router: Router | None = None, audits: Audits | None = None) -> None:
        """`router` forgets the sessions of a rollout that is taken. `audits` are offered each answer that is kept."""
        self._router = router
        self._audits = audits
        self._open: dict[str, dict[str, list[_Turn]]] = {}
        self._oldest_versions: dict[str, int] = {}
        self.num_bytes = 0
        """Bytes of token ids and logprobs held."""

    def __len__(self) -> int:
        return len(self._open)

    def open(self, rollout_id: str, oldest_version: int = 0) -> None:
        """Record this rollout's generations from now on, all by policy version `oldest_version` or newer ones.

        Raises ValueError when it is open already.
        """
        if rollout_id in self._open:
            raise ValueError(f"rollout {rollout_id!r} is open already: every attempt at a rollout needs its own id")
        self._open[rollout_id] = {}
        self._oldest_versions[rollout_id] = oldest_version

    def take(self, rollout_id: str) -> list[GenerationRecord]:
        """Close a rollout, and return its records in the order in which its requests began.

        Records of several agents come together; `session` separates them. A rollout that is not open has none.
        """
        sessions = self._open.pop(rollout_id, None)
        if sessions is None:
            return []
        del self._oldest_versions[rollout_id]
        if self._router is not None:
            for session in dict.fromkeys((rollout_id, *sessions)):
                self._router.forget(session)
        turns = sorted((turn for turns in sessions.values() for turn in turns), key=lambda turn: turn.order)
        chains = {id(turn.chain): turn.chain for turn in turns}
        self.num_bytes -= sum(chain.tokens.nbytes for chain in chains.values())
        self.num_bytes -= sum(len(turn.rest.answer.logprobs) for turn in turns)
        return [turn.record() for turn in turns]

    def rollout_of(self, session: str) -> str | None:
        """Return the open rollout that `session` belongs to, or None."""
        if session in self._open:
            return session
        rollout_id = _AGENT.sub("", session)
        return rollout_id if rollout_id in self._open else None

    def oldest_version(self, session: str) -> int:
        """Return the oldest policy version that may answer this session."""
        rollout_id = self.rollout_of(session)
        return 0 if rollout_id is None else self._oldest_versions[rollout_id]

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
        chain = turns[-1].chain if turns else _Chain(_EMPTY)
        size = len(chain.tokens)
        if not np.array_equal(record.prompt_ids[:size], chain.tokens):
            chain, size = _Chain(_EMPTY), 0
        chain.tokens = np.concatenate([chain.tokens, record.prompt_ids[size:], record.answer.ids])
        self.num_bytes += 4 * (len(record.prompt_ids) - size + 2 * len(record.answer))
        rest = replace(record, prompt_ids=_EMPTY, answer=msgspec.structs.replace(record.answer, token_ids=b""))
        turns.append(_Turn(order, chain, len(record.prompt_ids), len(record.answer), rest))
        if self._audits is not None:
            self._audits.offer(record, rollout_id)
        return True
