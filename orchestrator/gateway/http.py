"""The gateway's HTTP server on loopback, for environments, judges and people.

    POST /inference/v1/generate   token ids in, token ids and logprobs out (verifiers' training client); JSON, or
                                  packed (composer_prime/wire/turns.py), with a session's new tokens only
    POST /v1/chat/completions     OpenAI, messages and tools
    GET  /v1/models  /health  /metrics
    /control/...                  for the run's operator (orchestrator/fleet)

Bad input gets a 4xx status and OpenAI's error body. A client that closes its connection cancels its request.
"""

from __future__ import annotations

import errno
import hmac
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta

from composer_prime.errors import DeadlineError, EngineError, PortInUseError, RequestError
from composer_prime.wire.turns import PACKED, PackedAnswer, Prefix
from composer_prime.wire.types import pack_floats, pack_ints
from orchestrator.gateway.answers import NodeAnswer
from orchestrator.gateway.chat import ChatFormat
from orchestrator.gateway.generation import Generator, SamplingFields, TokenId

_MAX_BODY_BYTES = 64 << 20
_MAX_SESSION_CHARACTERS = 256
_SHUTDOWN_S = 2.0
"""Time for replies on their way. Requests without an answer have been ended by then."""
BodyT = TypeVar("BodyT")
Handler = Callable[[web.Request], Awaitable[web.Response]]


class GenerateBody(msgspec.Struct, kw_only=True):
    """POST /inference/v1/generate."""

    model: str
    token_ids: list[TokenId]
    sampling_params: SamplingFields
    content_parts: Any = None
    features: Any = None
    stream: bool | None = None


class PackedGenerateBody(msgspec.Struct, kw_only=True):
    """POST /inference/v1/generate, packed: the prompt is `prefix`, which the gateway holds, and then `new_ids`."""

    model: str
    new_ids: bytes
    """int32 [T_new]."""
    sampling_params: SamplingFields
    prefix: Prefix | None = None


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
_PACKED_DECODER = msgspec.msgpack.Decoder(PackedGenerateBody)
_CHAT_DECODER = msgspec.json.Decoder(ChatBody)


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
        control: Sequence[web.RouteDef] = (),
    ) -> None:
        """`token`: bearer token that every request must carry, None for no check. `health` returns status and body.

        `control`: routes with a check of their own.
        """
        self.url = ""
        self._generator = generator
        self._chat = chat
        self._token = token
        self._health = health
        self._metrics = metrics
        self._control = control
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> None:
        """Serve on `host`. Raises PortInUseError when another process holds the port."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.add_routes(
            [
                web.post("/inference/v1/generate", self._answering(self._generate)),
                web.post("/v1/chat/completions", self._answering(self._chat_complete)),
                web.get("/v1/models", self._answering(self._get_models)),
                web.get("/health", self._get_health),
                web.get("/metrics", self._answering(self._get_metrics)),
                *self._control,
                web.route("*", "/{path:.*}", self._answering(self._refuse_path)),
            ]
        )
        runner = self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
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

    async def _generate(self, request: web.Request) -> web.Response:
        session, is_packed = _session(request), request.content_type == PACKED
        if is_packed:
            packed = await _decoded(request, _PACKED_DECODER)
            model, sampling = packed.model, packed.sampling_params
            prompt = self._generator.whole_prompt(session, packed.prefix, packed.new_ids)
            prefix = packed.prefix
        else:
            body = await _decoded(request, _GENERATE_DECODER)
            if body.content_parts or body.features:
                raise RequestError("content_parts and features are for images: this model reads text only")
            _check_no_stream(request, body.stream)
            model, sampling = body.model, body.sampling_params
            prompt, prefix = self._generator.whole_prompt(session, None, pack_ints(body.token_ids)), None
        self._generator.check_model(model)
        answer = _packed_answer(*await self._generator.generate(session, prompt, sampling, prefix=prefix))
        if is_packed or PACKED in request.headers.get("Accept", ""):
            return web.Response(body=msgspec.msgpack.encode(answer), content_type=PACKED)
        return _reply(answer.to_json())

    async def _chat_complete(self, request: web.Request) -> web.Response:
        body = await _decoded(request, _CHAT_DECODER)
        self._generator.check_model(body.model)
        _check_chat(body)
        _check_no_stream(request, body.stream)
        tools = None if body.tool_choice == "none" else body.tools or None
        prompt, stop_ids = await self._chat.render(body.messages, tools)
        body.stop_token_ids = [*(body.stop_token_ids or []), *stop_ids]
        request_id, answer = await self._generator.generate(
            _session(request), pack_ints(prompt), body, max_tokens=body.max_completion_tokens
        )
        message, finish_reason = await self._chat.parse(answer.token_ids.tolist(), prompt, tools, answer.finish_reason)
        return _reply(_chat_reply(request_id, body.model, len(prompt), answer, message, finish_reason))

    async def _get_models(self, _: web.Request) -> web.Response:
        max_context = self._generator.max_context
        card = {"object": "model", "created": 0, "owned_by": "composer-prime", "max_model_len": max_context}
        return _reply({"object": "list", "data": [{"id": name, **card} for name in self._generator.model_names]})

    async def _get_health(self, _: web.Request) -> web.Response:
        status, body = self._health()
        return _reply(body, status)

    async def _get_metrics(self, _: web.Request) -> web.Response:
        return _reply(self._metrics())

    async def _refuse_path(self, request: web.Request) -> web.Response:
        raise RequestError(
            f"there is no {request.method} {request.path[:200]}: the routes are POST /inference/v1/generate, "
            "/v1/chat/completions and GET /v1/models, /health, /metrics",
            status=404,
            code="not_found",
        )

    # -- around every route --------------------------------------------------------------------------------------

    def _answering(self, handle: Handler) -> Handler:
        async def answer(request: web.Request) -> web.Response:
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


async def _decoded(
    request: web.Request, decoder: msgspec.json.Decoder[BodyT] | msgspec.msgpack.Decoder[BodyT]
) -> BodyT:
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


def _error(message: str, *, status: int, code: str, param: str | None = None) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return _reply({"error": {"message": message, "type": kind, "param": param, "code": code}}, status)


def _packed_answer(request_id: str, answer: NodeAnswer) -> PackedAnswer:
    return PackedAnswer(
        request_id=request_id,
        token_ids=pack_ints(answer.token_ids),
        logprobs=pack_floats(answer.logprobs),
        finish_reason=answer.finish_reason,
        version_spans=list(answer.version_spans),
    )


def _chat_reply(
    request_id: str, model: str, num_prompt: int, answer: NodeAnswer, message: dict[str, Any], finish_reason: str
) -> dict[str, Any]:
    """Return the body of OpenAI's chat completion; `token_ids` and `version_spans` are additions."""
    token_ids = answer.token_ids.tolist()
    choice = {"index": 0, "message": message, "finish_reason": finish_reason, "token_ids": token_ids, "logprobs": None}
    return {
        "id": f"chatcmpl-{request_id}",
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
