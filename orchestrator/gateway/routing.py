"""Hold each request until a node has answered it, and recover when one does not.

    generate() -> queued (FIFO) -> running on a node with a free place -> done -----> generate() returns
                    ^                  |  gone | stalled | draining: another node continues after the streamed tokens
                    |                  |  failed | bad answer: another node starts over
                    +---- at the front-+  (new lease: the old one's answer is dropped as late)

`Router._transition` makes every step between the three states (docs/explanation/routing.md). A node is gone when it
says so, its connection ends, or it is silent for `inference.lost_after_s`.

A node may claim a swap of weights within an answer only to a version that it first reported while it held the request,
and not among streamed tokens. Else one with old weights could claim a swap in each answer: tokens behind it would not
be compared with suspect weights (inference/audit.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Container, Hashable
from typing import Literal

from composer_prime.console import printable
from composer_prime.errors import DeadlineError, EngineError, RequestError, WireError
from composer_prime.monitor.events import event
from composer_prime.run.retry import backoff_s
from composer_prime.wire.node_messages import (
    NO_TOKENS,
    Answer,
    CancelGenerate,
    Generate,
    GenerateFailed,
    NodeHello,
    Sampled,
    Sampling,
    Status,
    ToNode,
)
from composer_prime.wire.types import FLOAT, INT, VersionSpan, floats, ints
from orchestrator.gateway.nodes import (
    CONTINUE,
    AttachedNode,
    GatewayRequest,
    NodeRecord,
    NodeSpeed,
    Placing,
    RequestQueue,
    Running,
    ServedPolicy,
)
from orchestrator.swarm import NodeTrust

logger = logging.getLogger(__name__)

_MAX_FAILURES = 3
"""Of one request. Nodes that vanish or drain do not count."""
_COMPARED = 16
_MAX_REFUSALS = 16
_HELD_SHARE = 0.25
"""Of request_timeout_s: from then on a node that has not answered is to blame, not the queue."""
_MAX_SUSPENSION_S = 3600.0
"""Nothing but a suspension's end lets a node that works again show so."""
_NO_EVIDENCE = -9999.0
"""vLLM's value for a missing logprob."""
_ROUNDING = 1e-3
"""A logprob may exceed 0 by this much, of bfloat16 arithmetic."""
COUNTERS = (
    "requests", "answered", "failed", "cancelled", "reissued", "late_answers", "bad_answers", "tokens",
    "tokens_resumed", "tokens_lost",
)  # fmt: skip
"""tokens: of accepted answers. tokens_resumed: streamed by nodes that are gone, and continued by others. tokens_lost:
streamed, and in no answer."""


