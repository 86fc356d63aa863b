"""Run verifiers environments: `Environment` loads a task set, plays rollouts and turns each into a RolloutReply.

    worker -> Environment.run --run_slot--> harness -> interception -> GatewayClient --HTTP--> gateway
                    ^                                                                           |
                    +---------------- trace -> to_reply <---------------------------------------+

The trace's id is set to the rollout id, because verifiers sends it as X-Session-ID.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib
import inspect
import itertools
import json
import logging
import math
import re
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import aiohttp
import jinja2
import msgspec
import pydantic
import verifiers.v1 as vf
from pydantic import Field
from renderers import RendererConfig
from renderers.client import MalformedGenerateResponseError
from verifiers.v1.clients.train import ElasticRendererPool, RendererSlot, TrainClient, tool_to_wire
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.client import TrainClientConfig, resolve_api_key
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.env import Env
from verifiers.v1.episode import Episode
from verifiers.v1.errors import ProviderError, RolloutError
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.runtimes import subprocess as subprocess_runtime
from verifiers.v1.trace import Error
from verifiers.v1.types import AssistantMessage, Response, ToolMessage, content_text
from verifiers.v1.utils import loaders

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.console import did_you_mean
from composer_prime.errors import ConfigError
from composer_prime.host import module_file
from composer_prime.import_path import frame_text, place_of
from composer_prime.monitor.events import event
from composer_prime.wire.node_messages import GATEWAY_TOKEN_VARIABLE
from composer_prime.wire.types import LARGEST_REWARD
from orchestrator.chat_renderer import prompt_parts
from orchestrator.coding.sandbox.runtime import make_images, runtime_settings
from orchestrator.workers import dialects
from orchestrator.workers.pool import (
    MessageRecord,
    RolloutFailure,
    RolloutReply,
    RunRollout,
    SessionRecord,
    SourceSpec,
    ToolCall,
    is_own,
)

logger = logging.getLogger(__name__)

_ANY_NUMBER = 1_000_000
_ENDLESS = 4096
"""Tasks of a set that never ends."""
_KINDS = ("provider", "unreadable", "render", "interception", "harness", "toolset", "sandbox", "task", "env", "timeout")
"""Class names of verifiers' errors, of RenderError and of UnreadableError begin so."""
_TEMPORARY_4XX = (408, 409, 425, 429)
_CONTEXT = re.compile(r"maximum context length|context window|context length|max_model_len", re.IGNORECASE)
_TOOL_ERROR = re.compile(
    r"(error\b|[\w.]*(error|exception):|traceback \(most recent|tool not found|unknown tool|no such tool|invalid json|"
    r"invalid argument|missing argument|unknown argument|wrong type|missing required|failed to\b|not a number:|"
    r"number out of range)",
    re.IGNORECASE,
)
_MESSAGE_CHARS = 2000
_FRAME = re.compile(r'^[ |]*File "([^"<]+)", line (\d+), in (\S+)', re.MULTILINE)
_CHAINED = re.compile(
    r"\n(?:The above exception was the direct cause|During handling of the above exception, another exception).*\n"
)
_RECORDED = re.compile(r"in record_(reward|metric)s?$")
"""Where verifiers turns a result into a float."""
_DETAIL_CHARS = 2000
_LOST = (aiohttp.ClientOSError, aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError)
_ASK_AGAIN_S = (0.1, 1.0)
"""After lost connections. A turn that is asked for again counts once (rollouts/rollout.py)."""
_IDLE_S = 15.0
"""Less than the gateway's, so that no request meets a closing connection."""
_CONNECT_S = 30.0
_LONGEST_TOKEN = 256
"""Most characters in known tokenizers."""


