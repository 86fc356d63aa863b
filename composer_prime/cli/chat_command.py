"""`composer chat RUN|MODEL`: talk to a model in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING, Any

from composer_prime.cli.serve_command import MODEL_HELP, model_config, open_endpoint
from composer_prime.config import Config
from composer_prime.console import printable

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_REQUEST_S = 600.0
"""Longest wait for a piece of an answer."""


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="composer chat",
        description="Talk to a model. /new starts a new conversation, /quit or Ctrl-D leaves.",
        epilog="Other flags are settings, such as --model.max_context 8192.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="RUN|MODEL", help=MODEL_HELP)
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default 0.7)")
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer (default 256)")
    options, settings = parser.parse_known_args(words)
    limits = {"temperature": options.temperature, "max_tokens": options.max_tokens}
    return asyncio.run(_chat(model_config(options.model, settings), limits))


async def _chat(config: Config, limits: dict[str, Any]) -> int:
    import httpx
    from openai import AsyncOpenAI, OpenAIError

    print(f"loading {config.model.path} ...", file=sys.stderr, flush=True)
    async with (
        open_endpoint(config, 0) as (url, key),
        # Loopback: a proxy of the environment must not see the key.
        httpx.AsyncClient(trust_env=False, timeout=_REQUEST_S) as http,
        AsyncOpenAI(base_url=url, api_key=key, max_retries=0, http_client=http) as client,
    ):
        print("/quit leaves, /new starts over", file=sys.stderr)
        messages: list[dict[str, str]] = []
        while (text := await asyncio.to_thread(_next_line)) not in (None, "/quit"):
            if text == "/new":
                messages = []
            elif text:
                question = {"role": "user", "content": text}
                try:
                    answer = await _answer(client, [*messages, question], limits)
                except (OpenAIError, httpx.HTTPError) as error:
                    print(printable(str(error)), file=sys.stderr)
                else:
                    messages += [question, {"role": "assistant", "content": answer}]
    return 0


def _next_line() -> str | None:
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    line = sys.stdin.readline()
    return line.strip() if line else None


async def _answer(client: AsyncOpenAI, messages: list[Any], limits: dict[str, Any]) -> str:
    """Print the answer as it is sampled, and return its content."""
    text = ""
    stream = await client.chat.completions.create(model="policy", messages=messages, stream=True, **limits)
    async for chunk in stream:
        for choice in chunk.choices:
            content = choice.delta.content or ""
            text += content
            shown = getattr(choice.delta, "reasoning_content", None) or content
            print(printable(shown), end="", flush=True)
    print()
    return text
