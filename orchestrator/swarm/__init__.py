"""The swarm: machines that others own serve a run, and are checked. Other folders import this module only.

invite.py          the string that lets a machine join
admission.py       which keys may connect, and what a node that enrolls gets
trust.py           what is believed of one node, and how an audit changes that (read first)
audits.py          answers that wait for an audit; auditors.py has who checks them
accounts.py        what each node did and costs, on disk and after a restart
node_control.py    drain, evict and ban in the running orchestrator
node_commands.py   the same from the command line, over loopback
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from composer_prime.config import Config
from composer_prime.run.keys import RunKeys
from composer_prime.run.run_dir import RunDir
from composer_prime.run.weights import WeightStore
from orchestrator.swarm.accounts import NodeAccounts
from orchestrator.swarm.admission import Admission
from orchestrator.swarm.audits import Audits, ChunkSender
from orchestrator.swarm.trust import NodeTrust

if TYPE_CHECKING:
    from orchestrator.swarm.node_control import NodeControl

__all__ = ["COMMANDS", "Admission", "Audits", "NodeTrust", "Swarm", "build_swarm"]

COMMANDS = {
    **{name: f"orchestrator.swarm.node_commands:{name}" for name in ("nodes", "drain", "evict", "ban", "unban")},
    "invite": "orchestrator.swarm.invite",
}
"""Words after `orchestrator`, each with the module whose `main`, or the function that, runs it."""


class Swarm:
    """What checks and sends away the nodes of a run."""

    def __init__(self, audits: Audits | None, control: NodeControl) -> None:
        """`audits`: None unless answers are audited."""
        self.audits = audits
        self.control = control
        self.accounts = control.accounts

    def is_tainted(self, rollout_ids: Any) -> bool:
        """Return whether a node that is now quarantined sampled one of these rollouts, and no audit cleared it."""
        return self.audits is not None and self.audits.is_tainted(rollout_ids)

    def metrics(self) -> dict[str, float]:
        return self.audits.metrics() if self.audits is not None else {}


def build_swarm(
    config: Config,
    *,
    keys: RunKeys,
    run_id: str,
    run_dir: RunDir | None,
    router: Any,
    store: WeightStore,
    chunks: ChunkSender,
    send: Callable[[Any, Any], bool],
    weights_sent: Callable[[Any], int],
    on_quarantine: Callable[[str, str], None],
) -> Swarm:
    """Build what checks and sends away the nodes of `router`, a Router.

    `run_dir`: where the nodes' figures are recorded; None records none. `send(node, message)` returns False when the
    node is gone. `weights_sent(node)`: bytes of weights that the gateway sent it.
    """
    from orchestrator.swarm.node_control import NodeControl  # It loads aiohttp, which a command line need not.

    audit, inference = config.orchestrator.audit, config.inference
    audits = None
    if audit.enabled:
        audits = Audits(
            audit,
            keys=keys,
            run_id=run_id,
            store=store,
            chunks=chunks,
            trust=router.nodes.trust,
            max_context=config.model.max_context,
            heartbeat_s=inference.heartbeat_s,
            lost_after_s=inference.lost_after_s,
            on_quarantine=on_quarantine,
        )
    accounts = NodeAccounts(router, run_dir, weights_sent=weights_sent)
    drain_s = max((source.timeout_s for source in config.orchestrator.source), default=0.0)
    control = NodeControl(router, accounts, keys, send, drain_s=drain_s)
    return Swarm(audits, control)
