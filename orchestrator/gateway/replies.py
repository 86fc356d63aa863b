"""Reply bodies of the gateway's HTTP routes, as JSON bytes."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from orchestrator.gateway.answers import Answer

_ENCODER = msgspec.json.Encoder()


class TokenLogprob(msgspec.Struct, gc=False):
    """`token` is `token_id:<id>`, which is what renderers' client checks."""

    token: str
    logprob: float


class Logprobs(msgspec.Struct):
    content: list[TokenLogprob]


class WeightVersion(msgspec.Struct, gc=False):
    """vLLM's form of a version span."""

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


def generate_reply(request_id: str, answer: Answer) -> bytes:
    """What vLLM's /inference/v1/generate answers, with the version spans."""
    ids = answer.token_ids.tolist()
    content = [TokenLogprob(f"token_id:{i}", value) for i, value in zip(ids, answer.logprobs.tolist(), strict=True)]
    versions = [WeightVersion(str(span.version), span.start, span.end) for span in answer.version_spans]
    choice = GenerateChoice(0, ids, answer.finish_reason, Logprobs(content), versions)
    return _ENCODER.encode(GenerateReply(request_id, [choice], list(answer.version_spans)))


def completion_reply(request_id: str, model: str, num_prompt: int, answer: Answer, text: str, tokens: list[str],
                     *, logprobs: bool) -> dict[str, Any]:  # fmt: skip
    """OpenAI's text completion; `token_ids` and `version_spans` are additions."""
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


def chat_reply(request_id: str, model: str, num_prompt: int, answer: Answer, message: dict[str, Any],
               finish_reason: str, tokens: list[str] | None) -> dict[str, Any]:  # fmt: skip
    """OpenAI's chat completion. `tokens` are the texts for logprobs, None when these were not asked for."""
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
    """`reply` as server-sent events: the whole message in one delta, the finish reason, [DONE].

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
    """OpenAI's error body."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return _ENCODER.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def _openai(kind: str, prefix: str, request_id: str, model: str, num_prompt: int, answer: Answer,
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