class Environment:
    def __init__(self, spec: SourceSpec, taskset: str, renderer: RendererConfig | None) -> None:
        """Load plugins and tasks. Raises ConfigError."""
        self.spec = spec
        self.name = taskset
        self._renderer = renderer
        self._env = load_env(spec, spec.tasksets[taskset])
        self._tasks = _make_tasks(self._env, spec, taskset)
        refuse_wrong_rewards(self._tasks[0])
        self._first = first_alike(self._tasks)
        named = Counter(self._tasks[index].data.name for index in set(self._first))
        self._shared_names = {name for name, count in named.items() if count > 1}
        self._clients: dict[str, vf.TrainClientConfig] = {}

    @property
    def num_tasks(self) -> int:
        return len(self._tasks)

    @property
    def has_tools(self) -> bool:
        return hasattr(self._tasks[0].data, "tool_executor")

    @property
    def repeated(self) -> str | None:
        """Say how many tasks are copies of others; None where none is."""
        distinct = len(set(self._first))
        if distinct == self.num_tasks:
            return None
        return f"taskset {self.name!r}: its {self.num_tasks} tasks are copies of {distinct}, which alone count as tasks"

    def describe(self, index: int) -> tuple[str, str]:
        """Return id and prompt of a task. Raises IndexError past the end."""
        task = self._tasks[index]
        return self._id(index), task.data.prompt_text

    async def make_images(self) -> None:
        """Make what sandboxes are opened from. Raises SandboxError."""
        await make_images(agent.runtime for agent in agent_config_fields(self._env.config).values())

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with self._env.serving():
            yield
            self._clients.clear()

    async def run(self, request: RunRollout) -> RolloutReply:
        """Play one rollout. Failures of environment, model and deadline are in the reply."""
        if not 0 <= request.task_index < self.num_tasks:
            message = f"task {request.task_index} of {self.spec.name}/{self.name}, which has {self.num_tasks} tasks"
            return request.failed("request", message, retryable=False)
        task = self._tasks[request.task_index]
        traces: list[vf.Trace] = []

        def name_session(trace: vf.Trace) -> None:
            trace.id = f"{request.rollout_id}#{len(traces)}" if traces else request.rollout_id
            traces.append(trace)

        slot, episode = self._env.slots(task)[0], None
        try:
            async with asyncio.timeout(request.timeout_s) as deadline:
                episode = await self._env.run_slot(slot, self._context(request), on_trace=name_session)
        except TimeoutError:
            if not deadline.expired():
                raise
        reply = to_reply(request, task, episode, traces)
        return msgspec.structs.replace(reply, task_id=self._id(request.task_index))

    def _id(self, index: int) -> str:
        """Return a task's durable id, else its name if no other has it, else its index."""
        task = self._tasks[index]
        if type(task).key is not vf.Task.key:
            return task.key
        own = None if task.data.name in self._shared_names else task.data.name
        return task.data.id or own or f"task-{self._first[index]}"

    def _context(self, request: RunRollout) -> vf.ModelContext:
        names = ("temperature", "max_tokens", "seed", "top_p", "top_k")
        settings = {name: getattr(request, name) for name in names}
        config = vf.SamplingConfig(**{name: value for name, value in settings.items() if value is not None})
        return vf.ModelContext(model=request.model, client=self._client(request.gateway_url), sampling=config)

    def _client(self, gateway_url: str) -> vf.TrainClientConfig:
        config = self._clients.get(gateway_url)
        if config is None:
            config = self._clients[gateway_url] = vf.TrainClientConfig(
                base_url=gateway_url,
                api_key_var=GATEWAY_TOKEN_VARIABLE,
                renderer=self._renderer,
                renderer_model_name=self.spec.model_path,
                # One renderer is shared by all; beyond this verifiers would build another one.
                multiplex=_ANY_NUMBER,
            )
            client = GatewayClient(config, self.spec.max_total_tokens)
            server = self._env._interception  # It has no public name.
            assert isinstance(server, InterceptionServer)
            server.clients[config.model_dump_json()] = client
            server.stack.push_async_callback(client.close)
        return config


