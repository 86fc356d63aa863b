"""Messages in, states out, of a trace whose records stand in the order in which the agent saw them.

    context() ──────────────┐
    assistant(), again ... ─┴─> open turn ──> tool_result() ... ──> next assistant/context/close ──> TraceState
                                                                     (the error that followed is known by then)

Of traces whose records name their parent, see record_tree.py.
"""

from __future__ import annotations

from collections.abc import Collection

from composer_prime.traces import Message, TraceState
from orchestrator.ingest.turns import NO_RESULT, Before, Call, StateMaker, Turn, digest_of, size_of, too_long


class TraceBuilder:
    """One trace. Methods that may end a turn return its state, None where there is none or it is passed over."""

    def __init__(self, maker: StateMaker) -> None:
        self._maker, self.tools = maker, maker.tools
        self._messages: list[Message] = []
        self._prefixes: list[bytes] = []
        self._marks: list[set[str]] = []
        self._chars, self._overflow = 0, False
        self._turn: Turn | None = None
        self._turn_marks: set[str] = set()

    def context(self, role: str, text: str, *, mark: str | None = None, error: str | None = None) -> TraceState | None:
        """A system or user message. `error` is what it tells of the turn before (formats without tool results)."""
        if error is not None:
            self.error(error)
        state = self.close()
        self._append(self._maker.message(role, text), {mark} if mark else set())
        return state

    def assistant(
        self,
        text: str = "",
        calls: Collection[Call] = (),
        reasoning: str = "",
        *,
        key: str | None = None,
        mark: str | None = None,
        model: str | None = None,
        entropy: float | None = None,
    ) -> TraceState | None:
        """A turn, or more of the open turn when `key` is its key (one turn written as several records).

        `model` made it and, unless another is named, those that follow; None where the record does not say.
        """
        state = None
        if self._turn is None or key is None or key != self._turn.key:
            state = self.close()
            self._turn = self._maker.turn(key, model, entropy)
        self._maker.origin.model = model or self._maker.origin.model
        self._turn.add(text, calls, reasoning)
        self._turn_marks |= {mark} if mark else set()
        return state

    def tool_result(self, call_id: str, text: str, *, error: str | None = None, mark: str | None = None) -> bool:
        """The result of a call of the open turn; False when it made no such call. Of two results the first stays."""
        if self._turn is None or not self._turn.answer(call_id, text, error):
            return False
        self._turn_marks |= {mark} if mark else set()
        return True

    def names_model(self, model: str) -> None:
        """A record beside the turns names the model that acts now; when it changes, the open turn is nobody's."""
        turn, self._maker.origin.model = self._turn, model
        if turn is not None:
            turn.several_models = turn.several_models or turn.model not in (None, model)
            turn.model = turn.model or model

    def unanswered(self) -> str | None:
        """The first call of the open turn that has no result yet."""
        return self._turn.unanswered() if self._turn else None

    def error(self, text: str) -> None:
        """The open turn led to an error; the first one is kept."""
        if self._turn is not None:
            self._turn.fail(text)

    def forget(self, marks: Collection[str], summary: str, mark: str | None = None) -> TraceState | None:
        """Drop the messages of these records and put `summary` after the leading prompt; it is the record `mark`."""
        state = self.close()
        gone = set(marks)
        kept = [(m, k) for m, k in zip(self._messages, self._marks, strict=True) if not k or not k <= gone]
        first = next((index for index, (m, _) in enumerate(kept) if m["role"] not in ("system", "user")), len(kept))
        message = self._maker.message("user", summary)
        kept = kept[:first] + ([(message, {mark} if mark else set())] if summary else []) + kept[first:]
        self._messages, self._marks, self._prefixes = [], [], []
        self._chars, self._overflow = 0, False
        for message, message_marks in _paired(kept):
            self._append(message, message_marks)
        return state

    def close(self) -> TraceState | None:
        """End the open turn: emit its state, then make it context."""
        turn, self._turn = self._turn, None
        marks, self._turn_marks = self._turn_marks, set()
        if turn is None:
            return None
        missing = too_long(self._maker.limits) if self._overflow else None
        before = Before(list(self._messages), self._prefixes[-1] if self._prefixes else b"", missing)
        state, shown = self._maker.finish(turn, before)
        for message in shown:
            self._append(message, marks)
        return state

    def _append(self, message: Message, marks: set[str]) -> None:
        if self._maker.unshown is not None:
            return
        self._chars += size_of(message)
        if self._chars > self._maker.limits.context_chars:
            # Nothing that follows can be shown with its context: hold no more of it until it is condensed.
            self._overflow = True
            self._messages, self._marks, self._prefixes = [], [], []
            return
        self._messages.append(message)
        self._marks.append(marks)
        self._prefixes.append(digest_of(self._prefixes[-1] if self._prefixes else b"", message))


def _paired(kept: list[tuple[Message, set[str]]]) -> list[tuple[Message, set[str]]]:
    """Without results whose call is gone; a call whose result is gone gets a stand-in."""
    out: list[tuple[Message, set[str]]] = []
    results = {message["tool_call_id"]: message for message, _ in kept if message["role"] == "tool"}
    for message, marks in kept:
        if message["role"] == "tool":
            continue
        out.append((message, marks))
        for call in message.get("tool_calls") or []:
            stand_in = {"role": "tool", "tool_call_id": call["id"], "content": NO_RESULT}
            out.append((results.get(call["id"], stand_in), marks))
    return out
