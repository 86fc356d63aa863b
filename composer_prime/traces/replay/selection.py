"""Which states of a file are replayed, where not all are: those that errors followed first, then spread over a trace.

Every trace has its turn before any has another, so a long session does not take what short ones could teach.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from composer_prime.config.teachers import SelectConfig
from composer_prime.errors import ConfigError
from composer_prime.traces.state import TraceState
from composer_prime.traces.states_file import read_states, trace_of_each


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A state's place in the file."""

    number: int
    failed: bool


def selected_states(
    path: Path, select: SelectConfig, on_bad: Callable[[ConfigError], None] | None = None
) -> Iterator[TraceState]:
    """Yield the states that `select` takes of a file, in its order. The file is read twice where it takes some.

    Raises ConfigError as `read_states` does.
    """
    if select.states is None and select.per_trace is None:
        yield from read_states(path, on_bad)
        return
    by_trace: dict[str, list[_Place]] = defaultdict(list)
    for number, state in enumerate(read_states(path, None if on_bad is None else lambda error: None)):
        by_trace[state.trace_id].append(_Place(number=number, failed=state.error is not None))
    chosen = _chosen(list(by_trace.values()), select)
    for number, state in enumerate(read_states(path, on_bad)):
        if number in chosen:
            yield state


def count_selected(path: Path, select: SelectConfig, states: int) -> int:
    """Return how many of the `states` of a file of states are taken. The file is read where a trace gives only some.

    Raises OSError.
    """
    if select.per_trace is not None:
        by_trace = Counter(trace for trace in trace_of_each(path) if trace is not None)
        states = sum(min(count, select.per_trace) for count in by_trace.values())
    return min(states, select.states or states)


def _chosen(traces: list[list[_Place]], select: SelectConfig) -> set[int]:
    """Return the numbers of the states that are taken, at most `states` and of each trace `per_trace`."""
    ranked = [_ranked(places)[: select.per_trace] for places in traces]
    turns = (place.number for turn in zip_longest(*ranked) for place in turn if place is not None)
    return {number for number, _ in zip(turns, range(select.states), strict=False)} if select.states else set(turns)


def _ranked(places: list[_Place]) -> list[_Place]:
    """Return the states of a trace: those with an error in their order, then the others, each far from those before."""
    failed = [place for place in places if place.failed]
    others = [place for place in places if not place.failed]
    bits = max(len(others) - 1, 1).bit_length()
    # The order of reversed bits halves the gaps: 0, 1/2, 1/4, 3/4 ...
    spread = sorted(range(len(others)), key=lambda index: int(f"{index:0{bits}b}"[::-1], 2))
    return failed + [others[index] for index in spread]
