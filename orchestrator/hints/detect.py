"""Find error turns: by rule in the tools' answers and the calls' schemas, and with a model as judge.

An own detector is a class in `orchestrator.hints.detect`, by import path. It is built once, as `Class(**settings)`, and
called with each finished rollout: `async def __call__(self, rollout) -> list[ErrorTurn]`. `error_turn` builds one.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Executor

import msgspec

from composer_prime.errors import EndpointError
from orchestrator.hints.endpoint import ChatEndpoint
from orchestrator.hints.generate import OTHER, ErrorTurn, Templates, transcript
from orchestrator.rollouts.groups import FinishedRollout, tool_replies
from orchestrator.workers.call_schema import violation

FAILED = "failed"
JUDGED = "judged"
_JUDGE_PROMPT = (
    "You review the work of a software agent. Below is one conversation; the agent's turns are numbered. Name the "
    "turns that were wasteful (repeated work, needless calls, circling) or in bad style (unclear, careless, against "
    "what was asked). Most turns are fine; an empty list is a good answer. Reply with JSON only:\n"
    '{"turns": [{"turn": 3, "reason": "one short sentence that tells the agent what to do instead"}]}'
)
_OBJECT = re.compile(r"\{.*\}", re.DOTALL)
_REASON_CHARS = 300

Detector = Callable[[FinishedRollout], Awaitable[list[ErrorTurn]]]
"""Finds turns that went wrong, at most one error a turn. Raises EndpointError where it asks a model."""


class RuleDetector:
    """Finds failed calls, exceptions and failed tests in tools' answers, and calls that break their schema."""

    def __init__(self, templates: Templates, detect: Collection[str]) -> None:
        """`detect`: as orchestrator.hints.detect."""
        self._templates = templates
        self._detect = set(detect)

    async def find(self, threads: Executor, rollout: FinishedRollout) -> list[ErrorTurn]:
        return await asyncio.get_running_loop().run_in_executor(threads, self.error_turns, rollout)

    def error_turns(self, rollout: FinishedRollout) -> list[ErrorTurn]:
        """Return the first error of each turn, in the order of the turns."""
        turns = rollout.turns
        replies_to = {index: replies for index, replies in tool_replies(turns).items() if turns[index].turn is not None}
        last = max(replies_to, default=None)
        errors = [
            self._in_answers(rollout, index, replies)
            or self._in_calls(rollout, index)
            or self._of_failed_task(rollout, index, last)
            for index, replies in replies_to.items()
        ]
        return [error for error in errors if error is not None]

    def _in_answers(self, rollout: FinishedRollout, index: int, replies: list[int]) -> ErrorTurn | None:
        calls = rollout.turns[index].tool_calls
        for number, reply in enumerate(replies):
            text, kind = rollout.turns[reply].text, None
            if rollout.turns[reply].error is not None and "tool_error" in self._detect:
                kind = self._templates.kind_of(text)
            kind = kind or self._templates.detected(text, self._detect)
            if kind == OTHER and (call_error := self._in_calls(rollout, index)) is not None:
                return call_error  # No template knows the tool's words, but the call itself shows what is wrong.
            if kind is not None:
                tool = calls[number].name if number < len(calls) else None
                return error_turn(rollout, index, kind, text, tool)
        return None

    def _in_calls(self, rollout: FinishedRollout, index: int) -> ErrorTurn | None:
        if "schema" not in self._detect:
            return None
        for call in rollout.turns[index].tool_calls:
            broken_rule = violation(call, tools_of(rollout, index))
            if broken_rule is not None:
                return error_turn(rollout, index, *broken_rule, call.name)
        return None

    def _of_failed_task(self, rollout: FinishedRollout, index: int, last: int | None) -> ErrorTurn | None:
        """Blame the last turn of a rollout that got no reward from its environment."""
        reward = rollout.reward
        if "failed" not in self._detect or index != last or reward is None or reward > 0:
            return None
        return error_turn(rollout, index, FAILED, "The task was not solved.")


class _Flag(msgspec.Struct, frozen=True):
    turn: int
    reason: str


class _Verdict(msgspec.Struct, frozen=True):
    turns: list[_Flag]


async def judged_turns(endpoint: ChatEndpoint, rollout: FinishedRollout) -> list[ErrorTurn]:
    """Ask a model to flag wasteful turns and bad style, which no rule sees.

    Raises EndpointError, also for an answer that is not the requested JSON.
    """
    position_of = {turn.turn: index for index, turn in enumerate(rollout.turns) if turn.turn is not None}
    if not position_of:
        return []
    messages = [
        {"role": "system", "content": _JUDGE_PROMPT},
        {"role": "user", "content": transcript(rollout.turns, numbered=True)},
    ]
    verdict = _verdict(await endpoint.ask(messages, check=_verdict))
    return [
        error_turn(rollout, position_of[flag.turn], JUDGED, flag.reason[:_REASON_CHARS])
        for flag in {flag.turn: flag for flag in verdict.turns}.values()
        if flag.turn in position_of and flag.reason.strip()
    ]


def _verdict(text: str) -> _Verdict:
    match = _OBJECT.search(text)
    try:
        return msgspec.json.decode(match[0] if match else text, type=_Verdict)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise EndpointError(f"the judge's answer is not the JSON it was asked for ({error}): {text[:120]!r}") from None


def error_turn(rollout: FinishedRollout, index: int, kind: str, text: str, tool: str | None = None) -> ErrorTurn:
    """Return the error `kind` of the sampled turn at position `index` of the rollout's messages."""
    turn = rollout.turns[index].turn
    assert turn is not None  # Both kinds of search look at numbered turns only.
    return ErrorTurn(message=index, turn=turn, kind=kind, text=text, tool=tool, tools=tools_of(rollout, index))


def tools_of(rollout: FinishedRollout, index: int) -> list[dict]:
    """Return the tools on offer in the conversation of message `index`."""
    session = rollout.turns[index].session
    return rollout.sessions[session].tools if session < len(rollout.sessions) else []
