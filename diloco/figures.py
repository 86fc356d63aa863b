"""What a completed outer step says of its round and its peers, by the names in docs/multi-cluster.md."""

from __future__ import annotations

from diloco.carry import Totals
from diloco.contributions import Accepted
from diloco.wire import Outcome


def figures(outcome: Outcome, accepted: Accepted, totals: Totals) -> dict[str, float]:
    """`totals`: of this peer's own work."""
    found: dict[str, float] = {
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
