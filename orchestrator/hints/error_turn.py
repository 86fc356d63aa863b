"""The nouns of this package: a turn that went wrong, and the two protocols around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from orchestrator.rollouts.groups import FinishedRollout


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorTurn:
    """An assistant turn that went wrong."""

    message: int
    """Its position in the rollout's `turns`."""
    turn: int
    """Its number in TurnSpan."""
    kind: str
    """tool_not_found, bad_json, argument_name, argument_type, test_failure, exception, tool_error, failed, judged, or
    a kind of the user's templates."""
    text: str
    """What was said about it: the tool's answer, the broken rule of the schema, the judge's reason."""
    tool: str | None = None
    """The tool that was called."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """What was on offer, as OpenAI function definitions; empty where that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HintRequest:
    """What a generator may look at."""

    error: ErrorTurn
    rollout: FinishedRollout
    siblings: Sequence[FinishedRollout] = ()
    """The other rollouts of the group."""


class ErrorDetector(Protocol):
    """Finds turns that went wrong. At most one ErrorTurn a turn; raises EndpointError where it asks a model."""

    name: str

    async def find(self, rollout: FinishedRollout) -> list[ErrorTurn]: ...


class HintGenerator(Protocol):
    """Makes the text of a hint, or None where it has none. Raises EndpointError where it asks a model."""

    name: str

    async def hint(self, request: HintRequest) -> str | None: ...
