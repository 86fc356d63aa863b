"""The slots of the cache: what a prompt may reuse, checked against a model of what the cache holds."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.engines.local.model import KvCache

CONTEXT = 160


class Mirror(KvCache):
    """Slots driven as the compute thread does, beside a plain record of each column: (token, weights)."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, CONTEXT)
        self.columns: list[list[tuple[int, int]]] = [[] for _ in range(capacity)]
        self.version = 0
        """The weights in use."""

    def owned(self) -> list[int]:
        return np.flatnonzero(self.running).tolist()

    def copy(self, source: int, target: int, count: int) -> None:
        self.columns[target] = self.columns[source][:count]

    def request(self, prompt: list[int], session: str) -> None:
        place = self.place(np.array(prompt, dtype=np.int32), session)
        if place is None:
            unfinished = any(self.computed[slot] < self.known[slot] - 1 for slot in self.owned())
            assert unfinished or len(self.owned()) == self.slots, "waits for nothing"
            return
        slot, cached = place
        self.columns[slot] = self.columns[slot][:cached]
        assert [token for token, _ in self.columns[slot]] == prompt[:cached], "reuses what is not there"
        assert all(version == self.version for _, version in self.columns[slot])
        assert cached < len(prompt)

    def compute(self, slot: int, count: int) -> None:
        start = int(self.computed[slot])
        count = min(count, int(self.known[slot]) - start)
        ids = self.tokens[slot, start : start + count].tolist()
        self.columns[slot][start:] = [(token, self.version) for token in ids]
        self.computed[slot] += count
        if self.computed[slot] == self.known[slot]:
            if self.known[slot] == CONTEXT:
                self.release(slot)
            else:
                self.append(slot, 7)

    def swap(self, again: list[int]) -> None:
        self.version += 1
        self.weights_changed(again)
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
        running = mirror.owned()
        match action:
            case ("place", head, length, tail, session):
                mirror.request(HEADS[head][:length] + [400 + k for k in range(tail)] or [1], session)
            case ("compute", index, count) if running:
                mirror.compute(running[index % len(running)], count)
            case ("release", index) if running:
                mirror.release(running[index % len(running)])
            case ("swap", chosen):
                mirror.swap([slot for slot in running if chosen >> slot & 1])
        assert mirror.high <= capacity
