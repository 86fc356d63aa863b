"""[channels]: the loss, one section a channel."""

from __future__ import annotations

from pydantic_config import BaseConfig

from composer_prime.config.policy import KlConfig, PolicyConfig, make_po_config
from composer_prime.config.replay_dpo import ReplayDpoConfig
from composer_prime.config.sdpo import SdpoConfig, SelfTeacherConfig
from composer_prime.config.weight_schedule import WeightSchedule

__all__ = [
    "ChannelsConfig",
    "KlConfig",
    "PolicyConfig",
    "ReplayDpoConfig",
    "SdpoConfig",
    "SelfTeacherConfig",
    "WeightSchedule",
    "make_po_config",
]


class ChannelsConfig(BaseConfig):
    policy: PolicyConfig = PolicyConfig()
    """Channel 1."""
    sdpo: SdpoConfig = SdpoConfig()
    """Channel 2."""
    replay_dpo: ReplayDpoConfig = ReplayDpoConfig()
    """Channel 3."""