def _make_tasks(env: Env, spec: SourceSpec, taskset: str) -> list[vf.Task]:
    if not env.taskset.bounded:
        logger.warning("source %s: task set %r never ends: its first %d tasks are played", spec.name, taskset, _ENDLESS)
    try:
        tasks = list(env.taskset if env.taskset.bounded else itertools.islice(env.taskset, _ENDLESS))
    except (Exception, SystemExit) as error:
        made = f"task set {taskset!r} of source {spec.name!r} (load: {place_of(env.taskset.load)})"
        raise ConfigError(f"{made}, which must give tasks, raised {describe_exception(error)}") from error
    if not tasks:
        raise ConfigError(
            f"source {spec.name!r}: its task set {taskset!r} ({spec.tasksets[taskset]}) has no task: check its settings"
        )
    return tasks


def load_env(spec: SourceSpec, taskset: dict[str, Any]) -> Env:
    """Load the verifiers Env of a task set. Raises ConfigError."""
    import_dotted_plugins()
    dialects.install()
    _check_plugin(spec.name, "taskset", taskset.get("id"), loaders.taskset_class)
    _check_plugin(spec.name, "harness", spec.harness.get("id"), loaders.harness_class)
    try:
        config = loaders.resolve_env_config(_env_config(spec, taskset))
        _set_runtime(config, spec)
        return loaders.load_environment(config)
    except pydantic.ValidationError as error:
        raise ConfigError(f"source {spec.name!r}: {_problems(error, spec, taskset)}") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"source {spec.name!r}: {error}") from error


def _problems(error: pydantic.ValidationError, spec: SourceSpec, taskset: dict[str, Any]) -> str:
    settings = {
        "taskset": loaders.taskset_config_type(taskset["id"]).model_fields,
        "harness": loaders.harness_config_type(spec.harness["id"]).model_fields,
    }
    lines = []
    for problem in error.errors():
        place = [str(part) for part in problem["loc"]]
        message = problem["msg"].removeprefix("Value error, ")
        fields = next((fields for name, fields in settings.items() if name in place[:-1]), None)
        if problem["type"] == "extra_forbidden" and fields is not None:
            message = "no such setting" + (did_you_mean(place[-1], fields) or f"; it has {', '.join(fields)}")
        lines.append(f"{'.'.join(place)}: {message}")
    return "\n".join(lines)


def _env_config(spec: SourceSpec, taskset: dict[str, Any]) -> dict[str, Any]:
    seat: dict[str, Any] = {"harness": dict(spec.harness), "runtime": {"type": "subprocess"}}
    settings = loaders.harness_config_type(spec.harness["id"]).model_fields
    if "max_context" in settings:  # Its program compacts the history: all of it may be longer than the context.
        seat["harness"].setdefault("max_context", spec.max_total_tokens or settings["max_context"].default)
        seat["max_turns"] = spec.harness.get("max_turns", getattr(settings.get("max_turns"), "default", None))
    elif spec.max_total_tokens is not None:
        seat["max_total_tokens"] = spec.max_total_tokens
    agents = agent_config_fields(loaders.env_config_type(taskset["id"], "").model_validate({})) or ["agent"]
    taskset = {"runtime": spec.runtime, **taskset} if spec.runtime and _opens_boxes(taskset["id"]) else taskset
    # One server, so one client and one connection pool for all rollouts.
    config: dict[str, Any] = {"taskset": dict(taskset), "interception": {"type": "server"}}
    return {name: dict(seat) for name in agents} | config


def _opens_boxes(taskset_id: str) -> bool:
    """Tell whether a task set opens sandboxes itself: it then has a `runtime` table."""
    field = loaders.taskset_config_type(taskset_id).model_fields.get("runtime")
    return field is not None and field.annotation is RuntimeConfig


def _set_runtime(config: Any, spec: SourceSpec) -> None:
    """Give agents the runtime that the source names, or a box if they execute code."""
    executes_code = loaders.harness_class(spec.harness["id"]).EXECUTES_CODE
    table = RuntimeConfig.model_validate(spec.runtime)
    if not executes_code and (table.type == "auto" or _opens_boxes(config.taskset.id)):
        return
    kind = "bubblewrap" if table.type == "auto" else table.type
    for agent in agent_config_fields(config).values():
        packages = [*table.packages, *getattr(agent.harness, "packages", [])]
        agent.runtime = runtime_settings(table.model_copy(update={"type": kind, "packages": packages}))


