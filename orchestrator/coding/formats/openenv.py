"""Episodes of an OpenEnv server that runs already, as tool calls.

    taskset = { id = "orchestrator.coding.formats.openenv", base_url = "http://127.0.0.1:8000", num_tasks = 512 }
    eval_taskset = { first_seed = 1000000, num_tasks = 64 }

    tool_loop --tool call--> OpenEnvEpisode --WebSocket--> server: reset, step ... until done
                  ^ observation, or the error of a call   |

This speaks the server's protocol (openenv-core 0.3) itself. openenv-core and verifiers need different versions of one
package, so they cannot share an environment; and a server has its own dependencies anyway. A call that the server
refuses is a tool error that the policy sees. Only a server that cannot be reached, is full or breaks fails the rollout.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from typing import Any, Literal

import aiohttp
import verifiers.v1 as vf
from pydantic import Field, field_validator
from verifiers.v1.errors import ToolsetError

from composer_prime.errors import ConfigError
from orchestrator.coding.code.tools import clip
from orchestrator.environments.task_row import TaskRow

__all__ = ["OpenEnv"]

_REFUSED = ("VALIDATION_ERROR", "EXECUTION_ERROR")
"""Codes of errors that an action caused; every other one is the server's failure."""
_GENERIC_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")
"""Titles of action schemas of servers whose actions are calls of MCP tools."""
_STEP = "step"
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024


class OpenEnvTaskConfig(vf.TaskConfig):
    """How an episode is played."""

    reward: Literal["sum", "last"] = "sum"
    """The rollout's reward: the sum of the steps' rewards, or the last one."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Longest wait for one answer of the server, in seconds."""
    max_observation_chars: int = Field(default=20_000, ge=100)
    """Longer observations lose their middle."""


class OpenEnvConfig(vf.TasksetConfig):
    """Which server, and which episodes."""

    base_url: str
    """http://host:port of the server."""
    num_tasks: int = Field(256, ge=1)
    """Number of episodes to choose from: seeds from `first_seed` on."""
    first_seed: int = Field(0, ge=0)
    """Seed of the first episode. Held-out episodes need seeds that training does not reach."""
    reset: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the environment's reset."""
    instruction: str | None = "Act with the tools until the observation says that the episode is over."
    """System prompt; None leaves it out."""
    prompt: str = Field("The first observation:", min_length=1)
    """What stands before the first observation."""
    task: OpenEnvTaskConfig = OpenEnvTaskConfig()
    """How an episode is played."""

    @field_validator("base_url")
    @classmethod
    def _http(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"base_url is {url!r}, but must begin with http:// or https://")
        return url.rstrip("/")


class OpenEnvData(TaskRow):
    """The wire row of a task."""

    base_url: str
    reset: dict[str, Any]
    settings: OpenEnvTaskConfig

    def tool_executor(self) -> OpenEnvEpisode:
        return OpenEnvEpisode(self.base_url, self.reset, self.settings)


class OpenEnvTask(vf.Task[OpenEnvData]):
    """Its reward comes from the server (`OpenEnvEpisode.finish`)."""


class OpenEnv(vf.Taskset[OpenEnvTask, OpenEnvConfig]):
    """Task i is the episode of seed `first_seed` + i."""

    def load(self) -> Iterator[OpenEnvTask]:
        config = self.config
        if "seed" in config.reset:
            raise ConfigError("taskset.reset has a seed, but each task has its own: set taskset.first_seed instead")
        for seed in range(config.first_seed, config.first_seed + config.num_tasks):
            data = OpenEnvData(
                name=f"{config.base_url}#{seed}",
                system_prompt=config.instruction,
                prompt=config.prompt,
                base_url=config.base_url,
                reset={**config.reset, "seed": seed},
                settings=config.task,
            )
            yield OpenEnvTask(data, config.task)


