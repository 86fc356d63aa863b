"""Episodes of an OpenEnv server that runs already, as tool calls.

    taskset = { id = "orchestrator.coding.formats.openenv", base_url = "http://127.0.0.1:8000", num_tasks = 512 }
    eval_taskset = { first_seed = 1000000, num_tasks = 64 }

    tool_loop --tool call--> OpenEnvEpisode --WebSocket--> server: reset, step ... until done
                  ^ observation, or the error of a call   |

This speaks the server's protocol (openenv-core 0.3) itself, because openenv-core and verifiers need different versions
of one package. A call that the server refuses is a tool error that the policy sees.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Iterator
from typing import Any, TypeVar

import aiohttp
import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.errors import ToolsetError

from composer_prime.errors import ConfigError
from orchestrator.coding.code.tools import clip
from orchestrator.environments.answers import TaskRow

__all__ = ["OpenEnv"]

TIMEOUT_S = 120.0
"""Longest wait for one answer of the server."""
_OBSERVATION_CHARS = 20_000
"""Longer observations lose their middle."""
_REFUSED = ("VALIDATION_ERROR", "EXECUTION_ERROR")
"""Codes of errors that an action caused; every other one is the server's failure."""
_GENERIC_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")
"""Titles of action schemas of servers whose actions are calls of MCP tools."""
_STEP = "step"
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_Answer = TypeVar("_Answer")


class OpenEnvConfig(vf.TasksetConfig):
    """Which server, and which episodes."""

    base_url: str = Field(pattern="^https?://")
    """http://host:port of the server."""
    num_tasks: int = Field(256, ge=1)
    """Number of episodes to choose from: seeds from `first_seed` on."""
    first_seed: int = Field(0, ge=0)
    """Seed of the first episode. Held-out episodes need seeds that training does not reach."""
    reset: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the environment's reset."""
    instruction: str | None = "Act with the tools until the observation says that the episode is over."
    """System prompt; None leaves it out."""


class OpenEnvData(TaskRow):
    """The wire row of a task."""

    base_url: str
    reset: dict[str, Any]

    def tool_executor(self) -> OpenEnvEpisode:
        return OpenEnvEpisode(self.base_url, self.reset)


class OpenEnv(vf.Taskset[vf.Task[OpenEnvData], OpenEnvConfig]):
    """Task i is the episode of seed `first_seed` + i. Its reward comes from the server (`OpenEnvEpisode.finish`)."""

    def load(self) -> Iterator[vf.Task[OpenEnvData]]:
        config = self.config
        if "seed" in config.reset:
            raise ConfigError("taskset.reset has a seed, but each task has its own: set taskset.first_seed instead")
        for seed in range(config.first_seed, config.first_seed + config.num_tasks):
            data = OpenEnvData(
                name=f"{config.base_url}#{seed}",
                system_prompt=config.instruction,
                prompt="The first observation:",
                base_url=config.base_url,
                reset={**config.reset, "seed": seed},
            )
            yield vf.Task(data, config.task)


