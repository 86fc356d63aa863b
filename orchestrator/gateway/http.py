"""The gateway's HTTP server on loopback, for environments, judges and people.

    POST /inference/v1/generate   token ids in, token ids and logprobs out (verifiers' training client)
    POST /v1/chat/completions     OpenAI, messages and tools
    GET  /v1/models  /health  /metrics
    /control/...                  for the run's operator (orchestrator/swarm)

Bad input gets a 4xx status. Every exception of a route gets OpenAI's error body. A client that closes its
connection cancels its request.
"""

from __future__ import annotations

import hmac
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta

from composer_prime.errors import DeadlineError, EngineError, RequestError
from composer_prime.wire.answer import Answer
from composer_prime.wire.types import pack_ints
from orchestrator.gateway.chat import ChatFormat
from orchestrator.gateway.generation import Generator, SamplingFields, TokenId

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 64 << 20
_MAX_SESSION_CHARACTERS = 256
_BACKLOG = 4096
_SHUTDOWN_S = 2.0
"""Time for replies on their way. Requests without an answer have been ended by then."""
BodyT = TypeVar("BodyT")


class GenerateBody(msgspec.Struct, kw_only=True):
    """POST /inference/v1/generate."""

    model: str
    token_ids: list[TokenId]
    sampling_params: SamplingFields
    content_parts: Any = None
    features: Any = None
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


_GENERATE_DECODER = msgspec.json.Decoder(GenerateBody)
_CHAT_DECODER = msgspec.json.Decoder(ChatBody)


class HttpServer:
    """Checks requests, has their turns answered and encodes the answers."""

    def __init__(
        self,
        generator: Generator,
        chat: ChatFormat,
        *,
        model_names: Sequence[str],
        max_context: int,
        token: str | None,
        health: Callable[[], tuple[int, dict[str, Any]]],
        metrics: Callable[[], dict[str, Any]],
        control: Sequence[web.RouteDef],
    ) -> None:
        """`model_names`: accepted values of `model`. `max_context`: prompt and reply together, in tokens.

        `token`: bearer token that requests must carry, None for no check. `health` returns status and body. `control`:
        routes with a check of their own.
        """
        self.url = ""
        self._generator = generator
        self._chat = chat
        self._model_names = model_names
        self._max_context = max_context
        self._token = token
        self._health = health
        self._metrics = metrics
        self._control = control
        self._runner: web.AppRunner | None = None

    async def start(self, listener: socket.socket) -> None:
        """Serve at a bound socket."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._guard])
        app.add_routes(
            [
                web.post("/inference/v1/generate", self._generate),
                web.post("/v1/chat/completions", self._chat_complete),
                web.get("/v1/models", self._get_models),
                web.get("/health", self._get_health),
                web.get("/metrics", self._get_metrics),
                *self._control,
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S)
        await self._runner.setup()
        await web.SockSite(self._runner, listener, backlog=_BACKLOG).start()
        self.url = "http://{}:{}".format(*listener.getsockname())

    async def close(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    # -- routes --------------------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.Response:
        body = await _decoded(request, _GENERATE_DECODER)
        if body.content_parts or body.features:
            raise RequestError("content_parts and features are for images: this model reads text only")
        _check_no_stream(request, body.stream)
        self._check_model(body.model)
        answer = await self._generator.answer(_session(request), pack_ints(body.token_ids), body.sampling_params)
        return _reply(answer.to_json())

    async def _chat_complete(self, request: web.Request) -> web.Response:
        body = await _decoded(request, _CHAT_DECODER)
        self._check_model(body.model)
        _check_chat(body)
        _check_no_stream(request, body.stream)
        tools = None if body.tool_choice == "none" else body.tools or None
        prompt, stop_ids = await self._chat.render(body.messages, tools)
        sampling = SamplingFields(**{name: getattr(body, name) for name in SamplingFields.__struct_fields__})
        sampling.stop_token_ids = [*(body.stop_token_ids or []), *stop_ids]
        sampling.max_tokens = body.max_completion_tokens or body.max_tokens
        answer = await self._generator.answer(_session(request), pack_ints(prompt), sampling)
        token_ids = answer.ids.tolist()
        message, finish_reason = await self._chat.parse(token_ids, prompt, tools, answer.finish_reason)
        return _reply(_chat_reply(body.model, len(prompt), answer, token_ids, message, finish_reason))

    async def _get_models(self, _: web.Request) -> web.Response:
        card = {"object": "model", "created": 0, "owned_by": "composer-prime", "max_model_len": self._max_context}
        return _reply({"object": "list", "data": [{"id": name, **card} for name in self._model_names]})

    def _check_model(self, name: str) -> None:
        """Raise RequestError (404) for a model that is not served here."""
        if name not in self._model_names:
            raise RequestError(
                f"model {name!r} is not served here: ask for {' or '.join(map(repr, self._model_names))}",
                status=404,
                code="model_not_found",
                param="model",
            )

    async def _get_health(self, _: web.Request) -> web.Response:
        status, body = self._health()
        return _reply(body, status)

    async def _get_metrics(self, _: web.Request) -> web.Response:
        return _reply(self._metrics())

    # -- around every route --------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Check the token, and give every error OpenAI's body."""
        try:
            if request.path != "/health" and not request.path.startswith("/control/"):
                self._authorize(request)
            return await handler(request)
        except web.RequestPayloadError:
            # aiohttp would read on after the reply and log this as its own error. Its parser takes no further request.
            request.content.feed_eof()
            encoding = request.headers.get("Content-Encoding", "")
            reply = _error(RequestError(f"the body does not decode as its Content-Encoding says: {encoding[:40]!a}"))
            reply.force_close()
            return reply
        except Exception as error:
            return _error(_to_request_error(error, request))

    def _authorize(self, request: web.Request) -> None:
        header = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if self._token is not None and not hmac.compare_digest(header, f"Bearer {self._token}".encode()):
            raise RequestError(
                "the Authorization header does not carry this gateway's token: send `Bearer` and the value of the "
                "environment variable COMPOSER_GATEWAY_TOKEN that the orchestrator was started with",
                status=401,
                code="unauthorized",
            )