class OpenEnvEpisode:
    """One episode: a `RemoteEpisode` of the tool loop."""

    def __init__(self, base_url: str, reset: dict[str, Any], settings: OpenEnvTaskConfig) -> None:
        self._url = base_url
        self._reset = reset
        self._settings = settings
        self._http = aiohttp.ClientSession(trust_env=False, timeout=aiohttp.ClientTimeout(total=settings.timeout_s))
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._rewards: list[float] = []
        self._refused = 0
        self._has_mcp_tools = False
        self.schemas: list[dict[str, Any]] = []
        self.is_over = False

    async def start(self) -> str:
        """Connect, list the tools, and return the first observation. Raises ToolsetError."""
        action = (await self._reach(self._get_schema())).get("action") or {}
        self._has_mcp_tools = action.get("title") in _GENERIC_ACTIONS
        self._socket = await self._reach(self._http.ws_connect(f"{self._url}/ws", max_msg_size=_MAX_MESSAGE_BYTES))
        if self._has_mcp_tools:
            listing = self._observation(await self._ask(_STEP, {"type": "list_tools"}), "list_tools")
            self.schemas = [
                _function(tool["name"], tool.get("description", ""), tool.get("input_schema") or {})
                for tool in listing["observation"].get("tools", [])
            ]
        else:
            self.schemas = [_function(_STEP, action.get("description", "Act in the environment."), action)]
        result = self._observation(await self._ask("reset", self._reset), "reset")
        self.is_over = bool(result.get("done"))
        return self._text(result)

    async def call(self, name: str, arguments_json: str) -> str:
        """Take one step. Return the observation, or the error of a call that the server refuses."""
        names = [schema["function"]["name"] for schema in self.schemas]
        if self.is_over:
            return "Error: the episode is over"
        if name not in names:
            return f"Tool not found: {name}"
        try:
            arguments = json.loads(arguments_json)
            json.dumps(arguments)  # Nesting that can be read may still be too deep to be sent.
        except (ValueError, RecursionError):
            return self._refuse("Invalid JSON in tool call")
        if not isinstance(arguments, dict):
            return self._refuse("Invalid arguments: they must be a JSON object")
        action = {"type": "call_tool", "tool_name": name, "arguments": arguments} if self._has_mcp_tools else arguments
        reply = await self._ask(_STEP, action)
        problem = reply["data"]
        if reply["type"] == "error" and problem.get("code") in _REFUSED:
            return self._refuse(f"Error: {_problem_text(problem)}")
        result = self._observation(reply, _STEP)
        reward = result.get("reward")
        if reward is not None:
            if not isinstance(reward, int | float) or not abs(reward) <= sys.float_info.max:
                shown = str(reward)[:200]
                raise ToolsetError(f"OpenEnv server {self._url}: a step's reward is {shown!r}, not a finite number")
            self._rewards.append(float(reward))
        self.is_over = bool(result.get("done"))
        error = result["observation"].get("error") if self._has_mcp_tools else None
        return self._refuse(f"Error: {error.get('message', error)}") if isinstance(error, dict) else self._text(result)

    async def finish(self, trace: vf.Trace) -> None:
        """Record the reward of the steps so far, and disconnect."""
        rewards = self._rewards or [0.0]
        trace.record_reward("openenv", sum(rewards) if self._settings.reward == "sum" else rewards[-1])
        trace.record_metrics({"steps": len(self._rewards), "refused": self._refused, "done": float(self.is_over)})
        if self._socket is not None:
            await self._socket.close()
        await self._http.close()

    async def _get_schema(self) -> dict[str, Any]:
        async with self._http.get(f"{self._url}/schema") as response:
            response.raise_for_status()
            return await response.json()

    async def _reach(self, request: Any) -> Any:
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                return await request
        except (aiohttp.ClientError, OSError, ValueError) as error:  # A TimeoutError is an OSError.
            raise ToolsetError(
                f"no OpenEnv server answers at {self._url} within {self._settings.timeout_s:g} s: "
                f"{type(error).__name__} {error}; start it, or correct taskset.base_url"
            ) from error

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Send a message and return the answer. Raises ToolsetError for a server that does not answer with one."""
        if self._socket is None:
            raise ToolsetError(f"OpenEnv server {self._url}: an earlier call got no answer, so the episode has ended")
        limit_s = self._settings.timeout_s
        socket, self._socket = self._socket, None  # A late answer must not become the next call's.
        try:
            async with asyncio.timeout(limit_s):
                await socket.send_json({"type": kind, "data": data})
                reply = await socket.receive_json()
            self._socket = socket
        except (aiohttp.ClientError, OSError, RecursionError, TypeError, ValueError) as error:
            raise ToolsetError(
                f"OpenEnv server {self._url}: no answer to {kind} within {limit_s:g} s: {type(error).__name__} {error}"
            ) from error
        finally:
            if self._socket is None:
                await self._http.close()
        if not isinstance(reply, dict) or not isinstance(reply.get("data"), dict):
            raise ToolsetError(f"OpenEnv server {self._url}: not a message of its protocol: {str(reply)[:200]}")
        return reply

    def _observation(self, reply: dict[str, Any], kind: str) -> dict[str, Any]:
        result = reply["data"]
        if reply["type"] == "observation" and isinstance(result.get("observation"), dict):
            return result
        advice = ""
        if result.get("code") == "CAPACITY_REACHED":
            advice = "; give its create_app max_concurrent_envs >= orchestrator.max_concurrent"
        raise ToolsetError(f"OpenEnv server {self._url}: {kind}: {_problem_text(result)}{advice}")

    def _refuse(self, text: str) -> str:
        self._refused += 1
        return text

    def _text(self, result: dict[str, Any]) -> str:
        observation = {**result["observation"], **({"done": True} if result.get("done") else {})}
        return clip(json.dumps(observation, ensure_ascii=False), self._settings.max_observation_chars)


def _function(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return an OpenAI function definition. OpenEnv's own `metadata` field is not the policy's to fill."""
    shown = {key: value for key, value in parameters.items() if key not in ("title", "description")}
    if "properties" in shown:
        shown["properties"] = {key: value for key, value in shown["properties"].items() if key != "metadata"}
    parameters = {"type": "object", "properties": {}, **shown}
    function = {"name": name, "description": description.strip(), "parameters": parameters}
    return {"type": "function", "function": function}


def _problem_text(problem: dict[str, Any]) -> str:
    """Return one line for an error of the server, with the fields that it names."""
    text = str(problem.get("message", problem))
    fields = [
        f"{'.'.join(map(str, entry.get('loc', ())))}: {entry.get('msg')}" for entry in problem.get("errors") or ()
    ]
    return f"{text}: {'; '.join(fields)}" if fields else text
