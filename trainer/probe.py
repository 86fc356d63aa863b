"""A check before training: does this architecture give the same log-probabilities packed as alone?

Two short documents go through transformers' own forward pass one by one, then through the trainer's path in one row.
Attention that leaks between documents, state carried along a row, or a head with an unknown scaling all show here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from composer_prime.errors import ConfigError
from composer_prime.prefixes import Tree
from trainer.attention import NAME
from trainer.policy import Policy
from trainer.rows import Reading

LENGTHS = (7, 12)
TOLERANCE = 1e-3


@torch.no_grad()
def check_packing(lm: PreTrainedModel) -> float:
    """The largest difference in nats on the CPU in float32.

    Raises ConfigError when it is above 1e-3: the model cannot be trained on packed rows as this program makes them.
    """
    draw = torch.Generator().manual_seed(0)
    vocabulary = lm.config.get_text_config().vocab_size
    documents = [torch.randint(0, vocabulary, (length,), generator=draw) for length in LENGTHS]
    lm.eval()
    attention = lm.config._attn_implementation
    reading, targets_R = _row(documents)
    packed = Policy(lm, attention).scores(reading, targets_R)
    lm.set_attn_implementation("sdpa" if attention == NAME else attention)
    alone = torch.cat([_reference(lm, document) for document in documents])
    lm.set_attn_implementation(attention)
    worst = (packed - alone).abs().max().item()
    if not worst <= TOLERANCE:
        raise ConfigError(
            f"{type(lm).__name__}: log-probabilities in a packed row differ by {worst:.3g} nats from those of the same "
            f"documents alone (allowed {TOLERANCE}): this architecture cannot be trained on packed rows; use another "
            "model, or open an issue that names it"
        )
    return worst


def _reference(lm: PreTrainedModel, document: Tensor) -> Tensor:
    logprobs_TV = lm(input_ids=document[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return logprobs_TV.gather(1, document[1:, None]).squeeze(1)


def _row(documents: list[Tensor]) -> tuple[Reading, Tensor]:
    """The documents in one row; all tokens but each document's first are targets."""
    ids = torch.cat(documents)
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    targets = positions.nonzero().squeeze(1)
    reading = Reading(
        input_ids=ids[None],
        position_ids=positions[None],
        trees=tuple(Tree(run=len(document)) for document in documents),
        source_R=targets - 1,
    )
    return reading, ids[targets]
