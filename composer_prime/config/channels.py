"""[channels]: the loss, one table a term; and the weights that the terms need.

Each term's settings are in its file in composer_prime/channels; a term is switched on by a weight above 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field
from pydantic_config import BaseConfig

from composer_prime.channels.policy import PolicyConfig, PolicyTerm
from composer_prime.channels.replay_dpo import ReplayDpoConfig
from composer_prime.channels.sdpo import SdpoConfig
from composer_prime.channels.sft import SftConfig
from composer_prime.channels.term import Term, TermConfig
from composer_prime.errors import ConfigError
from composer_prime.import_path import PartConfig, build_part


class OwnTermConfig(TermConfig, PartConfig):
    """A loss term of your own: a subclass of composer_prime.channels.term.Term, called with these settings.

    Its module lies beside a configuration file or in a folder of run.import_from.
    """

    weight: float = Field(default=1.0, ge=0)
    """Factor of the term in the loss; 0 turns it off."""

    def term(self, policy: PolicyTerm) -> Term:
        """Return the term. Raises ConfigError when it cannot be imported or does not take the settings."""
        return build_part(self.name, self.settings, {}, "channels.own.name", {"config": self})


class ChannelsConfig(BaseConfig):
    """The terms of the loss, and their weights."""

    policy: PolicyConfig = PolicyConfig()
    """The policy loss."""
    sdpo: SdpoConfig = SdpoConfig()
    """SDPO: distillation of hints at error turns."""
    replay_dpo: ReplayDpoConfig = ReplayDpoConfig()
    """Replay-DPO: preference pairs from teachers' votes."""
    sft: SftConfig = SftConfig()
    """SFT: recorded conversations to imitate."""
    own: list[OwnTermConfig] = []
    """Loss terms of your own."""

    def terms(self, max_length: int) -> list[Term]:
        """Return the terms that are on: the policy loss, then those with a weight, in the order of the fields.

        `max_length` is the policy loss's constant length divisor, in tokens. Raises ConfigError for a loss or term of
        the user's that cannot be built.
        """
        others: list[TermConfig] = [self.sdpo, self.replay_dpo, self.sft, *self.own]
        policy = PolicyTerm(self.policy, max_length)
        terms: list[Term] = [policy, *(config.term(policy) for config in others if config.weight > 0)]
        names = [term.name for term in terms]
        if len(set(names)) < len(names):
            raise ConfigError(f"two loss terms have the same name, of {', '.join(names)}: rename one in its class")
        return terms


WeightSet = Literal["frozen", "teacher", "reference"]
"""The start weights, or a moving average of the trained ones: the teacher, or the KL penalty's reference."""
AVERAGES: tuple[WeightSet, ...] = ("teacher", "reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSets:
    """The weights that a run keeps besides the trained ones."""

    teacher: WeightSet | None
    """The self-teacher; None for the live weights, and without SDPO."""
    reference: WeightSet | None
    """The origin of the KL penalty; None without a penalty."""
    scores_pairs: bool
    """Whether preference pairs need log-probabilities under the start weights; simpo's margin has no reference."""

    @property
    def needed(self) -> set[WeightSet]:
        names: list[WeightSet | None] = [self.teacher, self.reference, "frozen" if self.scores_pairs else None]
        return {name for name in names if name is not None}


def weight_sets(channels: ChannelsConfig) -> WeightSets:
    """Return the weights that `channels` needs; a term of weight 0 needs none."""
    kl, sdpo = channels.policy.kl, channels.sdpo
    teachers: dict[str, WeightSet | None] = {"live": None, "ema": "teacher", "frozen": "frozen"}
    return WeightSets(
        teacher=teachers[sdpo.teacher.kind] if sdpo.weight > 0 else None,
        reference=None if kl.weight == 0 else "reference" if kl.reference == "ema" else "frozen",
        scores_pairs=channels.replay_dpo.weight > 0 and channels.replay_dpo.loss != "simpo",
    )
