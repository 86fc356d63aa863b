"""What a call costs: configured prices, or those of genai-prices."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING

from composer_prime.console import install_command
from composer_prime.errors import ConfigError

if TYPE_CHECKING:
    from genai_prices.types import ModelPrice, TieredPrices

PER_MILLION = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What tokens cost, USD each. `tiers` has a price that rises with the prompt's length."""

    input_usd: float
    """A prompt token, in the dearest tier."""
    output_usd: float
    """An answer token, in the dearest tier."""
    request_usd: float = 0.0
    """A call, whatever its length (perplexity's search)."""
    tiers: ModelPrice | None = None

    def cost_usd(self, input_tokens: int, output_tokens: int, cached_tokens: int = 0) -> float:
        """Return the cost of a call. Without tiers `cached_tokens` cost as much as others."""
        if self.tiers is None:
            return self.bound_usd(input_tokens, output_tokens)
        from genai_prices import Usage

        cached = min(cached_tokens, input_tokens) if self.tiers.cache_read_mtok is not None else 0
        usage = Usage(input_tokens=input_tokens, output_tokens=output_tokens, cache_read_tokens=cached)
        return float(self.tiers.calc_price(usage)["total_price"])

    def bound_usd(self, input_tokens: int, output_tokens: int) -> float:
        """Return the most that so many tokens may cost."""
        return self.request_usd + input_tokens * self.input_usd + output_tokens * self.output_usd


def listed_price(model: str, base_url: str) -> Price:
    """Return today's price of a model at an endpoint. Raises LookupError for an unlisted one, ConfigError without
    genai-prices."""
    try:
        from genai_prices import Usage, calc_price
    except ImportError as error:
        raise ConfigError(
            f"prices of {model} are not known without genai-prices ({error}): run {install_command('traces')}, "
            "or set input_usd_per_mtok and output_usd_per_mtok"
        ) from None
    usage = Usage(input_tokens=1, output_tokens=1)
    listed = calc_price(usage, model_ref=model, provider_api_url=base_url).model_price
    return Price(
        input_usd=_dearest(listed.input_mtok),
        output_usd=_dearest(listed.output_mtok),
        request_usd=float(listed.calc_price(Usage(input_tokens=0, output_tokens=0))["total_price"]),
        tiers=listed,
    )


def _dearest(price: Decimal | TieredPrices | None) -> float:
    if price is None:
        return 0.0
    steps = [price] if isinstance(price, Decimal) else [price.base, *(tier.price for tier in price.tiers)]
    return float(max(steps) / 10**6)
