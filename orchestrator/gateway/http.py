"""The gateway's HTTP server on loopback, for environments, judges and people.

    POST /inference/v1/generate   token ids in, token ids and logprobs out (verifiers' training client)
    POST /v1/completions          OpenAI, prompt of token ids
    POST /v1/chat/completions     OpenAI, messages and tools
    GET  /v1/models  /health  /metrics

Bad input gets a 4xx status and OpenAI's error body. A client that closes its connection cancels its request.
"""

from __future__ import annotations

import errno
import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from composer_prime.errors import DeadlineError, EngineError, PortInUseError, RequestError
from orchestrator.gateway import http_bodies
from orchestrator.gateway.chat import ChatFormat
from orchestrator.gateway.generation import Generator
from orchestrator.gateway.http_bodies import ChatBody, CompletionBody, GenerateBody, one_prompt

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 64 << 20
_MAX_SESSION_CHARACTERS = 256
_KEEPALIVE_S = 75.0
"""Longer than workers keep idle connections, so the server never closes one under a request."""
_SHUTDOWN_S = 2.0
"""Time for replies on their way. Requests without an answer have been ended by then."""
_JSON = {"Content-Type": "application/json"}
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {
    body: msgspec.json.Decoder(body, strict=True) for body in (GenerateBody, CompletionBody, ChatBody)
}
T = TypeVar("T")


