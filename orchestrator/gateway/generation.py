"""One generation request: check, seed, route and record it, whichever HTTP route it came by.

A sampling parameter that would change the distribution, but that our engines do not have, is refused and not ignored.
Otherwise the recorded logprobs would belong to another distribution than the one requested.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import Counter
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from composer_prime.errors import RequestError
from composer_prime.wire.node import Sampling
from composer_prime.wire.types import pack_ints
from orchestrator.gateway.nodes import NodeAnswer
from orchestrator.gateway.records import GenerationRecord, RolloutRecords
from orchestrator.gateway.routing import Router

POLICY = "policy"
"""The model name under which requests ask for the policy that is trained."""

TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
_MAX_STOPS = 64


class SamplingFields(msgspec.Struct, kw_only=True):
    """Sampling parameters of a request; None where it names none."""

    max_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    """0 is greedy."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    """-1 and 0 keep every token."""
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
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


def to_sampling(
    fields: SamplingFields, *, num_prompt: int, max_context: int, max_tokens: int | None = None
) -> Sampling:
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
        # Clients recognize this sentence; renderers' own check uses it too.
        raise RequestError(
            f"Prompt length ({num_prompt}) exceeds maximum context length ({max_context}) less one token for the "
            "reply: shorten the conversation or raise model.max_context",
            code="context_length_exceeded",
            param="token_ids",
        )
    if fields.seed is not None and not -(1 << 63) <= fields.seed < 1 << 63:
        raise RequestError(f"seed is {fields.seed}: send an integer of 64 bits", param="seed")
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    if len(stop) > _MAX_STOPS or "" in stop:
        raise RequestError(f"stop has {len(stop)} strings; send at most {_MAX_STOPS}, none of them empty", param="stop")
    limit = max_tokens or fields.max_tokens or room
    return Sampling(
        max_tokens=min(limit, room),
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
        model_names: tuple[str, ...],
        vocab_size: int,
        max_context: int,
    ) -> None:
        """`model_names`: accepted values of `model`. `max_context`: prompt and reply together, in tokens."""
        self.model_names = model_names
        self.max_context = max_context
        self._vocab_size = vocab_size
        self._router = router
        self._records = records
        self._order = itertools.count()
        self._under_way: Counter[str] = Counter()
        """Requests without an answer yet, by session."""

    def check_model(self, name: str) -> None:
        """Raise RequestError (404) for a model that is not served here."""
        if name not in self.model_names:
            raise RequestError(
                f"model {name!r} is not served here: ask for {' or '.join(map(repr, self.model_names))}",
                status=404,
                code="model_not_found",
                param="model",
            )

    async def generate(
        self, session: str | None, token_ids: list[int], fields: SamplingFields, *, max_tokens: int | None = None
    ) -> tuple[str, NodeAnswer]:
        """Return the request's id and its answer, recorded when `session` belongs to an open rollout.

        Raises RequestError, and what Router.generate raises.
        """
        order = next(self._order)
        request_id = f"g{order}"
        highest = max(token_ids, default=-1)
        if not 0 <= highest < self._vocab_size:
            problem = f"token id {highest} is outside the vocabulary" if token_ids else "the prompt is empty"
            raise RequestError(f"{problem}: send at least one id in 0..{self._vocab_size - 1}", param="token_ids")
        sampling = to_sampling(fields, num_prompt=len(token_ids), max_context=self.max_context, max_tokens=max_tokens)
        prompt = pack_ints(token_ids)
        if session is None:
            return request_id, await self._router.generate(request_id, request_id, prompt, sampling)
        if sampling.seed is not None:  # Parallel requests of one session draw different noise.
            turn = self._records.answered(session) + self._under_way[session]
            sampling = msgspec.structs.replace(sampling, seed=turn_seed(sampling.seed, turn))
        self._under_way[session] += 1
        try:
            answer = await self._router.generate(request_id, session, prompt, sampling)
            record = GenerationRecord(
                session=session,
                prompt_ids=np.frombuffer(prompt, np.int32),
                completion_ids=answer.token_ids,
                logprobs=answer.logprobs,
                version_spans=answer.version_spans,
                finish_reason=answer.finish_reason,
                sampling=sampling,
                node_id=answer.node_id,
                time=time.time(),
            )
            self._records.append(record, order)
        finally:
            self._under_way[session] -= 1
            if not self._under_way[session]:
                del self._under_way[session]
        return request_id, answer


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a session's turn, counted from 0.

    A rollout's seed is the same in all its turns, but the noise must not be.
    """
    if turn == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{turn}".encode(), digest_size=8).digest(), "little") >> 11
