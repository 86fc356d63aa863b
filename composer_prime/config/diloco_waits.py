"""Which waits of a joint run happen inside which others: each must end first, and say what it waited for.

    orchestrator.trainer_timeout_s        a ready batch waits for the trainer
      round_timeout_s + 2 heal_timeout_s  a resume's first state; an outcome that says that the peer was left
                                          behind; a state once more
      offline_timeout_s > round_timeout_s waits without an outcome, one after the other
        round_deadline_s                  the rendezvous waits for late deltas
    trainer.collective_timeout_s          the other ranks wait for the one that connects last
      connect_timeout_s
"""

from __future__ import annotations

from collections.abc import Iterator

from composer_prime.config.diloco import DilocoConfig
from composer_prime.config.orchestrator import OrchestratorConfig
from composer_prime.config.trainer import TrainerConfig


def wrong_waits(
    diloco: DilocoConfig, trainer: TrainerConfig, orchestrator: OrchestratorConfig
) -> Iterator[str]:
    """One sentence, naming both values, for each wait that would be cut off by the one around it."""
    waits = [
        ("diloco.round_deadline_s", diloco.round_deadline_s, "diloco.round_timeout_s", diloco.round_timeout_s,
         "a peer would stop waiting before any round with a late peer can close"),
        ("diloco.round_timeout_s", diloco.round_timeout_s, "diloco.offline_timeout_s", diloco.offline_timeout_s,
         "the first wait without an outcome would end the run"),
        ("diloco.round_timeout_s + 2 diloco.heal_timeout_s", diloco.round_timeout_s + 2 * diloco.heal_timeout_s,
         "orchestrator.trainer_timeout_s", orchestrator.trainer_timeout_s,
         "the orchestrator would give up a trainer that takes over the others' state"),
        ("diloco.connect_timeout_s", diloco.connect_timeout_s, "trainer.collective_timeout_s",
         trainer.collective_timeout_s, "the ranks would give up one that still connects"),
    ]  # fmt: skip
    for inner, inner_s, outer, outer_s, why in waits:
        if inner_s >= outer_s:
            yield f"{inner} is {inner_s:g}, but {outer} is {outer_s:g}: {why}; lower the first or raise the second"
