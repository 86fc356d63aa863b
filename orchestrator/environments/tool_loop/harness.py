"""A harness without a program: the chat loop runs here, and so do the tools.

    launch --(OpenAI chat, loopback)--> interception --> client --> inference node
       ^            waits for the reply, at most request_timeout_s      |
       +---- tool replies <---- the task's executor <---- tool calls ---+

Every rollout of a worker shares one HTTP client: making one costs more CPU than a whole single-turn rollout.
"""

import asyncio
from typing import Any

import httpx
import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import HarnessError
from verifiers.v1.runtimes import ProgramResult

from orchestrator.environments.tool_loop.calls import HasTools, NoTools, ToolExecutor, answer_calls

_DONE = ProgramResult(exit_code=0, stdout="", stderr="")


class ToolLoopConfig(vf.HarnessConfig):
    """Limits of the loop."""

    max_turns: int = Field(6, ge=1)
    """Assistant turns after which the rollout stops, finished or not."""
    request_timeout_s: float = Field(600.0, gt=0)
    """Longest wait for one reply, in seconds."""


class ToolLoop(vf.Harness[ToolLoopConfig]):
    """Plays tasks with or without tools. A task with tools has data with a `tool_executor()`."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    def __init__(self, config: ToolLoopConfig) -> None:
        super().__init__(config)
        self._client: httpx.AsyncClient | None = None
        self._client_loop: asyncio.AbstractEventLoop | None = None

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,  # noqa: ARG002
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],  # noqa: ARG002
        data: vf.TaskData,
    ) -> ProgramResult:
        """Plays to the first reply without a tool call, a cut reply, or `max_turns`."""
        task = trace.task.data
        executor: ToolExecutor = task.tool_executor() if isinstance(task, HasTools) else NoTools()
        messages = self._opening(data)
        for _ in range(self.config.max_turns):
            choice = await self._complete(ctx, trace, endpoint, secret, messages, executor.schemas)
            if choice is None:
                return _DONE
            messages.append(choice["message"])
            answers = [] if choice["finish_reason"] == "length" else await answer_calls(executor, choice["message"])
            if not answers:
                return _DONE
            messages += answers
        trace.stop("max_turns")
        return _DONE

    def _opening(self, data: vf.TaskData) -> list[dict[str, Any]]:
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*messages, {"role": "user", "content": prompt}]
        return messages + [message_to_wire(message) for message in prompt or []]

    async def _complete(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        endpoint: str,
        secret: str,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
    ) -> dict[str, Any] | None:
        """The first choice of the reply, or None where a limit or a stop of the framework refused the turn."""
        body: dict[str, Any] = {"model": ctx.model, "messages": messages}
        if tools:
            body["tools"] = tools
        url = f"{endpoint}/chat/completions"
        response = await self._http().post(url, json=body, headers={"Authorization": f"Bearer {secret}"})
        if response.is_error and trace.stop_condition is not None:
            return None
        if response.is_error:
            raise HarnessError(f"tool_loop: the model endpoint answered {response.status_code}: {response.text[:500]}")
        return response.json()["choices"][0]

    def _http(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._client is None or self._client_loop is not loop:
            # Loopback only: no TLS context, no proxies, and as many connections as there are rollouts.
            self._client = httpx.AsyncClient(
                verify=False,
                trust_env=False,
                timeout=self.config.request_timeout_s,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            )
            self._client_loop = loop
        return self._client
