"""A harness without a program: the chat loop and the tools run in this process.

    launch --(OpenAI chat, loopback)--> interception --> client --> inference node
       ^                                                                |
       +---- tool replies <---- the task's executor <---- tool calls ---+

Every call in a reply gets a tool message. One that the renderer could not parse arrives as text (chat_renderer.py) and
gets an error: else the conversation would end, and the policy could hide its broken calls.
"""

import inspect
import json
import logging
import re
from typing import Any

import aiohttp
import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import MODEL_TRANSPORT_ERROR_EXIT_CODE, HarnessError, ToolsetError
from verifiers.v1.runtimes import ProgramResult

from composer_prime.llm.reply import TOOL_CALL_OR_REST
from composer_prime.monitor.events import event

logger = logging.getLogger(__name__)

INVALID_CALL = "Invalid JSON in tool call"
BROKEN = "broken_"
"""Begins the id of a call that could not be read."""
_CONTEXT_FULL = re.compile(r"context length|context window|max_model_len", re.IGNORECASE)
_DONE = ProgramResult(exit_code=0, stdout="", stderr="")


def bounded(text: str, limit: int, origin: str) -> str:
    """Return a reply with its middle cut beyond `limit` characters. `origin`: who gave it, such as `tool 'search'`."""
    if len(text) <= limit:
        return text
    logger.warning(
        "a reply of %s had %d characters; the model sees %d of them (max_reply_chars of the harness): return less, or "
        "raise [orchestrator.source.harness] max_reply_chars",
        origin, len(text), limit, extra=event("warning", same_as=f"cut {origin}"),
    )  # fmt: skip
    half = limit // 2
    note = f"[{len(text) - 2 * half} of {len(text)} characters were cut here]"
    return f"{text[:half]}\n{note}\n{text[-half:]}"


async def reply_of(executor: Any, name: str, arguments: str) -> str:
    """Return the text of a tool's reply. Raises ToolsetError for anything else."""
    reply = executor.call(name, arguments)
    while inspect.isawaitable(reply):
        reply = await reply
    if isinstance(reply, str):
        return reply
    raise wrong_tool(executor, f"tool {name!r} returned {type(reply).__name__}: it must return text")


def schemas_of(executor: Any) -> list[dict[str, Any]]:
    """Return the tools on offer. Raises ToolsetError for anything but OpenAI function definitions."""
    try:
        json.dumps([executor.schemas, [tool["function"]["name"] for tool in executor.schemas]])
    except (TypeError, ValueError, KeyError) as error:
        form = "[{'type': 'function', 'function': {'name': ...}}]"
        raise wrong_tool(executor, f"`schemas` must be {form}: {type(error).__name__}: {error}") from None
    return executor.schemas


def wrong_tool(executor: Any, message: str) -> ToolsetError:
    """Return an error whose traceback ends where the executor's `call` is written."""
    error = ToolsetError(message)
    error.status_code = 400  # pyright: ignore[reportAttributeAccessIssue]  # Another try would not help.
    if (code := getattr(inspect.unwrap(executor.call), "__code__", None)) is not None:
        error.add_note(f'  File "{code.co_filename}", line {code.co_firstlineno}, in {code.co_name}')
    return error


class ToolLoopConfig(vf.HarnessConfig):
    """Limits of the loop."""

    max_turns: int = Field(6, ge=1)
    """Assistant turns after which the rollout stops, finished or not."""
    max_reply_chars: int = Field(50_000, ge=200)
    """Longest text that a tool adds to the conversation in one reply. The middle of a longer one is cut."""


