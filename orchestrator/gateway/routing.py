"""Hold each request until a node has answered it, and recover when one does not.

    generate() -> queue (FIFO) -> node with a free place -> Generated ------> generate() returns
                    ^                  |  gone | stalled | draining: another node continues after the streamed tokens
                    |                  |  failed | bad answer: another node starts over
                    +---- at the front-+  (new lease: the old one's answer is dropped as late)

placing.py chooses the node. waits.py finds requests that make no progress, and ends those that waited too long.
twins.py starts the last ones of a group on a second node. Everything runs on one event loop. Only `generate` waits, at
most until one of its deadlines.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable

from composer_prime.console import printable
from composer_prime.errors import EngineError, RequestError, WireError
from composer_prime.wire.node import CancelGenerate, Generated, GenerateFailed, Progress, Sampling, ToNode
from composer_prime.wire.turns import Prefix
from orchestrator.gateway.answers import NodeAnswer, PartialAnswer, check_answer, check_progress, complete
from orchestrator.gateway.nodes import (
    AttachedNode,
    GatewayRequest,
    Nodes,
    RequestCounters,
    able_nodes,
    node_needs,
    too_long,
)
from orchestrator.gateway.placing import Placing
from orchestrator.gateway.twins import SiblingRequests, adopt_twin, count_lost, goes_on_without

logger = logging.getLogger(__name__)

_MAX_FAILURES = 3
"""Failed or bad answers after which a request ends. Nodes that vanish or drain do not count."""
_MAX_REFUSALS = 16
"""Nodes that may refuse a request before it ends; it ends sooner when no other node is left."""
_HELD_SHARE = 0.25
"""Share of request_timeout_s after which a node that has not answered is to blame, not the queue."""


class Router:
    """Holds every request from its arrival to its answer."""

    def __init__(
        self,
        send: Callable[[AttachedNode, ToNode], bool],
        *,
        vocab_size: int,
        suspend_s: float,
        no_node_timeout_s: float,
        request_timeout_s: float,
        placing: Placing | None = None,
    ) -> None:
        """`send` returns False when the node cannot be reached any more.

        `suspend_s`: how long a node that keeps failing gets no request. `no_node_timeout_s`: how long requests wait
        while no node can serve. `request_timeout_s`: how long one waits at all. `placing` chooses among nodes
        otherwise.
        """
        self.placing = placing or Placing()
        self.siblings = SiblingRequests()
        self.nodes = Nodes(self._on_gone, self.placing.update)
        self.counters = RequestCounters()
        self._oldest_version = 0
        self.queue: OrderedDict[str, GatewayRequest] = OrderedDict()
        """Requests without a node, by id, in the order in which they are placed."""
        self.open: dict[str, GatewayRequest] = {}
        """Every request without an answer, by id."""
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
    def oldest_version(self) -> int:
        """Nodes with older weights get no request: they are catching up."""
        return self._oldest_version

    @oldest_version.setter
    def oldest_version(self, version: int) -> None:
        self._oldest_version = version
        self.placing.look_again()

    @property
    def newest_version(self) -> int:
        """Nodes with newer weights get no request: they belong to a future that was rewound."""
        return self.nodes.newest_version

    @newest_version.setter
    def newest_version(self, version: int) -> None:
        self.nodes.newest_version = version
        self.placing.look_again()

    # -- requests ------------------------------------------------------------------------------------------------

    async def generate(
        self,
        request_id: str,
        session: str,
        prompt_ids: bytes,
        sampling: Sampling,
        *,
        oldest_version: int = 0,
        prefix: Prefix | None = None,
    ) -> NodeAnswer:
        """Return the checked answer of a node with `oldest_version` or newer weights.

        `prefix`: the start of the prompt that the session's newest turn had. Cancelling the awaiting task cancels the
        request on its node.

        Raises DeadlineError when no node answered in time, EngineError when nodes failed several times, and
        RequestError when no node could serve it as it stands.
        """
        request = GatewayRequest(
            request_id=request_id,
            session=session,
            prompt_ids=prompt_ids,
            sampling=sampling,
            since=time.monotonic(),
            done=asyncio.get_running_loop().create_future(),
            oldest_version=oldest_version,
            prefix=prefix,
        )
        if self._closed is not None:
            raise self._closed
        self.counters.requests += 1
        self.siblings.note(session)
        self.open[request_id] = self.queue[request_id] = request
        try:
            self.place()
            return await request.done
        except asyncio.CancelledError:
            self.counters.cancelled += 1
            self.blame_nodes(request)
            raise
        finally:
            self._drop(request)
            if session == request_id:  # It is of no conversation, and may have failed.
                self.placing.forget(session)

    def _drop(self, request: GatewayRequest) -> None:
        """Forget a request that has ended for its caller, and cancel it where it is."""
        self.open.pop(request.request_id, None)
        self.queue.pop(request.request_id, None)
        held = [one for one in (request, request.twin) if one is not None and one.node is not None]
        for one in held:
            self.counters.tokens_lost += len(one.streamed)
            self.take_back(one)
        if held:
            self.place()

    def take_back(self, request: GatewayRequest) -> None:
        """Take the request from its node, which may stop working on it."""
        node = self._release(request)
        if node is not None:
            self._send(node, CancelGenerate(request_id=request.request_id, lease=request.lease))

    def _release(self, request: GatewayRequest) -> AttachedNode | None:
        """Take the request's lease from its node, and return that node."""
        node = request.node
        request.node = None
        if node is not None:
            node.leases.pop(request.lease, None)
            if node.attached:
                self.placing.update(node)
        return node

    # -- placing -------------------------------------------------------------------------------------------------

    def place(self) -> None:
        """Hand waiting requests to nodes, oldest first, until no node has a free place."""
        if self._placing:
            return
        self._placing = True
        unmet: set[tuple[tuple[int, int, int], bool]] = set()
        try:
            while (placement := self._next_placement(unmet)) is not None:
                request, node = placement
                del self.queue[request.request_id]
                if isinstance(node, RequestError):
                    self.end(request, node)
                else:
                    self.assign(request, node)
        finally:
            self._placing = False

    def serving(self) -> list[AttachedNode]:
        """Return the nodes that may get requests now, full or not."""
        now, oldest, newest = time.monotonic(), self.oldest_version, self.newest_version
        return [node for node in self.nodes.attached() if node.cannot_serve(now, oldest, newest) is None]

    def _next_placement(
        self, unmet: set[tuple[tuple[int, int, int], bool]]
    ) -> tuple[GatewayRequest, AttachedNode | RequestError] | None:
        """Return the first request that a free node can take, or whose prompt no known node has room for.

        Requests that need a node that is not free, or that is away for a while, keep their position. What they need
        goes into `unmet`: nodes only fill up while requests are placed, so others with the same needs are passed over.
        """
        now, oldest, newest = time.monotonic(), self.oldest_version, self.newest_version
        serving: list[AttachedNode] | None = None
        for request in self.queue.values():
            if not self.placing.any_free(now):
                return None
            needs, begun = node_needs(request, self.nodes.contexts), bool(request.kept)
            if (needs, begun) in unmet:
                continue
            free = self.placing.free(request, now, oldest, newest)
            if not free:
                serving = self.serving() if serving is None else serving
                if not any(node.has_room for node in serving):
                    return None
                outcome = self._able_and_free(request, serving)
                if isinstance(outcome, RequestError):
                    return request, outcome
                free = outcome
            if free:
                return request, self.placing.choose(request, free)
            if needs is not None and begun == bool(request.kept):  # Else it starts over.
                unmet.add((needs, begun))
        return None

    def _able_and_free(self, request: GatewayRequest, serving: list[AttachedNode]) -> list[AttachedNode] | RequestError:
        """Return the free nodes that may take `request` though none has room for all that it may become.

        Restart a request that no serving node can continue. Return an error for one that no known node has room for.
        """
        able = able_nodes(request, serving)
        if request.kept and not able:
            self._lose(request)
            able = able_nodes(request, serving)
        largest_known = self.nodes.largest_context(self.no_node_timeout_s)
        if request.num_prompt >= largest_known:
            return too_long(request, int(largest_known))
        return [node for node in able if node.has_room]

    def assign(self, request: GatewayRequest, node: AttachedNode) -> None:
        """Send `request` to `node`, which continues after the tokens that others have sampled."""
        if request.kept and request.sampling.stop and not node.continues:
            self._lose(request)
        self.placing.note_placed(request, node)
        request.node = node
        request.lease = next(self._leases)
        request.placed = request.last_part = time.monotonic()
        node.leases[request.lease] = request
        self.placing.update(node)
        message = request.message(node, request.prefix if self.placing.holds_prefix(request, node) else None)
        self.counters.prompt_bytes_sent += len(message.prompt_ids)
        if not self._send(node, message):
            self.nodes.leave(node, "unreachable")

    def reissue(self, request: GatewayRequest, reason: str, *, keep: bool = True) -> None:
        """Put `request`, taken from its node, back at the front of the queue, because it has waited before.

        With `keep` its next node continues after the streamed tokens. If it also runs on a second node, only that node
        continues, unless it builds on tokens that must not be kept.
        """
        first = self.open.get(request.request_id)
        if request.done.done() or first is not request:
            self.counters.tokens_lost += len(request.streamed)
            if first is not None and first.twin is request:
                first.twin = None
            return
        if request.twin is not None:
            if keep or goes_on_without(request, first):
                adopt_twin(self.counters, request)
                return
            self.counters.tokens_lost += len(request.twin.streamed)
            self.take_back(request.twin)
            request.twin = None
        if keep:
            self.counters.tokens_resumed += len(request.streamed)
            request.kept.extend(request.streamed)
        else:
            self.counters.tokens_lost += len(request.streamed)
        request.streamed = PartialAnswer()
        self.counters.reissued += 1
        request.last_error = reason
        self.queue[request.request_id] = request
        self.queue.move_to_end(request.request_id, last=False)

    def _lose(self, request: GatewayRequest) -> None:
        """Make `request` start over. What a twin does not keep, the first request still has."""
        if self.open.get(request.request_id) is request:
            self.counters.tokens_lost += len(request.kept)
        request.kept = PartialAnswer()

    def close(self, reason: str) -> None:
        """End every request, and each later one, with a 503."""
        self._closed = RequestError(reason, status=503, code="closing")
        for request in list(self.open.values()):
            self.end(request, self._closed)

    def forget(self, session: str) -> None:
        """Forget the node of a session that is over."""
        self.placing.forget(session)
        self.siblings.end(session)

    # -- answers -------------------------------------------------------------------------------------------------

    def on_generated(self, node: AttachedNode, message: Generated) -> None:
        request = self._claim(node, message)
        if request is None:
            return
        if message.finish_reason == "cancelled":
            node.failures += 1
            self._retry(request, node, "the node cancelled it")
            return
        try:
            answer = check_answer(
                message,
                max_tokens=request.tokens_on(node),
                vocab_size=self._vocab_size,
                versions=range(request.least_version, self.newest_version + 1),
                node_id=node.node_id,
                swaps=node.reports.swaps_since(request.placed),
                streamed=request.streamed,
            )
        except WireError as error:
            self._refuse(request, node, error)
            return
        node.note_answer(len(answer.token_ids))
        node.speed.note_tokens(len(answer.token_ids) - len(request.streamed))
        self.placing.note_answer(request, node, time.monotonic() - request.placed, len(answer.token_ids))
        self.placing.update(node)
        # Other nodes refused a request that can be answered. If all refuse, no node is at fault.
        for refuser in self.nodes.attached() if request.refused_by else ():
            if refuser.node_id in request.refused_by:
                self.blame(refuser)
        answer = complete(request.kept, answer)
        request.streamed = PartialAnswer()
        self.counters.answered += 1
        self.counters.tokens += len(answer.token_ids)
        first = self.open.get(request.request_id)
        if first is not None and first is not request:
            self.counters.twins_won += 1
            count_lost(self.counters, first, request)
        request.done.set_result(answer)
        self.place()

    def on_progress(self, node: AttachedNode, message: Progress) -> None:
        """Take in a part of an answer. A part that comes late, after its request was taken back, means nothing."""
        request = node.leases.get(message.lease)
        if request is None or request.request_id != message.request_id or request.done.done():
            return
        try:
            part = check_progress(
                message,
                request.streamed,
                max_tokens=request.tokens_on(node),
                vocab_size=self._vocab_size,
                versions=range(request.least_version, self.newest_version + 1),
                node_id=node.node_id,
                swaps=node.reports.swaps_since(request.placed),
            )
        except WireError as error:
            self.take_back(request)
            self._refuse(request, node, error)
            return
        request.streamed.extend(part)
        node.streams = True
        if node.speed.note_tokens(len(part)):
            self.placing.update(node)
            self.place()
        node.last_progress = node.last_delivered = request.last_part = time.monotonic()

    def _refuse(self, request: GatewayRequest, node: AttachedNode, error: WireError) -> None:
        """Take nothing of what `node` sampled for `request`."""
        node.bad_answers += 1
        self.counters.bad_answers += 1
        logger.warning("node %s sent a bad answer to %s: %s", node.node_id, request.request_id, error)
        self._retry(request, node, f"bad answer: {error}")

    def on_failed(self, node: AttachedNode, message: GenerateFailed) -> None:
        request = self._claim(node, message)
        if request is None:
            return
        error = printable(message.error)
        if message.prefix_missing and request.prefix is not None:
            self.counters.prefixes_missing += 1
            self.placing.forget(request.session)
            request.prefix = None
            request.streamed = PartialAnswer()
            self.assign(request, node)
            return
        if not message.tried and not message.prefix_missing:
            node.draining = True
            self.reissue(request, f"{node.node_id} is leaving: {error}")
            self.place()
            return
        node.failures += 1
        if message.retryable:
            self._retry(request, node, error)
            return
        for one in (request, self.open.get(request.request_id, request)):
            one.refused_by.add(node.node_id)
        may_go_on = len(request.refused_by) < _MAX_REFUSALS and any(map(request.may_go_to, self.nodes.attached()))
        if may_go_on or goes_on_without(request, self.open.get(request.request_id)):
            self.reissue(request, f"{node.node_id}: {error}", keep=False)
        else:
            self.end(request, RequestError(f"node {node.node_id}: {error}", code="refused_by_node"))
        self.place()

    def _claim(self, node: AttachedNode, message: Generated | GenerateFailed) -> GatewayRequest | None:
        """Take the request that `node` holds under the message's lease; None for a late answer.

        In one burst with it, another node may have answered, or the deadline passed.
        """
        request = node.leases.get(message.lease)
        if request is None or request.request_id != message.request_id:
            if not (isinstance(message, Generated) and message.finish_reason == "cancelled"):
                node.late_answers += 1
                self.counters.late_answers += 1
            return None
        self._release(request)
        node.last_progress = time.monotonic()
        if request.done.done():
            self.counters.tokens_lost += len(request.streamed)
            self.place()
            return None
        return request

    def _retry(self, request: GatewayRequest, node: AttachedNode, error: str) -> None:
        """Count a failure of `node`, then reissue `request` or end it after _MAX_FAILURES.

        A twin's failure also counts for the first request, which continues.
        """
        self.blame(node)
        request.failures += 1
        request.avoid = node.node_id
        first = self.open.get(request.request_id, request)
        first.failures = max(first.failures, request.failures)
        if request.failures >= _MAX_FAILURES and not goes_on_without(request, self.open.get(request.request_id)):
            message = (
                f"{request.failures} attempts failed, the last on node {node.node_id}: {error}; "
                "see that node's log (another attempt may go better)"
            )
            self.end(request, EngineError(message))
        else:
            self.reissue(request, f"{node.node_id}: {error}", keep=False)
        self.place()

    def blame(self, node: AttachedNode) -> None:
        """Count a failure of an attached node, which may suspend it."""
        node.note_failure(self._suspend_s)
        self.placing.update(node)

    def blame_nodes(self, request: GatewayRequest) -> None:
        """Count a failure of each node that had `request` for long, when it ended, and delivered nothing meanwhile."""
        since = time.monotonic() - _HELD_SHARE * self.request_timeout_s
        for one in (request, request.twin):
            if one is not None and one.node is not None and one.node.last_delivered <= one.placed <= since:
                self.blame(one.node)

    def end(self, request: GatewayRequest, error: Exception) -> None:
        """End `request` with `error`, unless it has ended."""
        if not request.done.done():
            self.counters.failed += 1
            request.done.set_exception(error)

    # -- nodes come and go ---------------------------------------------------------------------------------------

    def _on_gone(self, node: AttachedNode, reason: str) -> None:
        self.placing.drop(node)
        requests = list(node.leases.values())
        if requests and node.last_delivered <= min(request.placed for request in requests):
            node.note_failure(self._suspend_s)  # Else it could come back for them again and again.
        node.leases = {}
        for request in requests:
            request.node = None
        for request in reversed(requests):
            self.reissue(request, f"node {node.node_id} is gone: {reason}")
        self.place()

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        return len(self.queue)

    @property
    def in_flight(self) -> int:
        return len(self.open) - len(self.queue)
