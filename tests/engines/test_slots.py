"""The slot table: what a prompt may reuse, checked against a model of what the cache holds."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.engines.local.slots import SlotPlace, SlotTable

CONTEXT = 160


def place(table: SlotTable, prompt: list[int], session: str) -> SlotPlace | None:
    return table.place(np.array(prompt, dtype=np.int32), session)


class Mirror:
    """A slot table driven as the compute thread does, beside a plain record of each column: (token, weights)."""

    def __init__(self, capacity: int) -> None:
        self.table = SlotTable(capacity, CONTEXT)
        self.columns: list[list[tuple[int, int]]] = [[] for _ in range(capacity)]
        self.version = 0
        """The weights in use."""

    @property
    def running(self) -> list[int]:
        return np.flatnonzero(self.table.running).tolist()

    def place(self, prompt: list[int], session: str) -> bool:
        found = place(self.table, prompt, session)
        if found is None:
            table = self.table
            unfinished = any(table.computed[slot] < table.known[slot] - 1 for slot in self.running)
            assert unfinished or len(self.running) == table.capacity, "waits for nothing"
            return False
        held = self.columns[found.slot if found.source is None else found.source][: found.cached]
        assert [token for token, _ in held] == prompt[: found.cached], "reuses what is not there"
        assert all(version == self.version for _, version in held)
        assert found.cached < len(prompt)
        self.columns[found.slot] = list(held)
        return True

    def compute(self, slot: int, count: int) -> None:
        table = self.table
        start = int(table.computed[slot])
        count = min(count, int(table.known[slot]) - start)
        ids = table.tokens[slot, start : start + count].tolist()
        self.columns[slot][start:] = [(token, self.version) for token in ids]
        table.computed[slot] += count
        if table.computed[slot] == table.known[slot]:
            if table.known[slot] == CONTEXT:
                self.release(slot)
            else:
                table.append(slot, 7)

    def release(self, slot: int) -> None:
        self.table.release(slot)

    def swap(self, again: list[int]) -> None:
        self.version += 1
        self.table.weights_changed(again)
        for slot in again:
            self.columns[slot] = []


HEADS = [list(range(10, 90)), list(range(10, 60)) + list(range(200, 230)), list(range(300, 340))]
ACTIONS = st.one_of(
    st.tuples(st.just("place"), st.integers(0, 2), st.integers(1, 80), st.integers(0, 5), st.sampled_from("abcd")),
    st.tuples(st.just("compute"), st.integers(0, 9), st.integers(1, 50)),
    st.tuples(st.just("release"), st.integers(0, 9)),
    st.tuples(st.just("swap"), st.integers(0, 31)),
)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 5), st.lists(ACTIONS, max_size=60))
def test_only_what_is_there_is_reused(capacity, actions):
    # Whatever order requests come, progress, end and weights change in: a request reuses exactly columns that current
    # weights computed for its own tokens, and waits only for a running slot or a prefix that is being computed.
    # At a swap any running ones compute their columns again.
    mirror = Mirror(capacity)
    for action in actions:
        running = mirror.running
        match action:
            case ("place", head, length, tail, session):
                mirror.place(HEADS[head][:length] + [400 + k for k in range(tail)] or [1], session)
            case ("compute", index, count) if running:
                mirror.compute(running[index % len(running)], count)
            case ("release", index) if running:
                mirror.release(running[index % len(running)])
            case ("swap", chosen):
                mirror.swap([slot for slot in running if chosen >> slot & 1])
        assert mirror.table.high <= capacity
