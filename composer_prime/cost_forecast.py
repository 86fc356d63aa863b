"""What teachers will probably cost, before the first call; `composer report` sets what they did cost beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from composer_prime.config import Config
from composer_prime.config.teachers import TeacherConfig
from composer_prime.errors import ConfigError
from composer_prime.prices import price_of

BYTES_PER_TOKEN = 4.0
"""Of English and code, about; budgets reserve with fewer (teachers.budget.bytes_per_token)."""
ANSWER_SHARE = 0.25
"""Of max_tokens that an answer takes, about."""
SAMPLE_LINES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """USD of a whole replay."""

    states: int
    state_usd: float
    """Two votes on one state, answers of a quarter of max_tokens."""
    low_usd: float
    """Two votes on each state, answers of a quarter of max_tokens."""
    high_usd: float
    """All voters on each state, answers of max_tokens; at most the cap of the run."""

    def text(self) -> str:
        return f"${self.low_usd:,.2f} to ${self.high_usd:,.2f} for {self.states:,} states"


def forecast(config: Config, states_file: Path | None = None) -> Forecast | None:
    """For a states file (teachers.states by default); None where there is none to measure, or no teacher.

    Raises ConfigError for an unknown price or an unreadable file.
    """
    teachers = config.teachers
    path = states_file or teachers.states
    if path is None or not teachers.teacher:
        return None
    states, mean_bytes = _measure(path)
    tiers = ("cheap", "mid", "frontier")
    asked = sorted(teachers.teacher, key=lambda each: (tiers.index(each.tier), price_of(each).output_usd))
    prompt = mean_bytes / BYTES_PER_TOKEN
    low = sum(_vote(each, prompt, ANSWER_SHARE * teachers.max_tokens) for each in asked[:2])
    high = sum(_vote(each, prompt, teachers.max_tokens) for each in asked[: teachers.voters])
    cap = teachers.budget.usd_per_run
    return Forecast(
        states=states, state_usd=low, low_usd=min(states * low, cap), high_usd=min(states * high, cap)
    )


def _vote(teacher: TeacherConfig, prompt_tokens: float, answer_tokens: float) -> float:
    return price_of(teacher).cost_usd(int(prompt_tokens), int(answer_tokens))


def _measure(path: Path) -> tuple[int, float]:
    """(states, mean bytes of one); of a large file, from its first lines and its size."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            lengths = [len(line) for line, _ in zip(file, range(SAMPLE_LINES), strict=False)]
    except OSError as error:
        raise ConfigError(f"the states file {path} cannot be read ({error}): make it with `composer ingest`") from None
    if not lengths:
        return 0, 0.0
    mean = sum(lengths) / len(lengths)
    return (len(lengths) if len(lengths) < SAMPLE_LINES else round(size / mean)), mean
