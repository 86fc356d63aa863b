"""A request on its way through the gateway, and the counts over all of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from composer_prime.wire.node import Sampling
from orchestrator.gateway.answers import Answer
from orchestrator.gateway.nodes import Node

_VERSIONS_COUNTED = 16


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    request_id: str
    session: str
    prompt_ids: bytes
    """int32 [T]."""
    sampling: Sampling
    since: float
    """When it came, monotonic seconds."""
    done: asyncio.Future[Answer]
    node: Node | None = None
    """None while it waits in the queue."""
    lease: int = 0
    placed: float = 0.0
    """When it went to its node, monotonic seconds."""
    failures: int = 0
    avoid: str | None = None
    """The node that failed it last."""
    last_error: str = ""


@dataclass(slots=True, kw_only=True)
class Counters:
    requests: int = 0
    answered: int = 0
    failed: int = 0
    cancelled: int = 0
    reissued: int = 0
    late_answers: int = 0
    bad_answers: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    """Sampled tokens of accepted answers."""
    tokens_by_version: dict[int, int] = field(default_factory=dict)

    def accept(self, request: Request, answer: Answer) -> None:
        """Count an accepted answer."""
        self.answered += 1
        self.prompt_tokens += len(request.prompt_ids) // 4
        self.tokens += len(answer.token_ids)
        by_version = self.tokens_by_version
        for span in answer.version_spans:
            by_version[span.version] = by_version.get(span.version, 0) + span.end - span.start
        while len(by_version) > _VERSIONS_COUNTED:
            del by_version[min(by_version)]

    def snapshot(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}
