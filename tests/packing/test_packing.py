"""Packing: every sample once, no row over budget, equal counts, balanced work."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_prime.errors import ConfigError
from composer_prime.packing.pack import FlopCost, model_flops, pack, totals
from composer_prime.wire.types import (
    Sample,
    VersionSpan,
    flags,
    floats,
    ints,
    pack_flags,
    pack_floats,
    pack_ints,
    verify_batch,
)


def sample(index: int, length: int, trained: int | None = None) -> Sample:
    trained = length - 1 if trained is None else trained
    mask = [0] * (length - trained) + [1] * trained
    return Sample(
        sample_id=f"rollout-{index}/0",
        group_id=f"group-{index // 4}",
        source="toolsmith",
        task_id="task",
        input_ids=pack_ints(np.arange(length) + 1000 * index),
        loss_mask=pack_flags(mask),
        logprobs=pack_floats(np.full(length, -0.5) * mask),
        advantages=pack_floats(np.full(length, 1.0 + index) * mask),
        reward=1.0,
        temperature=1.0 + index,
        version_spans=[VersionSpan(length - trained, length, 3)],
        turns=[],
    )


lengths = st.lists(st.integers(2, 64), min_size=0, max_size=60)


@settings(max_examples=150, deadline=None)
@given(lengths=lengths, world_size=st.integers(1, 5), budget=st.integers(64, 200), pair=st.sampled_from([0.0, 0.05]))
def test_every_sample_once_equal_counts_within_budget(lengths, world_size, budget, pair):
    # Every sample is in exactly one micro-batch with its own bytes; counts are equal; no row is over the budget.
    samples = [sample(i, n) for i, n in enumerate(lengths)]
    ranks = pack(
        samples,
        run_id="r",
        step=5,
        world_size=world_size,
        max_tokens=budget,
        cost=FlopCost(per_token=1.0, per_pair=pair),
    )
    assert len(ranks) == world_size and len({len(own) for own in ranks}) == 1 and len(ranks[0]) >= 1
    by_id, seen = {s.sample_id: s for s in samples}, []
    for rank, own in enumerate(ranks):
        for index, batch in enumerate(own):
            verify_batch(batch, run_id="r", step=5, rank=rank, versions=(3, 4))
            assert batch.index == index and len(ints(batch.input_ids)) == sum(batch.lengths) <= budget
            assert len(floats(batch.logprobs)) == len(flags(batch.loss_mask)) == sum(batch.lengths)
            start = 0
            for sample_id, length, temperature in zip(
                batch.sample_ids, batch.lengths, batch.temperatures, strict=bool(batch.sample_ids)
            ):
                one, span = by_id[sample_id], slice(start, start + length)
                assert ints(batch.input_ids)[span].tobytes() == one.input_ids
                assert floats(batch.advantages)[span].tobytes() == one.advantages
                assert temperature == one.temperature
                start += length
            seen += batch.sample_ids
            if not batch.sample_ids:
                assert not flags(batch.loss_mask).any()
    assert sorted(seen) == sorted(by_id)


def test_the_rank_with_the_least_work_gets_the_longest_row_that_is_left():
    # Rows of 10, 9, 8 and 6 tokens on two ranks: 10 + 6 and 9 + 8, not 10 + 8 and 9 + 6.
    samples = [sample(index, length) for index, length in enumerate((10, 9, 8, 6))]
    ranks = pack(samples, run_id="r", step=5, world_size=2, max_tokens=10)
    assert [sum(sum(batch.lengths) for batch in own) for own in ranks] == [16, 17]


def test_a_row_names_the_oldest_and_the_newest_version_of_its_samples():
    # The trainer refuses a row by these two.
    spans = [[VersionSpan(1, 4, version)] for version in (2, 4)]
    samples = [msgspec.structs.replace(sample(index, 4), version_spans=span) for index, span in enumerate(spans)]
    ((row,),) = pack(samples, run_id="r", step=5, world_size=1, max_tokens=10)
    assert row.versions == (2, 4)


@settings(max_examples=30, deadline=None)
@given(lengths=lengths, seed=st.integers(0, 9))
def test_deterministic_whatever_the_order_of_samples(lengths, seed):
    # The same set of samples gives the same micro-batches, byte for byte, in whatever order it arrives.
    samples = [sample(i, n) for i, n in enumerate(lengths)]
    shuffled = [samples[i] for i in np.random.default_rng(seed).permutation(len(samples))]
    options = {"run_id": "r", "step": 1, "world_size": 2, "max_tokens": 128}
    assert pack(samples, **options) == pack(shuffled, **options)


def test_ranks_get_nearly_equal_work():
    # With many samples, the slowest rank of each round costs at most 10 % more than the mean of the round.
    rng = np.random.default_rng(0)
    samples = [sample(i, int(n)) for i, n in enumerate(rng.integers(20, 400, 200))]
    cost = FlopCost(per_token=1.0, per_pair=0.001)
    ranks = pack(samples, run_id="r", step=1, world_size=4, max_tokens=2048, cost=cost)
    for batches in zip(*ranks, strict=True):
        costs = [sum(n + 0.001 * n * n for n in batch.lengths) for batch in batches]
        assert max(costs) <= 1.1 * np.mean(costs)


def test_fewer_samples_than_ranks_leaves_dummies():
    # One sample on three ranks: two ranks hold a dummy of one masked token.
    ranks = pack([sample(0, 10)], run_id="r", step=1, world_size=3, max_tokens=64)
    assert sorted(len(own[0].sample_ids) for own in ranks) == [0, 0, 1]


def test_wrong_samples_are_refused_by_name():
    # Too long, twice, or training the first token: an error that names the sample and the remedy.
    options = {"run_id": "r", "step": 1, "world_size": 1, "max_tokens": 16}
    with pytest.raises(ConfigError, match=r"rollout-0/0 has 17 tokens.*micro_batch_tokens is 16"):
        pack([sample(0, 17)], **options)
    with pytest.raises(ConfigError, match="rollout-1/0 was given twice"):
        pack([sample(1, 8), sample(1, 8)], **options)
    with pytest.raises(ConfigError, match="rollout-2/0 trains its first token"):
        pack([sample(2, 8, trained=8)], **options)


def test_totals_count_only_sequences_with_trained_tokens():
    # B and the token count leave out a sample whose mask is empty.
    counted = totals([sample(0, 8), sample(1, 8, trained=0), sample(9, 5)])
    assert (counted.samples, counted.tokens) == (2, 11)


def test_flops_of_a_known_model():
    # 2 operations a weight and token on the matrices of a Qwen3-shaped decoder.
    config = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
              "head_dim": 4, "intermediate_size": 16, "vocab_size": 32}  # fmt: skip
    matrices = 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16) + 8 * 32
    assert model_flops(config) == FlopCost(per_token=2.0 * matrices, per_pair=2.0 * 2 * 8)
