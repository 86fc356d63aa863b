"""What each node does and costs: the rows of `orchestrator nodes`, and its lines on disk.

    gateway's tick --> NodeAccounts.tick: add time, tokens, dollars --> metrics.jsonl: a line for each change of a node
    scheduler: step taken --> note_trained(step, tokens by node)    --> costs.jsonl: sums, each minute and at departure

Sums continue after a restart: they are read from costs.jsonl. Device, price and the bytes of
weights that it pulled are the node's claims.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from composer_prime.errors import LedgerError
from composer_prime.monitor.metrics_file import MetricsFile
from composer_prime.monitor.node_table import AWAY, DRAINING, LOADING, SERVING, SUSPENDED, NodeRow
from composer_prime.run.costs import CostLedger, NodeTotals, spent
from composer_prime.run.run_dir import RunDir
from composer_prime.wire.node_messages import ComputeDevice

if TYPE_CHECKING:
    from orchestrator.gateway.nodes import AttachedNode
    from orchestrator.gateway.routing import Router

logger = logging.getLogger(__name__)

_SAMPLE_S = 5.0
"""Between two lines of a node of which only a count changed."""
_LINE_S_A_NODE = 0.1
"""With many nodes such lines come less often: ten a second of all nodes together."""
_LEDGER_S = 60.0
_LEDGER_LINES = 50
"""Such lines in one tick at most: the event loop waits for them."""
_MAX_WHY = 400
"""Characters of a node's own words in the table."""


@dataclass(slots=True, kw_only=True)
class NodeAccount:
    """The sums of one node over the whole run, and what was written of them."""

    totals: NodeTotals = field(default_factory=NodeTotals)
    written: NodeTotals = field(default_factory=NodeTotals)
    """What costs.jsonl has."""
    written_at: float = -math.inf
    counted: dict[str, int] = field(default_factory=lambda: {"tokens": 0, "failures": 0})
    """The gateway's counters, and from its first report on the node's own, as of the last tick."""
    seen: float | None = None
    """When it was last counted as attached, monotonic seconds; None while away."""
    line: dict[str, str | int | float | None] = field(default_factory=dict)
    """Its last line in metrics.jsonl."""
    line_at: float = 0.0

    def add(self, node: AttachedNode, now: float) -> None:
        """Take in what `node` did since the last call."""
        if node.hello.run_id is None:
            self.counted.setdefault("weight_bytes", 0)
        failures = node.counters.failures + node.counters.bad_answers
        counters = {"tokens": node.counters.tokens_out, "failures": failures}
        if node.status is not None:
            counters["weight_bytes"] = node.status.weight_bytes
        added = {name: max(0, count - self._before(name, count)) for name, count in counters.items()}
        seconds = now - self.seen if self.seen is not None and node.attached else 0.0
        usd = None if node.hello.usd_per_hour is None else node.hello.usd_per_hour * seconds / 3600
        self.totals = self.totals.plus(usd, seconds=seconds, **added)
        self.counted |= counters
        self.seen = now if node.attached else None

    def _before(self, name: str, count: int) -> int:
        """Return what of `count` was counted before.

        The node's own counter begins again with its process. All that it has when a new orchestrator meets it was
        counted by an earlier one.
        """
        before = self.counted.get(name, count)
        return before if count >= before else 0


