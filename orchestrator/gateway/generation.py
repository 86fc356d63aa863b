"""One generation request: check, seed, route and record it, whichever HTTP route it came by."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import Counter
from dataclasses import dataclass

import msgspec
import numpy as np

from composer_prime.errors import RequestError
from composer_prime.wire.node import Sampling
from composer_prime.wire.types import pack_ints
from orchestrator.gateway.http_bodies import SamplingFields, to_sampling
from orchestrator.gateway.node_answer import NodeAnswer
from orchestrator.gateway.records import GenerationRecord, RolloutRecords
from orchestrator.gateway.routing import Router

POLICY = "policy"
"""The model name under which requests ask for the policy that is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Limits from the model folder and the configuration."""

    names: tuple[str, ...]
    """Accepted values of `model`."""
    vocab_size: int
    max_context: int
    """Prompt and reply together, in tokens."""


class Generator:
    """Turns token ids and sampling parameters into a checked answer, and records it."""

    def __init__(self, router: Router, records: RolloutRecords, limits: ModelLimits) -> None:
        self.limits = limits
        self._router = router
        self._records = records
        self._order = itertools.count()
        self._under_way: Counter[str] = Counter()
        """Requests without an answer yet, by session."""

    def check_model(self, name: str) -> None:
        """Raise RequestError (404) for a model that is not served here."""
        if name not in self.limits.names:
            raise RequestError(
                f"model {name!r} is not served here: ask for {' or '.join(map(repr, self.limits.names))}",
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
        if not 0 <= highest < self.limits.vocab_size:
            problem = f"token id {highest} is outside the vocabulary" if token_ids else "the prompt is empty"
            raise RequestError(f"{problem}: send at least one id in 0..{self.limits.vocab_size - 1}", param="token_ids")
        max_context = self.limits.max_context
        sampling = to_sampling(fields, num_prompt=len(token_ids), max_context=max_context, max_tokens=max_tokens)
        prompt = pack_ints(token_ids)
        if session is None:
            return request_id, await self._router.generate(request_id, request_id, prompt, sampling)
        if sampling.seed is not None:  # Parallel requests of one session draw different noise.
            turn = self._records.answered(session) + self._under_way[session]
            sampling = msgspec.structs.replace(sampling, seed=turn_seed(sampling.seed, turn))
        self._under_way[session] += 1
        try:
            answer = await self._router.generate(request_id, session, prompt, sampling)
            self._records.append(_record(session, prompt, sampling, answer), order)
        finally:
            self._under_way[session] -= 1
            if not self._under_way[session]:
                del self._under_way[session]
        return request_id, answer


def _record(session: str, prompt: bytes, sampling: Sampling, answer: NodeAnswer) -> GenerationRecord:
    return GenerationRecord(
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


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a session's turn, counted from 0.

    A rollout's seed is the same in all its turns, but the noise must not be.
    """
    if turn == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{turn}".encode(), digest_size=8).digest(), "little") >> 11