class Router:
    def __init__(
        self, send: Callable[[bytes, ToNode], bool], *, policy: ServedPolicy, suspend_s: float, request_timeout_s: float
    ) -> None:
        """`send` returns False for a connection that is gone. `suspend_s`: of a node that keeps failing."""
        self.policy = policy
        self.placing = Placing()
        self.counters = Counter(dict.fromkeys(COUNTERS, 0))
        self.nodes: dict[str, AttachedNode] = {}
        self.trust: defaultdict[str, NodeTrust] = defaultdict(NodeTrust)
        self.queue = RequestQueue()
        self.request_timeout_s = request_timeout_s
        self.connections: dict[bytes, AttachedNode] = {}
        self._roomy: OrderedDict[bytes, AttachedNode] = OrderedDict()
        """Attached nodes but those that were full when last looked at, and are since."""
        self.send = send
        self._suspend_s = suspend_s
        self._closed: RequestError | None = None

    @property
    def open(self) -> list[GatewayRequest]:
        return [*self.queue.values(), *(request for node in self.attached() for request in node.leases.values())]

    # -- requests ------------------------------------------------------------------------------------------------

    async def generate(
        self, request_id: str, session: str, prompt_ids: bytes, sampling: Sampling, *, oldest_version: int = 0
    ) -> Answer:
        """Return the checked answer of a node with `oldest_version` or newer weights.

        Cancelling the awaiting task cancels the request. Raises DeadlineError when no node answered in time,
        EngineError when nodes failed several times, and RequestError when no node could serve it.
        """
        if self._closed is not None:
            raise self._closed
        request = GatewayRequest(
            asked=Generate(request_id=request_id, lease=0, prompt_ids=prompt_ids, sampling=sampling, session=session),
            since=time.monotonic(),
            done=asyncio.get_running_loop().create_future(),
            oldest_version=oldest_version,
        )
        self.counters["requests"] += 1
        self.queue.add(request)
        try:
            self.place()
            return await request.done
        except asyncio.CancelledError as error:
            self.counters["cancelled"] += 1
            self.blame_node_of(request)
            self.finish(request, error)
            self.place()
            raise

    def _transition(
        self, request: GatewayRequest, to: Literal["queued", "done"] | Running, *, cancel: bool = False
    ) -> Answer:
        """Return what the node that held the request has streamed. With `cancel`, that node stops.

        A request that is queued again comes first: it has waited before.
        """
        former, streamed = request.running, NO_TOKENS
        self.queue.discard(request)
        request.running = None
        if former is not None:
            streamed = former.streamed
            del former.node.leases[former.lease]
            if former.node.attached:
                self._roomy[former.node.identity] = former.node
            if cancel and former.node.attached:
                stop = CancelGenerate(request_id=request.asked.request_id, lease=former.lease)
                self.send(former.node.identity, stop)
        if isinstance(to, Running):
            request.running = to
            to.node.leases[to.lease] = request
        elif to == "queued":
            self.queue.add(request, is_first=True)
        return streamed

    def assign(self, request: GatewayRequest, node: AttachedNode) -> None:
        """Send `request` to `node`, which continues after the tokens of others."""
        if request.kept and request.asked.sampling.stop and node.hello.engine not in CONTINUE:
            self._start_over(request)
        running = self.placing.note_placed(request, node)
        self._transition(request, running)
        if not self.send(node.identity, request.message(running.lease)):
            self._take_away(node, "unreachable")

    def reissue(self, request: GatewayRequest, reason: str, *, keep: bool, cancel: bool = True) -> None:
        """Queue a request of a node again. With `keep`, another one continues after the streamed tokens."""
        streamed = request.running.streamed if request.running is not None else NO_TOKENS
        if keep and streamed:
            request.kept = request.kept.then(streamed)
            self.counters["tokens_resumed"] += len(streamed)
        else:
            self.counters["tokens_lost"] += len(streamed)
        self._transition(request, "queued", cancel=cancel)
        request.last_error = reason
        self.counters["reissued"] += 1

    def finish(self, request: GatewayRequest, outcome: Answer | BaseException, *, cancel: bool = True) -> None:
        """Wake the caller of a request, unless it has ended."""
        if request.running is None and request.row is None:
            return
        streamed = self._transition(request, "done", cancel=cancel)
        if request.asked.session == request.asked.request_id:  # It is of no conversation.
            self.placing.forget(request.asked.session)
        if isinstance(outcome, Answer):
            self.counters["answered"] += 1
            self.counters["tokens"] += len(outcome)
        else:
            self.counters["tokens_lost"] += len(streamed)
            self.counters["failed"] += not isinstance(outcome, asyncio.CancelledError)
        if request.done.done():  # Its caller was cancelled.
            return
        if isinstance(outcome, Answer):
            request.done.set_result(outcome)
        else:
            request.done.set_exception(outcome)

    def _start_over(self, request: GatewayRequest) -> None:
        """Give up what was kept of a queued request."""
        self.counters["tokens_lost"] += len(request.kept)
        request.kept = NO_TOKENS

    def close(self, reason: str) -> None:
        """End every request, and each later one, with a 503."""
        self._closed = RequestError(reason, status=503, code="closing")
        for request in self.open:
            self.finish(request, self._closed)

    # -- placing -------------------------------------------------------------------------------------------------

    def place(self) -> None:
        """Hand waiting requests to nodes, oldest first.

        A request that no free node may take keeps its position. Nodes only fill up meanwhile, so what has the same
        needs is passed over.
        """
        unmet = set[Hashable]()
        while self._closed is None and self._roomy and (head := self.queue.first(unmet)) is not None:
            needs, request = head
            node = self._node_for(request)
            if node is None:
                unmet.add(needs)
                continue
            self.assign(request, node)
            if not node.attached:  # What it held came back, and may need another node now.
                unmet = set()

    def serving(self) -> list[AttachedNode]:
        """Return the nodes that may get requests, full or not."""
        return [node for node in self.attached() if node.cannot_serve(self.policy) is None]

    def _node_for(self, request: GatewayRequest) -> AttachedNode | None:
        """Return the best free node. A request that no node can continue starts over.

        Only its conversation's node and those looked at longest ago are compared: a large fleet costs no more.
        """
        if request.kept and not any(map(request.may_run_on, self.serving())):
            self._start_over(request)
        own = self.nodes.get(self.placing.node_of(request) or "")
        if own is not None and own.identity in self._roomy:
            self._roomy.move_to_end(own.identity, last=False)
        free: list[AttachedNode] = []
        for _ in range(len(self._roomy)):
            identity, node = self._roomy.popitem(last=False)
            if not node.has_room:
                continue
            self._roomy[identity] = node
            if request.may_run_on(node) and node.cannot_serve(self.policy) is None:
                free.append(node)
            if len(free) == _COMPARED:
                break
        return self.placing.choose(request, free) if free else None

    # -- answers -------------------------------------------------------------------------------------------------

    def on_sampled(self, node: AttachedNode, message: Sampled) -> None:
        """Take in an answer or a part of one, unless it comes late."""
        request = self._held(node, message)
        if request is None:
            return
        running = request.running
        assert running is not None, "a lease is of a running request"
        node.progress = time.monotonic()
        try:
            answer = check_sampled(message, request, running, self.policy)
        except WireError as error:
            node.record.bad_answers += 1
            self.counters["bad_answers"] += 1
            logger.warning("node %s sent a bad answer to %s: %s", node.node_id, message.request_id, error)
            self._retry(request, node, f"bad answer: {error}", cancel=message.is_part)
            return
        node.delivered = node.progress
        if message.is_part:
            self._take_part(running, answer)
        else:
            self._take_answer(request, running, answer)

    def _take_part(self, running: Running, part: Answer) -> None:
        running.streamed, speed = running.streamed.then(part), running.node.speed
        speed.streams = True
        speed.tokens += len(part)
        if speed.pace is None:  # With each token it may get more requests.
            self._roomy[running.node.identity] = running.node
            self.place()

    def _take_answer(self, request: GatewayRequest, running: Running, answer: Answer) -> None:
        node = running.node
        self.finish(request, request.kept.then(answer), cancel=False)
        node.record.note_answer(len(answer))
        node.speed.tokens += len(answer) - len(running.streamed)
        self.placing.note_answer(request, running, answer, self.attached())
        # Other nodes refused a request that can be answered. If all refuse, no node is at fault.
        for refuser in self.attached() if request.refused_by else ():
            if refuser.node_id in request.refused_by:
                self.blame(refuser)
        self.place()

    def on_failed(self, node: AttachedNode, message: GenerateFailed) -> None:
        request = self._held(node, message)
        if request is None:
            return
        node.progress = time.monotonic()
        error = printable(message.error)
        if not message.tried:
            node.draining = True
            self.reissue(request, f"{node.node_id} is leaving: {error}", keep=True, cancel=False)
        elif message.retryable:
            node.record.failures += 1
            self._retry(request, node, error, cancel=False)
        else:
            node.record.failures += 1
            self._refused_by(request, node, error)
        self.place()

    def _refused_by(self, request: GatewayRequest, node: AttachedNode, error: str) -> None:
        request.refused_by.add(node.node_id)
        others = [node for node in self.attached() if not node.draining]
        may_go_on = any(node.node_id not in request.refused_by for node in others)
        if may_go_on and len(request.refused_by) < _MAX_REFUSALS:
            self.reissue(request, f"{node.node_id}: {error}", keep=False, cancel=False)
        else:
            refused = RequestError(f"node {node.node_id}: {error}", code="refused_by_node")
            self.finish(request, refused, cancel=False)

    def _held(self, node: AttachedNode, message: Sampled | GenerateFailed) -> GatewayRequest | None:
        """Return the request of the message's lease; None for a late one."""
        request = node.leases.get(message.lease)
        if request is not None and request.asked.request_id == message.request_id:
            return request
        if not (isinstance(message, Sampled) and message.is_part):
            self.counters["late_answers"] += 1
        return None

    def _retry(self, request: GatewayRequest, node: AttachedNode, error: str, *, cancel: bool = True) -> None:
        self.blame(node)
        request.failures += 1
        request.avoid = node.node_id
        if request.failures >= _MAX_FAILURES:
            message = (
                f"{request.failures} attempts failed, the last on node {node.node_id}: {error}; "
                "see that node's log (another attempt may go better)"
            )
            self.finish(request, EngineError(message), cancel=cancel)
        else:
            self.reissue(request, f"{node.node_id}: {error}", keep=False, cancel=cancel)
        self.place()

    def blame(self, node: AttachedNode) -> None:
        node.record.note_failure(self._suspend_s)

    def blame_node_of(self, request: GatewayRequest) -> None:
        """Count a failure of the node that had `request` for long and delivered nothing."""
        since = time.monotonic() - _HELD_SHARE * self.request_timeout_s
        running = request.running
        if running is not None and running.node.delivered <= running.placed <= since:
            self.blame(running.node)

    # -- nodes come and go ---------------------------------------------------------------------------------------

    def attached(self) -> list[AttachedNode]:
        return list(self.connections.values())

    def attach(self, identity: bytes, hello: NodeHello, key: bytes = b"") -> AttachedNode:
        """Requests that the sender held before count as lost."""
        if (previous := self.connections.get(identity)) is not None:
            self.leave(previous, "said hello again")
        former = self.nodes.pop(hello.node_id, None)
        if former is not None:
            self.leave(former, "came back on a new connection")
        # A node could restart to be tried first, again and again.
        speed = NodeSpeed(is_hopeful=former is None or former.speed.pace is not None)
        if former is not None and hello.instance and hello.instance == former.hello.instance:
            speed = former.speed
        record = former.record if former is not None else NodeRecord(trust=self.trust[hello.node_id])
        node = AttachedNode(hello=hello, identity=identity, key=key, record=record, speed=speed)
        record.note_version(min(node.version, self.policy.newest))
        self.nodes[hello.node_id] = self.connections[identity] = self._roomy[identity] = node
        text = f"node {node.node_id} connected (engine {hello.engine})"
        logger.info(
            "%s: %d places, version %d", text, hello.max_concurrent, node.version, extra=event("node", text=text)
        )
        return node

    def update_status(self, node: AttachedNode, status: Status) -> None:
        node.heard = time.monotonic()
        if status.tokens_per_s > 0 or status.version != node.version:
            node.progress = node.heard
        node.status = status
        node.record.note_version(min(node.version, self.policy.newest))

    def leave(self, node: AttachedNode, reason: str) -> None:
        """Place elsewhere what `node` held."""
        self._take_away(node, reason)
        self.place()

    def _take_away(self, node: AttachedNode, reason: str) -> None:
        if not node.attached:
            return
        del self.connections[node.identity]
        self._roomy.pop(node.identity, None)
        node.attached = False
        held = len(node.leases)
        logger.warning("node %s is gone (%s); it held %d requests", node.node_id, reason, held, extra=event("node"))
        if node.leases and node.delivered <= min(node.placed_at()):
            self.blame(node)  # Else it could come back for them again and again.
        for request in reversed(list(node.leases.values())):
            self.reissue(request, f"node {node.node_id} is gone: {reason}", keep=True)

    def lose_silent(self, lost_after_s: float) -> None:
        now = time.monotonic()
        for node in self.attached():
            if now - node.heard > lost_after_s:
                self.leave(node, f"silent for {now - node.heard:.1f} s")

    def reclaim_stalled(self, stall_s: float) -> None:
        """Reissue what a node holds that has made no progress for `stall_s`, if another node can serve.

        It may send heartbeats while its engine hangs, and then misses new weights too. It gets no request for
        `stall_s`, doubled with each further stall up to a bound, and then one at a time until it has answered.
        """
        now = time.monotonic()
        for node in self.attached():
            stalled_s, record = node.stalled_s(now), node.record
            if stalled_s < stall_s or all(other is node for other in self.serving()):
                continue
            reason = f"node {node.node_id} gave neither answer nor token for {stalled_s:.1f} s"
            longest_s = min(4 * stall_s, _MAX_SUSPENSION_S)
            suspended_s = backoff_s(record.stalls_in_row, first_s=stall_s, longest_s=longest_s)
            record.suspended_until = now + suspended_s
            record.stalls_in_row += 1
            logger.warning(
                "%s, but sends heartbeats. Its %d requests go to other nodes, and it gets none for %.0f s. Check its "
                "log for a hanging engine. A restart does not shorten that time", reason, len(node.leases), suspended_s,
            )  # fmt: skip
            self._reclaim(node, reason, keep=True)
        self.place()

    def reclaim_quarantined(self, node_id: str, reason: str) -> None:
        """Reissue what a node holds, without what it has streamed."""
        if (node := self.nodes.get(node_id)) is not None:
            self._reclaim(node, f"node {node_id} is {reason}", keep=False)
        self.place()

    def _reclaim(self, node: AttachedNode, reason: str, *, keep: bool) -> None:
        for request in reversed(list(node.leases.values())):
            request.avoid = node.node_id
            self.reissue(request, reason, keep=keep)


