"""Error turns that no rule sees: a model reads the finished rollout and flags wasteful turns and bad style."""

from __future__ import annotations

import re

import msgspec

from composer_prime.errors import EndpointError
from composer_prime.llm.endpoint import ChatEndpoint
from orchestrator.hints.detect import tools_of
from orchestrator.hints.error_turn import ErrorTurn
from orchestrator.hints.generate import transcript
from orchestrator.rollouts.groups import FinishedRollout

JUDGED = "judged"
_TASK = (
    "You review the work of a software agent. Below is one conversation; the agent's turns are numbered. Name the "
    "turns that were wasteful (repeated work, needless calls, circling) or in bad style (unclear, careless, against "
    "what was asked). Most turns are fine; an empty list is a good answer. Reply with JSON only:\n"
    '{"turns": [{"turn": 3, "reason": "one short sentence that tells the agent what to do instead"}]}'
)
_OBJECT = re.compile(r"\{.*\}", re.DOTALL)
_REASON_CHARS = 300


class _Flag(msgspec.Struct, frozen=True):
    turn: int
    reason: str


class _Verdict(msgspec.Struct, frozen=True):
    turns: list[_Flag]


class JudgeDetector:
    name = "judge"

    def __init__(self, endpoint: ChatEndpoint) -> None:
        self._endpoint = endpoint

    async def find(self, rollout: FinishedRollout) -> list[ErrorTurn]:
        """Raises EndpointError, also for an answer that is not the JSON that was asked for."""
        sampled = {turn.turn: index for index, turn in enumerate(rollout.turns) if turn.turn is not None}
        if not sampled:
            return []
        messages = [
            {"role": "system", "content": _TASK},
            {"role": "user", "content": transcript(rollout.turns, numbered=True)},
        ]
        verdict = _verdict(await self._endpoint.ask(messages, check=_verdict))
        return [
            ErrorTurn(
                message=sampled[flag.turn],
                turn=flag.turn,
                kind=JUDGED,
                text=flag.reason[:_REASON_CHARS],
                tools=tools_of(rollout, sampled[flag.turn]),
            )
            for flag in {flag.turn: flag for flag in verdict.turns}.values()
            if flag.turn in sampled and flag.reason.strip()
        ]


def _verdict(text: str) -> _Verdict:
    found = _OBJECT.search(text)
    try:
        return msgspec.json.decode(found[0] if found else text, type=_Verdict)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise EndpointError(f"the judge's answer is not the JSON it was asked for ({error}): {text[:120]!r}") from None