def _check_plugin(source: str, kind: str, plugin_id: Any, load: Any) -> None:
    if not isinstance(plugin_id, str) or not plugin_id:
        raise ConfigError(f"source {source!r}: its {kind} has no `id`: name an importable module that exports one")
    try:
        load(plugin_id)
    except (AttributeError, TypeError, ValueError) as error:
        found = f"{module_file(plugin_id) or plugin_id} (where that is not yours, rename yours)"
        raise ConfigError(f"source {source!r}: {kind} {plugin_id!r}, read from {found}: {error}") from error
    except Exception as error:
        cause = error.__cause__ or error
        remedy = "Install the package that provides it into this environment (`uv pip install …`), or correct"
        raise ConfigError(
            f"source {source!r}: {kind} {plugin_id!r} cannot be imported: {describe_exception(cause)}. "
            f"{remedy if isinstance(cause, ImportError) else 'Correct that file, or'} {kind}.id"
        ) from error


def to_reply(request: RunRollout, task: vf.Task, episode: Episode | None, traces: list[vf.Trace]) -> RolloutReply:
    """Return an episode's reply; None: the deadline cut it. `traces`: in the order of their session ids."""
    main = next((trace for trace in traces if trace.agent.trainable), traces[0] if traces else None)
    if episode is None:
        failure = RolloutFailure(kind="timeout", message=f"no end after timeout_s = {request.timeout_s:g} s")
    else:
        failure = with_function(_failure(task, episode, traces, main), task, main)
    return RolloutReply(
        rollout_id=request.rollout_id,
        reward=None if failure or main is None else main.reward,
        parts={name: part.score for name, part in main.rewards.items() if part is not None} if main else {},
        metrics=finite_metrics(task, main.metrics) if main else {},
        turns=played_messages(traces),
        sessions=_sessions(traces),
        stop_reason=main.stop_condition if main else None,
        truncated=bool(main and main.is_truncated),
        failure=failure,
        verdict=_verdict(main),
    )


def finite_metrics(task: vf.Task, metrics: dict[str, float | None]) -> dict[str, float]:
    """Name the functions of what is no number, and leave that out: a mean with a NaN is NaN."""
    for hook in task.hooks("metric"):
        if not math.isfinite(value := metrics.get(hook.__name__) or 0.0):
            message = f"metric {hook.__name__} = {value} is left out: return a finite number on every way"
            logger.warning(message, extra=event("warning", where=place_of(hook)))
    return {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}


def _verdict(main: vf.Trace | None) -> dict[str, Any]:
    verdict = getattr(main.state, "verdict", None) if main is not None else None
    record: Callable[[], dict[str, Any]] | None = getattr(verdict, "record", None)
    return record() if callable(record) else {}


def first_alike(tasks: list[vf.Task]) -> list[int]:
    """Return for each task the index of the first of the first _ENDLESS with the same data; else its own."""
    known: dict[int, int] = {}
    first = [*range(len(tasks))]
    for index, task in enumerate(tasks[:_ENDLESS]):
        content = hash(repr([field for field in task.data if field[0] not in ("idx", "id", "name")]))
        first[index] = known.setdefault(content, index)
    return first


def tool_error(task_data: Any, text: str) -> str | None:
    """Return the first line of a tool message that reports a failed call; the task's data may decide which does."""
    decide = getattr(task_data, "is_tool_error", None)
    is_error = decide(text) if decide is not None else _TOOL_ERROR.match(text.lstrip()) is not None
    return (text.strip().splitlines() or [""])[0][:500] if is_error else None


def _failure(task: vf.Task, episode: Episode, traces: list[vf.Trace], main: vf.Trace | None) -> RolloutFailure | None:
    for errors in (episode.errors, *(trace.errors for trace in traces if not trace.ok)):
        if errors:
            return _classify(errors[-1])
    if main is None:
        return RolloutFailure(kind="env", message="the environment ran no agent", retryable=False)
    return _no_turn(traces, main) or _no_reward(task, main)


