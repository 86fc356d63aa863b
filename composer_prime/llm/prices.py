"""What a call costs."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING

from composer_prime.config.teachers import TeacherConfig
from composer_prime.errors import ConfigError

if TYPE_CHECKING:
    from genai_prices.types import ModelPrice, TieredPrices

PER_MILLION = 1e-6


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

    def cost_usd(self, input_tokens: int, output_tokens: int) -> float:
        """Return the cost of a call with a prompt of this length."""
        if self.tiers is None:
            return self.bound_usd(input_tokens, output_tokens)
        from genai_prices import Usage

        usage = Usage(input_tokens=input_tokens, output_tokens=output_tokens)
        return float(self.tiers.calc_price(usage)["total_price"])

    def bound_usd(self, input_tokens: int, output_tokens: int) -> float:
        """Return the most that a call with so many tokens may cost."""
        return self.request_usd + input_tokens * self.input_usd + output_tokens * self.output_usd


def price_of(teacher: TeacherConfig) -> Price:
    """Return the configured price, nothing for a local model, else today's price of genai-prices.

    Raises ConfigError when there is none: a cap on an unknown cost would be no cap.
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
        usage = Usage(input_tokens=1, output_tokens=1)
        listed = calc_price(usage, model_ref=teacher.model, provider_api_url=teacher.base_url).model_price
    except LookupError as error:
        raise ConfigError(
            f"genai-prices has no price for teacher {teacher.name!r} ({teacher.model} at {teacher.base_url}: {error}): "
            "set input_usd_per_mtok and output_usd_per_mtok for it"
        ) from None
    dearest = {"input_usd": _dearest(listed.input_mtok), "output_usd": _dearest(listed.output_mtok)}
    request_usd = float(listed.calc_price(Usage(input_tokens=0, output_tokens=0))["total_price"])
    return Price(**dearest, request_usd=request_usd, tiers=listed)


def _dearest(price: Decimal | TieredPrices | None) -> float:
    """Return the highest tier's price, USD a token."""
    if price is None:
        return 0.0
    steps = [price] if isinstance(price, Decimal) else [price.base, *(tier.price for tier in price.tiers)]
    return float(max(steps) / 10**6)
