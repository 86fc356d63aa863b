"""Whether an action could be carried out where it would be trained: a pair must not teach one that cannot."""

from __future__ import annotations

from composer_prime.traces import Message, TraceState
from orchestrator.teachers.canonical import Canonical
from orchestrator.teachers.written import way_of, written


def why_not(message: Message, form: Canonical, state: TraceState) -> str | None:
    """Why an action of this form cannot run in the state; None where it can, as far as its form tells.

    A call must be whole and name a tool of the state. Where the agent acts in its text, an action must be written in
    the way that it uses.
    """
    if "broken" in (form[0], *(part[0] for part in form[1:] if isinstance(part, tuple) and part)):
        return "the call is broken"
    names = {(tool.get("function") or {}).get("name") for tool in state.tools}
    for call in message.get("tool_calls") or []:
        if call["function"]["name"] not in names:
            return "the call names a tool that the state lacks"
    acts = None if state.tools else written(message.get("content") or "")
    way = None if acts is None else way_of([state.student_action, *state.messages])
    return None if acts is None or way in (None, acts.way) else f"it is written as {acts.way}, the trace's as {way}"
