"""`composer chat RUN|MODEL`: talk to a model in the terminal or on a page, with an environment's tools where wanted.

Read conversation.py first: it has what both share. chat_page.py is the page.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import threading
from concurrent.futures import Future

import msgspec

from composer_prime.cli.chat.conversation import TOOL_ROUNDS, ChatSettings, Conversation, Entry, open_conversation
from composer_prime.config import Config
from composer_prime.console import printable
from composer_prime.errors import ComposerError, ConfigError
from composer_prime.model_source import resolve_model

_COMMANDS = """\
/new           start a new conversation
/system TEXT   set the system message and start over
/task [I]      ask task I of the environment (with --env)
/quit          leave (or Ctrl-D)"""
_TASK_DIGITS = 18


def main(words: list[str]) -> int:
    options = _parser().parse_args(words)
    config = _config(options)
    settings = ChatSettings(temperature=options.temperature, max_tokens=options.max_tokens, system=options.system)
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    try:
        if options.page:
            from composer_prime.cli.chat.chat_page import serve_page

            return asyncio.run(serve_page(config, settings, options))
        return asyncio.run(_chat(config, settings, options))
    except KeyboardInterrupt:
        print()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="composer chat",
        description="Talk to a model in the terminal, or with --page on a web page of this machine.",
        epilog=f"in the conversation:\n{_COMMANDS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="RUN|MODEL", help="run directory, model folder, Hub id, tiny, or smollm2")
    parser.add_argument("--env", help="environment whose tools the model gets: a module, its file, or a run directory")
    parser.add_argument("--task", type=int, default=0, help="task of the environment that the tools belong to")
    parser.add_argument("--temperature", type=float, default=0.7, help="sampling temperature; 0.01 is nearly greedy")
    parser.add_argument("--max-tokens", type=int, default=256, help="maximum tokens of an answer (default 256)")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--page", action="store_true", help="talk on a web page; only this machine can open it")
    parser.add_argument("--port", type=int, help="the page's port on 127.0.0.1 (default: the first free from 8410)")
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

    def __init__(self) -> None:
        self._shown = 0

    def show(self, partial: Entry | None) -> None:
        """Print what is new of an answer. Bytes of an unfinished character wait for the next token."""
        text = partial.message["content"] if partial is not None else ""
        if not text.endswith("\ufffd"):
            print(printable(text[self._shown :]), end="", flush=True)
            self._shown = len(text)

    def end(self) -> bool:
        """End the line. Return whether anything was printed of this answer."""
        printed = self._shown > 0
        self._shown = 0
        print(end="\n" if printed else "")
        return printed


async def _chat(config: Config, settings: ChatSettings, options: argparse.Namespace) -> int:
    print(f"loading {config.model.path} ...", file=sys.stderr, flush=True)
    live = LiveAnswer()
    # Others than a terminal get each answer in one piece.
    show = (lambda: live.show(talk.partial())) if sys.stdout.isatty() else (lambda: None)
    async with open_conversation(config, settings, with_tools=bool(options.env), on_token=show) as talk:
        await (talk.use_task(options.task) if options.env else talk.restart())
        if options.env:
            print(f"task: {talk.question}   (/task asks it)", file=sys.stderr)
        print("/quit leaves, /help lists the commands", file=sys.stderr)
        while (text := await _next_line()) is not None:
            if not await _obey(talk, live, options.task, text):
                break
    return 0


async def _obey(talk: Conversation, live: LiveAnswer, first_task: int, text: str) -> bool:
    """Do what `text` asks for. Return False for /quit."""
    command, _, rest = text.strip().partition(" ")
    try:
        if command == "/quit":
            return False
        if command == "/new":
            await talk.restart()
        elif command == "/system":
            talk.settings = msgspec.structs.replace(talk.settings, system=rest)
            await talk.restart()
        elif command == "/task" and talk.environment is not None:
            await talk.use_task(_task_index(rest.strip()) if rest.strip() else first_task)
            print(f"> {talk.question}")
            await _say(talk, live, talk.question)
        elif command.startswith("/"):
            print(_COMMANDS)
        elif text.strip():
            await _say(talk, live, text.strip())
    except ComposerError as error:
        live.end()
        print(f"  {error}; /new starts over", file=sys.stderr)
    return True


def _task_index(text: str) -> int:
    if not text.isdecimal() or len(text) > _TASK_DIGITS:
        raise ConfigError(f"there is no task {text[:80]!r}; give a number, counted from 0")
    return int(text)


async def _say(talk: Conversation, live: LiveAnswer, text: str) -> None:
    """Print the answer to `text`, with the calls before it."""
    calls, entry = iter(()), None
    async for entry in talk.say(text):
        message = entry.message
        if message["role"] == "tool":
            function = next(calls)["function"]
            print(printable(f"  -> {function['name']}({function['arguments']})\n  <- {message['content']}"))
            continue
        calls = iter(message.get("tool_calls") or [])
        if not live.end() and message.get("content"):
            print(printable(message["content"]))
    if entry is not None and entry.usage is not None:
        usage = entry.usage
        print(f"  [{usage['completion_tokens']} tokens, {usage['total_tokens']} in total]", file=sys.stderr)
    else:
        print(f"  [stopped after {TOOL_ROUNDS} rounds of tool calls]", file=sys.stderr)


async def _next_line() -> str | None:
    """Return a line that the user typed; None at the end of the input.

    A daemon thread waits for it: Ctrl-C must end the program, and nothing ends a thread that waits for Enter.
    """
    answer: Future[str | None] = Future()
    answer.set_running_or_notify_cancel()

    def read() -> None:
        try:
            answer.set_result(_read())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=read, name="chat-line", daemon=True).start()
    return await asyncio.wrap_future(answer)


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
