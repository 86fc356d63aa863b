"""What teachers will probably cost, before the first call; `composer report` sets what they did cost beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from composer_prime.config import Config
from composer_prime.config.teachers import TeacherConfig, TeachersConfig
from composer_prime.errors import ConfigError
from composer_prime.llm.families import UNKNOWN, family_named, family_of
from composer_prime.llm.prices import Price, price_of

BYTES_PER_TOKEN = 4.0
"""Of English and code, about; budgets reserve with fewer (teachers.budget.bytes_per_token)."""
ANSWER_SHARE = 0.25
"""Of max_tokens that an answer takes, about."""
SAMPLE_LINES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class CostForecast:
    """USD of a whole replay, by the length and the family of the states that were looked at."""

    states: int
    state_usd: float
    """Two votes on one state, of the cheapest two families that may judge it, answers of a quarter of max_tokens."""
    low_usd: float
    """Such votes on each state."""
    high_usd: float
    """All voters on each state, the dearest that may judge it, answers of max_tokens; at most the cap of the run."""

    def text(self) -> str:
        return f"${self.low_usd:,.2f} to ${self.high_usd:,.2f} for {self.states:,} states"


class _Line(msgspec.Struct):
    source_family: str = UNKNOWN


def forecast_cost(config: Config, states_file: Path | None = None) -> CostForecast | None:
    """For a states file (teachers.states by default); None where there is none to measure, or no teacher.

    Raises ConfigError for an unknown price or an unreadable file.
    """
    teachers = config.teachers
    path = states_file or teachers.states
    if path is None or not teachers.teacher:
        return None
    states, lines = _sampled(path)
    priced = [(each, price_of(each)) for each in teachers.teacher]
    costs = [_state_usd(teachers, priced, _family(line, teachers), len(line) / BYTES_PER_TOKEN) for line in lines]
    low, high = (sum(each) / len(lines) for each in zip(*costs, strict=True)) if lines else (0.0, 0.0)
    cap = teachers.budget.usd_per_run
    return CostForecast(states=states, state_usd=low, low_usd=min(states * low, cap), high_usd=min(states * high, cap))


def beside_the_cap(config: Config, expected: CostForecast | None) -> str:
    """What a replay will probably cost, and what it cannot cost more than. Raises ConfigError for an unknown price."""
    free = all(price_of(each).bound_usd(1, 1) == 0 for each in config.teachers.teacher)
    cost = "nothing: all are local" if free else expected.text() if expected else _of_rollouts(config)
    budget = config.teachers.budget
    but = "" if free else f" while no call is charged more than {budget.overcharge_factor:g} times its bound"
    return f"cost forecast: {cost}; never more than ${budget.usd_per_run:g}{but}"


def _of_rollouts(config: Config) -> str:
    """About what the rollouts that are trained will cost, as far as it is known: neither is how many turns they have,
    nor how many groups are dropped, whose rollouts are replayed too."""
    teachers, orchestrator = config.teachers, config.orchestrator
    if not teachers.online:
        return "grows with the states"
    family = _known(family_of(config.model.path), teachers)
    context, rollouts = config.model.max_context, orchestrator.groups_per_step * orchestrator.group_size
    rollouts *= config.run.max_steps
    priced = [(each, price_of(each)) for each in teachers.teacher]
    _, state_usd = _state_usd(teachers, priced, family, context)
    if not state_usd:
        return (
            f"nothing: rollouts are of family {family!r} (model.path = {config.model.path}), which leaves no two "
            "families to judge them"
        )
    votes = min(teachers.voters, sum(each.known_family != family for each in teachers.teacher))
    return (
        f"about ${rollouts * state_usd:,.2f} for each turn of the trained rollouts (dropped groups add theirs): "
        f"{rollouts:,} rollouts, prompts of "
        f"model.max_context = {context:,} tokens, {votes} votes of the dearest, answers of "
        f"teachers.max_tokens = {teachers.max_tokens:,}"
    )


def _state_usd(
    teachers: TeachersConfig, priced: list[tuple[TeacherConfig, Price]], family: str, prompt_tokens: float
) -> tuple[float, float]:
    """(low, high) of one state; nothing where it will be refused."""
    allowed = [(each, price) for each, price in priced if each.known_family != family]
    cheapest: dict[str, float] = {}
    for each, price in allowed:
        usd = price.cost_usd(int(prompt_tokens), int(ANSWER_SHARE * teachers.max_tokens))
        cheapest[each.known_family] = min(usd, cheapest.get(each.known_family, usd))
    if family == UNKNOWN or len(cheapest) < 2:
        return 0.0, 0.0
    full = sorted((price.cost_usd(int(prompt_tokens), teachers.max_tokens) for _, price in allowed), reverse=True)
    return sum(sorted(cheapest.values())[:2]), sum(full[: teachers.voters])


def _family(line: bytes, teachers: TeachersConfig) -> str:
    """The family that wrote a state; UNKNOWN also of a line that is none."""
    try:
        known = family_named(msgspec.json.decode(line, type=_Line).source_family)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return UNKNOWN
    return _known(known, teachers)


def _known(family: str, teachers: TeachersConfig) -> str:
    return (teachers.assume_family or UNKNOWN) if family == UNKNOWN else family


def _sampled(path: Path) -> tuple[int, list[bytes]]:
    """(states, lines of some); of a large file, from its first lines and its size."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            lines = [line for line, _ in zip(file, range(SAMPLE_LINES), strict=False)]
    except OSError as error:
        raise ConfigError(f"the states file {path} cannot be read ({error}): make it with `composer ingest`") from None
    if len(lines) < SAMPLE_LINES:
        return len(lines), lines
    return round(size * len(lines) / sum(map(len, lines))), lines
