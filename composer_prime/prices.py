"""What a call costs."""

from __future__ import annotations

from dataclasses import dataclass

from composer_prime.config.teachers import TeacherConfig
from composer_prime.errors import ConfigError

PER_MILLION = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """USD per token."""

    input_usd: float
    output_usd: float

    def cost_usd(self, input_tokens: int, output_tokens: int) -> float:
        return input_tokens * self.input_usd + output_tokens * self.output_usd


def price_of(teacher: TeacherConfig) -> Price:
    """The configured price, nothing for a local model, else that of genai-prices.

    Raises ConfigError when nobody knows the price: a cap on an unknown cost would be no cap.
    """
    if teacher.input_usd_per_mtok is not None and teacher.output_usd_per_mtok is not None:
        return Price(
            input_usd=teacher.input_usd_per_mtok * PER_MILLION, output_usd=teacher.output_usd_per_mtok * PER_MILLION
        )
    if teacher.local:
        return Price(input_usd=0.0, output_usd=0.0)
    return _listed(teacher)


def _listed(teacher: TeacherConfig) -> Price:
    from genai_prices import Usage, calc_price

    try:
        # Tiered prices rise with the length of the prompt: a long one gives the bound.
        listed = calc_price(
            Usage(input_tokens=1_000_000, output_tokens=1_000_000),
            model_ref=teacher.model,
            provider_api_url=teacher.base_url,
        )
    except LookupError as error:
        raise ConfigError(
            f"genai-prices has no price for teacher {teacher.name!r} ({teacher.model} at {teacher.base_url}: {error}): "
            "set input_usd_per_mtok and output_usd_per_mtok for it"
        ) from None
    return Price(input_usd=float(listed.input_price) * PER_MILLION, output_usd=float(listed.output_price) * PER_MILLION)
