"""A few small models behind an OpenAI-compatible endpoint on loopback: local teachers.

    python -m inference.model_server --model tiny/teacher_a --model tiny     prints {"url": ...} once it serves

    POST /v1/chat/completions   messages, tools -> answer, usage
    GET  /v1/models             the orchestrator asks until its teachers are there

Each model has the local engine and its own chat template.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import re
import secrets
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from composer_prime.config.inference import InferenceConfig, LocalEngineConfig
from composer_prime.console import start_log
from composer_prime.errors import BadRequestError, ComposerError, EngineError
from composer_prime.llm.reply import TOOL_CALL, read_tool_call
from composer_prime.model_source import resolve_model
from composer_prime.run.process import end_with_parent
from composer_prime.wire.node_messages import Sampling
from inference.engines.local.local_engine import LocalEngine

_THINK = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_MAX_BODY_BYTES = 64 << 20


class _Chat(msgspec.Struct, kw_only=True):
    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    temperature: float = 1.0
    max_tokens: int = 512
    seed: int | None = None


Served = dict[str, tuple[LocalEngine, Any]]
"""Engine and tokenizer by model."""


async def _chat(served: Served, request: web.Request) -> web.Response:
    body = msgspec.json.decode(await request.read(), type=_Chat)
    if body.model not in served:
        raise BadRequestError(f"there is no model {body.model!r} here, only {', '.join(served)}")
    engine, tokenizer = served[body.model]
    prompt = _prompt(tokenizer, body)
    request_id = f"chat-{secrets.token_hex(8)}"
    sampling = Sampling(
        temperature=body.temperature,
        max_tokens=body.max_tokens,
        seed=body.seed,
        stop_token_ids=[tokenizer.eos_token_id],
    )
    done = await engine.generate(request_id, prompt, sampling, request_id)
    message = _message(tokenizer.decode(done.ids.tolist(), skip_special_tokens=True))
    finish = "tool_calls" if message.get("tool_calls") and done.finish_reason == "stop" else done.finish_reason
    count = len(done)
    answer = {
        "id": request_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.model,
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count},
    }
    return web.json_response(answer)


async def _list_models(served: Served, _: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in served]})


@web.middleware
async def _with_errors(request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> web.StreamResponse:
    """Give errors OpenAI's form."""
    try:
        return await handler(request)
    except (msgspec.DecodeError, BadRequestError) as error:
        return web.json_response({"error": {"message": str(error), "type": "invalid_request_error"}}, status=400)
    except EngineError as error:
        return web.json_response({"error": {"message": str(error), "type": "server_error"}}, status=503)


async def serve_models(models: list[str], port: int) -> None:
    import torch

    config = InferenceConfig(local=LocalEngineConfig(max_batch=16, kv_cache_gib=1.0))
    torch.set_num_threads(config.threads)
    async with AsyncExitStack() as stack:
        served: Served = {}
        for name in dict.fromkeys(models):
            served[name] = await _load(name, config)
            stack.push_async_callback(served[name][0].close)
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_with_errors])
        app.router.add_post("/v1/chat/completions", partial(_chat, served))
        app.router.add_get("/v1/models", partial(_list_models, served))
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", port).start()
        print(json.dumps({"url": f"http://127.0.0.1:{runner.addresses[0][1]}/v1"}), flush=True)
        await asyncio.Event().wait()


async def _load(name: str, config: InferenceConfig) -> tuple[LocalEngine, Any]:
    from transformers import AutoConfig, AutoTokenizer

    folder = resolve_model(name)
    engine = LocalEngine(folder, config, int(AutoConfig.from_pretrained(folder).max_position_embeddings))
    await engine.start()
    return engine, AutoTokenizer.from_pretrained(folder)


def _prompt(tokenizer: Any, body: _Chat) -> list[int]:
    """Raises BadRequestError when the model's template refuses these messages."""
    try:
        text = tokenizer.apply_chat_template(
            [_with_content(message) for message in body.messages],
            tools=body.tools or None,
            add_generation_prompt=True,
            tokenize=False,
        )
    except Exception as error:  # Templates raise errors of any class.
        raise BadRequestError(f"the chat template does not take these messages: {error}") from error
    return list(tokenizer.encode(text, add_special_tokens=False))


def _message(text: str) -> dict[str, Any]:
    calls = []

    def take(block: re.Match[str]) -> str:
        if (call := read_tool_call(block[1])) is None:
            return block[0]
        calls.append(call)
        return ""

    content = TOOL_CALL.sub(take, _THINK.sub("", text))
    message: dict[str, Any] = {"role": "assistant", "content": content.strip() or None}
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for index, (name, arguments) in enumerate(calls)
        ]
    return message


def _with_content(message: dict[str, Any]) -> dict[str, Any]:
    """Return what templates need: they print None, and expect arguments as objects."""
    filled = {**message, "content": message.get("content") or ""}
    if message.get("tool_calls"):
        filled["tool_calls"] = [_decoded(call) for call in message["tool_calls"]]
    return filled


def _decoded(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", {})
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, TypeError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m inference.model_server", description=__doc__)
    parser.add_argument("--model", action="append", required=True, help="model folder, tiny, tiny/teacher_a, ...")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    options = parser.parse_args(words)
    end_with_parent()
    start_log(logging.WARNING)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        asyncio.run(serve_models(options.model, options.port))
    except (ComposerError, OSError) as error:
        print(f"model server: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
