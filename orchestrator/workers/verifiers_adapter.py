"""verifiers environments behind two nouns of ours: `Environment` (load, tasks) and `run` (one rollout → RolloutReply).

    worker -> Environment.run --run_slot--> harness -> interception -> GatewayClient --HTTP--> gateway
                    ^                                                                           |
                    +---------------- trace -> reply (verifiers_reply) <------------------------+

Only this module, verifiers_reply, verifiers_compat and the plugins under environments/ import verifiers. What a rollout
sampled is in the gateway's record of its session: the trace's id is set to the rollout id, and verifiers sends the
trace's id as X-Session-ID.

From a verifiers episode to the reply that the orchestrator reads: text, rewards, and what went wrong where.

verifiers attributes every failure to the boundary it crossed (its errors.py). Here each boundary becomes a `kind`, and
the rule that a failed environment is never a zero reward is kept in one place: `to_reply` gives a reward only to a
trace that ended well and whose every reward function returned a finite number.
"""

from __future__ import annotations

import asyncio
import difflib
import itertools
import logging
import math
import os
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pydantic
import verifiers.v1 as vf
from renderers import RendererConfig
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.env import Env
from verifiers.v1.episode import Episode
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.trace import Error
from verifiers.v1.types import AssistantMessage, ToolMessage, content_text
from verifiers.v1.utils import loaders

from composer_prime.errors import ConfigError, EmptyTaskSetError, EnvironmentNotInstalledError
from orchestrator.workers import verifiers_compat
from orchestrator.workers.protocol import (
    MessageRecord,
    RolloutFailure,
    RolloutReply,
    RunRollout,
    SessionRecord,
    SourceSpec,
    ToolCall,
)

logger = logging.getLogger(__name__)


_KINDS = {
    "ProviderError": "provider",
    "RenderError": "render",
    "InterceptionError": "interception",
    "TunnelError": "interception",
    "HarnessError": "harness",
    "ToolsetError": "toolset",
    "SandboxError": "sandbox",
    "TaskError": "task",
    "EnvError": "env",
    "TimeoutError": "timeout",
}
_TEMPORARY_4XX = (408, 409, 425, 429)
_CONTEXT = re.compile(r"maximum context length|context window|context length|max_model_len", re.IGNORECASE)
_TOOL_ERROR = re.compile(
    r"(error\b|[\w.]*(error|exception):|traceback \(most recent|tool not found|unknown tool|no such tool|invalid json|"
    r"invalid argument|missing argument|unknown argument|wrong type|missing required|failed to\b|not a number:|"
    r"number out of range)",
    re.IGNORECASE,
)
_DETAIL_CHARS = 2000


def to_reply(request: RunRollout, task: vf.Task, episode: Episode, traces: list[vf.Trace]) -> RolloutReply:
    """`traces` in the order they were made, which is the order of their session ids."""
    task_id = task_id_of(task, request.task_index)
    main = next((trace for trace in traces if trace.agent.trainable), traces[0] if traces else None)
    error = _failure(episode, traces, main)
    parts = {name: part.score for name, part in main.rewards.items() if part is not None} if main else {}
    return RolloutReply(
        rollout_id=request.rollout_id,
        task_id=task_id,
        reward=None if error or main is None else main.reward,
        parts=parts,
        metrics={name: value for name, value in main.metrics.items() if value is not None} if main else {},
        turns=_turns(traces),
        sessions=_sessions(traces),
        stop_reason=main.stop_condition if main else None,
        truncated=bool(main and main.is_truncated),
        error=error,
    )


def failed(
    rollout_id: str, task_id: str, kind: str, message: str, *, retryable: bool = True, traces: list[vf.Trace] = ()
) -> RolloutReply:
    """A reply without reward, with as many turns as there were."""
    return RolloutReply(
        rollout_id=rollout_id,
        task_id=task_id,
        reward=None,
        turns=_turns(traces),
        sessions=_sessions(traces),
        error=RolloutFailure(kind=kind, message=message, retryable=retryable),
    )


def task_id_of(task: vf.Task, index: int) -> str:
    """A task's own durable id if it has one, else its name, else its index."""
    if type(task).key is not vf.Task.key:
        return task.key
    return task.data.id or task.data.name or f"task-{index}"


def tool_error(task_data: Any, text: str) -> str | None:
    """The first line of a tool message that reports a failed call, else None.

    A task whose data has `is_tool_error(text)` decides itself; otherwise the beginning of the text does.
    """
    decide = getattr(task_data, "is_tool_error", None)
    is_error = decide(text) if decide is not None else _TOOL_ERROR.match(text.lstrip()) is not None
    return (text.strip().splitlines() or [""])[0][:500] if is_error else None


