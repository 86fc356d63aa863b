"""Answered requests as the gateway records them."""

from collections.abc import Sequence

import numpy as np

from composer_prime.wire.node_messages import Answer, Sampling
from composer_prime.wire.types import VersionSpan, pack_floats, pack_ints
from orchestrator.gateway.http import GenerationRecord

_SAMPLING = Sampling(
    max_tokens=64, temperature=1.0, top_p=1.0, top_k=0, seed=1, stop=[], stop_token_ids=[], ignore_eos=False
)


def record_of(
    session: str,
    prompt: Sequence[int],
    ids: Sequence[int],
    *,
    logprobs: Sequence[float] | None = None,
    spans: Sequence[VersionSpan] | None = None,
    version: int = 0,
    finish: str = "stop",
    sampled_by: Sequence[tuple[str, int]] | None = None,
    sampling: Sampling = _SAMPLING,
    record_id: str = "",
) -> GenerationRecord:
    """One answered request, as the gateway records it."""
    count = len(ids)
    answer = Answer(
        token_ids=pack_ints(ids),
        logprobs=pack_floats(np.full(count, -0.5) if logprobs is None else logprobs),
        version_spans=list(spans) if spans is not None else [VersionSpan(0, count, version)] if count else [],
        finish_reason=finish,
        sampled_by=[("n", count)] if sampled_by is None else list(sampled_by),
        record_id=record_id,
    )
    return GenerationRecord(session=session, prompt_ids=np.array(prompt, np.int32), answer=answer, sampling=sampling)
