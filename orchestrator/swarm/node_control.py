"""What an operator does to nodes: drain, evict, ban.

orchestrator drain|evict|ban NODE --HTTP, keys/operator.token--> control_routes --> NodeControl --> router, node
gateway's tick --> NodeControl.tick: end drains

drain   no new request; once the node has answered what it holds, it is sent away. It may come back. With --now it is
        sent away at once: after five seconds it streams what it has sampled, and others continue.
evict   sent away at once, its requests go elsewhere. Refused until the orchestrator starts again.
        Its process ends without an error, so nothing starts it again.
ban     evict that outlasts a restart: the name is in keys/banned.json, a key of its own is revoked, and the invite by
        which it came is withdrawn.
"""

from __future__ import annotations

import difflib
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from composer_prime.console import pluralize
from composer_prime.errors import ConfigError, RequestError
from composer_prime.monitor.events import event
from composer_prime.monitor.node_table import AWAY, BANNED, EVICTED
from composer_prime.run.keys import RunKeys
from composer_prime.run.run_dir import write_atomic
from composer_prime.wire.node_messages import Drain, ToNode
from orchestrator.swarm.accounts import NodeAccounts

if TYPE_CHECKING:
    from orchestrator.gateway.nodes import AttachedNode
    from orchestrator.gateway.routing import Router

logger = logging.getLogger(__name__)

ACTIONS = ("drain", "drain_now", "evict", "ban", "unban")
_NAMES_SHOWN = 12