def _failure(episode: Episode, traces: list[vf.Trace], main: vf.Trace | None) -> RolloutFailure | None:
    for errors in (episode.errors, *(trace.errors for trace in traces if not trace.ok)):
        if errors:
            return _classify(errors[-1])
    if main is None:
        return RolloutFailure(kind="env", message="the environment ran no agent", retryable=False)
    late = next((trace for trace in traces if trace.is_timeout and trace.stop_condition != "agent_timeout"), None)
    if late is not None:
        return RolloutFailure(kind="timeout", message=f"{late.stop_condition} of the environment", retryable=True)
    if main.num_turns == 0:
        last = next((call.error for call in reversed(main.calls) if call.error), None)
        if last is not None:
            return _classify(last)
        return RolloutFailure(kind="harness", message="the harness ended without a model turn", retryable=True)
    if not main.rewards or any(part is None for part in main.rewards.values()):
        missing = [name for name, part in main.rewards.items() if part is None]
        message = f"reward functions without a result: {missing}" if missing else "the task has no reward function"
        return RolloutFailure(kind="no_reward", message=message, retryable=bool(missing))
    if not math.isfinite(main.reward):
        message = f"reward {main.reward} from {[(name, part.score) for name, part in main.rewards.items()]}"
        return RolloutFailure(kind="task", message=message, retryable=False)
    return None


def _classify(error: Error) -> RolloutFailure:
    kind = _KINDS.get(error.type, "internal")
    retryable = True
    if error.status_code is not None and 400 <= error.status_code < 500:
        retryable = error.status_code in _TEMPORARY_4XX
        if error.status_code in (400, 413) and _CONTEXT.search(error.message):
            kind = "context_overflow"
    detail = error.traceback[-_DETAIL_CHARS:] if error.traceback else None
    return RolloutFailure(kind=kind, message=error.message[:_DETAIL_CHARS], retryable=retryable, detail=detail)


def _sessions(traces: list[vf.Trace]) -> list[SessionRecord]:
    return [
        SessionRecord(
            session_id=trace.id,
            agent=trace.agent.name,
            trainable=trace.agent.trainable,
            reward=trace.reward if trace.ok and trace.rewards and None not in trace.rewards.values() else None,
            tools=[_definition(tool) for tool in trace.tools],
        )
        for trace in traces
    ]


def _definition(tool: vf.Tool) -> dict[str, Any]:
    """The tool as an OpenAI function definition."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _turns(traces: list[vf.Trace]) -> list[MessageRecord]:
    turns: list[MessageRecord] = []
    for session, trace in enumerate(traces):
        first = len(turns)
        done = sorted((call for call in trace.calls if call.node is not None), key=lambda call: call.time.start)
        call_of = {call.node: number for number, call in enumerate(done)}
        for index, node in enumerate(trace.nodes):
            parent = None if node.parent is None else node.parent + first
            turns.append(_turn(trace, node, session=session, call=call_of.get(index), parent=parent))
    return turns


def _valid(text: str) -> str:
    """The text with lone surrogates (a model may write them as escapes) replaced: they cannot be encoded."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _turn(trace: vf.Trace, node: Any, *, session: int, call: int | None, parent: int | None) -> MessageRecord:
    message = node.message
    text = _valid(content_text(message.content))
    calls = message.tool_calls or [] if isinstance(message, AssistantMessage) else []
    return MessageRecord(
        role=message.role,
        text=text,
        error=tool_error(trace.task.data, text) if isinstance(message, ToolMessage) else None,
        num_tokens=(sum(node.mask) if node.sampled else len(node.token_ids)) or None,
        call=call,
        session=session,
        parent=parent,
        tool_calls=[ToolCall(id=c.id, name=_valid(c.name), arguments=_valid(c.arguments)) for c in calls],
        reasoning=message.reasoning_content if isinstance(message, AssistantMessage) else None,
    )


_ANY_NUMBER = 1_000_000
_BACKLOG = 4096
"""Connections that may wait to be accepted: as many rollouts can start at once."""


