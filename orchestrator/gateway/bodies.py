"""Request bodies of the gateway's HTTP routes, and how their sampling parameters become a node's.

A parameter that would change the distribution and that engines here do not have is refused, not ignored: the recorded
logprobs would not be those of what was asked for.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from composer_prime.errors import RequestError
from composer_prime.wire.node import Sampling

TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
_MAX_STOPS = 64


class SamplingFields(msgspec.Struct, kw_only=True):
    """What a caller may say about sampling; None where it said nothing."""

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


class GenerateBody(msgspec.Struct, kw_only=True):
    """POST /inference/v1/generate."""

    model: str
    token_ids: list[TokenId]
    sampling_params: SamplingFields
    content_parts: Any = None
    features: Any = None
    stream: bool | None = None


class CompletionBody(SamplingFields, kw_only=True):
    """POST /v1/completions with a prompt of token ids."""

    model: str
    prompt: list[Any] | str
    logprobs: int | None = None
    echo: bool | None = None
    stream: bool | None = None


class ChatBody(SamplingFields, kw_only=True):
    """POST /v1/chat/completions."""

    model: str
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_completion_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    stream: bool | None = None


def one_prompt(body: CompletionBody) -> list[int]:
    """The token ids of a completion's single prompt. Raises RequestError."""
    prompt = body.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        if len(prompt) != 1:
            raise RequestError(f"prompt holds {len(prompt)} prompts: send one a request", param="prompt")
        prompt = prompt[0]
    try:
        return msgspec.convert(prompt, list[TokenId])
    except msgspec.ValidationError as error:
        raise RequestError(
            f"prompt is not a list of token ids ({error}): send ids, or messages to /v1/chat/completions",
            param="prompt",
        ) from None


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
}
"""Parameters that engines here do not have, with the value that means `off`."""


def sampling(fields: SamplingFields, *, num_prompt: int, max_context: int, max_tokens: int | None = None) -> Sampling:
    """What a node is asked to do. The reply is cut where the context ends.

    Raises RequestError for a parameter that cannot be honoured and for a prompt that leaves no room.
    """
    for name, neutral in _NEUTRAL.items():
        value = getattr(fields, name)
        if value is not None and value not in neutral:
            raise RequestError(f"{name} is {value!r}, which is not supported: leave it out or send {neutral[0]!r}",
                               param=name)  # fmt: skip
    room = max_context - num_prompt
    if room < 1:
        # Clients recognise this sentence, which is also what renderers' own check says.
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
    asked = max_tokens or fields.max_tokens or room
    return Sampling(
        max_tokens=min(asked, room),
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        top_k=max(0, fields.top_k or 0),
        seed=fields.seed,
        stop=stop,
        stop_token_ids=fields.stop_token_ids or [],
        ignore_eos=bool(fields.ignore_eos),
    )
