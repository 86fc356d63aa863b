"""Which states of a file are replayed, and what that will cost: `composer plan`, `composer replay` and the report.

`teachers.select` takes states that errors followed first. Every trace has its turn before any has another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path

from composer_prime.config import Config
from composer_prime.config.teachers import SelectConfig, TeachersConfig
from composer_prime.errors import ConfigError
from composer_prime.llm.prices import Price
from composer_prime.model_families import UNKNOWN
from composer_prime.traces.replay.teacher_pool import price_of, writer_family
from composer_prime.traces.states import TraceState, read_states, state_names, write_state

BYTES_PER_TOKEN = 4.0
"""A mean for English and code. Budgets reserve with fewer."""
ANSWER_SHARE = 0.25
"""Mean length of an answer, as a share of max_tokens."""
SAMPLE_STATES = 200


def selected_states(
    path: Path, select: SelectConfig, on_bad: Callable[[ConfigError], None] | None = None
) -> Iterator[TraceState]:
    """Yield the states that `select` takes of a file, in its order. Raises as `read_states` does."""
    taken = None if select.states is None and select.per_trace is None else _taken(path, select)
    for state in read_states(path, on_bad):
        if taken is None or (state.trace_id, state.state_id) in taken:
            yield state


def count_selected(path: Path, select: SelectConfig) -> int:
    """Return how many states of a file are taken. Raises ConfigError where the file cannot be read."""
    if select.states is None and select.per_trace is None:
        return sum(name is not None for name in state_names(path))
    return len(_taken(path, select))


def _taken(path: Path, select: SelectConfig) -> set[tuple[str, str]]:
    """Return (trace, state) of the states that are taken."""
    failed, others = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for name in state_names(path):
        if name is not None:
            (others if name.error is None else failed)[name.trace_id].append(name.state_id)
    traces = [
        [(trace, state) for state in (failed[trace] + others[trace])[: select.per_trace]]
        for trace in dict.fromkeys([*failed, *others])
    ]
    turns = (place for turn in zip_longest(*traces) for place in turn if place is not None)
    return set(islice(turns, select.states))


@dataclass(frozen=True, slots=True, kw_only=True)
class CostForecast:
    """USD of a whole replay, from the lengths and families of a sample of its states."""

    states: int
    low_usd: float
    """Two votes on each state, from the cheapest two families that may judge it, with answers of mean length."""
    high_usd: float
    """Votes of all voters on each state, the dearest that may judge it, with answers of max_tokens. At most the cap."""

    def text(self) -> str:
        return f"${self.low_usd:,.2f} to ${self.high_usd:,.2f} for {self.states:,} states"


def forecast_cost(config: Config, states_file: Path | None = None) -> CostForecast | None:
    """Forecast the replay of a states file (teachers.states by default); None without a file or without teachers.

    Raises ConfigError for an unknown price or an unreadable file.
    """
    teachers = config.teachers
    path = states_file or teachers.states
    if path is None or not teachers.teacher:
        return None
    states = count_selected(path, teachers.select)
    prices = _prices(teachers)
    sample = islice(read_states(path, lambda error: None), SAMPLE_STATES)
    costs = [_state_usd(state, teachers, prices) for state in sample]
    low, high = (sum(each) / len(costs) for each in zip(*costs, strict=True)) if costs else (0.0, 0.0)
    cap = teachers.budget.usd_per_run
    return CostForecast(states=states, low_usd=min(states * low, cap), high_usd=min(states * high, cap))


def cost_with_cap(config: Config, forecast: CostForecast | None) -> str:
    """Return one line: the probable cost of a replay, and its cap. Raises ConfigError for an unknown price."""
    budget = config.teachers.budget
    if all(price.bound_usd(1, 1) == 0 for _, price in _prices(config.teachers)):
        return f"cost forecast: nothing: all are local; never more than ${budget.usd_per_run:g}"
    cost = forecast.text() if forecast else "grows with the states"
    return f"cost forecast: {cost}; never more than ${budget.usd_per_run:g} while no call is charged above its bound"


def _prices(teachers: TeachersConfig) -> list[tuple[str, Price]]:
    """Return (family, price) of each teacher. Raises ConfigError for an unknown price."""
    return [(teacher.known_family, price_of(teacher)) for teacher in teachers.teacher]


def _state_usd(state: TraceState, teachers: TeachersConfig, prices: list[tuple[str, Price]]) -> tuple[float, float]:
    """Return the (low, high) cost of one state; zeros where the state will be refused."""
    family, prompt_tokens = writer_family(state, teachers), int(len(write_state(state)) / BYTES_PER_TOKEN)
    allowed = [(teacher_family, price) for teacher_family, price in prices if teacher_family != family]
    cheapest: dict[str, float] = {}
    for teacher_family, price in allowed:
        usd = price.cost_usd(prompt_tokens, int(ANSWER_SHARE * teachers.max_tokens))
        cheapest[teacher_family] = min(usd, cheapest.get(teacher_family, usd))
    if family == UNKNOWN or len(cheapest) < 2:
        return 0.0, 0.0
    full = sorted((price.cost_usd(prompt_tokens, teachers.max_tokens) for _, price in allowed), reverse=True)
    return sum(sorted(cheapest.values())[:2]), sum(full[: teachers.voters])
