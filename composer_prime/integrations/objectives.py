"""The policy loss's settings by the name of an objective, for other trainers."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from composer_prime.channels.policy import PolicyConfig
from composer_prime.config.problems import wrong_config


def make_po_config(objective: str = "dr_grpo", **settings: Any) -> PolicyConfig:
    """Return the settings of `objective`: denominator, ratio, clip range and scaling of its paper unless given.

    Raises ConfigError for an unknown objective or setting (with the nearest known one) or a wrong value.
    """
    try:
        return PolicyConfig.model_validate({"objective": objective, **settings})
    except ValidationError as error:
        raise wrong_config(error, [], section=("channels", "policy")) from None
