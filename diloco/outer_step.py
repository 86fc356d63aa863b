"""One outer step on one rank: a closed round's deltas that pass the guards, averaged; outer step; local <- global.

All peers apply the same deltas in the same order, also those that have no part in the round.
"""

from __future__ import annotations

import logging

from composer_prime.config.diloco import DilocoConfig
from diloco.carry import Fate, fate_of
from diloco.contributions import Accepted, accept
from diloco.exchange import Arrived
from diloco.figures import figures
from diloco.link import Link
from diloco.pending import Pending
from diloco.ranks import Ranks
from diloco.replica import Replica
from diloco.schedule import Schedule

logger = logging.getLogger(__name__)


class OuterSteps:
    def __init__(self, config: DilocoConfig, link: Link, replica: Replica, ranks: Ranks) -> None:
        self._config, self._link, self._replica, self._ranks = config, link, replica, ranks
        self._schedule = Schedule.of(config)
        self.metrics: dict[str, float] = {}
        """Figures of the last one."""

    def take(self, arrived: Arrived, exposed_s: float) -> None:
        """Advance the global model by this round, and give the parameters their values. A collective.

        Whatever delta was on offer is so no more. `exposed_s`: what training waited for the outcome.
        """
        model, replica = self._replica.globals, self._replica
        fragment = self._schedule.fragment(model.outer_step)
        accepted = self._accepted(fragment, arrived)
        pending, replica.pending = replica.pending, None
        fate = fate_of(self._config.peer_id, pending and pending.header, arrived.outcome.headers, accepted.reasons)
        before_n = model.masters[fragment].clone() if fate is Fate.MISSED else None
        model.advance(fragment, accepted.deltas, accepted.weights)
        self._settle_error(fragment, fate, pending)
        replica.work.install(fragment, fate, pending and pending.offer, before_n)
        self._link.position(model.outer_step, model.hash)
        self.metrics = figures(
            arrived.outcome, accepted, model=model, totals=replica.work.totals, exposed_s=exposed_s,
            traffic=self._link.traffic,
        )  # fmt: skip

    def _accepted(self, fragment: int, arrived: Arrived) -> Accepted:
        """The deltas that count. A collective."""
        model = self._replica.globals
        accepted = accept(
            arrived.outcome.headers, arrived.bodies, fragment=fragment, n=self._replica.fragments[fragment].numel,
            guard=self._config.guard, ranks=self._ranks,
        )  # fmt: skip
        if not self._ranks.all(model.can_advance(fragment, accepted.deltas)):
            accepted = accepted.without_all("the outer step along the round's mean would leave the range of float32")
        for peer, reason in accepted.reasons.items():
            logger.warning("outer step %d: the delta of peer %s is rejected: %s", model.outer_step, peer, reason)
        return accepted

    def _settle_error(self, fragment: int, fate: Fate, pending: Pending | None) -> None:
        """What compression still owes, now that the round's outcome is in the global model."""
        if fate is Fate.COUNTED and pending is not None:
            self._replica.feedback.settle(fragment, pending.residual_n)
        elif fate is Fate.EARLIER:
            self._replica.feedback.reset(fragment)
            if pending is not None:
                logger.warning(
                    "outer step %d holds a delta of another process of peer %s: this one's, of %.0f tokens, is lost",
                    self._replica.globals.outer_step - 1, self._config.peer_id, pending.offer.work.tokens,
                )  # fmt: skip