# -- waits -----------------------------------------------------------------------------------------------------------


class Waits:
    def __init__(self, router: Router, no_node_timeout_s: float, join_hint: str) -> None:
        self._no_node_since: float | None = time.monotonic()
        self._router = router
        self._no_node_timeout_s = no_node_timeout_s
        self._join_hint = join_hint

    def enforce(self) -> DeadlineError | None:
        """Return an error if no node came for requests that waited too long."""
        now, router = time.monotonic(), self._router
        if router.serving():
            self._no_node_since = None
        elif self._no_node_since is None:
            self._no_node_since = now
        for request in router.open:
            if now - request.since >= router.request_timeout_s:
                router.blame_node_of(request)
                router.finish(request, self._too_slow(request, now - request.since))
        error = None if self._no_node_since is None else self._end_without_node(self._no_node_since, now)
        router.place()
        return error

    def _end_without_node(self, since: float, now: float) -> DeadlineError | None:
        waiting, limit_s = self._router.queue.values(), self._no_node_timeout_s
        overdue = [request for request in waiting if now - max(since, request.since) >= limit_s]
        if not overdue:
            return None
        clock_time = time.strftime("%H:%M:%S", time.localtime(time.time() - (now - since)))
        error = DeadlineError(
            f"{len(waiting)} requests waited for an inference node, but there has been none since {clock_time} "
            f"({now - since:.1f} s, orchestrator.no_node_timeout_s is {limit_s}): {self.why_no_node()}"
        )
        for request in overdue:
            self._router.finish(request, error)
        return error

    def _too_slow(self, request: GatewayRequest, waited_s: float) -> DeadlineError:
        limit_s = self._router.request_timeout_s
        waited = f"request {request.asked.request_id} waited {waited_s:.1f} s, at most {limit_s}"
        if request.running is not None:
            return DeadlineError(f"{waited}: node {request.running.node.node_id} has not answered")
        previous = f" (before that, {request.last_error})" if request.last_error else ""
        serving = self._router.serving()
        able = f"{sum(map(request.may_run_on, serving))} of {len(serving)} serving nodes"
        return DeadlineError(f"{waited}: it was queued, all places of the {able} that may take it are used{previous}")

    def why_no_node(self) -> str:
        """Return what each node lacks, or how to start one."""
        nodes = list(self._router.nodes.values())
        reasons = [f"{node.node_id} {node.cannot_serve(self._router.policy)}" for node in nodes[:8]]
        if reasons:
            return "; ".join(reasons)
        return f"none has connected: {self._join_hint}, or set inference.nodes to at least 1"


