"""Hold each request until a node has answered it, and recover when one does not.

    generate() -> queue (FIFO) -> node with a free place -> answer -----> generate() returns
                    ^                  |  gone | stalled | draining: another node continues after the streamed tokens
                    |                  |  failed | bad answer: another node starts over
                    +---- at the front-+  (new lease: the old one's answer is dropped as late)

request_state.py has the states and their transitions, placing.py the choice of a node, and waits.py finds requests that
make no progress. Everything runs on one event loop. Only `generate` waits, at most until
one of its deadlines.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from composer_prime.console import printable
from composer_prime.errors import EngineError, RequestError, WireError
from composer_prime.wire.answer import RUNNING, Answer
from composer_prime.wire.node_messages import (
    CancelGenerate,
    GenerateFailed,
    NodeHello,
    Sampled,
    Sampling,
    Status,
    ToNode,
)
from orchestrator.gateway.answer_checks import check_sampled
from orchestrator.gateway.nodes import AttachedNode, Nodes
from orchestrator.gateway.placing import Placing
from orchestrator.gateway.request_state import (
    Answered,
    Discarded,
    Done,
    Ended,
    Event,
    GatewayRequest,
    Lost,
    Placed,
    Queued,
    Restarted,
    Running,
    Streamed,
    transition,
)

logger = logging.getLogger(__name__)

_MAX_FAILURES = 3
"""Discarded or bad answers after which a request ends. Nodes that vanish or drain do not count."""
_MAX_REFUSALS = 16
"""Nodes that may refuse a request before it ends; it ends sooner when no other node is left."""
_HELD_SHARE = 0.25
"""Share of request_timeout_s after which a node that has not answered is to blame, not the queue."""


@dataclass(slots=True, kw_only=True)
class RequestCounters:
    """Counts over all requests."""

    requests: int = 0
    answered: int = 0
    failed: int = 0
    cancelled: int = 0
    reissued: int = 0
    late_answers: int = 0
    bad_answers: int = 0
    tokens: int = 0
    """Sampled tokens of accepted answers."""
    tokens_resumed: int = 0
    """Tokens that nodes had streamed before they were gone, and after which others continued."""
    tokens_lost: int = 0
    """Streamed tokens that no answer has. What a node sampled and did not stream is not known."""


class Router:
    """Holds every request from its arrival to its answer."""

    def __init__(
        self,
        nodes: Nodes,
        send: Callable[[bytes, ToNode], bool],
        *,
        vocab_size: int,
        suspend_s: float,
        no_node_timeout_s: float,
        request_timeout_s: float,
        placing: Placing | None = None,
    ) -> None:
        """`send` to a connection returns False when it is gone.

        `suspend_s`: how long a node that keeps failing gets no request. `no_node_timeout_s`: how long requests wait
        while no node can serve. `request_timeout_s`: how long one waits at all. `placing` chooses among nodes
        otherwise.
        """
        self.nodes = nodes
        self.placing = placing or Placing()
        self.counters = RequestCounters()
        self.queue: OrderedDict[str, GatewayRequest] = OrderedDict()
        """Requests without a node, by id, the next one first."""
        self.open: dict[str, GatewayRequest] = {}
        """Every request without an answer, by id."""
        self.oldest_version = 0
        """Nodes with older weights get no request: they are catching up."""
        self.newest_version = 0
        """The newest that is published. Nodes with newer weights get no request: their future was rewound."""
        self.published: set[int] = set()
        """The versions that there were, from the first of them on."""
        self._send = send
        self._vocab_size = vocab_size
        self._suspend_s = suspend_s
        self.no_node_timeout_s = no_node_timeout_s
        self.request_timeout_s = request_timeout_s
        # Starts at random: an answer to a lease of an earlier orchestrator must not match one of ours.
        self._leases = itertools.count(secrets.randbits(48))
        self._placing = False
        self._closed: RequestError | None = None

    @property
    def queued(self) -> int:
        return len(self.queue)

    @property
    def in_flight(self) -> int:
        return len(self.open) - len(self.queue)

    # -- requests ------------------------------------------------------------------------------------------------

    async def generate(
        self,
        request_id: str,
        session: str,
        prompt_ids: bytes,
        sampling: Sampling,
        *,
        oldest_version: int = 0,
    ) -> Answer:
        """Return the checked answer of a node with `oldest_version` or newer weights.

        Cancelling the awaiting task cancels the request on its node.

        Raises DeadlineError when no node answered in time, EngineError when nodes failed several times, and
        RequestError when no node could serve it as it stands.
        """
        if self._closed is not None:
            raise self._closed
        request = GatewayRequest(
            request_id=request_id,
            session=session,
            prompt_ids=prompt_ids,
            sampling=sampling,
            since=time.monotonic(),
            done=asyncio.get_running_loop().create_future(),
            oldest_version=oldest_version,
        )
        self.counters.requests += 1
        self.open[request_id] = request
        self.queue[request_id] = request
        try:
            self.place()
            return await request.done
        except asyncio.CancelledError as error:
            self.counters.cancelled += 1
            self.blame_node_of(request)
            self.apply(request, Ended(error))
            self.place()
            raise
        finally:
            if session == request_id:  # It is of no conversation, and may have failed.
                self.placing.forget(session)

    def send(self, node: AttachedNode, message: ToNode) -> bool:
        """Return False when the node cannot be reached any more."""
        return self._send(node.identity, message)

    def apply(self, request: GatewayRequest, event: Event, *, cancel: bool = True) -> None:
        """Change the state of a request, and do what follows from that. With `cancel`, the node that loses it stops."""
        before = request.state
        tokens = transition(request, event)
        after = request.state
        self.counters.tokens_lost += tokens.lost
        self.counters.tokens_resumed += tokens.resumed
        if isinstance(before, Running) and after is not before:
            self._release(request, before, cancel=cancel)
        if isinstance(after, Queued):
            self.counters.reissued += isinstance(before, Running)
            self.queue[request.request_id] = request
            self.queue.move_to_end(request.request_id, last=False)  # It has waited before.
        else:
            self.queue.pop(request.request_id, None)
        if isinstance(after, Done) and not isinstance(before, Done):
            self._finish(request, after)

    def _release(self, request: GatewayRequest, running: Running, *, cancel: bool) -> None:
        """Take the lease from the node."""
        node = running.node
        node.leases.pop(running.lease, None)
        if cancel and node.attached:
            self.send(node, CancelGenerate(request_id=request.request_id, lease=running.lease))

    def _finish(self, request: GatewayRequest, done: Done) -> None:
        """Wake the caller."""
        self.open.pop(request.request_id, None)
        if isinstance(done.outcome, Answer):
            self.counters.answered += 1
            self.counters.tokens += len(done.outcome)
        elif not isinstance(done.outcome, asyncio.CancelledError):
            self.counters.failed += 1
        if request.done.done():  # Its caller was cancelled.
            return
        if isinstance(done.outcome, Answer):
            request.done.set_result(done.outcome)
        else:
            request.done.set_exception(done.outcome)

    def end(self, request: GatewayRequest, error: Exception) -> None:
        """End `request` with `error`, unless it has ended."""
        self.apply(request, Ended(error))
        self.place()

    def close(self, reason: str) -> None:
        """End every request, and each later one, with a 503."""
        self._closed = RequestError(reason, status=503, code="closing")
        for request in list(self.open.values()):
            self.end(request, self._closed)

    def forget(self, session: str) -> None:
        """Forget the node of a session that is over."""
        self.placing.forget(session)

    # -- placing -------------------------------------------------------------------------------------------------

    def place(self) -> None:
        """Hand waiting requests to nodes, oldest first, until no node has a free place."""
        if self._placing or self._closed is not None or not self.queue:
            return
        self._placing = True
        try:
            while self._place_waiting():
                pass
        finally:
            self._placing = False

    def serving(self) -> list[AttachedNode]:
        """Return the nodes that may get requests now, full or not."""
        now, oldest, newest = time.monotonic(), self.oldest_version, self.newest_version
        return [node for node in self.nodes.attached() if node.cannot_serve(now, oldest, newest) is None]

    def _place_waiting(self) -> bool:
        """Look at each waiting request once. Return whether a node turned out to be gone: its requests came back.

        Requests that need a node that is not free, or that is away for a while, keep their position. Nodes only fill
        up meanwhile, so what has the same needs as one of them is passed over.
        """
        serving, unmet = self.serving(), set[Hashable]()
        roomy = [node for node in serving if node.has_room]
        for request in list(self.queue.values()):
            if not roomy:
                break
            needs = request.least_version, frozenset(request.tried.refused_by), bool(request.kept)
            if needs in unmet:
                continue
            node = self._node_for(request, serving, roomy)
            if node is None:
                unmet.add(needs)
                continue
            self.assign(request, node)
            roomy = [node for node in roomy if node.attached and node.has_room]
        return not all(node.attached for node in serving)

    def _node_for(
        self, request: GatewayRequest, serving: list[AttachedNode], roomy: list[AttachedNode]
    ) -> AttachedNode | None:
        """Return the best of the `roomy` nodes. A request that no node can continue starts over."""
        if request.kept and not any(map(request.may_run_on, serving)):
            self.apply(request, Restarted())
        free = [node for node in roomy if request.may_run_on(node)]
        return self.placing.choose(request, free) if free else None

    def assign(self, request: GatewayRequest, node: AttachedNode) -> None:
        """Send `request` to `node`, which continues after the tokens that others have sampled."""
        if request.kept and request.sampling.stop and not node.continues:
            self.apply(request, Restarted())
        running = self.placing.note_placed(request, node, next(self._leases))
        self.apply(request, Placed(running), cancel=False)
        node.leases[running.lease] = request
        if not self.send(node, request.message(running)):
            self.leave(node, "unreachable")

    # -- answers -------------------------------------------------------------------------------------------------

    def on_sampled(self, node: AttachedNode, message: Sampled) -> None:
        """Take in an answer or a part of one. What comes late, after its request was taken back, means nothing."""
        request = self._held(node, message)
        if request is None:
            return
        running = request.state
        assert isinstance(running, Running), "a lease is of a running request"
        node.heard.progress = time.monotonic()
        if message.finish_reason == "cancelled":
            node.counters.failures += 1
            self._retry(request, node, "the node cancelled it", cancel=False)
            return
        try:
            answer = check_sampled(
                message,
                running.streamed,
                max_tokens=request.num_left,
                vocab_size=self._vocab_size,
                versions=range(request.least_version, self.newest_version + 1),
                node_id=node.node_id,
                swaps=node.reports.swaps_since(running.placed),
                published=self.published,
            )
        except WireError as error:
            self._refuse(request, node, error, cancel=message.is_part)
            return
        if message.is_part:
            self._take_part(request, node, answer)
        else:
            self._take_answer(request, running, answer)

    def _take_part(self, request: GatewayRequest, node: AttachedNode, part: Answer) -> None:
        self.apply(request, Streamed(part))
        node.speed.streams = True
        node.heard.delivered = time.monotonic()
        if node.speed.note_tokens(len(part)):
            self.place()

    def _take_answer(self, request: GatewayRequest, running: Running, answer: Answer) -> None:
        node = running.node
        self.apply(request, Answered(answer), cancel=False)
        node.note_answer(len(answer))
        node.speed.note_tokens(len(answer) - len(running.streamed))
        self.placing.note_answer(request, running, len(answer), self.nodes.attached())
        # Other nodes refused a request that can be answered. If all refuse, no node is at fault.
        for refuser in self.nodes.attached() if request.tried.refused_by else ():
            if refuser.node_id in request.tried.refused_by:
                self.blame(refuser)
        self.place()

    def _refuse(self, request: GatewayRequest, node: AttachedNode, error: WireError, *, cancel: bool = True) -> None:
        """Take nothing of what `node` sampled for `request`."""
        node.counters.bad_answers += 1
        self.counters.bad_answers += 1
        logger.warning("node %s sent a bad answer to %s: %s", node.node_id, request.request_id, error)
        self._retry(request, node, f"bad answer: {error}", cancel=cancel)

    def on_failed(self, node: AttachedNode, message: GenerateFailed) -> None:
        request = self._held(node, message)
        if request is None:
            return
        node.heard.progress = time.monotonic()
        error = printable(message.error)
        if not message.tried:
            node.draining = True
            self.apply(request, Lost(f"{node.node_id} is leaving: {error}"), cancel=False)
        elif message.retryable:
            node.counters.failures += 1
            self._retry(request, node, error, cancel=False)
        else:
            node.counters.failures += 1
            self._refused_by(request, node, error)
        self.place()

    def _refused_by(self, request: GatewayRequest, node: AttachedNode, error: str) -> None:
        """Take note that `node` cannot serve `request`, which ends when no other node may."""
        request.tried.refused_by.add(node.node_id)
        others = [node for node in self.nodes.attached() if not node.draining]
        may_go_on = any(node.node_id not in request.tried.refused_by for node in others)
        if may_go_on and len(request.tried.refused_by) < _MAX_REFUSALS:
            self.apply(request, Discarded(f"{node.node_id}: {error}"), cancel=False)
        else:
            ended = Ended(RequestError(f"node {node.node_id}: {error}", code="refused_by_node"))
            self.apply(request, ended, cancel=False)

    def _held(self, node: AttachedNode, message: Sampled | GenerateFailed) -> GatewayRequest | None:
        """Return the request that `node` holds under the message's lease; None for a late answer or part."""
        request = node.leases.get(message.lease)
        if request is not None and request.request_id == message.request_id:
            return request
        if not (isinstance(message, Sampled) and message.finish_reason in ("cancelled", RUNNING)):
            node.counters.late_answers += 1
            self.counters.late_answers += 1
        return None

    def _retry(self, request: GatewayRequest, node: AttachedNode, error: str, *, cancel: bool = True) -> None:
        """Count a failure of `node`, then let another one start over, or end the request after _MAX_FAILURES."""
        self.blame(node)
        request.tried.failures += 1
        request.tried.avoid = node.node_id
        if request.tried.failures >= _MAX_FAILURES:
            message = (
                f"{request.tried.failures} attempts failed, the last on node {node.node_id}: {error}; "
                "see that node's log (another attempt may go better)"
            )
            self.apply(request, Ended(EngineError(message)), cancel=cancel)
        else:
            self.apply(request, Discarded(f"{node.node_id}: {error}"), cancel=cancel)
        self.place()

    def blame(self, node: AttachedNode) -> None:
        """Count a failure of an attached node, which may suspend it."""
        node.note_failure(self._suspend_s)

    def blame_node_of(self, request: GatewayRequest) -> None:
        """Count a failure of the node that had `request` for long, when it ended, and delivered nothing meanwhile."""
        since = time.monotonic() - _HELD_SHARE * self.request_timeout_s
        state = request.state
        if isinstance(state, Running) and state.node.heard.delivered <= state.placed <= since:
            self.blame(state.node)

    # -- nodes come and go ---------------------------------------------------------------------------------------

    def attach(self, identity: bytes, hello: NodeHello, key: bytes = b"") -> AttachedNode:
        """Attach the sender of `hello` on connection `identity`. Requests that it held before count as lost."""
        previous = self.nodes.at(identity)
        if previous is not None:
            self.leave(previous, "said hello again")
        former = self.nodes.named(hello.node_id)
        if former is not None and former.attached:
            self.leave(former, "came back on a new connection")
        return self.nodes.add(identity, hello, key, self.newest_version)

    def update_status(self, node: AttachedNode, status: Status) -> None:
        """Take in a heartbeat."""
        node.note_status(status, self.newest_version)

    def leave(self, node: AttachedNode, reason: str) -> None:
        """Mark `node` as away, and place elsewhere what it held."""
        if not self.nodes.remove(node, reason):
            return
        if node.leases and node.heard.delivered <= min(node.placed_at()):
            node.note_failure(self._suspend_s)  # Else it could come back for them again and again.
        for request in reversed(list(node.leases.values())):
            self.apply(request, Lost(f"node {node.node_id} is gone: {reason}"))
        self.place()

    def lose_silent(self, lost_after_s: float) -> None:
        """Mark every node as away that was silent for longer than `lost_after_s`."""
        now = time.monotonic()
        for node in self.nodes.attached():
            if now - node.heard.anything > lost_after_s:
                self.leave(node, f"silent for {now - node.heard.anything:.1f} s")