def _no_turn(traces: list[vf.Trace], main: vf.Trace) -> RolloutFailure | None:
    timed_out = [trace for trace in traces if trace.is_timeout and trace.stop_condition != "agent_timeout"]
    if timed_out:
        return RolloutFailure(kind="timeout", message=f"{timed_out[0].stop_condition} of the environment")
    if main.num_turns:
        return None
    last = next((call.error for call in reversed(main.calls) if call.error), None)
    if last is not None:
        return _classify(last)
    return RolloutFailure(kind="harness", message="the harness ended without a model turn")


def _no_reward(task: vf.Task, main: vf.Trace) -> RolloutFailure | None:
    missing = [name for name, part in main.rewards.items() if part is None]
    if missing or not main.rewards:
        message = f"reward functions without a result: {missing}" if missing else "the task has no @vf.reward method"
        return RolloutFailure(kind="no_reward", message=message, retryable=bool(missing))
    if abs(main.reward) <= LARGEST_REWARD:
        return None
    scores = {name: part.score for name, part in main.rewards.items() if part}
    wrong = {name: score for name, score in scores.items() if not abs(score) <= LARGEST_REWARD} or scores
    hook = next((each for each in task.hooks("reward") if each.__name__ in wrong), None)
    message = (
        f"reward {', '.join(f'{name} = {score:g}' for name, score in wrong.items())}: return a number between "
        f"-{LARGEST_REWARD:g} and {LARGEST_REWARD:g} on every way"
    )
    return RolloutFailure(kind="task", message=message, retryable=False, where=hook and place_of(hook))


def _classify(error: Error) -> RolloutFailure:
    kind = error.type.removesuffix("Error").lower()
    kind = kind if kind in _KINDS else "internal"
    retryable = True
    if error.status_code is not None and 400 <= error.status_code < 500:
        retryable = error.status_code in _TEMPORARY_4XX
        if error.status_code in (400, 413) and _CONTEXT.search(error.message):
            kind = "context_overflow"
    detail, where = read_traceback(error.traceback) if error.traceback else (None, None)
    message = error.message[:_MESSAGE_CHARS]
    if kind == "context_overflow":
        message += ": raise model.max_context, or have prompt and tools take less (harness.args cuts a native agent's)"
    return RolloutFailure(kind=kind, message=message, retryable=retryable, detail=detail, where=where)


def _sessions(traces: list[vf.Trace]) -> list[SessionRecord]:
    return [
        SessionRecord(
            session_id=trace.id,
            agent=trace.agent.name,
            trainable=trace.agent.trainable,
            reward=trace.reward if trace.ok and trace.rewards and None not in trace.rewards.values() else None,
            tools=[
                {
                    "type": "function",
                    "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
                }
                for tool in dialects.as_functions([], trace.tools)[1]
            ],
            expected=_expected(trace.task.data),
        )
        for trace in traces
    ]


def _expected(task_data: Any) -> str | None:
    answer = getattr(task_data, "answer", None)
    return _valid(str(answer))[:_MESSAGE_CHARS] if isinstance(answer, str | int | float) else None


def played_messages(traces: list[vf.Trace]) -> list[MessageRecord]:
    """Return all messages of the sessions, each once, in the order in which they were made."""
    turns: list[MessageRecord] = []
    for session, trace in enumerate(traces):
        first = len(turns)
        answered = sorted((call for call in trace.calls if call.node is not None), key=lambda call: call.time.start)
        call_of = {call.node: (number, call.time) for number, call in enumerate(answered)}
        for index, node in enumerate(trace.nodes):
            parent = None if node.parent is None else node.parent + first
            turn = _turn(trace, node, *call_of.get(index, (None, None)), session, parent)
            turns.append(msgspec.structs.replace(turn, on_side=node.sampled and _is_on_side(trace.nodes, index)))
    return turns