# -- checks of what nodes sample -------------------------------------------------------------------------------------


def check_sampled(message: Sampled, request: GatewayRequest, running: Running, policy: ServedPolicy) -> Answer:
    """Return the answer in `message`, or the part that comes after what was streamed.

    `running` holds `request`. Raises WireError naming what is wrong with the message.
    """
    streamed, node, max_tokens = running.streamed, running.node, request.num_left
    count = _check_numbers(message, policy.vocab_size)
    if message.is_part:
        _check_part(message, len(streamed), count, max_tokens)
    else:
        _check_end(message.finish_reason, count, max_tokens)
        _check_beginning(message, streamed)
    last = streamed.newest_version if message.is_part and streamed else None
    versions = range(request.least_version if last is None else last, policy.newest + 1)
    swaps = {version for version, time_s in node.record.first_reported.items() if time_s >= running.placed}
    _check_spans(message.version_spans, count, versions, last, swaps)
    for span in message.version_spans:
        if span.version not in policy.published and span.version > min(policy.published, default=span.version):
            raise WireError(f"there never was a version {span.version}")
    return Answer(
        token_ids=message.token_ids,
        logprobs=message.logprobs,
        version_spans=message.version_spans,
        finish_reason=message.finish_reason,
        prompt_cached=message.prompt_cached,
        sampled_by=[(node.node_id, count)],
    )