class HttpServer:
    """Checks requests, passes them to the generator and encodes the answers."""

    def __init__(
        self,
        generator: Generator,
        chat: ChatFormat,
        *,
        token: str | None,
        health: Callable[[], tuple[int, dict[str, Any]]],
        metrics: Callable[[], dict[str, Any]],
    ) -> None:
        """`token`: bearer token that every request must carry, None for no check. `health` returns status and body."""
        self.url = ""
        self._generator = generator
        self._chat = chat
        self._token = token
        self._health = health
        self._metrics = metrics
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> None:
        """Serve on `host`. Raises PortInUseError when another process holds the port."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.add_routes(
            [
                web.post("/inference/v1/generate", self._answering(self._generate)),
                web.post("/v1/completions", self._answering(self._complete)),
                web.post("/v1/chat/completions", self._answering(self._chat_complete)),
                web.get("/v1/models", self._answering(self._models)),
                web.get("/health", self._get_health),
                web.get("/metrics", self._answering(self._get_metrics)),
                web.route("*", "/{path:.*}", self._answering(self._unknown)),
            ]
        )
        runner = self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=_KEEPALIVE_S,
            shutdown_timeout=_SHUTDOWN_S,
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port, backlog=4096).start()
        except OSError as error:
            await self.close()
            if error.errno == errno.EADDRINUSE:
                raise PortInUseError(
                    f"http://{host}:{port} is held by another process: stop it, or set orchestrator.gateway_port to "
                    "another port (0 takes a free one)"
                ) from None
            raise
        self.url = f"http://{host}:{runner.addresses[0][1]}"

    async def close(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    # -- routes --------------------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await _decoded(request, GenerateBody)
        self._generator.check_model(body.model)
        if body.content_parts or body.features:
            raise RequestError("content_parts and features are for images: this model reads text only")
        if body.stream:
            raise RequestError("stream is true: /inference/v1/generate answers in one piece; send stream=false")
        request_id, answer = await self._generator.generate(_session(request), body.token_ids, body.sampling_params)
        return web.Response(body=http_bodies.generate_reply(request_id, answer), headers=_JSON)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await _decoded(request, CompletionBody)
        self._generator.check_model(body.model)
        prompt = one_prompt(body)
        if body.echo or body.stream:
            raise RequestError("echo and stream are not supported by /v1/completions: leave them out")
        request_id, answer = await self._generator.generate(_session(request), prompt, body)
        ids = answer.token_ids.tolist()
        text = await self._chat.text(ids)
        tokens = [] if body.logprobs is None else await self._chat.texts(ids)
        reply = http_bodies.completion_reply(
            request_id, body.model, len(prompt), answer, text, tokens, logprobs=body.logprobs is not None
        )
        return web.Response(body=http_bodies.encode(reply), headers=_JSON)

    async def _chat_complete(self, request: web.Request) -> web.StreamResponse:
        body = await _decoded(request, ChatBody)
        self._generator.check_model(body.model)
        _check_chat(body)
        tools = None if body.tool_choice == "none" else body.tools or None
        prompt, stop_ids = await self._chat.render(body.messages, tools)
        body.stop_token_ids = [*(body.stop_token_ids or []), *stop_ids]
        request_id, answer = await self._generator.generate(
            _session(request), prompt, body, max_tokens=body.max_completion_tokens
        )
        ids = answer.token_ids.tolist()
        message, finish_reason = await self._chat.parse(ids, prompt, tools, answer.finish_reason)
        tokens = await self._chat.texts(ids) if body.logprobs else None
        reply = http_bodies.chat_reply(request_id, body.model, len(prompt), answer, message, finish_reason, tokens)
        if not body.stream:
            return web.Response(body=http_bodies.encode(reply), headers=_JSON)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await stream.prepare(request)
        for chunk in http_bodies.chat_chunks(reply):
            await stream.write(chunk)
        await stream.write_eof()
        return stream

    async def _models(self, request: web.Request) -> web.StreamResponse:
        del request
        limits = self._generator.limits
        card = {"object": "model", "created": 0, "owned_by": "composer-prime", "max_model_len": limits.max_context}
        cards = [{"id": name, **card} for name in limits.names]
        return web.Response(body=http_bodies.encode({"object": "list", "data": cards}), headers=_JSON)

    async def _get_health(self, request: web.Request) -> web.StreamResponse:
        del request
        status, body = self._health()
        return web.Response(status=status, body=http_bodies.encode(body), headers=_JSON)

    async def _get_metrics(self, request: web.Request) -> web.StreamResponse:
        del request
        return web.Response(body=http_bodies.encode(self._metrics()), headers=_JSON)

    async def _unknown(self, request: web.Request) -> web.StreamResponse:
        raise RequestError(
            f"there is no {request.method} {request.path[:200]}: the routes are POST /inference/v1/generate, "
            "/v1/completions, /v1/chat/completions and GET /v1/models, /health, /metrics",
            status=404,
            code="not_found",
        )

    # -- around every route --------------------------------------------------------------------------------------

    def _answering(
        self, handle: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                self._authorize(request)
                return await handle(request)
            except RequestError as error:
                return _error(str(error), status=error.status, code=error.code, param=error.param)
            except DeadlineError as error:
                return _error(str(error), status=503, code="deadline")
            except EngineError as error:
                return _error(str(error), status=502, code="node_failed")

        return answer

    def _authorize(self, request: web.Request) -> None:
        if self._token is None:
            return
        header = request.headers.get("Authorization", "")
        if not hmac.compare_digest(header.encode(errors="surrogateescape"), f"Bearer {self._token}".encode()):
            raise RequestError(
                "the Authorization header does not carry this gateway's token: send `Bearer` and the value of the "
                "environment variable COMPOSER_GATEWAY_TOKEN that the orchestrator was started with",
                status=401,
                code="unauthorized",
            )


def _error(message: str, *, status: int, code: str, param: str | None = None) -> web.Response:
    body = http_bodies.error_reply(message, status=status, code=code, param=param)
    return web.Response(status=status, body=body, headers=_JSON)


async def _decoded(request: web.Request, kind: type[T]) -> T:
    """Return the request's body. Raises RequestError naming the field and what was expected there."""
    try:
        raw = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise RequestError(
            f"the body is larger than {_MAX_BODY_BYTES} bytes: shorten the prompt", status=413, code="too_large"
        ) from error
    try:
        return _DECODERS[kind].decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"the body of {len(raw)} bytes is not a valid {request.path} request: {error}; it starts with {raw[:60]!r}"
        ) from None


def _session(request: web.Request) -> str | None:
    session = request.headers.get("X-Session-ID") or request.headers.get("X-Rollout-Id")
    if session is not None and not (len(session) <= _MAX_SESSION_CHARACTERS and session.isprintable()):
        raise RequestError(
            f"X-Session-ID has {len(session)} characters, {session[:40]!a} first: send at most "
            f"{_MAX_SESSION_CHARACTERS} printable ones"
        )
    return session


def _check_chat(body: ChatBody) -> None:
    if body.tool_choice not in (None, "auto", "none"):
        raise RequestError(f"tool_choice is {body.tool_choice!r}: send 'auto' or 'none'", param="tool_choice")
    if body.top_logprobs:
        raise RequestError(
            f"top_logprobs is {body.top_logprobs}: only the sampled token's logprob is kept; leave it out",
            param="top_logprobs",
        )
    kind = (body.response_format or {}).get("type", "text")
    if kind != "text":
        raise RequestError(f"response_format has type {kind!r}: only 'text' is supported", param="response_format")
