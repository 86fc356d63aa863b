"""`composer chat RUN|MODEL`: talk to a model in the terminal. `composer serve` is for other clients."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

from composer_prime.cli.serve_command import MODEL_HELP, model_config, open_endpoint
from composer_prime.config import Config
from composer_prime.console import printable
from composer_prime.errors import ComposerError, DeadlineError, EngineError

_COMMANDS = """\
in the conversation:
  /new     start a new conversation
  /quit    leave (or Ctrl-D)"""
_REQUEST_S = 600.0
"""Longest wait for a piece of an answer."""


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="composer chat",
        description="Talk to a model in the terminal.",
        epilog=f"{_COMMANDS}\nOther flags are settings, such as --model.max_context 8192.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="RUN|MODEL", help=MODEL_HELP)
    parser.add_argument("--temperature", type=float, default=0.7, help="sampling temperature; 0 is greedy")
    parser.add_argument("--max-tokens", type=int, default=256, help="maximum tokens of an answer (default 256)")
    parser.add_argument("--system", help="system message")
    options, settings = parser.parse_known_args(words)
    try:
        return asyncio.run(_chat(model_config(options.model, settings), options))
    except KeyboardInterrupt:
        print()
        return 0


async def _chat(config: Config, options: argparse.Namespace) -> int:
    start = [{"role": "system", "content": options.system}] if options.system else []
    print(f"loading {config.model.path} ...", file=sys.stderr, flush=True)
    async with open_endpoint(config, 0) as (url, key):
        print("/quit leaves, /new starts over", file=sys.stderr)
        messages = list(start)
        while (text := await asyncio.to_thread(_next_line)) not in (None, "/quit"):
            if text == "/new":
                messages = list(start)
            elif text:
                messages.append({"role": "user", "content": text})
                try:
                    messages.append(await _answer(url, key, messages, options))
                except ComposerError as error:
                    messages.pop()
                    print(printable(str(error)), file=sys.stderr)
    return 0


def _next_line() -> str | None:
    """Return the next line, None at the end of the input."""
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    line = sys.stdin.readline()
    return line.strip() if line else None


async def _answer(url: str, key: str, messages: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Print the answer as it is sampled, and return its message. Raises EngineError or DeadlineError."""
    import httpx

    limits = {"temperature": options.temperature, "max_tokens": options.max_tokens}
    body = {"model": "policy", "messages": messages, "stream": True, **limits}
    headers = {"Authorization": f"Bearer {key}"}
    text = ""
    try:
        async with (
            httpx.AsyncClient(timeout=_REQUEST_S, trust_env=False) as client,
            client.stream("POST", f"{url}/chat/completions", json=body, headers=headers) as reply,
        ):
            if reply.status_code != 200:
                raise EngineError(json.loads(await reply.aread())["error"]["message"])
            async for line in reply.aiter_lines():
                piece, is_content = _piece(line)
                print(printable(piece), end="", flush=True)
                text += piece if is_content else ""
    except httpx.TimeoutException:
        raise DeadlineError(f"waited {_REQUEST_S:g} s for the model's answer") from None
    except httpx.HTTPError as error:
        raise EngineError(f"the model is gone: {type(error).__name__}: {error}") from error
    print()
    return {"role": "assistant", "content": text}


def _piece(line: str) -> tuple[str, bool]:
    """Return the text that a line of the stream adds, and whether it belongs to the content. Raises EngineError."""
    data = line.removeprefix("data: ")
    if data in ("", "[DONE]"):
        return "", False
    chunk = json.loads(data)
    if "error" in chunk:
        raise EngineError(chunk["error"]["message"])
    delta = chunk["choices"][0]["delta"] if chunk["choices"] else {}
    return delta.get("reasoning_content") or delta.get("content") or "", "content" in delta
