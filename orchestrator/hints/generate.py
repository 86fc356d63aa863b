"""The layers that write a hint, besides templates: the raw error, a model, the policy itself, a successful sibling."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

from orchestrator.hints.endpoint import ChatEndpoint
from orchestrator.hints.error_turn import HintRequest
from orchestrator.hints.templates import excerpt
from orchestrator.rollouts.groups import FinishedRollout, answers, derive_seed, messages_before
from orchestrator.workers.protocol import MessageRecord

_MESSAGE_CHARS = 1_500
_TOTAL_CHARS = 12_000
_WRITE = (
    "You coach a software agent. It is about to take the turn shown last, which will go wrong as shown. Write one "
    "short reminder that it should have read just before that turn: the fact or rule that it missed. Do not solve the "
    "task, do not write the turn for it, do not mention this conversation. Reply with the reminder only."
)
_INTROSPECT = "Your last turn went wrong: {error}\nIn one sentence: what should you have kept in mind before it?"
_ERROR_CHARS = 400
_POOL = 256


class RawError:
    """Quotes the tool's error."""

    name = "raw_error"

    async def hint(self, request: HintRequest) -> str | None:
        error = " ".join(excerpt(request.error.text).split())
        return f"Reminder: The next step can lead to this error: {cut(error, _ERROR_CHARS)}" if error else None


class ModelHint:
    """Asks a model, which reads the conversation, the turn and the error."""

    name = "llm"

    def __init__(self, endpoint: ChatEndpoint) -> None:
        self._endpoint = endpoint

    async def hint(self, request: HintRequest) -> str | None:
        turns, position = request.rollout.turns, request.error.message
        conversation = transcript(messages_before(turns, position))
        turn = message_text(turns[position])
        error = f"What went wrong ({request.error.kind}):\n{request.error.text[:1000]}"
        content = f"{conversation}\n\nThe turn:\n{turn}\n\n{error}"
        text = await self._endpoint.ask([{"role": "system", "content": _WRITE}, {"role": "user", "content": content}])
        return _one_paragraph(text)


class Introspection:
    """Asks the policy, through the run's own gateway, what it should have kept in mind."""

    name = "introspection"

    def __init__(self, endpoint: ChatEndpoint) -> None:
        self._endpoint = endpoint

    async def hint(self, request: HintRequest) -> str | None:
        turns, position = request.rollout.turns, request.error.message
        conversation = {"role": "user", "content": transcript([*messages_before(turns, position), turns[position]])}
        question = {"role": "user", "content": _INTROSPECT.format(error=request.error.text[:1000])}
        # The policy changes from step to step, so its answers are not shared between rollouts.
        variant = f"{request.rollout.rollout_id}/{request.error.turn}"
        return _one_paragraph(await self._endpoint.ask([conversation, question], variant=variant))


class SiblingDemonstration:
    """Shows the calls of the group's best rollout, where its reward is above this one's."""

    name = "sibling"

    async def hint(self, request: HintRequest) -> str | None:
        reward = max(request.rollout.task_reward or 0.0, 0.0)
        better = [sibling for sibling in request.siblings if (sibling.task_reward or 0.0) > reward]
        best = max(better, key=lambda sibling: (sibling.task_reward, -sibling.sibling), default=None)
        return None if best is None else f"Reminder: This worked before: {_steps(best)}"


def _steps(rollout: FinishedRollout) -> str:
    """Return the calls that were answered without an error, and the last reply."""
    steps = [
        f"{call.name} {call.arguments}"
        for index, replies in answers(rollout.turns).items()
        for call in rollout.turns[index].tool_calls
        if not any(rollout.turns[reply].error for reply in replies)
    ]
    last = next((turn.text.strip() for turn in reversed(rollout.turns) if turn.role == "assistant"), "")
    return "; then ".join([*steps, *([last] if last else [])])


class WrongHints:
    """A control arm: replaces the right hint by one that another error turn got.

    `other_error` takes a hint for another kind of error, `other_episode` one of another task. Both draw from the
    newest right hints, so the first turns of a run find none.
    """

    def __init__(self, mode: str, seed: int) -> None:
        self._mode = mode
        self._seed = seed
        self._pool: deque[tuple[str, str, str]] = deque(maxlen=_POOL)

    def replace(self, right: str, request: HintRequest) -> str | None:
        """Return a wrong hint for the turn, and add `right` to those that other turns draw from."""
        kind, task = request.error.kind, request.rollout.task_id
        others = [
            text
            for other_kind, other_task, text in self._pool
            if text != right and (other_kind != kind if self._mode == "other_error" else other_task != task)
        ]
        self._pool.append((kind, task, right))
        seed = derive_seed(self._seed, "wrong hint", request.rollout.rollout_id, request.error.turn)
        return random.Random(seed).choice(others) if others else None


def _one_paragraph(text: str) -> str | None:
    return " ".join(text.split()) or None


def transcript(turns: Sequence[MessageRecord], *, numbered: bool = False) -> str:
    """Return one paragraph a message, without the middle of long messages and of a long conversation."""
    return without_middle("\n\n".join(message_text(turn, numbered) for turn in turns), _TOTAL_CHARS)


def message_text(turn: MessageRecord, numbered: bool = False) -> str:
    """Return role, text and calls of a message; with `numbered` also the turn number of a sampled one."""
    number = f" turn {turn.turn}" if numbered and turn.turn is not None else ""
    lines = [f"[{turn.role}{number}]"]
    lines += [without_middle(turn.text.strip(), _MESSAGE_CHARS)] if turn.text.strip() else []
    lines += [without_middle(f"calls {call.name} {call.arguments}", _MESSAGE_CHARS) for call in turn.tool_calls]
    return "\n".join(lines)


def without_middle(text: str, limit: int) -> str:
    """Return `text`, without its middle where it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    half = (limit - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def cut(text: str, limit: int) -> str:
    """Return the beginning of `text`, at most `limit` characters, ending at a word."""
    if len(text) <= limit:
        return text
    return text[: limit - 3].rsplit(" ", 1)[0] + "..."