def _is_on_side(nodes: list[Any], index: int) -> bool:
    """Tell whether an answer served the program alone: a title or a topic.

    Its call offers no tools, where another of the session does. Its prompt has no answer. No line of it is in a later
    message, as a summary's or a plan's are: it cannot have moved the reward.
    """
    node = nodes[index]
    while node.parent is not None:
        node = nodes[node.parent]
        if isinstance(node.message, AssistantMessage):
            return False
    if node.tools or not any(each.tools for each in nodes):
        return False
    lines = [line.strip() for line in content_text(nodes[index].message.content).splitlines() if line.strip()]
    later = [content_text(each.message.content) for each in nodes[index + 1 :] if not each.sampled]
    return not any(line in text for line in lines for text in later)


def _valid(text: str) -> str:
    """Replace lone surrogates, which cannot be encoded."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _turn(trace: vf.Trace, node: Any, call: int | None, time: Any, session: int, parent: int | None) -> MessageRecord:
    message = dialects.as_functions([node.message], [])[0][0]
    text = _valid(content_text(message.content))
    calls = message.tool_calls or [] if isinstance(message, AssistantMessage) else []
    return MessageRecord(
        role=message.role,
        text=text,
        error=tool_error(trace.task.data, text) if isinstance(message, ToolMessage) else None,
        record_id=getattr(node.message, "record_id", ""),
        num_tokens=(sum(node.mask) if node.sampled else len(node.token_ids)) or None,
        call=call,
        asked_s=time and time.start - trace.timing.start,
        answered_s=time and time.end - trace.timing.start,
        session=session,
        parent=parent,
        tool_calls=[ToolCall(id=c.id, name=_valid(c.name), arguments=_valid(c.arguments)) for c in calls],
        reasoning=message.reasoning_content if isinstance(message, AssistantMessage) else None,
    )


# -- where an environment's code raised ----------------------------------------------------------------------------


def describe_exception(error: BaseException) -> str:
    """Return `LookupError: no word list (envs/words.py:12, in load)`."""
    _, where = read_traceback("".join(traceback.format_exception(error)))
    return f"{type(error).__name__}: {error}{f' ({where})' if where else ''}"


def read_traceback(text: str) -> tuple[str, str | None]:
    """Return the end of the traceback of the code that raised, and its place, best in the user's files."""
    parts = _CHAINED.split(text)
    for part in reversed(parts):
        own = [frame for frame in _FRAME.findall(part) if is_own(frame[0])]
        if own:
            return part.strip()[-_DETAIL_CHARS:], frame_text(*own[-1])
    frames = _FRAME.findall(parts[0])
    return parts[0].strip()[-_DETAIL_CHARS:], frame_text(*frames[-1]) if frames else None


def refuse_wrong_rewards(task: Any) -> None:
    """Raise ConfigError for a method of a Task that cannot be called as such.

    verifiers awaits each reward and metric. A helper named as a member of vf.Task takes that one's place.
    """
    for name, function in [item for cls in type(task).__mro__ for item in vars(cls).items() if _hides_member(*item)]:
        raise ConfigError(f"`{name}` ({place_of(function)}) hides vf.Task.{name}, which is called: rename it")
    for kind, function in [(each, hook) for each in ("reward", "metric") for hook in task.hooks(each)]:
        named, signature = f"{kind} `{function.__name__}` ({place_of(function)})", inspect.signature(function)
        taken = {name for name, each in signature.parameters.items() if each.default is each.empty}
        if unknown := taken - {"task", "trace", "runtime", "args", "kwargs"}:
            given = "trace (with its last_reply), task (its data) and runtime"
            raise ConfigError(f"{named} takes {', '.join(unknown)}, but is given {given}: take some of these")
        returned = getattr(signature.return_annotation, "__name__", signature.return_annotation)
        is_awaited = any(map(inspect.iscoroutinefunction, (function, inspect.unwrap(function))))
        if returned in ("float", "int", "bool") and not is_awaited:
            raise ConfigError(f"{named} must be `async def` and return a number")


