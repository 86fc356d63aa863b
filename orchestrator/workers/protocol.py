"""Messages between the orchestrator's worker pool and one environment worker (msgpack, over a private socket pair).

    pool   --SourceSpec--> worker --Ready | StartFailed--> pool     once
    pool   --RunRollout | Cancel--> worker
    worker --RolloutReply | Heartbeat--> pool

A reply carries text and numbers only. Token ids, logprobs and version spans are in the gateway's record of the
rollout's session, so they cross one process boundary, not two.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

TRAIN, EVAL = "train", "eval"
"""The usual names of a source's task sets (`SourceSpec.tasksets`)."""
HEARTBEAT_S = 2.0
"""A worker says this often that its event loop runs."""
STALL_S = 5.0
"""A worker whose event loop stands still for this long writes its stack to its log."""


class SourceSpec(msgspec.Struct, frozen=True, kw_only=True, tag="source"):
    """The first message: the environment that a source's workers load. Plain data: it imports no verifiers."""

    name: str
    tasksets: dict[str, dict[str, Any]]
    """Task sets by name (`train`, `eval`); each has `id`, an importable module, and its own settings."""
    harness: dict[str, Any]
    """`id`, an importable module, and its own settings."""
    model_path: str
    """Folder with the policy's tokenizer and chat template."""
    runtime: dict[str, Any] = {}
    """[orchestrator.source.runtime], a RuntimeConfig; what is left out has its default."""
    renderer: str | dict[str, Any] | None = None
    """A renderer's name or configuration; None chooses by the model folder (chat_renderer.py)."""
    max_total_tokens: int | None = None
    """Prompt tokens of one rollout, each counted once, and sampled tokens."""
    import_from: list[str] = []
    """Folders with further modules, behind what is installed (`run.import_from`)."""


class WorkerReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The environment has loaded."""

    num_tasks: dict[str, int]
    """By task set."""
    overlap: str | None = None
    """A sentence where held-out prompts are training prompts too."""


class StartFailed(msgspec.Struct, frozen=True, kw_only=True, tag="start_failed"):
    """The environment cannot be loaded; another try would fail the same way."""

    error: str
    """Class name in composer_prime.errors."""
    message: str


class RunRollout(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """Play one rollout."""

    rollout_id: str
    """Sent as X-Session-ID with every generate request. Unique for each attempt: a retry takes a new one."""
    task_index: int
    model: str
    gateway_url: str
    """http://host:port/v1"""
    timeout_s: float
    """Wall-clock limit of the whole rollout, including its scoring."""
    taskset: str = TRAIN
    seed: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 switches top-k off."""
    max_tokens: int | None = None
    """Per assistant turn; None lets the context be the limit."""

    def failed(self, kind: str, message: str, **details: Any) -> RolloutReply:
        """Return the reply to this request where its task is not known. Arguments as of RolloutFailure."""
        failure = RolloutFailure(kind=kind, message=message, **details)
        return RolloutReply(rollout_id=self.rollout_id, task_id=f"task-{self.task_index}", failure=failure)


class CancelRollout(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Abort a rollout; its reply has an error of kind `cancelled`."""

    rollout_id: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    arguments: str
    """Raw JSON, exactly as the model wrote it."""


class PlayedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the rollout, as the worker has it. Messages are in the order in which they were made."""

    role: str
    text: str
    error: str | None = None
    """On a tool message that reports a failed call: its first line."""
    num_tokens: int | None = None
    """Tokens this message added to the context (for an assistant turn: those sampled)."""
    call: int | None = None
    """Sampled turns: number of its request among the session's successful generate requests, in order of start."""
    record_id: str = ""
    """Sampled turns: the gateway's record of its tokens (Answer.record_id)."""
    asked_s: float | None = None
    answered_s: float | None = None
    """Sampled turns: when its request was sent and when its answer came, in seconds from the session's start. What
    lies between an answer and the next request is the tools' time."""
    session: int = 0
    """Index into RolloutReply.sessions."""
    parent: int | None = None
    """Index of the preceding message in `turns`; None for the first. Two turns with one parent are a branch."""
    tool_calls: list[ToolCall] = []
    reasoning: str | None = None


class MessageRecord(PlayedMessage, frozen=True, kw_only=True):
    """A message, and what the orchestrator adds to sampled turns."""

    turn: int | None = None
    """The turn's number in TurnSpan and HintedTurn."""
    finish_reason: str | None = None
    """stop | length"""
    surprisal: float | None = None
    """Mean of -log p of its tokens, in nats, under the sampling distribution. This is an unbiased estimate of that
    distribution's entropy per token."""
    hint: str | None = None
    """The hint that SDPO put before a turn that went wrong (orchestrator/hints); `error` then is the kind of error."""


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One agent's conversation. `session_id` is its name at the gateway."""

    session_id: str
    agent: str
    trainable: bool
    reward: float | None
    tools: list[dict[str, Any]] = []
    """The tools on offer, as OpenAI function definitions."""


class RolloutFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why a rollout has no reward."""

    kind: str
    """provider | context_overflow | render | interception | harness | toolset | sandbox | task | env | no_reward |
    quarantine | timeout | cancelled | worker | request | internal"""
    message: str
    retryable: bool = True
    detail: str | None = None
    """End of the traceback, where there is one."""
    where: str | None = None
    """`file:line, in function` of the code that raised, where it is known."""

    def text(self) -> str:
        """Return kind, message and place in one line."""
        return f"{self.kind}: {self.message}{f' ({self.where})' if self.where else ''}"

    @property
    def cause(self) -> tuple[str, str]:
        """Equal for failures of one cause: the same line of code, or the same message but for its numbers."""
        return self.kind, self.where or re.sub(r"\d+", "#", self.message)


class RolloutReply(msgspec.Struct, frozen=True, kw_only=True, tag="reply"):
    """The outcome of one rollout: a reward or a failure, which is data, never a zero reward."""

    rollout_id: str
    task_id: str
    reward: float | None = None
    """Weighted sum of the reward functions; None exactly when `failure` is set."""
    parts: dict[str, float] = {}
    """Score of each reward function, before its weight."""
    metrics: dict[str, float] = {}
    turns: list[MessageRecord] = []
    sessions: list[SessionRecord] = []
    stop_reason: str | None = None
    """agent_completed, a limit (max_turns, …), a stop hook's name, or <stage>_timeout."""
    truncated: bool = False
    """A limit or the token budget cut the rollout short."""
    failure: RolloutFailure | None = None
    verdict: dict[str, Any] = {}
    """The hack monitor's verdict (`HackVerdict.record`); empty without a monitor."""
    wall_s: float | None = None


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """The worker's event loop runs."""


ToWorker = SourceSpec | RunRollout | CancelRollout
FromWorker = WorkerReady | StartFailed | RolloutReply | Heartbeat