class NodeAccounts:
    """The accounts of all nodes of a run, by name. Used on the gateway's event loop."""

    def __init__(
        self,
        router: Router,
        run_dir: RunDir | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`run_dir`: where lines go; None writes none."""
        self.step = 0
        """The last step that was trained; lines carry it."""
        self._router = router
        self._clock = clock
        self._ledger = None if run_dir is None else CostLedger(run_dir.root / "costs.jsonl")
        self._metrics = None if run_dir is None else MetricsFile(run_dir.metrics, "orchestrator")
        self._accounts = {name: NodeAccount(totals=t, written=t) for name, t in _earlier(run_dir).items()}

    def note_trained(self, step: int, tokens: Mapping[str, int]) -> None:
        """Count the tokens that a step trained of each node's answers."""
        self.step = step
        for name, count in tokens.items():
            account = self._accounts.setdefault(name, NodeAccount())
            account.totals = account.totals.plus(None, trained_tokens=count)

    def tick(self) -> None:
        """Count what happened since the last call, and write what changed."""
        now = self._clock()
        nodes = list(self._router.nodes)
        due: list[str] = []
        for node in nodes:
            account = self._accounts.setdefault(node.node_id, NodeAccount())
            was_attached = account.seen is not None
            account.add(node, now)
            self._log(node, account, now, pause_s=max(_SAMPLE_S, _LINE_S_A_NODE * len(nodes)))
            has_left = was_attached and not node.attached
            if has_left or (now - account.written_at >= _LEDGER_S and len(due) < _LEDGER_LINES):
                account.written_at = now
                due.append(node.node_id)
        self._write_sums(due)

    def close(self) -> None:
        """Write what is not written yet; every node is away from now on."""
        self.tick()
        self._write_sums(self._accounts)
        for account in self._accounts.values():
            if account.line and account.seen is not None and self._metrics is not None:
                self._metrics.log(self.step, {**account.line, "node/state": AWAY, "node/in_flight": 0})

    # -- lines -----------------------------------------------------------------------------------------------------

    def _log(self, node: AttachedNode, account: NodeAccount, now: float, *, pause_s: float) -> None:
        """Write the node's line if its state or version changed; if only its requests or trust did, after `pause_s`."""
        line: dict[str, str | int | float | None] = {
            "node": node.node_id,
            "node/state": self._state(node),
            "node/version": node.version,
            "node/in_flight": len(node.leases),
            "node/trust": None if (trust := node.expectation) is None else round(trust, 2),
        }
        before = {name: account.line.get(name) for name in line}
        is_minor = all(before[name] == line[name] for name in ("node/state", "node/version"))
        if self._metrics is None or before == line or (is_minor and now - account.line_at < pause_s):
            return
        account.line, account.line_at = line, now
        if before["node/state"] in (None, AWAY):
            device = device_text(node.hello.device)
            line = {
                **line,
                "node/engine": node.hello.engine,
                "node/device": device or None,
                "node/usd_per_hour": node.hello.usd_per_hour,
            }
        self._metrics.log(self.step, line)

    def _write_sums(self, names: Iterable[str]) -> None:
        for name in names:
            account = self._accounts[name]
            if self._ledger is None or account.totals == account.written:
                continue
            with suppress(OSError):  # A full disk costs only these lines; their amounts are in the next one.
                self._ledger.write("node", node=name, **account.totals.since(account.written))
                account.written = account.totals

    # -- what they say ---------------------------------------------------------------------------------------------

    def rows(self) -> list[NodeRow]:
        """Return the table's rows as of now, then those of earlier starts that are not here."""
        self.tick()
        nodes = {node.node_id: node for node in self._router.nodes}
        rows = [self._row(node, self._accounts[name]) for name, node in nodes.items()]
        absent = {name: account for name, account in self._accounts.items() if name not in nodes}
        return rows + [NodeRow(name=name, state=AWAY, totals=account.totals) for name, account in absent.items()]

    def _row(self, node: AttachedNode, account: NodeAccount) -> NodeRow:
        router = self._router
        return NodeRow(
            name=node.node_id,
            state=self._state(node),
            why=_why(node, node.cannot_serve(router.policy)),
            device=device_text(node.hello.device),
            engine=node.hello.engine,
            version=node.version,
            behind=max(0, router.policy.newest - node.version),
            trust=node.expectation,
            usd_per_hour=node.hello.usd_per_hour,
            in_flight=len(node.leases),
            totals=account.totals,
        )

    def _state(self, node: AttachedNode) -> str:
        policy = self._router.policy
        if not node.attached:
            return AWAY
        if node.draining:
            return DRAINING
        if not max(policy.oldest, node.reports.newest) <= node.version <= policy.newest:
            return LOADING
        return SERVING if node.cannot_serve(policy) is None else SUSPENDED


def device_text(device: ComputeDevice | None) -> str:
    """Return a device in a few words: `2 x NVIDIA L4, 45 GiB`."""
    if device is None:
        return ""
    memory = "" if device.memory_gib is None else f", {device.memory_gib:.0f} GiB"
    return f"{device.count} x {device.name}{memory}" if device.count > 1 else f"{device.name}{memory}"


def _why(node: AttachedNode, obstacle: str | None) -> str:
    """Return why a node gets no request, and why it does not have the newest weights, in its own words."""
    error = node.status.weight_error if node.status is not None and node.attached else None
    return "; ".join([*([obstacle] if obstacle else []), *([error[:_MAX_WHY]] if error else [])])


def _earlier(run_dir: RunDir | None) -> dict[str, NodeTotals]:
    """Return the sums that earlier starts of the orchestrator wrote; none where they cannot be added up."""
    if run_dir is None:
        return {}
    try:
        return spent(run_dir.root / "costs.jsonl").nodes
    except LedgerError as error:
        logger.warning("the sums of nodes begin at 0: %s", error)
        return {}
