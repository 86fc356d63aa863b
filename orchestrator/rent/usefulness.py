"""Which rented machines a run no longer needs, by its metrics.jsonl: all after its end, one whose nodes were sent away.

A machine's nodes have its label as their name, the further ones of several GPUs with -1, -2, ... behind it.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

from composer_prime.console import pluralize
from composer_prime.monitor.metrics_file import Tail
from composer_prime.monitor.nodes import AWAY, BANNED, DRAINING, EVICTED
from composer_prime.run.run_dir import RunDir

KEPT_S = 600.0
"""How long machines are kept without use: a run may be resumed, and a node let in again."""
_DRAINED = "drained"


class RunUse:
    """Reads on in metrics.jsonl with each `update`. A run whose file is elsewhere needs its machines."""

    def __init__(self, run_dir: Path) -> None:
        self._tail = Tail(RunDir(run_dir).metrics)
        self._begun = time.time()
        """A run that ended before may be about to be resumed."""
        self._ended: tuple[str, float] | None = None
        """How the run ended, and when, Unix seconds."""
        self._nodes: dict[str, tuple[str, float]] = {}
        """The last state of each node and since when."""

    def update(self) -> None:
        for line in self._tail.read():
            at = float(line.get("time", 0.0))
            if line.get("event") == "ended":
                self._ended = str(line.get("state")), at
            elif line.get("role") != "weights":  # `orchestrator weights` may outlive the run.
                self._ended = None
            if not isinstance(name := line.get("node"), str):
                continue
            state, (before, since) = str(line.get("node/state")), self._nodes.get(name, ("", at))
            if state == AWAY and before in (DRAINING, _DRAINED):
                state = _DRAINED
            self._nodes[name] = state, since if state == before else at

    def over(self, now: float) -> str | None:
        """Return why no machine is needed any more; None while some may be."""
        if self._ended is None or now - max(self._begun, self._ended[1]) < KEPT_S:
            return None
        state, at = self._ended
        return f"the run ended ({state}) {_minutes(now - at)} ago"

    def unused(self, label: str, now: float) -> str | None:
        """Return why the machine `label` is no longer needed; None while it may be."""
        own = re.compile(rf"{re.escape(label)}(-\d+)?")
        nodes = [state for name, state in self._nodes.items() if own.fullmatch(name)]
        if not nodes or not all(state in (_DRAINED, EVICTED, BANNED) for state, _ in nodes):
            return None
        state, since = max(nodes, key=lambda node: node[1])
        return f"its node was {state} {_minutes(now - since)} ago" if now - since >= KEPT_S else None


def _minutes(seconds: float) -> str:
    return pluralize(round(seconds / 60), "minute")