def _hides_member(name: str, function: Any) -> bool:
    """Tell whether a method replaces a member of vf.Task, and cannot be called as that one."""
    if not inspect.isfunction(function) or name[:2] == "__" or name not in {*dir(vf.Task), "data", "config"}:
        return False
    is_async = inspect.iscoroutinefunction
    member: Any = getattr(vf.Task, name, None)
    try:
        inspect.signature(function).bind(**dict.fromkeys(inspect.signature(member).parameters))
    except TypeError:
        return True
    is_signal = hasattr(function, "reward") or hasattr(function, "metric")
    return is_signal or is_async(member) > is_async(inspect.unwrap(function))


def with_function(failure: RolloutFailure | None, task: Any, trace: Any) -> RolloutFailure | None:
    """Name the reward or metric that gave no number: verifiers' traceback ends where that is recorded."""
    match = _RECORDED.search(failure.where or "") if failure is not None else None
    if failure is None or match is None or trace is None:
        return failure
    kind = match[1]
    values = trace.rewards if kind == "reward" else trace.metrics
    hooks = [hook for hook in task.hooks(kind) if values.get(hook.__name__) is None]
    names = " or ".join(hook.__name__ for hook in hooks)
    message = f"{kind} {names} returned no number ({failure.message})"
    where = place_of(hooks[0]) if hooks else failure.where
    return msgspec.structs.replace(failure, message=message, retryable=False, where=where)


# -- replacements for parts of verifiers and renderers, each for a measured reason -----------------------------------


class RecordedMessage(AssistantMessage):
    record_id: str = Field(default="", exclude=True)


RecordedMessage.__name__ = AssistantMessage.__name__
"""verifiers tells messages apart by class names."""


class RenderError(RolloutError):
    """The renderer or chat template cannot render this conversation."""

    status_code = 400


