"""`composer serve RUN|MODEL`: an endpoint on 127.0.0.1 for clients of OpenAI's and Anthropic's API, with streaming.

    client --HTTP--> Front --HTTP--> gateway <--CURVE--> node    (all but the client in this process)

The gateway answers in one piece; the front turns answers into chunks for `stream: true`. Only the
local engine tells tokens as it draws them. An answer that may call tools is one chunk: calls are
known only when they are complete. So is an answer in Anthropic's Messages or OpenAI's Responses.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_prime.cli.environments.try_command import module_configuration
from composer_prime.config import Config
from composer_prime.config.load import resolve
from composer_prime.console import tell_waits
from composer_prime.errors import PortInUseError, RequestError
from composer_prime.model_source import model_folder, resolve_model
from composer_prime.run.scratch import Scratch

if TYPE_CHECKING:
    from aiohttp import ClientSession, web

    from orchestrator.gateway.chat import ChatFormat

PORT = 8400
MODEL_HELP = "run directory, model folder, Hub id, tiny, or smollm2"
_FORWARDED = ("Authorization", "Content-Type", "Accept", "X-Session-ID")
_MAX_BODY_BYTES = 64 << 20
_AGENTS_PATHS = ("/v1/messages", "/v1/messages/count_tokens", "/v1/responses")
_TEXTS = ("reasoning_content", "content")


def model_config(model: str, settings: list[str]) -> Config:
    """Return a configuration around `model`, with `settings` such as --model.max_context 8192.

    Raises ConfigError and ModelNotFoundError.
    """
    # A configuration needs a source; none is loaded.
    module = "orchestrator.environments.toolsmith"
    threads = ["--inference.threads", str(min(4, os.cpu_count() or 1))]
    with tempfile.TemporaryDirectory(prefix="composer-serve-") as folder:
        file = module_configuration(module, model_folder(model), Path(folder), held_out=False)
        config = resolve(["@", str(file), *threads, *settings])
    resolve_model(config.model.path)
    return config


class Front:
    """Passes requests on to the gateway, and streams where clients ask for it."""

    def __init__(self, gateway_url: str, key: str, chat: ChatFormat, client: ClientSession) -> None:
        self._url = gateway_url
        self._key = key
        self._chat = chat
        self._client = client
        self._draws: dict[str, asyncio.Queue[int | None]] = {}

    def take(self, session: str, token: int, _: float) -> None:
        """Add a token that the local engine drew. A token of an unstreamed answer is dropped."""
        if (draws := self._draws.get(session)) is not None:
            draws.put_nowait(token)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        raw = await request.read()
        if request.path in _AGENTS_PATHS:
            return await self._answer_agent(request, _json_object(raw))
        body = _json_object(raw) if request.path == "/v1/chat/completions" else {}
        if body.get("stream"):
            return await self._stream(request, body)
        status, content_type, reply = await self._ask(request, request.path, raw, {})
        return web.Response(status=status, body=reply, headers={"Content-Type": content_type})

    async def _answer_agent(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Answer in the dialect of an agent's program."""
        from aiohttp import web

        dialects = await asyncio.to_thread(import_module, "composer_prime.cli.agent_dialects")
        dialect = dialects.of_path(request.path)
        key = dialect.secret(request.headers)
        if not secrets.compare_digest(key.encode(), self._key.encode()):
            return web.json_response(
                dialect.error_body("the key is not the one that composer serve printed"), status=401
            )
        try:
            chat = dialects.completion_request(dialect, body)
            if request.path.endswith("/count_tokens"):
                ids, _ = await self._chat.render(chat["messages"], chat.get("tools"))
                return web.json_response({"input_tokens": len(ids)})
        except RequestError as error:
            return web.json_response(dialect.error_body(str(error)), status=400)
        headers = {"Authorization": f"Bearer {key}"}
        status, _, reply = await self._ask(request, "/v1/chat/completions", json.dumps(chat).encode(), headers)
        if status != 200:
            said = _json_object(reply).get("error", {}).get("message") or reply[:500].decode(errors="replace")
            return web.json_response(dialect.error_body(said), status=status)
        content, kind = dialects.written(dialect, json.loads(reply), body)
        return web.Response(body=content, content_type=kind)

    async def _ask(self, request: web.Request, path: str, raw: bytes, extra: dict[str, str]) -> tuple[int, str, bytes]:
        """Return the gateway's status, content type and body."""
        headers = {name: request.headers[name] for name in _FORWARDED if name in request.headers} | extra
        async with self._client.request(request.method, self._url + path, data=raw, headers=headers) as reply:
            return reply.status, reply.headers.get("Content-Type", "application/json"), await reply.read()

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        from aiohttp import web

        session, options = secrets.token_hex(8), body.get("stream_options") or {}
        whole = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
        draws = self._draws[session] = asyncio.Queue()
        asking = asyncio.create_task(
            self._ask(request, request.path, json.dumps(whole).encode(), {"X-Session-ID": session})
        )
        asking.add_done_callback(lambda _: draws.put_nowait(None))
        stream: _Stream | None = None
        try:
            if not body.get("tools"):
                async for message in self._messages_so_far(whole, draws):
                    stream = stream or await _Stream.open(request, body.get("model"))
                    await stream.send(_held_back(message))
            status, content_type, reply = await asking
            if status != 200 and stream is None:
                return web.Response(status=status, body=reply, headers={"Content-Type": content_type})
            stream = stream or await _Stream.open(request, body.get("model"))
            await stream.end(json.loads(reply), with_usage=bool(options.get("include_usage")))
            return stream.response
        finally:
            del self._draws[session]
            asking.cancel()

    async def _messages_so_far(
        self, body: dict[str, Any], draws: asyncio.Queue[int | None]
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the unfinished message whenever tokens were drawn."""
        token_ids: list[int] = []
        prompt: list[int] | None = None
        while (token := await draws.get()) is not None:
            token_ids.append(token)
            if draws.empty():
                with suppress(RequestError):  # Not every format takes half an answer.
                    prompt = prompt or (await self._chat.render(body["messages"], None))[0]
                    yield (await self._chat.parse(token_ids, prompt, None, "length"))[0]


def _json_object(raw: bytes) -> dict[str, Any]:
    """Return the body as an object, else {}; the gateway refuses another body."""
    with suppress(ValueError, RecursionError):
        value = json.loads(raw)
        return value if isinstance(value, dict) else {}
    return {}


def _held_back(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message without what its end may lose: half a character, white space."""
    return {name: (message.get(name) or "").rstrip("\ufffd \t\r\n") for name in _TEXTS}


class _Stream:
    """Chunks of one chat completion, as server-sent events."""

    def __init__(self, response: web.StreamResponse, model: str | None) -> None:
        self.response = response
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(8)}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._sent = dict.fromkeys(_TEXTS, "")

    @classmethod
    async def open(cls, request: web.Request, model: str | None) -> _Stream:
        from aiohttp import web

        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        stream = cls(response, model)
        await stream._choice({"role": "assistant", "content": ""})
        return stream

    async def send(self, message: dict[str, Any]) -> None:
        """Send what `message` adds to what was sent, from its first visible character on.

        A chat format strips or keeps leading white space by whether a call has begun.
        """
        for name in _TEXTS:
            text, sent = (message.get(name) or "").lstrip(), self._sent[name]
            if text.startswith(sent) and text != sent:
                self._sent[name] = text
                await self._choice({name: text[len(sent) :]})

    async def end(self, reply: dict[str, Any], *, with_usage: bool) -> None:
        """Send the rest of the reply, or its error, and the end of the stream."""
        if "error" in reply:
            await self._event(reply)
        else:
            (choice,) = reply["choices"]
            await self.send(choice["message"])
            calls = choice["message"].get("tool_calls") or []
            if calls:
                await self._choice({"tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]})
            await self._choice({}, choice["finish_reason"])
            if with_usage:
                await self._event({**self._head, "choices": [], "usage": reply["usage"]})
        await self.response.write(b"data: [DONE]\n\n")
        await self.response.write_eof()

    async def _choice(self, delta: dict[str, Any], finish_reason: str | None = None) -> None:
        await self._event({**self._head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]})

    async def _event(self, data: dict[str, Any]) -> None:
        await self.response.write(b"data: " + json.dumps(data).encode() + b"\n\n")


@asynccontextmanager
async def open_endpoint(config: Config, port: int) -> AsyncIterator[tuple[str, str]]:
    """Serve `config.model` on 127.0.0.1 until the block ends. Yield the base URL and the key.

    Port 0 takes a free one. Raises PortInUseError, and what `serve` raises.
    """
    from aiohttp import ClientSession, ClientTimeout, web

    from composer_prime.cli.served_model import serve
    from composer_prime.wire.node_messages import GATEWAY_TOKEN_VARIABLE
    from orchestrator.gateway.chat import ChatFormat

    front: Front | None = None

    def take(session: str, token: int, logprob: float) -> None:
        if front is not None:
            front.take(session, token, logprob)

    with closing(Scratch("serve")) as scratch:
        async with (
            serve(config, scratch.path / "served", take) as (gateway, folder),
            ClientSession(timeout=ClientTimeout(total=None)) as client,
        ):
            chat = ChatFormat(folder, config.model.renderer)
            front = Front(gateway.http_url, os.environ[GATEWAY_TOKEN_VARIABLE], chat, client)
            app = web.Application(client_max_size=_MAX_BODY_BYTES)
            app.add_routes([web.route("*", "/{path:.*}", front.answer)])
            runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
            try:
                await runner.setup()
                try:
                    await web.TCPSite(runner, "127.0.0.1", port).start()
                except OSError as error:
                    text = f"port {port} of 127.0.0.1: {error.strerror}; choose another with --port"
                    raise PortInUseError(text) from None
                yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", os.environ[GATEWAY_TOKEN_VARIABLE]
            finally:
                await runner.cleanup()
                chat.close()


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="composer serve",
        description="Serve a model on 127.0.0.1 to clients of OpenAI's API (chat, responses) and of Anthropic's.",
        epilog="Other flags are settings, such as --model.max_context 8192 or --inference.engine vllm.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="RUN|MODEL", help=MODEL_HELP)
    parser.add_argument("--port", type=int, default=PORT, help=f"port on 127.0.0.1 (default {PORT}; 0: a free one)")
    options, settings = parser.parse_known_args(words)
    try:
        return asyncio.run(_serve(model_config(options.model, settings), options.port))
    except KeyboardInterrupt:
        return 0


async def _serve(config: Config, port: int) -> int:
    async with AsyncExitStack() as stack:
        with tell_waits(f"loading {config.model.path}"):
            url, key = await stack.enter_async_context(open_endpoint(config, port))
        print(f"OPENAI_BASE_URL={url}\nOPENAI_API_KEY={key}", flush=True)
        print(f"ANTHROPIC_BASE_URL={url.removesuffix('/v1')}\nANTHROPIC_API_KEY={key}", flush=True)
        print("model: policy; Ctrl-C ends", file=sys.stderr)
        await asyncio.Event().wait()
    return 0
