"""Whether peers that stand at one outer step hold one global model, as they say in beats and hellos. No I/O here.

A round compares what its deltas start from. What comes out of the last round nothing starts from: this compares it too,
also where a rendezvous that was restarted in between has closed a round a second time.
"""

from __future__ import annotations

from diloco.peer import Position

_KEPT = 64
"""Outer steps behind the most advanced that are remembered."""


class Agreement:
    def __init__(self) -> None:
        self._models: dict[tuple[int, int], tuple[str, str]] = {}
        """By outer step and rank: who came first, and the hash of its model."""
        self._told: set[int] = set()
        self._front = -1
        """The most advanced outer step."""

    def difference(self, peer: str, rank: int, position: Position) -> str:
        """What differs from the first that was at this outer step, in words that name both; empty when nothing does.

        Of each outer step it is said once.
        """
        step = position.outer_step
        first, model = self._models.get((step, rank), (peer, ""))
        if first == peer:  # it may have joined anew since
            self._models[step, rank] = peer, position.base_hash
            if step > self._front:
                self._front = step
                self._forget_before(step - _KEPT)
            return ""
        if model == position.base_hash or step in self._told:
            return ""
        self._told.add(step)
        return (
            f"peers {first} and {peer} hold different global models of outer step {step} (hashes {model} and "
            f"{position.base_hash} of rank {rank}): unless one of them joins anew with the other's state, their final "
            "models differ"
        )

    def go_to(self, outer_step: int) -> None:
        """The run goes on from this outer step: what was said of it and of later ones is void."""
        self._models = {key: found for key, found in self._models.items() if key[0] < outer_step}
        self._told = {step for step in self._told if step < outer_step}
        self._front = min(self._front, outer_step - 1)

    def _forget_before(self, outer_step: int) -> None:
        for key in [key for key in self._models if key[0] < outer_step]:
            del self._models[key]
        self._told = {step for step in self._told if step >= outer_step}