class OpenEnvEpisode:
    """One episode: an executor of the tool loop."""

    def __init__(self, base_url: str, reset: dict[str, Any]) -> None:
        self._url = base_url.rstrip("/")
        self._reset = reset
        self._http = aiohttp.ClientSession(trust_env=False)
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._rewards: list[float] = []
        self._has_mcp_tools = False
        self.schemas: list[dict[str, Any]] = []
        self.is_over = False

    async def start(self) -> str:
        """Connect, list the tools, and return the first observation. Raises ToolsetError."""
        action = (await self._wait(self._get_schema(), "/schema")).get("action") or {}
        connecting = self._http.ws_connect(f"{self._url}/ws", max_msg_size=_MAX_MESSAGE_BYTES)
        self._socket = await self._wait(connecting, "/ws")
        self._has_mcp_tools = action.get("title") in _GENERIC_ACTIONS
        tools = [{"name": _STEP, "description": action.get("description", ""), "input_schema": action}]
        if self._has_mcp_tools:
            tools = self._result(await self._ask(_STEP, {"type": "list_tools"}))["observation"].get("tools", [])
        self.schemas = [_function(tool) for tool in tools]
        result = self._result(await self._ask("reset", self._reset))
        self.is_over = bool(result.get("done"))
        return _text(result)

    async def call(self, name: str, arguments_json: str) -> str:
        """Take one step. Return the observation, or the error of a refused call."""
        if self.is_over:
            return "Error: the episode is over"
        if name not in [schema["function"]["name"] for schema in self.schemas]:
            return f"Tool not found: {name}"
        try:
            arguments = json.loads(arguments_json)
            json.dumps(arguments)  # Nesting that can be read may still be too deep to be sent.
        except (ValueError, RecursionError):
            return "Invalid JSON in tool call"
        if not isinstance(arguments, dict):
            return "Invalid arguments: they must be a JSON object"
        action = {"type": "call_tool", "tool_name": name, "arguments": arguments} if self._has_mcp_tools else arguments
        reply = await self._ask(_STEP, action)
        if reply["type"] == "error" and reply["data"].get("code") in _REFUSED:
            return f"Error: {_problem(reply['data'])}"
        result = self._result(reply)
        if result.get("reward") is not None:
            self._rewards.append(float(result["reward"]))
        self.is_over = bool(result.get("done"))
        error = result["observation"].get("error") if self._has_mcp_tools else None
        return f"Error: {_problem(error)}" if isinstance(error, dict) else _text(result)

    async def finish(self, trace: vf.Trace) -> None:
        """Record the sum of the steps' rewards, and disconnect."""
        trace.record_reward("openenv", sum(self._rewards))
        trace.record_metrics({"steps": len(self._rewards), "done": float(self.is_over)})
        if self._socket is not None:
            await self._socket.close()
        await self._http.close()

    async def _get_schema(self) -> dict[str, Any]:
        async with self._http.get(f"{self._url}/schema") as response:
            response.raise_for_status()
            return await response.json()

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Send a message and return the answer. Raises ToolsetError without one."""
        if self._socket is None:
            raise self._failure("an earlier call got no answer, so the episode has ended")
        socket, self._socket = self._socket, None  # A late answer must not become the next call's.

        async def exchange() -> Any:
            await socket.send_json({"type": kind, "data": data})
            return await socket.receive_json()

        try:
            reply = await self._wait(exchange(), kind)
            self._socket = socket
        finally:
            if self._socket is None:
                await self._http.close()
        if not isinstance(reply, dict) or not isinstance(reply.get("data"), dict):
            raise self._failure(f"not a message of its protocol: {str(reply)[:200]}")
        return reply

    async def _wait(self, answer: Awaitable[_Answer], what: str) -> _Answer:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await answer
        except (aiohttp.ClientError, OSError, RecursionError, TypeError, ValueError) as error:
            words = f"no answer to {what} within {TIMEOUT_S:g} s: {type(error).__name__} {error}"
            raise self._failure(f"{words}; start it, or correct taskset.base_url") from error

    def _result(self, reply: dict[str, Any]) -> dict[str, Any]:
        result = reply["data"]
        if reply["type"] == "observation" and isinstance(result.get("observation"), dict):
            return result
        advice = ""
        if result.get("code") == "CAPACITY_REACHED":
            advice = "; give its create_app max_concurrent_envs >= orchestrator.max_concurrent"
        raise self._failure(f"{_problem(result)}{advice}")

    def _failure(self, text: str) -> ToolsetError:
        return ToolsetError(f"OpenEnv server {self._url}: {text}")


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    """Return an OpenAI function definition, without OpenEnv's own field `metadata`."""
    schema = tool.get("input_schema") or {}
    parameters = {key: value for key, value in schema.items() if key not in ("title", "description")}
    fields = {key: value for key, value in schema.get("properties", {}).items() if key != "metadata"}
    function = {
        "name": tool["name"],
        "description": (tool.get("description") or "").strip(),
        "parameters": {"type": "object", **parameters, "properties": fields},
    }
    return {"type": "function", "function": function}


def _text(result: dict[str, Any]) -> str:
    observation = {**result["observation"], **({"done": True} if result.get("done") else {})}
    return clip(json.dumps(observation, ensure_ascii=False), _OBSERVATION_CHARS)


def _problem(problem: dict[str, Any]) -> str:
    """Return one line for an error of the server, with the fields that it names."""
    fields = [f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg')}" for each in problem.get("errors") or ()]
    text = str(problem.get("message", problem))
    return f"{text}: {'; '.join(fields)}" if fields else text