class NodeControl:
    """Used on the gateway's event loop."""

    def __init__(
        self,
        router: Router,
        accounts: NodeAccounts,
        keys: RunKeys,
        send: Callable[[AttachedNode, ToNode], bool],
        *,
        drain_s: float,
    ) -> None:
        """`drain_s`: how long a drained node may answer what it holds."""
        self.accounts = accounts
        self._router = router
        self._operator_token = keys.operator_token
        self._registry = keys.registry
        self._path = keys.folder / "banned.json"
        self._send = send
        self._drain_s = drain_s
        self._leaving: dict[str, tuple[str, float]] = {}
        """Why nodes are drained, and until when they may answer, monotonic seconds."""
        self._banned = self._read_banned()
        router.nodes.refused |= {name: (BANNED, reason) for name, reason in self._banned.items()}

    # -- the operator's words --------------------------------------------------------------------------------------

    def drain(self, name: str, reason: str = "by the operator") -> str:
        """Give node `name` no further request, and send it away once it has answered. Return what happened.

        Raises RequestError when no such node is attached, or it is drained already.
        """
        node = self._attached(name)
        held = len(node.leases)
        if name in self._leaving or node.draining:
            raise RequestError(f"node {name} is drained already: it holds {pluralize(held, 'request')}", status=409)
        node.draining = True
        self._leaving[name] = (reason, time.monotonic() + self._drain_s)
        logger.warning("node %s is drained: %s", name, reason, extra=event("node", same_as=f"drain/{name}"))
        others = len(self._router.serving())
        alone = "" if others else "; no other node serves now, requests wait (orchestrator.no_node_timeout_s)"
        rest = f"once it has answered {pluralize(held, 'request')}" if held else "now"
        return f"node {name} is drained: it gets no new request and leaves {rest}{alone}"

    def drain_now(self, name: str) -> str:
        """Give node `name` no further request, and send it away before it has answered. Return what happened.

        Raises RequestError when no such node is attached.
        """
        node, reason = self._attached(name), "by the operator"
        if name not in self._leaving and not node.draining:
            self.drain(name, reason)
        self._leaving[name] = reason, 0.0
        held = pluralize(len(node.leases), "request")
        return f"node {name} leaves within seconds; other nodes finish what is left of its {held}"

    def evict(self, name: str, reason: str = "evicted by the operator") -> str:
        """Send node `name` away, and refuse it until the orchestrator starts again. Return what happened.

        Raises RequestError for an unknown node and one that is evicted already.
        """
        if name in self._router.nodes.refused:
            _, why = self._router.nodes.refused[name]
            raise RequestError(f"node {name} is refused already ({why})", status=409)
        node = self._known(name)
        how_long = "until the orchestrator starts again, or `orchestrator unban`"
        return self._refuse(name, node, EVICTED, reason, how_long)

    def ban(self, name: str) -> str:
        """Evict node `name`, and refuse it after restarts too. Return what happened.

        Raises RequestError for an unknown node and one that is banned already.
        """
        if name in self._banned:
            raise RequestError(f"node {name} is banned already", status=409)
        node, reason = self._known(name), "banned by the operator"
        registered, by = self._registry.find(name), "by name, as it has no key of its own"
        invite = ""
        if registered is not None:
            by = "by name and key"
            self._registry.revoke(registered.key, reason)
            if registered.invite and self._registry.withdraw(registered.invite):
                invite = "; the invite by which it came admits no further node (`orchestrator invite` makes another)"
        self._banned[name] = reason
        self._write_banned()
        return self._refuse(name, node, BANNED, reason, f"{by}, until `orchestrator unban {name}`{invite}")

    def unban(self, name: str) -> str:
        """Let node `name` connect again. Return what happened. Raises RequestError when it is not refused."""
        refused = self._router.nodes.refused
        # A revoked key may have no name beside it: banned.json was removed, or the ban was cut short.
        revoked = {node.name: node for node in self._registry.list() if node.revoked is not None}
        if name not in refused and name not in revoked:
            names = {*refused, *revoked}
            known = f": refused are {_listed(names)}" if names else ": no node is refused"
            raise RequestError(f"node {name} is not refused{known}", status=404)
        if (node := revoked.get(name)) is not None:
            self._registry.admit(node.key, node.name, node.machine)
        refused.pop(name, None)
        if self._banned.pop(name, None) is not None:
            self._write_banned()
        logger.info("node %s may connect again", name, extra=event("node", text=f"node {name} may connect again"))
        return f"node {name} may connect again"

    def _refuse(self, name: str, node: AttachedNode | None, state: str, reason: str, how_long: str) -> str:
        self._router.nodes.refused[name] = state, reason
        self._leaving.pop(name, None)
        held = 0
        if node is not None and node.attached:
            held = len(node.leases)
            # Not Rejected, which is an error: the launcher would start it again, and end the run after the last try.
            self._send(node, Drain(reason=f"this node was {reason}"))
            self._router.leave(node, reason)
        logger.warning("node %s was %s", name, reason, extra=event("node", same_as=f"{reason}/{name}"))
        return f"node {name} was {reason}; requests that go elsewhere now: {held}. It is refused {how_long}"

    def _known(self, name: str) -> AttachedNode | None:
        """Return the node, None for one that enrolled and is not here. Raises RequestError for an unknown name."""
        for node in self._router.nodes:
            if node.node_id == name:
                return node
        if self._registry.find(name) is not None:
            return None
        known = {node.node_id for node in self._router.nodes} | {node.name for node in self._registry.list()}
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        shown = f"the known ones are {_listed(known)}" if known else "none has connected yet"
        raise RequestError(f"there is no node {name!r}: {shown}{hint}", status=404)

    def _attached(self, name: str) -> AttachedNode:
        node = self._known(name)
        if node is None or not node.attached:
            _, why = self._router.nodes.refused.get(name, (AWAY, "not connected now"))
            raise RequestError(f"node {name} is {why}: only a connected node can be drained", status=409)
        return node

    # -- upkeep ----------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Count, and send away drained nodes that have answered."""
        self.accounts.tick()
        now = time.monotonic()
        attached = {node.node_id: node for node in self._router.nodes.attached()}
        for name, (reason, until) in list(self._leaving.items()):
            node = attached.get(name)
            if node is None:
                del self._leaving[name]
                continue
            node.draining = True  # It may have reconnected.
            if not node.leases or now > until:
                self._send(node, Drain(reason=f"drained: {reason}"))

    def routes(self, run_id: str) -> list[web.RouteDef]:
        """Return GET /control/nodes (the table) and POST /control/nodes/ACTION?node=NAME, for the operator's token."""
        return control_routes(self, run_id=run_id, token=self._operator_token())

    # -- what is remembered ----------------------------------------------------------------------------------------

    def _read_banned(self) -> dict[str, str]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, str])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(
                f"{self._path} cannot be read ({error}): correct it, or remove it to admit every banned name again "
                "(nodes with a key of their own need `orchestrator unban`, too)"
            ) from None

    def _write_banned(self) -> None:
        write_atomic(self._path, json.dumps(self._banned, indent=1).encode() + b"\n")


def _listed(names: Any) -> str:
    shown = sorted(names)
    more = f" and {len(shown) - _NAMES_SHOWN} more" if len(shown) > _NAMES_SHOWN else ""
    return ", ".join(shown[:_NAMES_SHOWN]) + more


def control_routes(control: NodeControl, *, run_id: str, token: str) -> list[web.RouteDef]:
    """Return the operator's routes, which require `token`."""

    async def show(_: web.Request) -> dict[str, Any]:
        return {"run_id": run_id, "nodes": control.accounts.rows()}

    async def act(request: web.Request) -> dict[str, Any]:
        action, name = request.match_info["action"], request.query.get("node", "")
        if action not in ACTIONS or not name:
            raise RequestError(
                f"{request.path} with node={name!r}: an action is one of {', '.join(ACTIONS)}, of a node"
            )
        return {"run_id": run_id, "text": getattr(control, action)(name)}

    def authorized(handle: Callable[[web.Request], Awaitable[dict[str, Any]]]) -> Any:
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

    return [
        web.get("/control/nodes", authorized(show)),
        web.post("/control/nodes/{action}", authorized(act)),
    ]
