"""Rows with teacher documents and preference pairs: what shares a row, where the indices point, what is refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_packing import sample

from composer_prime.channels.replay_dpo import pair_unit
from composer_prime.errors import ConfigError, RunMismatchError
from composer_prime.packing.pack import Row, pack, totals, without_hints
from composer_prime.wire.types import HintedTurn, Sample, TermUnit, flags, floats, ints, pack_ints, verify_batch

ROW = {"run_id": "r", "step": 5, "world_size": 1, "max_tokens": 400}


def hinted(index: int, length: int, turns: list[tuple[int, int]]) -> Sample:
    """A sample whose turns [start, end) were given hints of 3 tokens after the context."""
    plain = sample(index, length)
    ids, distillations = ints(plain.input_ids), []
    for number, (start, end) in enumerate(turns):
        teacher = np.r_[ids[:start], [7, 7, number], ids[start:end]]
        distillations.append(
            HintedTurn(start=start, end=end, teacher_ids=pack_ints(teacher), teacher_start=start + 3,
                         weight=1.0 + number, turn=number, error="tool_not_found")
        )  # fmt: skip
    return msgspec.structs.replace(plain, distillations=distillations)


def pair(index: int, context: int = 6, chosen: int = 4, rejected: int = 5, epsilon: float = 0.2) -> TermUnit:
    common = np.arange(context) + 50 * index
    one, other = pack_ints(np.r_[common, np.full(chosen, 1)]), pack_ints(np.r_[common, np.full(rejected, 2)])
    return pair_unit(pair_id=f"pair-{index}", chosen_ids=one, rejected_ids=other, context=context, epsilon=epsilon)


@st.composite
def hinted_samples(draw):
    made = []
    for index in range(draw(st.integers(0, 12))):
        length = draw(st.integers(4, 40))
        cuts = sorted(draw(st.sets(st.integers(1, length), max_size=4)))
        made.append(hinted(index, length, list(zip(cuts[::2], cuts[1::2], strict=False))))
    return made


@settings(max_examples=100, deadline=None)
@given(hinted_samples(), st.integers(0, 5), st.integers(1, 3), st.integers(150, 400), st.integers(0, 9))
def test_teachers_share_their_sample_s_row_and_pairs_are_whole(samples, pair_count, world_size, budget, seed):
    # Every sample, hinted turn and pair is in exactly one row; a turn's teacher document can be made from its sample
    # and what the row adds; both answers of a pair are in its row; only samples are trained; and the order in
    # which samples and pairs arrive changes no byte.
    pairs = [pair(index) for index in range(pair_count)]
    options = {**ROW, "world_size": world_size, "max_tokens": budget}
    ranks = pack(samples, pairs, **options)
    order = np.random.default_rng(seed)
    shuffled = [samples[i] for i in order.permutation(len(samples))], [pairs[i] for i in order.permutation(pair_count)]
    assert pack(*shuffled, **options) == ranks
    names, wanted, found, seen_pairs, sent = [], [], [], [], {}
    for rank, own in enumerate(ranks):
        for batch in own:
            verify_batch(batch, run_id="r", step=5, rank=rank, versions=(3, 4))
            ids, starts = ints(batch.input_ids), np.cumsum([0, *batch.lengths])
            samples_end = starts[len(batch.sample_ids)] if batch.sample_ids else 0
            assert len(ids) == starts[-1] <= budget and len(batch.temperatures) == len(batch.lengths)
            assert not flags(batch.loss_mask)[samples_end:].any() and not floats(batch.advantages)[samples_end:].any()
            for turn in batch.turns:
                home = np.searchsorted(starts, turn.student, "right") - 1
                assert home < len(batch.sample_ids)
                sent[batch.sample_ids[home], int(turn.student - starts[home])] = np.r_[
                    ids[starts[home] :][: turn.shared], ints(turn.tail)
                ]
                found.append((batch.sample_ids[home], int(turn.student - starts[home]), turn.count, turn.weight))
            for unit in batch.units:
                ((chosen,), (rejected,)) = unit.spans
                assert (ids[slice(*chosen)] == 1).all() and (ids[slice(*rejected)] == 2).all()
                assert [starts[unit.document + 1], starts[unit.document + 2]] == [chosen[1], rejected[1]]
                seen_pairs.append((unit.name, chosen[1] - chosen[0], unit.value))
            names += batch.sample_ids
    for one in samples:
        for turn in one.distillations:
            assert np.array_equal(sent[one.sample_id, turn.start], ints(turn.teacher_ids))
        wanted += [(one.sample_id, turn.start, turn.end - turn.start, turn.weight) for turn in one.distillations]
    assert sorted(names) == sorted(one.sample_id for one in samples) and sorted(found) == sorted(wanted)
    assert sorted(seen_pairs) == [(f"pair pair-{index}", 4, pytest.approx(0.2)) for index in range(pair_count)]
    counted = totals(samples, pairs)
    assert counted.distilled_turns == len(wanted) and counted.units == (
        {"replay_dpo": pair_count} if pair_count else {}
    )
    assert counted.distilled_tokens == sum(count for _, _, count, _ in wanted)


def test_without_sdpo_and_replay_dpo_rows_are_those_of_the_policy_loss():
    # No pairs and no hints: byte for byte the micro-batches of samples that never had any.
    samples = [hinted(index, 30, [(5, 9), (12, 20)]) for index in range(6)]
    bare = [msgspec.structs.replace(one, distillations=[]) for one in samples]
    assert pack(without_hints(samples), **ROW) == pack(bare, **ROW)
    assert totals(without_hints(samples)) == totals(bare)


def test_common_contexts_are_counted_once():
    # The work of a hinted sample is estimated with the shared context: rows are balanced by what is computed.
    samples = [hinted(index, 60, [(55, 59)]) for index in range(2)] + [sample(8, 75), sample(9, 75)]
    ranks = pack(samples, **{**ROW, "world_size": 2})
    assert sorted(sorted(name.split("/")[0] for batch in own for name in batch.sample_ids) for own in ranks) == [
        ["rollout-0", "rollout-8"],
        ["rollout-1", "rollout-9"],
    ]


def test_a_document_holds_its_first_token_and_not_its_neighbor_s():
    # Positions belong to documents from each start on; the sample's teacher document follows all others.
    ((batch,),) = pack([hinted(0, 12, [(4, 8)]), hinted(1, 9, [])], (), **ROW)
    row = Row.of(batch)
    assert row.document_of(row.starts[:-1]).tolist() == list(range(len(row.starts) - 1))
    assert row.document_of(row.starts[1:] - 1).tolist() == list(range(len(row.starts) - 1))
    (turn,) = batch.turns
    assert [row.name(index) for index in row.teachers()] == [row.name(int(row.document_of(turn.student)))]


def test_what_does_not_fit_names_both_numbers_and_the_remedy():
    # A sample that fits alone but whose hinted turn does not, and a pair: needed and allowed tokens are named.
    with pytest.raises(ConfigError, match=r"rollout-0/0 has a hinted turn with 63 tokens .* is 60: .* least 63"):
        pack([hinted(0, 60, [(50, 55), (55, 60)])], **{**ROW, "max_tokens": 60})
    with pytest.raises(ConfigError, match=r"pair-1 has 21 tokens .* is 20: .* at least 21"):
        pack([], [pair(1)], **{**ROW, "max_tokens": 20})
    with pytest.raises(ConfigError, match="pair-1 was given twice"):
        pack([], [pair(1)] * 2, **ROW)


def test_turns_that_do_not_match_are_refused_by_name():
    # Other ids, and a turn that was cut or lacks a context.
    good = hinted(0, 30, [(10, 20)])

    def refused(match: str, **values):
        bad = msgspec.structs.replace(good.distillations[0], **values)
        with pytest.raises(RunMismatchError, match=match):
            pack([msgspec.structs.replace(good, distillations=[bad])], **ROW)

    ids = ints(good.distillations[0].teacher_ids)
    refused(r"rollout-0/0: turn 0 has id 15 in the sample and 16 .* at its token 5", teacher_ids=pack_ints(
        np.r_[ids[:18], 16, ids[19:]]))  # fmt: skip
    refused("10 tokens in the sample and 9 in the teacher document: was it cut", teacher_ids=pack_ints(ids[:-1]))
    refused("turn 0 is tokens 10..31 of 30", end=31)
    refused("a token and a context on both sides", teacher_start=0)
    twice = [good.distillations[0], msgspec.structs.replace(good.distillations[0], turn=1)]
    with pytest.raises(RunMismatchError, match="rollout-0/0: turn 1 overlaps"):
        pack([msgspec.structs.replace(good, distillations=twice)], **ROW)


def test_totals_count_units_and_their_trained_tokens():
    # A pair trains both of its answers; the denominators of other terms are counted by term.
    counted = totals([], [pair(index) for index in range(3)])
    assert counted.units == {"replay_dpo": 3} and counted.unit_tokens == {"replay_dpo": 3 * (4 + 5)}
