"""Where a live teacher's documents are read: the work of both places by hand, and the choice."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
import transformers
from hinted_runs import make_hinted, three_channels
from hypothesis import given
from hypothesis import strategies as st
from small_runs import VOCABULARY

from composer_prime.channels.sdpo import SdpoConfig
from composer_prime.config.trainer import TrainerConfig
from composer_prime.packing.pack import pack, totals
from composer_prime.packing.prefixes import FlopCost
from composer_prime.packing.row import Row
from composer_prime.wire.types import HintedTurn, Sample, TermUnit, pack_flags, pack_ints
from trainer.data.rows import checked_row, unpack
from trainer.model.build import blocks
from trainer.teacher.self_teacher import ReadCost, teachers_in_row

HINT = 3
SMALL = transformers.Qwen3Config(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8,
)  # fmt: skip


def one_turn(context: int, turn: int, rows: Sequence[TermUnit] = ()) -> Row:
    """One sample, `turn` tokens after `context` ones, its teacher document with a hint between them, and `rows`."""
    ids = np.arange(context + turn) % VOCABULARY
    hint = (ids[context] + 1 + np.arange(HINT)) % VOCABULARY
    hinted = HintedTurn(
        start=context, end=context + turn, teacher_ids=pack_ints(np.r_[ids[:context], hint, ids[context:]]),
        teacher_start=context + HINT, turn=0, error="test",
    )  # fmt: skip
    size = 4 * len(ids)
    sample = msgspec.structs.replace(
        make_hinted(1, 1)[0], input_ids=pack_ints(ids), loss_mask=bytes(context) + b"\1" * turn, logprobs=bytes(size),
        advantages=bytes(size), distillations=[hinted],
    )  # fmt: skip
    ((batch,),) = pack([sample], rows, run_id="r", step=1, world_size=1, max_tokens=4096)
    return checked_row(batch, VOCABULARY)


def cost_of(per_token: float, per_pair: float) -> ReadCost:
    trained = FlopCost(per_token=3 * per_token, per_pair=3 * per_pair)
    return ReadCost(forward=FlopCost(per_token=per_token, per_pair=per_pair), trained=trained)


@given(context=st.integers(24, 300), turn=st.integers(1, 60))
def test_work_counted_by_hand(context, turn):
    # In the row: hint and turn behind the shared context, forward and backward. Apart: the whole document, forward.
    # With nothing shared: the whole document either way.
    found, added, whole = one_turn(context, turn), HINT + turn, context + HINT + turn
    assert cost_of(1, 0).of_teachers(found, share=True) == (3 * added, whole)
    assert cost_of(0, 1).of_teachers(found, share=True) == (3 * (whole**2 - context**2), whole**2)
    assert cost_of(2, 1).of_teachers(found, share=False) == (3 * (2 * whole + whole**2), 2 * whole + whole**2)


def test_a_model_costs_what_its_blocks_hold():
    # Two operations a weight of the blocks' matrices and token, none of the output layer; the backward pass is two
    # forward passes, for adapters one, and one more where activations are computed again.
    lm = transformers.Qwen3ForCausalLM(SMALL)
    matrices = sum(p.numel() for block in blocks(lm) for p in block.parameters() if p.ndim == 2)
    plain = ReadCost.of(SMALL, TrainerConfig())
    assert plain.forward == FlopCost(per_token=2 * matrices, per_pair=2 * 2 * 4 * 8)
    assert plain.trained == FlopCost(per_token=6 * matrices, per_pair=3 * 2 * 2 * 4 * 8)
    again = ReadCost.of(SMALL, TrainerConfig(activation_checkpointing=True, lora={}))
    assert again.trained == FlopCost(per_token=6 * matrices, per_pair=4 * 2 * 2 * 4 * 8)
    assert ReadCost.of(transformers.GPT2Config(), TrainerConfig()).forward == FlopCost(per_token=1.0, per_pair=0.0)


@pytest.mark.parametrize(
    ("context", "turn", "share", "cost", "in_row"),
    [(400, 10, True, cost_of(1, 0), True), (20, 30, True, cost_of(1, 0), False), (400, 10, False, cost_of(1, 0), False),
     (400, 140, True, cost_of(1, 0), True), (400, 140, True, cost_of(0, 1), False)],
)  # fmt: skip
def test_the_cheaper_place_is_taken(world, context, turn, share, cost, in_row):
    # A long context with a short turn goes into the samples' row, a short one or one that cannot be shared goes apart.
    # A turn of a third of the context is worth it by its tokens, and not where attention is what costs.
    assert teachers_in_row([one_turn(context, turn)], three_channels(), cost, share=share) == [in_row]


@pytest.mark.parametrize(("max_tokens", "in_row"), [(463, True), (462, False)])
def test_demonstrations_count_towards_the_longest_row(world, max_tokens, in_row):
    # 400 + 10 tokens of the sample, 13 of its teacher behind the shared context, 40 of a conversation.
    ids = np.full(40, VOCABULARY - 1)
    row = TermUnit(term="sft", name="row f:1", documents=[pack_ints(ids)], masks=[pack_flags([0] * 30 + [1] * 10)])
    found = one_turn(400, 10, [row])
    assert teachers_in_row([found], three_channels(), cost_of(1, 0), share=True, max_tokens=max_tokens) == [in_row]


def test_a_teacher_with_other_weights_is_read_apart(world):
    # Also where the row is the cheaper place for its documents.
    found, cost = [one_turn(400, 10)], ReadCost.of(SMALL, TrainerConfig())
    assert teachers_in_row(found, three_channels(), cost, share=True) == [True]
    assert teachers_in_row(found, three_channels("ema"), cost, share=True) == [False]


def long_sample(tokens: int, turns: int, reply: int) -> Sample:
    """A rollout of `tokens` with a hinted reply at the end of each of `turns` equal stretches."""
    rng, stretch = np.random.default_rng(0), tokens // turns
    ids, distillations = rng.integers(0, VOCABULARY, tokens), []
    for turn in range(turns):
        end = (turn + 1) * stretch
        start = end - reply
        teacher = np.r_[ids[: start - 2], rng.integers(0, VOCABULARY, 100), ids[start - 2 : end]]
        distillations.append(
            HintedTurn(start=start, end=end, teacher_ids=pack_ints(teacher), teacher_start=start + 100, turn=turn,
                       error="test")
        )  # fmt: skip
    return msgspec.structs.replace(
        make_hinted(1, 1)[0], input_ids=pack_ints(ids), loss_mask=b"\0" + b"\1" * (tokens - 1),
        logprobs=bytes(4 * tokens), advantages=bytes(4 * tokens), distillations=distillations,
    )  # fmt: skip


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(("tokens", "in_row"), [(16_000, True), (30_000, False)])
def test_long_samples_keep_all_their_hinted_turns(world, tokens, in_row, share):
    # 20 hinted turns of 16,000 and of 30,000 tokens in rows of 32,768: the row holds one sample and no context twice,
    # every turn is read, and no forward pass computes more tokens than a row may have.
    limit, hinted = 32_768, long_sample(tokens, 20, 200)
    ((batch,),) = pack([hinted], run_id="r", step=1, world_size=1, max_tokens=limit)
    assert batch.lengths == [tokens] and batch.sample_ids == [hinted.sample_id]
    counts = totals([hinted])
    assert (counts.samples, counts.distilled_turns, counts.distilled_tokens) == (1, 20, 20 * 200)
    assert sum(len(turn.tail) // 4 for turn in batch.turns) == 20 * (100 + 2 + 200)
    documents, cost = checked_row(batch, VOCABULARY), ReadCost.of(SMALL, TrainerConfig())
    (taken,) = teachers_in_row([documents], three_channels(), cost, share=share, max_tokens=limit)
    assert taken == (in_row and share)
    options = {"share": share, "max_tokens": limit}
    row = unpack(documents, [SdpoConfig().term()], torch.device("cpu"), teacher_in_row=taken, **options)
    apart = unpack(documents, [SdpoConfig().term()], torch.device("cpu"), teacher_in_row=False, **options)
    assert max(reading.input_ids.numel() for reading in (row, *row.taught.readings, *apart.taught.readings)) <= limit
    assert row.taught.turns == 20 and (taken or len(row.taught.readings) > 0)
    assert (
        sum(len(reading.source_R) for reading in apart.taught.readings)
        == len(row.terms["sdpo"].arrays["turn"])
        == 20 * 200
    )
    if share:
        assert len(apart.taught.readings) <= 2
