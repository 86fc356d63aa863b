"""What a completed outer step says of itself, its round and its peers, by the names in docs/multi-cluster.md."""

from __future__ import annotations

from diloco.carry import Totals
from diloco.contributions import Accepted
from diloco.global_model import GlobalModel
from diloco.wire import Outcome


def figures(
    outcome: Outcome, accepted: Accepted, *, model: GlobalModel, totals: Totals, exposed_s: float,
    traffic: tuple[int, int],
) -> dict[str, float]:  # fmt: skip
    """`totals`: of this peer's own work; `exposed_s`: what training waited; `traffic`: bytes sent and received."""
    found: dict[str, float] = {
        "diloco/outer_step": model.outer_step,
        "diloco/sweep": model.sweep,
        "diloco/sync_s": exposed_s,
        "diloco/bytes_sent": traffic[0],
        "diloco/bytes_received": traffic[1],
        "diloco/participants": len(outcome.headers),
        "diloco/rejected": len(accepted.reasons),
        "diloco/quorum": outcome.quorum_id,
        "diloco/missed_rounds": totals.missed,
        "diloco/carried_tokens": totals.carried,
        "diloco/overwritten_tokens": totals.overwritten,
    }
    for header in outcome.headers:
        found[f"diloco/{header.peer}/norm"] = accepted.norms[header.peer]
        found[f"diloco/{header.peer}/weight"] = header.weight
        found[f"diloco/{header.peer}/inner_steps"] = header.inner_steps
    return found