class GatewayClient(TrainClient):
    """verifiers' training client over one aiohttp session; needs `install_renderer`.

    The stock client's pool walks every open connection at each request: the largest cost of a turn with 256 rollouts.
    """

    def __init__(self, config: TrainClientConfig, max_tokens: int | None = None) -> None:
        """`max_tokens`: a conversation whose text cannot fit is refused unrendered."""
        self.config = config
        self._max_chars = None if max_tokens is None else max_tokens * _LONGEST_TOKEN
        self.base_url = config.base_url.rstrip("/")
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {resolve_api_key(config)}"},
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            trust_env=False,
        )

    @property
    def client(self) -> Any:
        """`renderers.client.generate` calls `get` and `post` of it."""
        return self

    async def get_response(self, dialect: Any, body: dict[str, Any], *args: Any, **kwargs: Any) -> Response:
        turn = kwargs.pop("turn", None)
        self._check_length(turn.prompt if turn else dialect.parse_request(body).messages)
        messages, tools = dialects.as_functions(turn.prompt, turn.tools) if turn else ([], [])
        rendered = turn and dataclasses.replace(turn, prompt=messages, tools=tools)
        try:
            # A turn is rendered alike, whatever its dialect.
            response = await self._answer(body, *args, turn=rendered, **kwargs)
            for index, call in enumerate(response.message.tool_calls or []):
                if call.id == f"call_{index}":  # The policy gave none, and programs tell calls apart by it.
                    call.id = f"call_{len(turn.trace.nodes) if turn else 0}_{index}"
            response.raw = dialects.answer_in(dialect, response, turn.tools if turn else [])
        except MalformedGenerateResponseError as error:
            raise ProviderError(f"the gateway's reply breaks the generate contract: {error}") from error
        except (jinja2.TemplateError, LookupError, NotImplementedError, TypeError, ValueError) as error:
            raise RenderError(f"{type(error).__name__}: {error}") from error
        # The trace keeps this very object.
        response.message = RecordedMessage.model_construct(**dict(response.message), record_id=response.id)
        return response

    async def _answer(self, body: dict[str, Any], *args: Any, turn: Any, **kwargs: Any) -> Response:
        try:
            return await super().get_response(ChatDialect(), body, *args, turn=turn, **kwargs)
        except ProviderError as error:
            if turn is None or error.status_code not in (400, 413) or not _CONTEXT.search(str(error)):
                raise
            wire = [message_to_wire(message) for message in turn.prompt], [tool_to_wire(tool) for tool in turn.tools]
            text = f"{str(error).rstrip('.')}{await prompt_parts(self._count, *wire)}"
            raise ProviderError(text, status_code=error.status_code) from error

    async def _count(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> int:
        """Return the number of tokens of a prompt."""
        config, prompt = self.config, cast(Any, messages)
        pool = ElasticRendererPool(config.renderer_model_name or "", config.renderer, multiplex=config.multiplex)
        options: Any = {"tools": tools or None, "add_generation_prompt": True}
        async with pool.acquire() as slot:
            return len(await slot.run(lambda: slot.renderer.render_ids(prompt, **options)))

    def _check_length(self, messages: list[Any]) -> None:
        chars = sum(len(content_text(message.content)) for message in messages)
        if self._max_chars is not None and chars > self._max_chars:
            raise ProviderError(
                f"the conversation has {chars} characters and exceeds the maximum context length, which holds "
                f"{self._max_chars} at most (model.max_context): have tools and users return less",
                status_code=400,
            )

    async def relay_aux(self, dialect: Any, route: str, body: dict[str, Any], **_: Any) -> dict[str, int]:
        """Count the tokens of a prompt, the one thing that a program may ask beside answers."""
        request = dialect.parse_request(body)
        self._check_length(request.messages)
        messages, tools = dialects.as_functions(request.messages, request.tools or [])
        wire = [message_to_wire(message) for message in messages], [tool_to_wire(tool) for tool in tools]
        return {"input_tokens": await self._count(*wire)}

    async def get(self, path: str, *, cast_to: Any = None) -> Any:
        return json.loads(await self._send("GET", self.base_url + path, {}, None))

    async def post(self, url: str, *, cast_to: Any, body: dict[str, Any], options: Any = None) -> Any:
        headers = {"Content-Type": "application/json", **((options or {}).get("headers") or {})}
        return SimpleNamespace(content=await self._send("POST", url, headers, msgspec.json.encode(body)))

    async def close(self) -> None:
        await self._session.close()

    async def _send(self, method: str, url: str, headers: dict[str, str], data: bytes | None) -> bytes:
        pauses = iter(_ASK_AGAIN_S)
        while True:
            try:
                async with self._session.request(method, url, data=data, headers=headers) as reply:
                    content = await reply.read()
                    break
            except (aiohttp.ClientError, OSError) as error:
                pause_s = next(pauses, None) if isinstance(error, _LOST) else None
                if pause_s is None:
                    raise ProviderError(f"{url}: {type(error).__name__}: {error}", status_code=503) from error
                await asyncio.sleep(pause_s)
        if reply.status >= 400:
            raise ProviderError(_message(content) or f"{url} answered {reply.status}", status_code=reply.status)
        return content


def _message(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content[:500].decode(errors="replace")


def install_renderer(model_path: str, config: RendererConfig, renderer: Any) -> None:
    """Make every TrainClient with this model and configuration use `renderer`.

    The stock path's AutoTokenizer imports torch (0.6 GiB and 7 s in every worker).
    """
    pool = ElasticRendererPool(model_path, config, multiplex=1)
    pool.renderers[:] = [RendererSlot(renderer)]


@functools.cache
def import_dotted_plugins() -> None:
    """Import a plugin id with a dot as a module: the stock loader looks in its own namespace only."""
    stock = loaders._import_plugin

    def import_plugin(plugin_id: str, kind: str, group: str) -> ModuleType:
        return importlib.import_module(plugin_id) if "." in plugin_id else stock(plugin_id, kind, group)

    loaders._import_plugin = import_plugin


def keep_folders_in(folder: Path) -> None:
    """Move the subprocess runtime's folders: in the user's cache, two runs could share one."""
    subprocess_runtime.CACHE_DIR = folder


def taskset_settings(taskset_id: str) -> list[str]:
    """Import a task set and return the names of its own settings."""
    import_dotted_plugins()
    common = loaders.TasksetConfig.model_fields
    return [name for name in loaders.taskset_config_type(taskset_id).model_fields if name not in common]
