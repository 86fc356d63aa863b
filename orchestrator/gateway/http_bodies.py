"""Request and reply bodies of the gateway's HTTP routes.

A sampling parameter that would change the distribution, but that our engines do not have, is refused and not ignored.
Otherwise the recorded logprobs would belong to another distribution than the one requested.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from composer_prime.errors import RequestError
from composer_prime.wire.node import Sampling
from orchestrator.gateway.node_answer import NodeAnswer

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
    """Return the token ids of a completion's single prompt. Raises RequestError."""
    prompt = body.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        if len(prompt) != 1:
            raise RequestError(f"prompt holds {len(prompt)} prompts: send one per request", param="prompt")
        prompt = prompt[0]
    try:
        return msgspec.convert(prompt, list[TokenId])
    except msgspec.ValidationError as error:
        raise RequestError(
            f"prompt is not a list of token ids ({error}): send ids, or messages to /v1/chat/completions",
            param="prompt",
        ) from None


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


_ENCODER = msgspec.json.Encoder()


class TokenLogprob(msgspec.Struct, gc=False):
    """`token` is `token_id:<id>`: renderers' client checks it."""

    token: str
    logprob: float


class Logprobs(msgspec.Struct):
    content: list[TokenLogprob]


class WeightVersion(msgspec.Struct, gc=False):
    """A version span in vLLM's form."""

    version: str
    start: int
    end: int


class GenerateChoice(msgspec.Struct):
    index: int
    token_ids: list[int]
    finish_reason: str
    logprobs: Logprobs
    weight_versions: list[WeightVersion]


class GenerateReply(msgspec.Struct):
    request_id: str
    choices: list[GenerateChoice]
    version_spans: list[Any]


def encode(body: Any) -> bytes:
    return _ENCODER.encode(body)


def generate_reply(request_id: str, answer: NodeAnswer) -> bytes:
    """Encode the reply of vLLM's /inference/v1/generate, with the version spans added."""
    ids = answer.token_ids.tolist()
    content = [TokenLogprob(f"token_id:{i}", value) for i, value in zip(ids, answer.logprobs.tolist(), strict=True)]
    versions = [WeightVersion(str(span.version), span.start, span.end) for span in answer.version_spans]
    choice = GenerateChoice(0, ids, answer.finish_reason, Logprobs(content), versions)
    return _ENCODER.encode(GenerateReply(request_id, [choice], list(answer.version_spans)))


def completion_reply(request_id: str, model: str, num_prompt: int, answer: NodeAnswer, text: str, tokens: list[str],
                     *, logprobs: bool) -> dict[str, Any]:  # fmt: skip
    """Build OpenAI's text completion; `token_ids` and `version_spans` are additions."""
    choice: dict[str, Any] = {
        "index": 0,
        "text": text,
        "finish_reason": answer.finish_reason,
        "token_ids": answer.token_ids.tolist(),
        "logprobs": None,
    }
    if logprobs:
        choice["logprobs"] = {"tokens": tokens, "token_logprobs": answer.logprobs.tolist()}
    return _openai("text_completion", "cmpl", request_id, model, num_prompt, answer, choice)


def chat_reply(request_id: str, model: str, num_prompt: int, answer: NodeAnswer, message: dict[str, Any],
               finish_reason: str, tokens: list[str] | None) -> dict[str, Any]:  # fmt: skip
    """Build OpenAI's chat completion. `tokens`: the texts for logprobs, None when no logprobs were requested."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": message,
        "finish_reason": finish_reason,
        "token_ids": answer.token_ids.tolist(),
        "logprobs": None,
    }
    if tokens is not None:
        pairs = zip(tokens, answer.token_ids.tolist(), answer.logprobs.tolist(), strict=True)
        choice["logprobs"] = {
            "content": [
                {"token": t, "token_id": i, "bytes": list(t.encode()), "logprob": lp, "top_logprobs": []}
                for t, i, lp in pairs
            ]
        }
    return _openai("chat.completion", "chatcmpl", request_id, model, num_prompt, answer, choice)


def chat_chunks(reply: dict[str, Any]) -> list[bytes]:
    """Return `reply` as server-sent events: the whole message in one delta, the finish reason, [DONE].

    Nodes answer when a turn is complete, so there is nothing to send earlier.
    """
    choice = reply["choices"][0]
    head = {key: reply[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [call | {"index": index} for index, call in enumerate(delta["tool_calls"])]
    first = {"index": 0, "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}
    last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    bodies = [head | {"choices": [first]}, head | {"choices": [last], "usage": reply["usage"]}]
    return [b"data: " + encode(body) + b"\n\n" for body in bodies] + [b"data: [DONE]\n\n"]


def error_reply(message: str, *, status: int, code: str, param: str | None) -> bytes:
    """Encode OpenAI's error body."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return _ENCODER.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def _openai(kind: str, prefix: str, request_id: str, model: str, num_prompt: int, answer: NodeAnswer,
            choice: dict[str, Any]) -> dict[str, Any]:  # fmt: skip
    num_new = len(answer.token_ids)
    return {
        "id": f"{prefix}-{request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": answer.prompt_cached},
        },
        "version_spans": [list(msgspec.structs.astuple(span)) for span in answer.version_spans],
    }
