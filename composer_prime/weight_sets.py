"""Which sets of weights a run keeps besides the ones it trains: for teachers, KL references, preference pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from composer_prime.config.channels import ChannelsConfig

WeightSet = Literal["frozen", "teacher", "reference"]
"""The start weights, or a moving average of the trained ones that is the teacher or the KL penalty's reference."""
AVERAGES: tuple[WeightSet, ...] = ("teacher", "reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSets:
    teacher: WeightSet | None
    """What teaches, or takes part in it; None: the live weights alone, or nobody."""
    reference: WeightSet | None
    """What the KL penalty measures from; None: there is no penalty."""
    scores_pairs: bool
    """Whether preference pairs need log-probabilities under the start weights; simpo's margin has no reference."""

    @property
    def needed(self) -> set[WeightSet]:
        wanted: list[WeightSet | None] = [self.teacher, self.reference, "frozen" if self.scores_pairs else None]
        return {name for name in wanted if name is not None}


def weight_sets(channels: ChannelsConfig) -> WeightSets:
    """What `channels` asks for; a channel of weight 0 asks for nothing."""
    kl, sdpo = channels.policy.kl, channels.sdpo
    teachers: dict[str, WeightSet | None] = {"live": None, "ema": "teacher"}
    return WeightSets(
        teacher=teachers.get(sdpo.teacher.kind, "frozen") if sdpo.weight > 0 else None,
        reference=None if kl.weight == 0 else "reference" if kl.reference == "ema" else "frozen",
        scores_pairs=channels.replay_dpo.weight > 0 and channels.replay_dpo.loss != "simpo",
    )