class ToolLoop(vf.Harness[ToolLoopConfig]):
    """Plays tasks with or without tools. A task with tools has data with a `tool_executor()`, one for each rollout.

    An executor has `schemas`, the tools on offer as OpenAI function definitions, and `async call(name,
    arguments_json)`, which returns the text of the tool's reply, also for an error that the model should see. An
    exception ends the rollout as failed. It may hold state between calls.

    One with an episode of its own, in a sandbox or in an environment that runs elsewhere, has three parts more.
    `async start()` begins the episode, fills `schemas`, and returns text to append to the task's prompt, or "".
    `is_over` tells that the environment ended the episode; the rollout then ends too. `async finish(trace)` records the
    rewards and lets go of the environment. It is called once, also after a failure.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> ProgramResult:
        """Play until a reply without a tool call, a cut reply, the episode's end, or `max_turns`."""
        task = trace.task.data
        executor: Any = task.tool_executor() if hasattr(task, "tool_executor") else None
        messages = self._opening(data)
        if not hasattr(executor, "start"):
            return await self._play(ctx.model, trace, endpoint, secret, executor, messages)
        try:
            if addition := await executor.start():
                messages[-1]["content"] += f"\n\n{bounded(addition, self.config.max_reply_chars, 'the start')}"
            return await self._play(ctx.model, trace, endpoint, secret, executor, messages)
        finally:
            await executor.finish(trace)

    async def _play(
        self, model: str, trace: vf.Trace, endpoint: str, secret: str, executor: Any, messages: list[dict[str, Any]]
    ) -> ProgramResult:
        body: dict[str, Any] = {"model": model, "messages": messages}
        if executor is not None and (tools := schemas_of(executor)):
            body["tools"] = tools
        # Making an httpx client costs more CPU than a one-turn rollout.
        connector, no_limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        headers = {"Authorization": f"Bearer {secret}"}
        try:
            async with aiohttp.ClientSession(connector=connector, timeout=no_limit, headers=headers) as session:
                for _ in range(self.config.max_turns):
                    if not await self._turn(session, trace, endpoint, executor, body):
                        return _DONE
        except aiohttp.ClientError as error:
            message = f"tool_loop: {endpoint}: {type(error).__name__}: {error}"
            return ProgramResult(exit_code=MODEL_TRANSPORT_ERROR_EXIT_CODE, stdout="", stderr=message)
        trace.stop("max_turns")
        return _DONE

    async def _turn(
        self, session: aiohttp.ClientSession, trace: vf.Trace, endpoint: str, executor: Any, body: dict[str, Any]
    ) -> bool:
        """Have a turn sampled, and its calls answered. Return whether the policy is asked again."""
        choice = await self._complete(session, trace, endpoint, body)
        if choice is None:
            return False
        body["messages"].append(choice["message"])
        cut = choice["finish_reason"] == "length"
        answers = [] if cut else await self._answers(executor, choice["message"])
        body["messages"] += answers
        return bool(answers) and not getattr(executor, "is_over", False)

    async def _answers(self, executor: Any, message: dict[str, Any]) -> list[dict[str, Any]]:
        answers = []
        for call in message.get("tool_calls") or []:
            function = call["function"]
            name, reply = function["name"], f"Tool not found: {function['name']}"
            if executor is not None:
                reply = await reply_of(executor, name, function["arguments"])
            reply = bounded(reply, self.config.max_reply_chars, f"tool {name!r}")
            content = reply.encode("utf-8", "replace").decode()
            answers.append({"role": "tool", "tool_call_id": call["id"], "content": content, "name": name})
        broken = TOOL_CALL_OR_REST.findall(message.get("content") or "")
        answers += [
            {"role": "tool", "tool_call_id": f"{BROKEN}{index}", "content": INVALID_CALL}
            for index in range(len(broken))
        ]
        return answers

    def _opening(self, data: vf.TaskData) -> list[dict[str, Any]]:
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*messages, {"role": "user", "content": prompt}]
        return messages + [message_to_wire(message) for message in prompt or []]

    async def _complete(
        self, session: aiohttp.ClientSession, trace: vf.Trace, endpoint: str, body: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Return the first choice of the reply; None where verifiers refused the turn."""
        async with session.post(f"{endpoint}/chat/completions", json=body) as response:
            content = await response.read()
        if response.ok:
            return json.loads(content)["choices"][0]
        if trace.stop_condition is not None:
            return None
        detail = content[:500].decode(errors="replace")
        if trace.num_turns and response.status == 400 and _CONTEXT_FULL.search(detail):
            # A conversation that outgrew the context is scored as it stands. Dropping it would let the policy hide.
            trace.stop("context_full")
            return None
        raise HarnessError(f"tool_loop: the model endpoint answered {response.status}: {detail}")
