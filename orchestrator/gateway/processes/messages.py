"""Messages between the router's process and a gateway process, over a socket pair of the two (wire/frames.py)."""

from __future__ import annotations

from typing import Any

import msgspec

from composer_prime.wire.turns import PackedAnswer
from orchestrator.gateway.generation import TurnRequest

BUFFER_BYTES = 1 << 20
"""Of a link, read ahead: a long prompt arrives in one piece."""


class ProcessSettings(msgspec.Struct, frozen=True, kw_only=True, tag="settings"):
    """What a gateway process serves; the first message to it."""

    host: str
    port: int
    router_url: str
    """Of the router's own HTTP server."""
    token: str | None
    """Bearer token that every request must carry."""
    model_names: tuple[str, ...]
    model_dir: str
    renderer: str | dict[str, Any] | None
    max_context: int
    answer_timeout_s: float
    """How long the router takes for a turn at most."""


class AskTurn(msgspec.Struct, frozen=True, kw_only=True, tag="ask"):
    turn_id: int
    """Number among the turns of this process."""
    turn: TurnRequest


class CancelTurn(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """The client of this turn has gone."""

    turn_id: int


class AnsweredTurn(msgspec.Struct, frozen=True, kw_only=True, tag="answered"):
    turn_id: int
    answer: PackedAnswer


class FailedTurn(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """A turn that ended with a RequestError of these arguments."""

    turn_id: int
    message: str
    status: int
    code: str
    param: str | None


class ServingBeat(msgspec.Struct, frozen=True, kw_only=True, tag="beat"):
    """The process serves the port, and its event loop runs."""


ToProcess = ProcessSettings | AnsweredTurn | FailedTurn
FromProcess = AskTurn | CancelTurn | ServingBeat
