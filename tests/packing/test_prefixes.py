"""Shared beginnings: which tokens of a row are computed and which stand for which."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_packing import sample

from composer_prime.packing.pack import MAX_NESTED, MERGED_COST, MIN_SAVED, Tree, common_prefix, pack, prefix_layout

pieces = st.sampled_from([[1] * 3, [2] * 20, [3] * 40, [4], [5, 6, 7]])
documents = st.lists(
    st.lists(pieces, min_size=1, max_size=5).map(lambda parts: np.array([token for part in parts for token in part])),
    min_size=1,
    max_size=9,
)


def leaves(trees, above: int = 0) -> list[int]:
    """Lengths of the documents that end in these trees."""
    found = []
    for tree in trees:
        assert tree.run >= 1 and len(tree.branches) != 1
        found += leaves(tree.branches, above + tree.run) if tree.branches else [above + tree.run]
    return found


def history(documents, plan) -> None:
    """Walk each document through its computed tokens: it meets only the runs above it."""
    start, order = 0, np.argsort(plan.kept)
    assert len(order) == len(plan.kept)
    for document in documents:
        where = plan.where[start : start + len(document)]
        assert (np.diff(where) >= 1).all()
        start += len(document)


@given(documents, st.booleans())
def test_every_token_maps_to_an_equal_computed_token(documents, share):
    # where[] points each token of the row to a computed token with the same id, position and history; the trees end
    # in exactly the documents and add up to what is computed.
    row = np.concatenate(documents)
    positions = np.concatenate([np.arange(len(document)) for document in documents])
    plan = prefix_layout(documents, share=share)
    assert np.array_equal(row[plan.kept][plan.where], row)
    assert np.array_equal(positions[plan.kept][plan.where], positions)
    assert sum(tree.tokens for tree in plan.trees) == len(plan.kept) == len(set(plan.kept.tolist())) <= len(row)
    assert sorted(leaves(plan.trees)) == sorted(map(len, documents))
    assert sum(tree.pairs() for tree in plan.trees) <= sum(len(document) ** 2 for document in documents)
    history(documents, plan)
    if not share:
        assert np.array_equal(plan.kept, np.arange(len(row))) and len(plan.trees) == len(documents)


def test_forks_within_forks():
    # Three documents over a prompt of 20, two of which share 30 more, and a stranger: 20 + 30 + 5 + 6 + 7 + 9 tokens.
    prompt, middle = list(range(100, 120)), list(range(200, 230))
    documents = [[*prompt, *middle, *[1] * 5], [*prompt, *[2] * 7], list(range(9)), [*prompt, *middle, *[3] * 6]]
    plan = prefix_layout([np.array(document) for document in documents])
    fork = Tree(run=30, branches=(Tree(run=5), Tree(run=6)))
    assert plan.trees == (Tree(run=20, branches=(fork, Tree(run=7))), Tree(run=9))
    assert plan.trees[0].tokens == 68 and plan.trees[0].pairs() == 55**2 + (56**2 - 50**2) + (27**2 - 20**2)


@pytest.mark.parametrize(("length", "pays"), [(4096, 400), (1000, 100), (100, 24)])
def test_a_short_beginning_of_long_documents_is_computed_twice(length, pays):
    # What is shared must outweigh the merging of all that follows: 64 of 4096 tokens do not, 400 do.
    def shared(prefix: int) -> bool:
        documents = [np.r_[np.full(prefix, 9), np.full(length - prefix, index)] for index in range(2)]
        return len(prefix_layout(documents).trees) == 1

    saved = [prefix for prefix in range(1, length) if prefix >= MIN_SAVED + MERGED_COST * 2 * (length - prefix)]
    assert not shared(saved[0] - 1) and shared(saved[0]) and saved[0] <= pays
    assert not (length == 4096 and shared(64))


def test_what_is_merged_below_a_fork_counts_once():
    # Twenty contexts of one growing conversation: what later forks share is not counted for each of them.
    contexts = [np.r_[np.arange(100 * (turn + 1)), 5000 + np.arange(50)] for turn in range(20)]
    plan = prefix_layout(contexts)
    assert len(plan.kept) == 2000 + 20 * 50 and len(plan.trees) == 1


def test_a_fork_must_save_enough():
    # Two documents with 15 equal tokens stay apart, five of them share; parts of a group may share more than the whole.
    few = [np.array([7] * (MIN_SAVED - 1) + [index]) for index in range(2)]
    assert prefix_layout(few).trees == (Tree(run=MIN_SAVED), Tree(run=MIN_SAVED))
    many = [np.array([7] * (MIN_SAVED - 1) + [index]) for index in range(5)]
    assert prefix_layout(many).trees == (Tree(run=MIN_SAVED - 1, branches=(Tree(run=1),) * 5),)
    pairs = [np.array([7, kind] + [kind] * 30 + [index]) for kind in (1, 2) for index in (3, 4)]
    assert prefix_layout(pairs).trees == (Tree(run=32, branches=(Tree(run=1), Tree(run=1))),) * 2


def test_equal_documents_keep_a_token_of_their_own():
    # Identical documents, and one that is the beginning of another: all but the shorter's last token is shared.
    same = np.arange(40)
    assert common_prefix(same, same) == 39 and common_prefix(same, same[:30]) == 29
    assert prefix_layout([same] * 3).trees == (Tree(run=39, branches=(Tree(run=1),) * 3),)
    assert prefix_layout([same, same[:30]]).trees == (Tree(run=29, branches=(Tree(run=11), Tree(run=1))),)


def nested(tree: Tree) -> int:
    return 1 + max(map(nested, tree.branches)) if tree.branches else 0


def test_forks_nest_up_to_a_limit():
    # 600 documents, each leaving the rest one token later: the first forks are shared, what is deeper stays apart, and
    # every token still maps to an equal computed one.
    ladder = [np.array([7] * (20 + step) + [100 + step]) for step in range(600)]
    plan = prefix_layout(ladder)
    row = np.concatenate(ladder)
    assert np.array_equal(row[plan.kept][plan.where], row)
    assert max(map(nested, plan.trees)) == MAX_NESTED
    assert sorted(leaves(plan.trees)) == sorted(map(len, ladder))


def test_the_packer_puts_siblings_in_one_row():
    # On one rank, groups of four stay together in one row, whatever their lengths.
    rng = np.random.default_rng(0)
    samples = [sample(i, int(rng.integers(20, 60))) for i in range(32)]
    (batches,) = pack(samples, run_id="r", step=1, world_size=1, max_tokens=512)
    rows = {name: batch.index for batch in batches for name in batch.sample_ids}
    homes = [{rows[f"rollout-{4 * group + member}/0"] for member in range(4)} for group in range(8)]
    assert len(batches) > 1 and all(len(home) == 1 for home in homes)