def _to_request_error(error: Exception, request: web.Request) -> RequestError:
    """Return what the client learns of a request that ended with `error`."""
    match error:
        case RequestError():
            return error
        case DeadlineError():
            return RequestError(str(error), status=503, code="deadline")
        case EngineError():
            return RequestError(str(error), status=502, code="node_failed")
        case web.HTTPNotFound() | web.HTTPMethodNotAllowed():
            return RequestError(
                f"there is no {request.method} {request.path[:200]}: the routes are POST /inference/v1/generate, "
                "/v1/chat/completions and GET /v1/models, /health, /metrics",
                status=404,
                code="not_found",
            )
    logger.error("%s %a failed", request.method, request.path[:200], exc_info=error)
    return RequestError("the gateway failed; see the orchestrator's log", status=500, code="internal")


# -- input ---------------------------------------------------------------------------------------------------------


async def _decoded(request: web.Request, decoder: msgspec.json.Decoder[BodyT]) -> BodyT:
    """Return the request's body. Raises RequestError naming the field and what was expected there."""
    try:
        raw = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise RequestError(
            f"the body is larger than {_MAX_BODY_BYTES} bytes: shorten the prompt", status=413, code="too_large"
        ) from error
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"the body of {len(raw)} bytes is not a valid {request.path} request: {error}; it starts with {raw[:60]!r}"
        ) from None


def _session(request: web.Request) -> str | None:
    session = request.headers.get("X-Session-ID")
    if session is not None and not (len(session) <= _MAX_SESSION_CHARACTERS and session.isprintable()):
        raise RequestError(
            f"X-Session-ID has {len(session)} characters, {session[:40]!a} first: send at most "
            f"{_MAX_SESSION_CHARACTERS} printable ones"
        )
    return session


def _check_no_stream(request: web.Request, stream: bool | None) -> None:
    # Nodes answer when a turn is complete, so there is nothing to send earlier.
    if stream:
        raise RequestError(f"stream is true: {request.path} answers in one piece; send stream=false", param="stream")


def _check_chat(body: ChatBody) -> None:
    if body.tool_choice not in (None, "auto", "none"):
        raise RequestError(f"tool_choice is {body.tool_choice!r}: send 'auto' or 'none'", param="tool_choice")
    for name in ("logprobs", "top_logprobs"):
        if value := getattr(body, name):
            raise RequestError(
                f"{name} is {value}: chat replies have no logprobs; leave it out, or use /inference/v1/generate",
                param=name,
            )
    kind = (body.response_format or {}).get("type", "text")
    if kind != "text":
        raise RequestError(f"response_format has type {kind!r}: only 'text' is supported", param="response_format")


# -- replies -------------------------------------------------------------------------------------------------------


def _reply(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), headers={"Content-Type": "application/json"})


def _error(error: RequestError) -> web.Response:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    body = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return _reply({"error": body}, error.status)


def _chat_reply(
    model: str,
    num_prompt: int,
    answer: Answer,
    token_ids: list[int],
    message: dict[str, Any],
    finish_reason: str,
) -> dict[str, Any]:
    """Return the body of OpenAI's chat completion; `token_ids` and `version_spans` are additions."""
    choice = {"index": 0, "message": message, "finish_reason": finish_reason, "token_ids": token_ids, "logprobs": None}
    return {
        "id": f"chatcmpl-{answer.record_id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": len(token_ids),
            "total_tokens": num_prompt + len(token_ids),
            "prompt_tokens_details": {"cached_tokens": answer.prompt_cached},
        },
        "version_spans": answer.version_spans,
    }
