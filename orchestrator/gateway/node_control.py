"""What each node does and costs, and whom an operator bans.

    gateway's tick --> NodeControl.tick: add time, tokens, dollars --> metrics.jsonl: a line for each change of a node
    scheduler: step taken --> note_trained(step, tokens by node)   --> costs.jsonl: sums, each minute and at departure
    orchestrator nodes|ban|unban RUN_DIR --HTTP, keys/operator.token--> NodeControl.routes --> router, registry

Sums continue after a restart: they are read from costs.jsonl. Device, price and bytes of weights are the node's claims.
docs/how-to/operate-a-fleet.md says what a ban does.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from composer_prime.console import did_you_mean
from composer_prime.errors import ConfigError, LedgerError, RequestError
from composer_prime.monitor.events import event
from composer_prime.monitor.metrics_file import MetricsFile
from composer_prime.monitor.node_table import AWAY, BANNED, DRAINING, LOADING, SERVING, SUSPENDED, NodeRow
from composer_prime.run.costs import NodeTotals, spent, write_cost
from composer_prime.run.keys import RunKeys
from composer_prime.run.run_dir import RunDir
from composer_prime.wire.node_messages import ComputeDevice
from orchestrator.gateway.http import json_reply
from orchestrator.gateway.nodes import AttachedNode
from orchestrator.gateway.routing import Router

logger = logging.getLogger(__name__)

ACTIONS = ("ban", "unban")
_SAMPLE_S = 5.0
"""Between two lines of a node of which only its requests or trust changed."""
_LEDGER_S = 60.0
_MAX_WHY = 400
"""Characters of a node's own words in the table."""


@dataclass(slots=True, kw_only=True)
class NodeAccount:
    """The sums of one node, and what was written of them."""

    totals: NodeTotals = field(default_factory=NodeTotals)
    written: NodeTotals = field(default_factory=NodeTotals)
    written_at: float = -math.inf
    counted: dict[str, int] = field(default_factory=lambda: {"tokens": 0, "failures": 0})
    """As of the last tick; with the node's own counter from its first report on."""
    seen: float | None = None
    """When it was last attached, monotonic seconds; None while away."""
    line: dict[str, str | int | float | None] = field(default_factory=dict)
    line_at: float = 0.0

    def add(self, node: AttachedNode, now: float) -> None:
        if node.hello.run_id is None:
            self.counted.setdefault("weight_bytes", 0)
        failures = node.record.failures + node.record.bad_answers
        counters = {"tokens": node.record.tokens_out, "failures": failures}
        if node.status is not None:
            counters["weight_bytes"] = node.status.weight_bytes
        # A node's counter begins again with its process. What it has when a new orchestrator meets it was counted then.
        added = {}
        for name, count in counters.items():
            before = self.counted.get(name, count)
            added[name] = count - before if before <= count else count
        seconds = now - self.seen if self.seen is not None and node.attached else 0.0
        usd = None if node.hello.usd_per_hour is None else node.hello.usd_per_hour * seconds / 3600
        self.totals = self.totals.plus(usd, seconds=seconds, **added)
        self.counted |= counters
        self.seen = now if node.attached else None


