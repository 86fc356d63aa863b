"""`composer chat --page`: the page of `composer view` with a conversation, on loopback.

    browser --GET /api/chat?seen=N--> waits until something changed --> the whole conversation
            --POST /api/chat/say|stop|new|task|settings-->

The HTTP threads only check and pass on; the event loop that serves the model has the conversation. A conversation
runs a model and an environment's tools, so it takes more than a loopback host: the key of the printed address in every
request, and in a POST the page's own origin and JSON, which no page elsewhere can send unasked.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import logging
import secrets
import sys
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec

from composer_prime.cli.chat.conversation import TOOL_ROUNDS, ChatSettings, Conversation, Entry, open_conversation
from composer_prime.cli.view_command import listen
from composer_prime.config import Config
from composer_prime.errors import ComposerError, ConfigError, DeadlineError
from composer_prime.view.server import PageHandler, ViewServer
from composer_prime.view.workspace import Workspace

logger = logging.getLogger(__name__)

_PATH = "/api/chat"
_UNCHANGED_S = 20.0
"""Longest wait for a change, after which the page asks again."""
_ACTION_S = 300.0
"""Longest wait for an action; a task may start a sandbox."""
_STOP_S = 30.0
"""Longest wait for an answer to stop; a tool may clean up."""
_MAX_BODY_BYTES = 1 << 20


class ChangeCount:
    """Counts changes of the conversation, and wakes requests for the next one. Belongs to the event loop."""

    def __init__(self) -> None:
        self.number = 0
        self._next = asyncio.Event()

    def add(self) -> None:
        self.number += 1
        self._next.set()
        self._next = asyncio.Event()

    async def after(self, seen: int) -> None:
        """Return when there is a change that `seen` does not count, or after _UNCHANGED_S."""
        if seen == self.number:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._next.wait(), _UNCHANGED_S)


class SayBody(msgspec.Struct, forbid_unknown_fields=True):
    text: str


class TaskBody(msgspec.Struct, forbid_unknown_fields=True):
    index: int
    ask: bool = False


class PageConversation:
    """The conversation as the page sees it. Every method runs on the event loop."""

    def __init__(
        self, talk: Conversation, changes: ChangeCount, facts: dict[str, Any], stop_s: float = _STOP_S
    ) -> None:
        """`facts`: what never changes, for the page. `stop_s`: longest wait for an answer to stop."""
        self._talk = talk
        self._changes = changes
        self._facts = facts
        self._stop_s = stop_s
        self._acting = asyncio.Lock()
        self._answering: asyncio.Task[None] | None = None
        self._began = 0.0
        self._problem: str | None = None
        self._unsaid = ""
        """A question that got no answer: the page offers it again."""
        self._actions = {
            "say": self.say,
            "stop": self.stop,
            "new": self.new,
            "task": self.task,
            "settings": self.change,
        }

    async def state(self, seen: int) -> dict[str, Any]:
        """Return the conversation once it differs from what `seen` counts."""
        await self._changes.after(seen)
        talk, answering = self._talk, self._answering is not None
        turns = [self._turn(entry) for entry in talk.entries]
        if answering and (partial := talk.partial()) is not None:
            turns.append(self._turn(replace(partial, finish_reason=None)))
        usage = next((entry.usage for entry in reversed(talk.entries) if entry.usage), None)
        return {
            "seen": self._changes.number,
            **self._facts,
            "settings": talk.settings,
            "task": talk.task,
            "question": talk.question,
            "tools": talk.tools.schemas if talk.tools is not None else [],
            "turns": turns,
            "used_tokens": usage["total_tokens"] if usage else None,
            "doing": talk.doing if answering else "",
            "for_s": asyncio.get_running_loop().time() - self._began if answering else None,
            "problem": self._problem,
            "unsaid": self._unsaid,
        }

    @staticmethod
    def _turn(entry: Entry) -> dict[str, Any]:
        """Return a message as rollouts hold it, with its tokens."""
        message, logprobs = entry.message, [logprob for *_, logprob in entry.sampled]
        ones = [1] * len(logprobs)
        texts = [text for _, text, _ in entry.sampled]
        tokens = {"texts": texts, "sampled": ones, "mask": ones, "logprobs": logprobs}
        return {
            "role": message["role"],
            "text": message.get("content") or "",
            "reasoning": message.get("reasoning_content"),
            "tool_calls": [call["function"] for call in message.get("tool_calls") or []],
            "error": entry.error,
            "finish_reason": entry.finish_reason,
            "token_count": entry.usage["completion_tokens"] if entry.usage else len(logprobs) or None,
            "surprisal": abs(sum(logprobs)) / len(logprobs) if logprobs else None,
            "tokens": tokens if logprobs else None,
        }

    async def act(self, name: str, body: bytes) -> dict[str, Any]:
        """Do what a POST asks for. Raises ConfigError for what cannot be done."""
        action = self._actions.get(name)
        if action is None:
            raise ConfigError(f"there is no action {name!r}: the actions are {', '.join(self._actions)}")
        try:
            async with self._acting:
                await action(body)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{name}: {error}") from None
        finally:
            self._changes.add()
        return {}

    async def say(self, body: bytes) -> None:
        text = msgspec.json.decode(body, type=SayBody).text.strip()
        if not text:
            raise ConfigError("there is nothing to say: write a message first")
        self._ask(text)

    async def stop(self, body: bytes = b"") -> None:
        """End the answer that is under way, and keep what there is of it. Raises DeadlineError."""
        if (answering := self._answering) is not None:
            answering.cancel()
            ended, _ = await asyncio.wait([answering], timeout=self._stop_s)
            if not ended:
                raise DeadlineError(f"waited {self._stop_s:g} s for {self._talk.doing} to stop")
            self._answering = None

    async def new(self, body: bytes = b"") -> None:
        await self.stop()
        await self._talk.restart()
        self._problem, self._unsaid = None, ""

    async def task(self, body: bytes) -> None:
        chosen = msgspec.json.decode(body, type=TaskBody)
        await self.stop()
        await self._talk.use_task(chosen.index)
        self._problem, self._unsaid = None, ""
        if chosen.ask:
            self._ask(self._talk.question)

    async def change(self, body: bytes) -> None:
        """Take new settings. Another system message begins a new conversation."""
        settings = msgspec.json.decode(body, type=ChatSettings)
        is_new = settings.system != self._talk.settings.system
        if is_new:
            await self.stop()
        self._talk.settings = settings
        if is_new:
            await self.new()

    def _ask(self, text: str) -> None:
        if self._answering is not None:
            raise ConfigError("an answer is under way: stop it first")
        self._began = asyncio.get_running_loop().time()
        self._answering = asyncio.create_task(self._answer(text))

    async def _answer(self, text: str) -> None:
        self._problem, self._unsaid = None, ""
        before = len(self._talk.entries)
        try:
            role = ""
            async for entry in self._talk.say(text):
                role = entry.message["role"]
                self._changes.add()
            if role == "tool":
                self._problem = f"stopped after {TOOL_ROUNDS} rounds of tool calls; write a message to continue"
        except ComposerError as error:
            self._problem = f"{error}; send it again, or begin a new conversation (n)"
        except Exception as error:  # An environment's tools may raise anything; the conversation continues.
            logger.exception("an answer failed")
            self._problem = f"{type(error).__name__}: {error}"
        finally:
            self._answering = None
            if len(self._talk.entries) == before:
                self._unsaid = text
            self._changes.add()


class ChatServer(ViewServer):
    """Serves the page, and the conversation to clients with the key."""

    def __init__(
        self,
        workspace: Workspace,
        port: int,
        page: PageConversation,
        loop: asyncio.AbstractEventLoop,
        run_id: str | None,
    ) -> None:
        """`run_id`: the run whose page links to the conversation. Raises OSError when the port is taken."""
        super().__init__(workspace, port, ChatHandler)
        self.page = page
        self.key = secrets.token_urlsafe(24)
        self._loop = loop
        self.answers["/api/run"] = lambda query: workspace.run(query) | {"chat": query.get("run") == run_id}

    @property
    def chat_address(self) -> str:
        return f"{self.address}#/chat?key={self.key}"

    def on_loop(self, answer: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        """Return what `answer` gives on the event loop. Raises what it raises, or TimeoutError after _ACTION_S."""
        future = asyncio.run_coroutine_threadsafe(answer, self._loop)
        try:
            return future.result(_ACTION_S)
        finally:
            future.cancel()


class ChatHandler(PageHandler):
    """Answers one connection: also the conversation."""

    server: ChatServer

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if parts.path != _PATH:
            super().do_GET()
        elif not self.refuse_host() and not self._refuse(self._problem_of_key()):
            seen = dict(parse_qsl(parts.query)).get("seen", "")
            self._reply(self.server.page.state(int(seen) if seen.isdecimal() else -1))

    def do_POST(self) -> None:
        if self.refuse_host() or self._refuse(self._problem_of_post() or self._problem_of_key()):
            self.close_connection = True  # Its body was not read.
            return
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self._reply(self.server.page.act(urlsplit(self.path).path.removeprefix(f"{_PATH}/"), body))

    def _problem_of_post(self) -> str | None:
        """Return why no page of this server can have sent this POST; None where it may have."""
        origin, own = self.headers.get("Origin"), f"http://{self.headers.get('Host')}"
        if origin != own:
            return f"the request comes from {origin or 'no page'}, and the conversation's page is {own}"
        kind = self.headers.get("Content-Type", "").partition(";")[0]
        if kind != "application/json":
            return f"the body is {kind or 'of no type'}: send application/json"
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _MAX_BODY_BYTES:
            return f"the body has {length or 'no'} bytes: send at most {_MAX_BODY_BYTES}"
        return None

    def _problem_of_key(self) -> str | None:
        if hmac.compare_digest(self.headers.get("X-Chat-Key", "").encode(), self.server.key.encode()):
            return None
        return "the key is missing or of another conversation: open the address that composer chat printed"

    def _refuse(self, problem: str | None) -> bool:
        if problem is not None:
            self._send_json(HTTPStatus.FORBIDDEN, {"error": problem})
        return problem is not None

    def _reply(self, answer: Coroutine[Any, Any, dict[str, Any]]) -> None:
        try:
            self._send_json(HTTPStatus.OK, self.server.on_loop(answer))
        except ComposerError as error:
            self._send_json(HTTPStatus.CONFLICT, {"error": str(error)})
        except TimeoutError:
            self._send_json(HTTPStatus.SERVICE_UNAVAILABLE, {"error": f"waited {_ACTION_S:g} s for the conversation"})
        except CancelledError:
            self._send_json(HTTPStatus.SERVICE_UNAVAILABLE, {"error": "the conversation has ended"})
        except Exception as error:  # An environment may raise anything; the page stays up.
            logger.exception("a question of the page failed")
            self._send_json(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(error).__name__}: {error}"})

    def _send_json(self, status: HTTPStatus, answer: dict[str, Any]) -> None:
        with contextlib.suppress(ConnectionError):  # The page was closed.
            self.send(status, msgspec.json.encode(answer), "application/json")


async def serve_page(config: Config, settings: ChatSettings, options: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C. Raises ConfigError when the port is taken, and what open_conversation raises."""
    changes = ChangeCount()
    print(f"loading {config.model.path} ...", file=sys.stderr, flush=True)
    async with open_conversation(config, settings, with_tools=bool(options.env), on_token=changes.add) as talk:
        await (talk.use_task(options.task) if options.env else talk.restart())
        async with chat_server(talk, changes, options.model, config.model.max_context, options.port) as server:
            print(f"{server.chat_address}   (Ctrl-C ends the conversation)", flush=True)
            await asyncio.Event().wait()
    return 0


@contextlib.asynccontextmanager
async def chat_server(talk: Conversation, changes: ChangeCount, model: str, max_context: int, port: int | None):
    """Yield a ChatServer that answers, on the event loop of `talk`. Raises ConfigError: the port is taken.

    At the end it stops the answer that is under way, before anyone closes the tools. Raises what `stop` raises.
    """
    is_run = (Path(model) / "run_id").is_file()
    workspace = Workspace([Path(model)] if is_run else [])
    run_id = next(iter(workspace.runs()), None)
    num_tasks = talk.environment.num_tasks if talk.environment is not None else None
    facts = {"model": run_id or model, "run": run_id, "context_tokens": max_context, "num_tasks": num_tasks}
    page, loop = PageConversation(talk, changes, facts), asyncio.get_running_loop()
    server = listen(lambda chosen: ChatServer(workspace, chosen, page, loop, run_id), port)
    try:
        with server.in_background():
            yield server
    finally:
        await page.stop()
