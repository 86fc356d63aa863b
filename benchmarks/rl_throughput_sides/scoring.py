"""The two rewards, as functions of the model's text. Imports neither torch nor verifiers."""

from __future__ import annotations

import json
import re

from orchestrator.environments.toolsmith.taskset import Episode, run_call

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def first_call(text: str) -> tuple[str, str] | None:
    """(name, arguments as JSON) of the first tool call in a reply; None where there is none or it is malformed."""
    found = _CALL.search(text)
    try:
        call = json.loads(found[1]) if found else None
        return (call["name"], json.dumps(call["arguments"])) if isinstance(call["name"], str) else None
    except (ValueError, RecursionError, LookupError, TypeError):
        return None


def call_is_right(episode: Episode, call: tuple[str, str] | None) -> float:
    """1.0 where `call` is one that the episode's tools accept and that gives the first step's result, else 0.0."""
    return float(call is not None and run_call(episode, *call) == str(episode.steps[0].result))


def answer_is_right(episode: Episode, last_reply: str) -> float:
    """toolsmith's own reward: the last reply is exactly the answer."""
    return float(last_reply.strip() == episode.answer)
