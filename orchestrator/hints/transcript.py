"""A rollout's conversation as text for a model that judges it or writes a hint."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.workers.protocol import TurnRecord

_MESSAGE_CHARS = 1_500
_TOTAL_CHARS = 12_000


def transcript(turns: Sequence[TurnRecord], *, numbered: bool = False) -> str:
    """One paragraph a message; the middle of long messages and of a long conversation is left out."""
    parts = [message_text(turn, numbered) for turn in turns]
    return shortened("\n\n".join(parts), _TOTAL_CHARS)


def message_text(turn: TurnRecord, numbered: bool = False) -> str:
    """Role, text and calls of a message; with `numbered` its turn number too, where the policy sampled it."""
    number = f" turn {turn.turn}" if numbered and turn.turn is not None else ""
    lines = [f"[{turn.role}{number}]"]
    lines += [shortened(turn.text.strip(), _MESSAGE_CHARS)] if turn.text.strip() else []
    lines += [shortened(f"calls {call.name} {call.arguments}", _MESSAGE_CHARS) for call in turn.tool_calls]
    return "\n".join(lines)


def shortened(text: str, limit: int) -> str:
    """`text` with its middle left out where it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    half = (limit - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def cut(text: str, limit: int) -> str:
    """The beginning of `text`, at most `limit` characters, ending at a word."""
    if len(text) <= limit:
        return text
    return text[: limit - 3].rsplit(" ", 1)[0] + "..."
