"""What an operator does to nodes: drain and ban.

orchestrator drain|ban RUN_DIR NODE --HTTP, keys/operator.token--> NodeControl.routes --> router, registry
gateway's tick --> NodeControl.tick: end drains

drain   no new request; once the node has answered what it holds, it is sent away. It may come back. With --now it is
        sent away at once: after five seconds it streams what it has sampled, and others continue.
ban     its key is revoked in keys/nodes.sqlite, and the invite by which it came is withdrawn. The gateway ends its
        connection at the next tick. The run's own nodes share a key, so none of them can be banned.
"""

from __future__ import annotations

import difflib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from composer_prime.console import pluralize
from composer_prime.errors import ConfigError, RequestError
from composer_prime.monitor.events import event
from composer_prime.monitor.node_table import BANNED, NodeRow
from composer_prime.run.keys import RunKeys
from composer_prime.wire.node_messages import Dismissed
from orchestrator.swarm.accounts import NodeAccounts

if TYPE_CHECKING:
    from orchestrator.gateway.nodes import AttachedNode
    from orchestrator.gateway.routing import Router

logger = logging.getLogger(__name__)

ACTIONS = ("drain", "drain_now", "ban", "unban")
_NAMES_SHOWN = 12


class NodeControl:
    """Used on the gateway's event loop."""

    def __init__(self, router: Router, accounts: NodeAccounts, keys: RunKeys) -> None:
        self.accounts = accounts
        self._router = router
        self._keys = keys
        self._registry = keys.registry
        self._leaving: dict[str, float] = {}
        """Until when drained nodes may answer, monotonic seconds."""
        if (old := keys.folder / "banned.json").exists():
            logger.warning("%s is of an older release and bans nobody: ban its nodes again, then remove it", old)

    # -- the operator's words --------------------------------------------------------------------------------------

    def drain(self, name: str) -> str:
        """Give node `name` no further request, and send it away once it has answered. Return what happened.

        Raises RequestError when no such node is attached, or it is drained already.
        """
        node = self._attached(name)
        held = len(node.leases)
        if name in self._leaving or node.draining:
            raise RequestError(f"node {name} is drained already: it holds {pluralize(held, 'request')}", status=409)
        node.draining = True
        self._leaving[name] = time.monotonic() + self._router.request_timeout_s
        logger.warning("node %s is drained by the operator", name, extra=event("node", same_as=f"drain/{name}"))
        others = len(self._router.serving())
        alone = "" if others else "; no other node serves now, requests wait (orchestrator.no_node_timeout_s)"
        rest = f"once it has answered {pluralize(held, 'request')}" if held else "now"
        return f"node {name} is drained: it gets no new request and leaves {rest}{alone}"

    def drain_now(self, name: str) -> str:
        """Give node `name` no further request, and send it away before it has answered. Return what happened.

        Raises RequestError when no such node is attached.
        """
        node = self._attached(name)
        if name not in self._leaving and not node.draining:
            self.drain(name)
        self._leaving[name] = 0.0
        held = pluralize(len(node.leases), "request")
        return f"node {name} leaves within seconds; other nodes finish what is left of its {held}"

    def ban(self, name: str) -> str:
        """Revoke the key of node `name`. Return what happened.

        Raises RequestError for an unknown node, one without a key of its own, and one that is banned already.
        """
        node = self._registry.find(name)
        if node is None:
            self._known(name)
            raise RequestError(f"node {name} is the run's own and shares its key: drain it instead", status=409)
        invite = ""
        if node.invite and self._registry.withdraw(node.invite):  # first: repeating a ban that was cut short ends it
            invite = "; the invite by which it came admits no further node (`orchestrator invite` makes another)"
        if not self._registry.revoke(node.key, "banned by the operator") and not invite:
            raise RequestError(f"node {name} is banned already", status=409)
        logger.warning("node %s was banned by the operator", name, extra=event("node", same_as=f"ban/{name}"))
        return f"node {name} was banned; its key is refused until `orchestrator unban`{invite}"

    def unban(self, name: str) -> str:
        """Let node `name` connect again. Return what happened. Raises RequestError when it is not banned."""
        node = self._registry.find(name)
        if node is None or node.revoked is None:
            banned = self._banned()
            known = f": banned are {_listed(banned)}" if banned else ": no node is"
            raise RequestError(f"node {name} is not banned{known}", status=404)
        self._registry.admit(node.key, node.name, node.machine)
        logger.info("node %s may connect again", name, extra=event("node", text=f"node {name} may connect again"))
        return f"node {name} may connect again"

    def rows(self) -> list[NodeRow]:
        """Return the table of nodes; without who is banned while the registry cannot be read."""
        banned: set[str] = set()
        try:
            banned = self._banned()
        except ConfigError as error:
            logger.warning("who is banned is not shown: %s", error)
        rows = {row.name: row for row in self.accounts.rows()}
        for name in sorted(banned):
            rows[name] = msgspec.structs.replace(rows.get(name, NodeRow(name=name, state=BANNED)), state=BANNED)
        return list(rows.values())

    def _banned(self) -> set[str]:
        return {node.name for node in self._registry.list() if node.revoked is not None}

    def _known(self, name: str) -> AttachedNode | None:
        """Return the node, None for one that enrolled and is not here. Raises RequestError for an unknown name."""
        node = self._router.nodes.named(name)
        if node is not None or self._registry.find(name) is not None:
            return node
        known = {node.node_id for node in self._router.nodes} | {node.name for node in self._registry.list()}
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        shown = f"the known ones are {_listed(known)}" if known else "none has connected yet"
        raise RequestError(f"there is no node {name!r}: {shown}{hint}", status=404)

    def _attached(self, name: str) -> AttachedNode:
        node = self._known(name)
        if node is None or not node.attached:
            raise RequestError(f"node {name} is not connected now: only a connected node can be drained", status=409)
        return node

    # -- upkeep ----------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Count what nodes did, and send away drained ones that have answered."""
        self.accounts.tick()
        now = time.monotonic()
        attached = {node.node_id: node for node in self._router.nodes.attached()}
        for name, until in list(self._leaving.items()):
            node = attached.get(name)
            if node is None:
                del self._leaving[name]
                continue
            node.draining = True  # It may have reconnected.
            if not node.leases or now > until:
                self._router.send(node, Dismissed(reason="drained by the operator", finish_first=True))

    def routes(self, run_id: str) -> list[web.RouteDef]:
        """Return GET /control/nodes (the table) and POST /control/nodes/ACTION?node=NAME, for the operator's token."""
        token = self._keys.operator_token()

        async def show(_: web.Request) -> dict[str, Any]:
            return {"run_id": run_id, "nodes": self.rows()}

        async def act(request: web.Request) -> dict[str, Any]:
            action, name = request.match_info["action"], request.query.get("node", "")
            if action not in ACTIONS or not name:
                raise RequestError(
                    f"{request.path} with node={name!r}: an action is one of {', '.join(ACTIONS)}, of a node"
                )
            return {"run_id": run_id, "text": getattr(self, action)(name)}

        return [
            web.get("/control/nodes", _authorized(show, token)),
            web.post("/control/nodes/{action}", _authorized(act, token)),
        ]


def _listed(names: set[str]) -> str:
    shown = sorted(names)
    more = f" and {len(shown) - _NAMES_SHOWN} more" if len(shown) > _NAMES_SHOWN else ""
    return ", ".join(shown[:_NAMES_SHOWN]) + more


def _authorized(
    handle: Callable[[web.Request], Awaitable[dict[str, Any]]], token: str
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return a route that requires `token`."""

    async def answer(request: web.Request) -> web.Response:
        header = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(header, f"Bearer {token}".encode()):
            body, status = {"error": {"message": "the operator's token (keys/operator.token) is missing"}}, 401
        else:
            try:
                body, status = await handle(request), 200
            except RequestError as error:
                body, status = {"error": {"message": str(error)}}, error.status
            except (ConfigError, OSError) as error:  # the registry, or the disk that it is on
                body, status = {"error": {"message": str(error)}}, 503
        return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")

    return answer
