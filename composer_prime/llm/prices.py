"""What a call costs, and the forecast of a whole replay, beside which `composer report` shows the real cost."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from composer_prime.config import Config
from composer_prime.config.teachers import TeacherConfig, TeachersConfig
from composer_prime.errors import ConfigError
from composer_prime.llm.budget import OVERCHARGE
from composer_prime.llm.families import UNKNOWN, family_named, family_of
from composer_prime.traces.replay.selection import count_selected
from composer_prime.traces.state import Message, write_state
from composer_prime.traces.states_file import is_compressed, read_states, trace_of_each

if TYPE_CHECKING:
    from genai_prices.types import ModelPrice, TieredPrices

PER_MILLION = 1e-6
BYTES_PER_TOKEN = 4.0
"""A mean for English and code. Budgets reserve with fewer."""
ANSWER_SHARE = 0.25
"""Mean length of an answer, as a share of max_tokens."""
SAMPLE_LINES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What tokens cost, USD each. Where the price rises with the prompt, `tiers` has it by the prompt's length."""

    input_usd: float
    """A prompt token, in the dearest tier."""
    output_usd: float
    """An answer token, in the dearest tier."""
    request_usd: float = 0.0
    """A call, whatever its length (perplexity's search)."""
    tiers: ModelPrice | None = None

    def cost_usd(self, input_tokens: int, output_tokens: int, cached_tokens: int = 0) -> float:
        """Return the cost of a call with a prompt of this length, of which `cached_tokens` the endpoint had cached.

        A configured price has none for cached tokens, which then cost as much as others.
        """
        if self.tiers is None:
            return self.bound_usd(input_tokens, output_tokens)
        from genai_prices import Usage

        cached = min(cached_tokens, input_tokens) if self.tiers.cache_read_mtok is not None else 0
        usage = Usage(input_tokens=input_tokens, output_tokens=output_tokens, cache_read_tokens=cached)
        return float(self.tiers.calc_price(usage)["total_price"])

    def bound_usd(self, input_tokens: int, output_tokens: int) -> float:
        """Return the most that a call with this many tokens may cost."""
        return self.request_usd + input_tokens * self.input_usd + output_tokens * self.output_usd


def price_of(teacher: TeacherConfig) -> Price:
    """Return the configured price, nothing for a local model, else today's price of genai-prices.

    Raises ConfigError without a price: a cap needs a known cost.
    """
    if teacher.input_usd_per_mtok is not None and teacher.output_usd_per_mtok is not None:
        return Price(
            input_usd=teacher.input_usd_per_mtok * PER_MILLION, output_usd=teacher.output_usd_per_mtok * PER_MILLION
        )
    if teacher.local:
        return Price(input_usd=0.0, output_usd=0.0)
    from genai_prices import Usage, calc_price

    try:
        usage = Usage(input_tokens=1, output_tokens=1)
        listed = calc_price(usage, model_ref=teacher.model, provider_api_url=teacher.base_url).model_price
    except LookupError as error:
        raise ConfigError(
            f"genai-prices has no price for teacher {teacher.name!r} ({teacher.model} at {teacher.base_url}: {error}): "
            "set input_usd_per_mtok and output_usd_per_mtok for it"
        ) from None
    return Price(
        input_usd=_dearest(listed.input_mtok),
        output_usd=_dearest(listed.output_mtok),
        request_usd=float(listed.calc_price(Usage(input_tokens=0, output_tokens=0))["total_price"]),
        tiers=listed,
    )


def _dearest(price: Decimal | TieredPrices | None) -> float:
    """Return the highest tier's price, USD a token."""
    if price is None:
        return 0.0
    steps = [price] if isinstance(price, Decimal) else [price.base, *(tier.price for tier in price.tiers)]
    return float(max(steps) / 10**6)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostForecast:
    """USD of a whole replay, from the lengths and families of a sample of its states."""

    states: int
    low_usd: float
    """Two votes on each state, from the cheapest two families that may judge it, with answers of mean length. A vote is
    `teachers.samples` answers."""
    high_usd: float
    """Votes of all voters on each state, the dearest that may judge it, with answers of max_tokens. At most the cap."""

    def text(self) -> str:
        return f"${self.low_usd:,.2f} to ${self.high_usd:,.2f} for {self.states:,} states"


class _Line(msgspec.Struct):
    """What is read of a state."""

    source_family: str = UNKNOWN
    messages: list[Message] = msgspec.field(default_factory=list)
    student_action: Message = msgspec.field(default_factory=dict)


def forecast_cost(config: Config, states_file: Path | None = None) -> CostForecast | None:
    """Forecast the replay of a states file (teachers.states by default); None without a file or without teachers.

    Raises ConfigError for an unknown price or an unreadable file.
    """
    teachers = config.teachers
    path = states_file or teachers.states
    if path is None or not teachers.teacher:
        return None
    states, lines = _sampled(path)
    states = count_selected(path, teachers.select, states)
    priced = [(teacher, price_of(teacher)) for teacher in teachers.teacher]
    costs = [
        _state_usd(teachers, priced, _family(state, teachers), len(line) / BYTES_PER_TOKEN)
        for line, state in zip(lines, map(_read_line, lines), strict=True)
        if _can_be_trained(state, config)
    ]
    low, high = (sum(each) / len(lines) for each in zip(*costs, strict=True)) if costs else (0.0, 0.0)
    cap = teachers.budget.usd_per_run
    return CostForecast(states=states, low_usd=min(states * low, cap), high_usd=min(states * high, cap))


