"""A turn that went wrong, and the two protocols around it: who finds it and who writes its hint."""

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
    """Describes the error: the tool's answer, the broken rule of the schema, or the judge's reason."""
    tool: str | None = None
    """The tool that was called."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """The tools on offer, as OpenAI function definitions; empty where unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HintRequest:
    """The input of a generator."""

    error: ErrorTurn
    rollout: FinishedRollout
    siblings: Sequence[FinishedRollout] = ()
    """The other rollouts of the group."""


class ErrorDetector(Protocol):
    """Finds turns that went wrong, at most one error a turn. Raises EndpointError where it asks a model."""

    name: str

    async def find(self, rollout: FinishedRollout) -> list[ErrorTurn]: ...


class HintGenerator(Protocol):
    """Writes the text of a hint, or returns None. Raises EndpointError where it asks a model."""

    name: str

    async def hint(self, request: HintRequest) -> str | None: ...
