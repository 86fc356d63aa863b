"""From the statistics of a row to what each channel takes."""

from __future__ import annotations

from torch import Tensor

from composer_prime.channels.policy import PolicyTokens
from composer_prime.channels.replay_dpo import PairTokens
from composer_prime.channels.sdpo import DistilTokens
from composer_prime.channels.sequences import sum_by
from composer_prime.channels.total import ChannelInputs
from trainer.head import TokenStatistics
from trainer.rows import DistilledRow, PackedRow, PairsRow
from trainer.self_teacher import Aid


def channel_inputs(row: PackedRow, statistics: TokenStatistics, aid: Aid) -> ChannelInputs:
    """Inputs of the channels that are on; one without tokens in this row is empty, and attached to the graph."""
    return ChannelInputs(
        policy=PolicyTokens(
            logprobs_T=_picked(statistics.logprobs_R, row.policy_T),
            sampler_logprobs_T=row.sampler_logprobs_T,
            advantages_T=row.advantages_T,
            entropy_T=_picked(statistics.entropy_R, row.policy_T),
            sequence_T=row.sequence_T,
            sequences=row.sequences,
            reference_logprobs_T=aid.reference_logprobs_T,
        ),
        sdpo=None if row.distilled is None else _distil_tokens(row.distilled, statistics),
        replay_dpo=None if row.pairs is None else _pair_tokens(row.pairs, statistics, aid),
    )


def _picked(values_R: Tensor, rows: Tensor | None) -> Tensor:
    return values_R if rows is None else values_R[rows]


def _distil_tokens(distilled: DistilledRow, statistics: TokenStatistics) -> DistilTokens:
    """The head's last D rows; all of them were sampled, whether or not channel 1 trains them."""
    count = len(distilled.turn_D)
    logprobs_D = statistics.logprobs_R[len(statistics.logprobs_R) - count :]
    nothing = statistics.logprobs_R[:0]
    return DistilTokens(
        divergence_D=nothing if statistics.divergence_D is None else statistics.divergence_D,
        logprobs_D=logprobs_D,
        sampler_logprobs_D=distilled.sampler_logprobs_D,
        weight_D=distilled.weight_D,
        turn_D=distilled.turn_D,
        turns=distilled.turns,
        teacher_entropy_D=nothing.detach() if statistics.divergence_D is None else statistics.teacher_entropy_D,
    )


def _pair_tokens(pairs: PairsRow, statistics: TokenStatistics, aid: Aid) -> PairTokens:
    sums_S = sum_by(statistics.logprobs_R[pairs.answer_A], pairs.side_A, 2 * pairs.pairs)
    reference_S = aid.reference_S
    return PairTokens(
        chosen_logprobs_P=sums_S[0::2],
        rejected_logprobs_P=sums_S[1::2],
        chosen_length_P=pairs.length_S[0::2],
        rejected_length_P=pairs.length_S[1::2],
        reference_chosen_P=None if reference_S is None else reference_S[0::2],
        reference_rejected_P=None if reference_S is None else reference_S[1::2],
        epsilon_P=pairs.epsilon_P,
    )
