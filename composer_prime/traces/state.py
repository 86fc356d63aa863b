"""A recorded decision of some agent: what it saw and what it did. states_file.py has the form of a file of them.

composer ingest (traces/ingest) -> states.jsonl -> composer replay (traces/replay) -> pairs.jsonl -> replay-DPO
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

SCHEMA_VERSION = 1
Message = dict[str, Any]
"""A message in the form of OpenAI's chat completions."""


class TraceState(msgspec.Struct, frozen=True, kw_only=True):
    """One assistant turn of a trace, with everything before it."""

    trace_id: str
    state_id: str
    """`<trace_id>/<turn number>`; unique within a file of states."""
    step: int
    """Number of the assistant turn within its trace, from 0."""
    messages: list[Message]
    """What the agent saw: system, user, assistant and tool messages, without thinking. Every call has a result."""
    student_action: Message
    """What it did: an assistant message with `content`, `tool_calls`, and its thinking as `reasoning_content`."""
    source_model: str | None
    source_family: str
    """As composer_prime/llm/families.py names it; `unknown` where the trace does not tell."""
    tools: list[dict[str, Any]]
    """Function tools that the agent had; where the format does not list them, all that its file calls."""
    error: str | None = None
    """The first error that followed the action, cut to 500 characters; None where there was none, or none is known."""
    entropy: float | None = None
    """How uncertain the student was: mean surprisal (-log p) of the action's tokens in nats, which estimates the mean
    entropy of what they were sampled from. Rollouts of this project hold it; None for traces of other agents."""
    format: str
    """The format of the trace, with the version that the reader was written for: `claude_code/2`."""
    schema_version: int = SCHEMA_VERSION


SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def storable_arguments(arguments: str) -> str:
    """Return a call's arguments with "?" for each half character.

    A model may escape half a character in JSON text (`"\\ud83d"`), which no file, endpoint or tokenizer takes.
    """
    if not SURROGATE.search(arguments):
        return arguments
    try:
        text = json.dumps(json.loads(arguments), ensure_ascii=False)
    except (ValueError, RecursionError):
        return arguments
    whole = text.encode("utf-8", "replace").decode()
    return arguments if whole == text else whole


def write_state(state: TraceState) -> bytes:
    """Return a whole state as one line."""
    return msgspec.json.encode(state) + b"\n"