def _check_numbers(message: Sampled, vocab_size: int) -> int:
    if len(message.token_ids) % INT.itemsize or len(message.logprobs) % FLOAT.itemsize:
        raise WireError(f"{len(message.token_ids)} and {len(message.logprobs)} bytes are not 4-byte numbers")
    token_ids, logprobs = ints(message.token_ids), floats(message.logprobs)
    if len(token_ids) != len(logprobs):
        raise WireError(f"{len(token_ids)} token ids came with {len(logprobs)} logprobs")
    if not len(token_ids):
        return 0
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= vocab_size:
        raise WireError(f"token ids {low}..{high} leave the vocabulary 0..{vocab_size - 1}")
    least, most = float(logprobs.min()), float(logprobs.max())
    # A NaN makes both comparisons false.
    if not (least > _NO_EVIDENCE and most <= _ROUNDING):
        raise WireError(f"logprobs lie in {least}..{most}, expected finite numbers in ({_NO_EVIDENCE}, 0]")
    return len(token_ids)


def _check_part(message: Sampled, num_streamed: int, count: int, max_tokens: int) -> None:
    if message.start != num_streamed:
        raise WireError(f"tokens from {message.start} came after {num_streamed}")
    if not 0 < count < max_tokens - num_streamed:
        raise WireError(f"{count} tokens came after {num_streamed} as a part, but max_tokens is {max_tokens}")