class Environment:
    """One task set of a source and the agent that plays it."""

    def __init__(self, spec: SourceSpec, taskset: str, renderer: RendererConfig) -> None:
        """Loads the plugins and the tasks.

        Raises EnvironmentNotInstalledError, EmptyTaskSetError or ConfigError.
        """
        self.spec, self.name = spec, taskset
        self._renderer = renderer
        self._env = load_env(spec, spec.tasksets[taskset])
        self._tasks = _Tasks(self._env, spec, taskset)
        self._clients: dict[str, vf.TrainClientConfig] = {}

    @property
    def num_tasks(self) -> int | None:
        """None for a task set that never ends."""
        return self._tasks.count

    def describe(self, index: int) -> tuple[str, str]:
        """Id and prompt of a task. Raises IndexError past the end."""
        task = self._tasks[index]
        return task_id_of(task, index), task.data.prompt_text

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Holds the interception server and what the environment itself started."""
        async with self._env.serving():
            self._widen_backlog()
            yield
            self._clients.clear()

    async def run(self, request: RunRollout) -> RolloutReply:
        """One rollout, to its reply. A failure of the environment, the model or the deadline is a reply with `error`.

        Cancelling the task aborts the episode, closes its connection to the gateway and raises CancelledError.
        """
        try:
            task = self._tasks[request.task_index]
        except IndexError:
            message = f"task {request.task_index} of {self.spec.name}/{self.name}, which has {self.num_tasks} tasks"
            return failed(request.rollout_id, "", "request", message, retryable=False)
        sessions: list[vf.Trace] = []
        slot = self._env.slots(task)[0]
        try:
            async with asyncio.timeout(request.timeout_s) as deadline:
                episode = await self._env.run_slot(slot, self._context(request), on_trace=_naming(request, sessions))
        except TimeoutError:
            if not deadline.expired():
                raise
            message = f"no end after timeout_s = {request.timeout_s:g} s"
            return failed(request.rollout_id, task_id_of(task, request.task_index), "timeout", message, traces=sessions)
        return to_reply(request, task, episode, sessions)

    def _widen_backlog(self) -> None:
        """aiohttp listens with a backlog of 128; a connection beyond it waits a second for its retransmission."""
        runner = self._server.runner
        for site in runner.sites if runner else ():
            for listening in site._server.sockets:
                with socket.socket(fileno=os.dup(listening.fileno())) as same:
                    same.listen(_BACKLOG)

    @property
    def _server(self) -> InterceptionServer:
        server = self._env._interception  # There is no public way to it.
        assert isinstance(server, InterceptionServer)
        return server

    def _context(self, request: RunRollout) -> vf.ModelContext:
        sampling: dict[str, Any] = {"temperature": request.temperature}
        optional = {
            "max_tokens": request.max_tokens,
            "seed": request.seed,
            "stop": request.stop or None,
            "top_p": request.top_p if request.top_p < 1 else None,
            "top_k": request.top_k if request.top_k > 0 else None,
        }
        sampling |= {key: value for key, value in optional.items() if value is not None}
        client = self._client(request.gateway_url)
        return vf.ModelContext(model=request.model, client=client, sampling=vf.SamplingConfig(**sampling))

    def _client(self, gateway_url: str) -> vf.TrainClientConfig:
        config = self._clients.get(gateway_url)
        if config is None:
            config = self._clients[gateway_url] = vf.TrainClientConfig(
                base_url=gateway_url,
                api_key_var=self.spec.token_variable,
                renderer=self._renderer,
                renderer_model_name=self.spec.model_path,
                # One renderer is shared by all; beyond this number verifiers would build another by its own, slow way.
                multiplex=_ANY_NUMBER,
            )
            client = verifiers_compat.GatewayClient(config)
            self._server.clients[config.model_dump_json()] = client
            self._server.stack.push_async_callback(client.close)
        return config


class _Tasks:
    """The tasks of one set, by index; those of an endless set are made when first asked for."""

    def __init__(self, env: Env, spec: SourceSpec, taskset: str) -> None:
        try:
            view = env.taskset.select(vf.SelectConfig(**spec.select)) if spec.select else env.taskset
        except ValueError as error:
            raise ConfigError(f"source {spec.name!r}: select = {spec.select}: {error}") from error
        self._rest: Iterator[vf.Task] = iter(view)
        self._known: list[vf.Task] = []
        self.count: int | None = None
        if view.bounded:
            self._known = list(self._rest)
            self.count = len(self._known)
        if self.count == 0:
            raise EmptyTaskSetError(
                f"source {spec.name!r}: its task set {taskset!r} ({spec.tasksets[taskset]}) has no task"
                + (f" that select = {spec.select} keeps" if spec.select else "")
                + ": check its settings"
            )

    def __getitem__(self, index: int) -> vf.Task:
        if index < 0:
            raise IndexError(index)
        if self.count is None:
            self._known.extend(itertools.islice(self._rest, max(0, index + 1 - len(self._known))))
        return self._known[index]


def load_env(spec: SourceSpec, taskset: dict[str, Any]) -> Env:
    """The verifiers Env of one task set of a source, with its agents on this machine and no retries of its own.

    Raises EnvironmentNotInstalledError or ConfigError.
    """
    verifiers_compat.import_dotted_plugins()
    verifiers_compat.share_harnesses()
    verifiers_compat.remember_default_factories()
    _check_plugin(spec.name, "taskset", taskset.get("id"), loaders.taskset_class)
    _check_plugin(spec.name, "harness", spec.harness.get("id"), loaders.harness_class)
    try:
        return loaders.load_environment(loaders.resolve_env_config(_env_config(spec, taskset)))
    except pydantic.ValidationError as error:
        raise ConfigError(f"source {spec.name!r}: {_problems(error, spec, taskset)}") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"source {spec.name!r}: {error}") from error


def _problems(error: pydantic.ValidationError, spec: SourceSpec, taskset: dict[str, Any]) -> str:
    """One line for every wrong setting; an unknown one gets the nearest names."""
    settings = {
        "taskset": loaders.taskset_config_type(taskset["id"]).model_fields,
        "harness": loaders.harness_config_type(spec.harness["id"]).model_fields,
    }
    lines = []
    for problem in error.errors():
        place = [str(part) for part in problem["loc"]]
        message = problem["msg"].removeprefix("Value error, ")
        owner = next((known for name, known in settings.items() if name in place[:-1]), None)
        if problem["type"] == "extra_forbidden" and owner is not None:
            near = difflib.get_close_matches(place[-1], owner, n=3)
            message = f"no such setting; did you mean {' or '.join(near)}?" if near else f"it has {', '.join(owner)}"
        lines.append(f"{'.'.join(place)}: {message}")
    return "\n".join(lines)


def _env_config(spec: SourceSpec, taskset: dict[str, Any]) -> dict[str, Any]:
    limits = {
        name: value
        for name in ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens")
        if (value := getattr(spec, name)) is not None
    }
    seat = {"harness": dict(spec.harness), "runtime": {"type": "subprocess"}, **limits}
    env_class = loaders.env_config_type(taskset["id"], spec.env.get("id", ""))
    names = agent_config_fields(env_class()) or {"agent": None}
    seats = {name: {**seat, **spec.env.get(name, {})} for name in names}
    # One server, so one client and one connection pool, for all rollouts of this process.
    return {**spec.env, **seats, "taskset": dict(taskset), "interception": {"type": "server"}}


def _check_plugin(source: str, kind: str, plugin_id: Any, load: Any) -> None:
    if not isinstance(plugin_id, str) or not plugin_id:
        raise ConfigError(f"source {source!r}: its {kind} has no `id`: name an importable module that exports one")
    try:
        load(plugin_id)
    except ModuleNotFoundError as error:
        cause = error.__cause__ if isinstance(error.__cause__, ModuleNotFoundError) else error
        missing = cause.name or plugin_id
        what = f"module {missing!r} is missing" if missing != plugin_id else "there is no such module"
        raise EnvironmentNotInstalledError(
            f"source {source!r}: {kind} {plugin_id!r} cannot be imported: {what}. Install the package that provides it "
            f"into this environment (`uv pip install …`), or correct {kind}.id"
        ) from error
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"source {source!r}: {kind} {plugin_id!r}: {error}") from error
    except Exception as error:
        raise EnvironmentNotInstalledError(
            f"source {source!r}: importing {kind} {plugin_id!r} failed: {type(error).__name__}: {error}"
        ) from error


def _naming(request: RunRollout, sessions: list[vf.Trace]) -> Any:
    """Gives the rollout's traces the ids that the gateway will see: the rollout id, then `<rollout id>#1` …"""

    def on_trace(trace: vf.Trace) -> None:
        trace.id = f"{request.rollout_id}#{len(sessions)}" if sessions else request.rollout_id
        sessions.append(trace)

    return on_trace


@asynccontextmanager
async def serving(environments: list[Environment]) -> AsyncIterator[None]:
    """Serves several environments of one process."""
    async with AsyncExitStack() as stack:
        for environment in environments:
            await stack.enter_async_context(environment.serving())
        yield