class NodeControl:
    """A run's nodes, as its operator sees them. Used on the gateway's event loop."""

    def __init__(self, router: Router, keys: RunKeys, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Lines go to the run directory around `keys`."""
        self.step = 0
        self._router = router
        self._registry = keys.registry
        self._clock = clock
        self._costs = keys.folder.parent / "costs.jsonl"
        self._metrics = MetricsFile(RunDir(keys.folder.parent).metrics, "orchestrator")
        self._accounts: dict[str, NodeAccount] = {}
        try:
            self._accounts = {name: NodeAccount(totals=t, written=t) for name, t in spent(self._costs).nodes.items()}
        except LedgerError as error:
            logger.warning("the sums of nodes begin at 0: %s", error)

    # -- the operator's words --------------------------------------------------------------------------------------

    def ban(self, name: str) -> str:
        """Revoke the key of node `name`. Return what happened. Raises RequestError where that cannot be."""
        node = self._registry.find(name)
        if node is None:
            if name in self._router.nodes:
                own = f"node {name} is the run's own and shares its key: end its process with SIGTERM instead"
                raise RequestError(own, status=409)
            known = {*self._router.nodes, *(node.name for node in self._registry.list())}
            unknown = f"there is no node {name!r}, see `orchestrator nodes`{did_you_mean(name, known)}"
            raise RequestError(unknown, status=404)
        invite = ""
        # First, so that repeating a ban that was cut short ends it.
        if node.invite and self._registry.withdraw(node.invite):
            invite = "; the invite by which it came admits no further node (`orchestrator invite` makes another)"
        if not self._registry.revoke(node.key, "banned by the operator") and not invite:
            raise RequestError(f"node {name} is banned already", status=409)
        logger.warning("node %s was banned by the operator", name, extra=event("node", same_as=f"ban/{name}"))
        return f"node {name} was banned; its key is refused until `orchestrator unban`{invite}"

    def unban(self, name: str) -> str:
        """Let a node connect again. Raises RequestError when it is not banned."""
        node = self._registry.find(name)
        if node is None or node.revoked is None:
            raise RequestError(f"node {name} is not banned: `orchestrator nodes` shows which are", status=404)
        self._registry.admit(node.key, node.name, node.machine)
        logger.info("node %s may connect again", name, extra=event("node", text=f"node {name} may connect again"))
        return f"node {name} may connect again"

    # -- upkeep ----------------------------------------------------------------------------------------------------

    def note_trained(self, step: int, tokens: Mapping[str, int]) -> None:
        self.step = step
        for name, count in tokens.items():
            account = self._accounts.setdefault(name, NodeAccount())
            account.totals = account.totals.plus(None, trained_tokens=count)

    def tick(self) -> None:
        """Write what nodes did."""
        now, nodes = self._clock(), self._router.nodes
        due: list[str] = []
        for name, node in nodes.items():
            account = self._accounts.setdefault(name, NodeAccount())
            was_attached = account.seen is not None
            account.add(node, now)
            self._log(node, account, now)
            if now - account.written_at >= _LEDGER_S or (was_attached and not node.attached):
                account.written_at = now
                due.append(name)
        self._write_sums(due)

    def close(self) -> None:
        """Write what is left; every node is away from now on."""
        self.tick()
        self._write_sums(self._accounts)
        for account in self._accounts.values():
            if account.line and account.seen is not None:
                self._metrics.log(self.step, {**account.line, "node/state": AWAY, "node/in_flight": 0})

    def _log(self, node: AttachedNode, account: NodeAccount, now: float) -> None:
        trust = node.record.trust.expectation(time.monotonic())
        line: dict[str, str | int | float | None] = {
            "node": node.node_id,
            "node/state": self._state(node),
            "node/version": node.version,
            "node/in_flight": len(node.leases),
            "node/trust": None if trust is None else round(trust, 2),
        }
        before = {name: account.line.get(name) for name in line}
        is_minor = all(before[name] == line[name] for name in ("node/state", "node/version"))
        if before == line or (is_minor and now - account.line_at < _SAMPLE_S):
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
            if account.totals == account.written:
                continue
            with suppress(OSError):  # On a full disk the next line has these amounts too.
                write_cost(self._costs, "node", node=name, **account.totals.since(account.written))
                account.written = account.totals

    # -- what it says ----------------------------------------------------------------------------------------------

    def rows(self) -> list[NodeRow]:
        """Return the table's rows, earlier starts and banned nodes last. Not banned while the registry fails."""
        self.tick()
        nodes = self._router.nodes
        rows = {name: self._row(node, self._accounts[name]) for name, node in nodes.items()}
        for name, account in self._accounts.items():
            rows.setdefault(name, NodeRow(name=name, state=AWAY, totals=account.totals))
        try:
            banned = sorted(node.name for node in self._registry.list() if node.revoked is not None)
        except ConfigError as error:
            logger.warning("who is banned is not shown: %s", error)
            banned = []
        for name in banned:
            rows[name] = msgspec.structs.replace(rows.get(name, NodeRow(name=name, state=BANNED)), state=BANNED)
        return list(rows.values())

    def _row(self, node: AttachedNode, account: NodeAccount) -> NodeRow:
        policy, hello = self._router.policy, node.hello
        # Why it gets no request, and why it does not have the newest weights, in its own words.
        error = node.status.weight_error if node.status is not None and node.attached else None
        reasons = (node.cannot_serve(policy), error and error[:_MAX_WHY])
        return NodeRow(
            name=node.node_id,
            state=self._state(node),
            why="; ".join(filter(None, reasons)),
            device=device_text(hello.device),
            engine=hello.engine,
            version=node.version,
            behind=max(0, policy.newest - node.version),
            trust=node.record.trust.expectation(time.monotonic()),
            usd_per_hour=hello.usd_per_hour,
            in_flight=len(node.leases),
            totals=account.totals,
        )

    def _state(self, node: AttachedNode) -> str:
        policy = self._router.policy
        if not node.attached:
            return AWAY
        if node.draining:
            return DRAINING
        if not node.is_current(policy):
            return LOADING
        return SERVING if node.cannot_serve(policy) is None else SUSPENDED

    def routes(self, run_id: str) -> list[web.RouteDef]:
        """Return GET /control/nodes (the table) and POST /control/nodes/ACTION?node=NAME."""

        async def show(_: web.Request) -> web.Response:
            return json_reply({"run_id": run_id, "nodes": self.rows()})

        async def act(request: web.Request) -> web.Response:
            action, name = request.match_info["action"], request.query.get("node", "")
            if action not in ACTIONS or not name:
                raise RequestError(
                    f"{request.path} with node={name!r}: an action is one of {', '.join(ACTIONS)}, of a node"
                )
            try:
                return json_reply({"run_id": run_id, "text": getattr(self, action)(name)})
            except (ConfigError, OSError) as error:  # the registry, or the disk that it is on
                raise RequestError(str(error), status=503) from error

        return [web.get("/control/nodes", show), web.post("/control/nodes/{action}", act)]


def device_text(device: ComputeDevice | None) -> str:
    """Return words such as `2 x NVIDIA L4, 45 GiB`."""
    if device is None:
        return ""
    memory = "" if device.memory_gib is None else f", {device.memory_gib:.0f} GiB"
    return f"{device.count} x {device.name}{memory}" if device.count > 1 else f"{device.name}{memory}"