def _check_end(reason: str, count: int, max_tokens: int) -> None:
    if count > max_tokens:
        raise WireError(f"{count} tokens came, but max_tokens was {max_tokens}")
    if reason not in ("stop", "length"):
        raise WireError(f"finish_reason is {reason!r}, expected 'stop' or 'length'")
    if not count:
        raise WireError(f"no token came, with finish_reason {reason!r}: a stop has at least its token")
    if reason == "length" and count < max_tokens:
        raise WireError(f"finish_reason is 'length' after {count} tokens, but max_tokens was {max_tokens}")


def _check_beginning(message: Sampled, streamed: Answer) -> None:
    count = len(streamed)
    if not message.token_ids.startswith(streamed.token_ids):
        raise WireError(f"the answer does not begin with the {count} tokens that its node had streamed")
    spans = [span for span in message.version_spans if span.start < count]
    if [VersionSpan(span.start, min(span.end, count), span.version) for span in spans] != streamed.version_spans:
        raise WireError(f"other versions sampled its first {count} tokens than its node said with them")


def _check_spans(
    spans: list[VersionSpan], num_tokens: int, versions: range, last: int | None, swaps: Container[int]
) -> None:
    """`last`: version of the token before the first one, of the same node."""
    end, oldest = 0, versions.start
    for span in spans:
        if span.start != end or span.end <= span.start:
            raise WireError(f"version span [{span.start}, {span.end}) does not continue at position {end}")
        if not oldest <= span.version < versions.stop:
            raise WireError(f"version {span.version} is not between {oldest} and the newest, {versions.stop - 1}")
        if last not in (None, span.version) and span.version not in swaps:
            raise WireError(
                f"a swap to version {span.version} came, but the node reported none while it held the request"
            )
        end, oldest, last = span.end, span.version + 1, span.version
    if end != num_tokens:
        raise WireError(f"version spans cover {end} of {num_tokens} tokens")
