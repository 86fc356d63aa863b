"""`composer chat RUN|MODEL`: talk to a model in the terminal, with an environment's tools where wanted.

what you write -> messages -> gateway (the model's own chat template) -> answer
                     ^                                                     | tool calls, with --env
                     +---- the environment's tools answer <----------------+
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from composer_prime.config import Config
from composer_prime.config.load import make_importable
from composer_prime.console import printable
from composer_prime.errors import ConfigError, EngineError
from composer_prime.model_source import resolve_model

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_COMMANDS = """\
/new           forget the conversation
/system TEXT   set the system message, and begin anew
/task [I]      ask task I of the environment (with --env)
/quit          leave; so does Ctrl-D"""
_TOOL_ROUNDS = 8
"""Answers to tool calls, one after the other, before you have the word again."""
_REQUEST_S = 600.0


def main(words: list[str]) -> int:
    options = _parser().parse_args(words)
    config = _config(options)
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    try:
        return asyncio.run(_chat(config, options))
    except KeyboardInterrupt:
        print()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="composer chat",
        description="Talk to a model in the terminal.",
        epilog=f"in the conversation:\n{_COMMANDS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="RUN|MODEL", help="run directory, model folder, Hub id, tiny, or smollm2")
    parser.add_argument("--env", help="environment whose tools the model gets: a module, or a module's file")
    parser.add_argument("--task", type=int, default=0, help="task of the environment that the tools belong to")
    parser.add_argument("--temperature", type=float, default=0.7, help="0.01 is nearly always the likeliest token")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer (default 256)")
    parser.add_argument("--system", help="system message")
    return parser


def _config(options: argparse.Namespace) -> Config:
    """Return a configuration around the model and, with --env, the environment. Raises ConfigError."""
    from composer_prime.cli.environments.try_command import trial_config

    env = options.env or "orchestrator.environments.toolsmith"  # A configuration needs a source; none is loaded.
    trial = argparse.Namespace(
        env=env, episodes=1, model=options.model, source=None, eval=False, runtime=None, task=None
    )
    config = trial_config(trial, ["--inference.threads", str(min(4, os.cpu_count() or 1))])
    resolve_model(config.model.path)
    return config


class LiveAnswer:
    """Prints an answer while it is sampled, as the model writes it: with its thoughts and calls."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """`tokenizer`: None prints nothing, so the whole answer is printed at its end."""
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = 0

    def take(self, token: int) -> None:
        """Print what `token` adds. Bytes of an unfinished character wait for the next token."""
        if self._tokenizer is None:
            return
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        if not text.endswith("\ufffd"):
            print(printable(text[self._shown :]), end="", flush=True)
            self._shown = len(text)

    def end(self) -> bool:
        """End the line. Return whether anything was printed of this answer."""
        printed = self._shown > 0
        self._tokens, self._shown = [], 0
        print(end="\n" if printed else "")
        return printed


def _live_answer(config: Config) -> LiveAnswer:
    """Return one that prints to a terminal; others get each answer in one piece."""
    from tokenizers import Tokenizer

    file = resolve_model(config.model.path) / "tokenizer.json"
    return LiveAnswer(Tokenizer.from_file(str(file)) if sys.stdout.isatty() and file.is_file() else None)


@dataclass(slots=True, kw_only=True)
class Conversation:
    url: str
    token: str
    options: argparse.Namespace
    live: LiveAnswer
    tools: Any = None
    """A ToolExecutor of the environment; None without tools."""
    messages: list[dict[str, Any]] = field(default_factory=list)

    def restart(self, system: str | None) -> None:
        self.messages = [{"role": "system", "content": system}] if system else []

    async def say(self, text: str) -> None:
        """Print the answer to `text`, with the calls before it."""
        self.messages.append({"role": "user", "content": text})
        for _ in range(_TOOL_ROUNDS):
            message, usage = await self._ask()
            self.messages.append(message)
            if not self.live.end() and message.get("content"):
                print(printable(message["content"]))
            calls = message.get("tool_calls") or []
            if not calls or self.tools is None:
                print(f"  [{usage['completion_tokens']} tokens, {usage['total_tokens']} in all]", file=sys.stderr)
                return
            for call in calls:
                function = call["function"]
                answer = await self.tools.call(function["name"], function["arguments"])
                print(printable(f"  -> {function['name']}({function['arguments']})\n  <- {answer}"))
                self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": answer})
        print(f"  [stopped after {_TOOL_ROUNDS} rounds of tool calls]", file=sys.stderr)

    async def _ask(self) -> tuple[dict[str, Any], dict[str, int]]:
        import httpx

        body = {
            "model": "policy",
            "messages": self.messages,
            "tools": self.tools.schemas if self.tools is not None else None,
            "temperature": self.options.temperature,
            "max_tokens": self.options.max_tokens,
        }
        async with httpx.AsyncClient(timeout=_REQUEST_S) as client:
            headers = {"Authorization": f"Bearer {self.token}"}
            reply = await client.post(f"{self.url}/v1/chat/completions", json=body, headers=headers)
        if reply.status_code != 200:
            raise EngineError(json.loads(reply.text)["error"]["message"])
        answer = reply.json()
        return answer["choices"][0]["message"], answer["usage"]


async def _chat(config: Config, options: argparse.Namespace) -> int:
    from composer_prime.cli.served_model import serve
    from composer_prime.run.scratch import Scratch
    from orchestrator.gateway.gateway import TOKEN_VARIABLE

    print(f"loading {config.model.path} ...", file=sys.stderr, flush=True)
    scratch = Scratch("chat")
    try:
        environment = await asyncio.to_thread(_environment, config) if options.env else None
        live = _live_answer(config)
        async with serve(config, scratch.path / "served", live.take) as (gateway, _):
            token = os.environ[TOKEN_VARIABLE]
            talk = Conversation(url=gateway.http_url, token=token, options=options, live=live)
            talk.restart(options.system)
            if environment is not None:
                print(f"task: {_use_task(talk, environment, options.task)}   (/task asks it)", file=sys.stderr)
            print("/quit leaves, /help lists the commands", file=sys.stderr)
            while (text := await _next_line()) is not None:
                if not await _obey(talk, environment, text):
                    break
    finally:
        scratch.close()
    return 0


async def _obey(talk: Conversation, environment: Any, text: str) -> bool:
    """Do what `text` asks for. Return False for /quit."""
    command, _, rest = text.strip().partition(" ")
    try:
        if command == "/quit":
            return False
        if command == "/new":
            talk.restart(talk.options.system)
        elif command == "/system":
            talk.options.system = rest or None
            talk.restart(talk.options.system)
        elif command == "/task" and environment is not None:
            talk.restart(talk.options.system)
            question = _use_task(talk, environment, int(rest) if rest.isdigit() else talk.options.task)
            print(f"> {question}")
            await talk.say(question)
        elif command.startswith("/"):
            print(_COMMANDS)
        elif text.strip():
            await talk.say(text.strip())
    except (EngineError, ConfigError) as error:
        print(f"  {error}; /new begins anew", file=sys.stderr)
    return True


async def _next_line() -> str | None:
    """Return a line that the user typed; None at the end of the input.

    A daemon thread waits for it: Ctrl-C must end the program, and nothing ends a thread that waits for Enter.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str | None] = loop.create_future()

    def give(text: str | None, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(text)
        else:
            answer.set_exception(error)

    def read() -> None:
        text, error = None, None
        try:
            text = _read()
        except Exception as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # The conversation has ended.
            loop.call_soon_threadsafe(give, text, error)

    threading.Thread(target=read, name="chat-line", daemon=True).start()
    return await answer


def _read() -> str | None:
    if sys.stdin.isatty() and sys.stdout.isatty():
        try:
            return input("> ")
        except EOFError:
            return None
    # Not through sys.stdin: a thread that waits in it holds its lock, and Python aborts when it ends meanwhile.
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as typed:
        line = typed.readline()
    return line.decode(errors="replace").rstrip("\r\n") if line else None


def _environment(config: Config) -> Any:
    """Load the environment in this process. Raises ConfigError."""
    from orchestrator.chat_renderer import build_renderer
    from orchestrator.tasks.sources import source_spec
    from orchestrator.workers.protocol import TRAIN
    from orchestrator.workers.verifiers_adapter import Environment

    make_importable(config)
    folder = str(resolve_model(config.model.path))
    chosen, _ = build_renderer(folder, config.model.renderer)
    spec = source_spec(
        config.orchestrator.source[0], model_path=folder, renderer=None, max_context=config.model.max_context
    )
    return Environment(spec, TRAIN, chosen)


def _use_task(talk: Conversation, environment: Any, index: int) -> str:
    """Give the conversation the tools of a task. Return its question. Raises ConfigError where it has no such task."""
    try:
        _, question = environment.describe(index)
        talk.tools = environment.tools(index)
    except IndexError:
        raise ConfigError(f"there is no task {index}; there are {environment.num_tasks}, counted from 0") from None
    return question
