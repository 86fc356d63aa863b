"""A generation request, its states, and the only function that changes one.

             +-- Lost (tokens stay) | Discarded | Restarted --+
             v                                             |
    Queued --+-- Placed --> Running -- Streamed --> Running+
      |                        |
      +-- Ended --> Done <-----+-- Answered | Ended

`transition` neither sends nor counts anything outside of the request. The router compares the state before and after,
and does what follows: take the lease from the node, cancel the work there, queue the request, wake its caller.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from composer_prime.wire.answer import NO_TOKENS, Answer
from composer_prime.wire.node_messages import Generate, Sampling
from composer_prime.wire.types import INT

if TYPE_CHECKING:
    from orchestrator.gateway.nodes import AttachedNode


@dataclass(frozen=True, slots=True)
class Queued:
    """It waits for a node."""


@dataclass(slots=True, eq=False)
class Running:
    """A node holds it."""

    node: AttachedNode
    lease: int
    placed: float
    """When the node was given it, monotonic seconds."""
    load: int
    """Requests that the node held then, this one included."""
    cold: int
    """Prompt tokens that the node had to compute, as far as this gateway knows."""
    streamed: Answer = NO_TOKENS
    """What the node has sampled so far, after what is kept."""


@dataclass(frozen=True, slots=True)
class Done:
    outcome: Answer | BaseException


State = Queued | Running | Done
QUEUED = Queued()


@dataclass(frozen=True, slots=True)
class Placed:
    """A node takes it."""

    running: Running


@dataclass(frozen=True, slots=True)
class Streamed:
    """Its node delivered more checked tokens."""

    part: Answer


@dataclass(frozen=True, slots=True)
class Answered:
    """Its node delivered all checked tokens."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class Lost:
    """Its node no longer works on it. The streamed tokens stay: another node continues after them."""

    reason: str


@dataclass(frozen=True, slots=True)
class Discarded:
    """Its node's work is worth nothing: it starts over after what was kept before."""

    reason: str


@dataclass(frozen=True, slots=True)
class Restarted:
    """What was kept is given up: no node that serves can continue it."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Nobody waits for it any more, or it cannot be answered."""

    error: BaseException


Event = Placed | Streamed | Answered | Lost | Discarded | Restarted | Ended


@dataclass(slots=True)
class Attempts:
    """What was tried before."""

    failures: int = 0
    avoid: str | None = None
    """The node on which it failed last."""
    refused_by: set[str] = field(default_factory=set)
    """Nodes that cannot serve it as it stands."""
    last_error: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class GatewayRequest:
    """A request from its arrival at the gateway to its answer."""

    request_id: str
    session: str
    prompt_ids: bytes
    """int32 [T]."""
    sampling: Sampling
    since: float
    """When it arrived, monotonic seconds."""
    done: asyncio.Future[Answer]
    oldest_version: int = 0
    """Nodes with older weights may not answer it."""
    state: State = QUEUED
    kept: Answer = NO_TOKENS
    """What nodes that are gone sampled: its next node continues there."""
    tried: Attempts = field(default_factory=Attempts)

    @property
    def node(self) -> AttachedNode | None:
        """The node that holds it."""
        return self.state.node if isinstance(self.state, Running) else None

    @property
    def streamed(self) -> Answer:
        return self.state.streamed if isinstance(self.state, Running) else NO_TOKENS

    @property
    def num_prompt(self) -> int:
        """Tokens that its next node begins with."""
        return len(self.prompt_ids) // INT.itemsize + len(self.kept)

    @property
    def num_left(self) -> int:
        """Tokens that its next node may sample at most."""
        return self.sampling.max_tokens - len(self.kept)

    @property
    def least_version(self) -> int:
        """Oldest policy version that may continue it: versions never fall within an answer."""
        return max(self.oldest_version, self.kept.newest_version)

    def may_run_on(self, node: AttachedNode) -> bool:
        """Tell whether `node` has not refused it, and has weights that may continue it."""
        return node.version >= self.least_version and node.node_id not in self.tried.refused_by

    def message(self, running: Running) -> Generate:
        """Return what the node of `running` is sent."""
        return Generate(
            request_id=self.request_id,
            lease=running.lease,
            prompt_ids=self.prompt_ids + self.kept.token_ids,
            sampling=msgspec.structs.replace(self.sampling, max_tokens=self.num_left, resumed=len(self.kept)),
            session=self.session,
        )


@dataclass(frozen=True, slots=True)
class Tokens:
    """What an event did to tokens that nodes had streamed."""

    lost: int = 0
    resumed: int = 0


def transition(request: GatewayRequest, event: Event) -> Tokens:
    """Change the state of `request` as `event` says. A request that is done stays so."""
    streamed = request.streamed
    match request.state, event:
        case Done(), _:
            return Tokens()
        case _, Placed(running=running):
            request.state = running
            return Tokens(lost=len(streamed))
        case Running() as running, Streamed(part=part):
            running.streamed = streamed.then(part)
            return Tokens()
        case Running(), Answered(answer=answer):
            request.state = Done(request.kept.then(answer))
            return Tokens()
        case _, Lost(reason=reason):
            request.kept = request.kept.then(streamed) if streamed else request.kept
            request.tried.last_error = reason
            request.state = QUEUED
            return Tokens(resumed=len(streamed))
        case _, Discarded(reason=reason):
            request.tried.last_error = reason
            request.state = QUEUED
            return Tokens(lost=len(streamed))
        case _, Restarted():
            lost, request.kept = len(request.kept) + len(streamed), NO_TOKENS
            request.state = QUEUED
            return Tokens(lost=lost)
        case _, Ended(error=error):
            request.state = Done(error)
            return Tokens(lost=len(streamed))
    raise AssertionError(f"{type(event).__name__} of a request that is {type(request.state).__name__}")
