"""From a verifiers episode to the reply that the orchestrator reads: text, rewards, and what went wrong where.

verifiers attributes every failure to the boundary it crossed (its errors.py). Here each boundary becomes a `kind`, and
the rule that a failed environment is never a zero reward is kept in one place: `to_reply` gives a reward only to a
trace that ended well and whose every reward function returned a finite number.
"""

from __future__ import annotations

import math
import re
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.episode import Episode
from verifiers.v1.trace import Error
from verifiers.v1.types import AssistantMessage, ToolMessage, content_text

from orchestrator.workers.protocol import (
    RolloutFailure,
    RolloutReply,
    RunRollout,
    SessionRecord,
    ToolCall,
    TurnRecord,
)

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


def _turns(traces: list[vf.Trace]) -> list[TurnRecord]:
    turns: list[TurnRecord] = []
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


def _turn(trace: vf.Trace, node: Any, *, session: int, call: int | None, parent: int | None) -> TurnRecord:
    message = node.message
    text = _valid(content_text(message.content))
    calls = message.tool_calls or [] if isinstance(message, AssistantMessage) else []
    return TurnRecord(
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