def cost_with_cap(config: Config, forecast: CostForecast | None) -> str:
    """Return one line: the probable cost of a replay, and its cap. Raises ConfigError for an unknown price."""
    budget = config.teachers.budget
    if all(price_of(teacher).bound_usd(1, 1) == 0 for teacher in config.teachers.teacher):
        return f"cost forecast: nothing: all are local; never more than ${budget.usd_per_run:g}"
    cost = forecast.text() if forecast else _cost_of_rollouts(config)
    return (
        f"cost forecast: {cost}; never more than ${budget.usd_per_run:g} while no call is charged more than "
        f"{OVERCHARGE:g} times its bound"
    )


def _cost_of_rollouts(config: Config) -> str:
    """Return the cost of one turn of every trained rollout.

    The number of turns is not known, nor is the number of dropped groups, whose rollouts are replayed too.
    """
    teachers, orchestrator = config.teachers, config.orchestrator
    if not teachers.online:
        return "grows with the states"
    family = family_of(config.model.path)
    family = (teachers.assume_family or UNKNOWN) if family == UNKNOWN else family
    context = config.model.max_context
    rollouts = config.run.max_steps * orchestrator.groups_per_step * orchestrator.group_size
    priced = [(teacher, price_of(teacher)) for teacher in teachers.teacher]
    _, state_usd = _state_usd(teachers, priced, family, context)
    if not state_usd:
        return (
            f"nothing: rollouts are of family {family!r} (model.path = {config.model.path}), which leaves no two "
            "families to judge them"
        )
    votes = min(teachers.voters, sum(teacher.known_family != family for teacher in teachers.teacher))
    return (
        f"about ${rollouts * state_usd:,.2f} for each turn of the trained rollouts (dropped groups add theirs): "
        f"{rollouts:,} rollouts, prompts of "
        f"model.max_context = {context:,} tokens, {votes} votes of the dearest"
        f"{f' (teachers.samples = {teachers.samples} answers each)' if teachers.samples > 1 else ''}, answers of "
        f"teachers.max_tokens = {teachers.max_tokens:,}"
    )


def _state_usd(
    teachers: TeachersConfig, priced: list[tuple[TeacherConfig, Price]], family: str, prompt_tokens: float
) -> tuple[float, float]:
    """Return the (low, high) cost of one state; zeros where the state will be refused."""
    allowed = [(teacher.known_family, price) for teacher, price in priced if teacher.known_family != family]
    cheapest: dict[str, float] = {}
    for teacher_family, price in allowed:
        usd = price.cost_usd(int(prompt_tokens), int(ANSWER_SHARE * teachers.max_tokens))
        cheapest[teacher_family] = min(usd, cheapest.get(teacher_family, usd))
    if family == UNKNOWN or len(cheapest) < 2:
        return 0.0, 0.0
    full = sorted((price.cost_usd(int(prompt_tokens), teachers.max_tokens) for _, price in allowed), reverse=True)
    return teachers.samples * sum(sorted(cheapest.values())[:2]), teachers.samples * sum(full[: teachers.voters])


def _read_line(line: bytes) -> _Line | None:
    """Return a state; None for any other line."""
    try:
        return msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _can_be_trained(state: _Line | None, config: Config) -> bool:
    """Estimate what TrainingLimits measures: only texts count, without the tools and the reasoning."""
    if state is None:
        return True
    context = sum(map(_text_tokens, state.messages))
    side = context + _text_tokens(state.student_action)
    return side <= config.model.max_context and context + side <= config.trainer.micro_batch_tokens


def _text_tokens(message: Message) -> float:
    calls = [call["function"] for call in message.get("tool_calls") or []]
    texts = [message.get("content") or "", *(text for call in calls for text in (call["name"], call["arguments"]))]
    return sum(len(text.encode("utf-8", "replace")) for text in texts) / BYTES_PER_TOKEN


def _family(state: _Line | None, teachers: TeachersConfig) -> str:
    """Return the family that wrote a state; UNKNOWN for any other line."""
    if state is None:
        return UNKNOWN
    family = family_named(state.source_family)
    return (teachers.assume_family or UNKNOWN) if family == UNKNOWN else family


def _sampled(path: Path) -> tuple[int, list[bytes]]:
    """Return (states, some whole ones as lines). For a large file of whole states the number is estimated."""
    try:
        size = path.stat().st_size
        if is_compressed(path):
            states = islice(read_states(path, lambda error: None), SAMPLE_LINES)
            return sum(1 for _ in trace_of_each(path)), [write_state(state) for state in states]
        with path.open("rb") as file:
            lines = list(islice(file, SAMPLE_LINES))
    except OSError as error:
        raise ConfigError(f"the states file {path} cannot be read ({error}): make it with `composer ingest`") from None
    if len(lines) < SAMPLE_LINES:
        return len(lines), lines
    return round(size * len(lines) / sum(map(len, lines))), lines
