"""Shared beginnings: which tokens of a row are computed and which stand for which."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from test_packing import sample

from composer_prime.packing import pack
from composer_prime.prefixes import MIN_SHARED, Tree, common_prefix, layout

tokens = st.integers(0, 2)
documents = st.lists(
    st.builds(
        lambda shared, own: np.array([7] * shared + own),
        st.sampled_from([0, 3, MIN_SHARED, 30]),
        st.lists(tokens, min_size=1, max_size=12),
    ),
    min_size=1,
    max_size=8,
)


@given(documents, st.booleans())
def test_every_token_is_stood_for_by_an_equal_one_at_its_place(documents, share):
    # where[] points each token of the row to a computed token with the same id, position and history; trees add up.
    row = np.concatenate(documents)
    positions = np.concatenate([np.arange(len(document)) for document in documents])
    plan = layout(documents, share=share)
    assert np.array_equal(row[plan.kept][plan.where], row)
    assert np.array_equal(positions[plan.kept][plan.where], positions)
    assert sum(tree.tokens for tree in plan.trees) == len(plan.kept) <= len(row)
    assert len(set(plan.kept.tolist())) == len(plan.kept)
    if not share:
        assert np.array_equal(plan.kept, np.arange(len(row))) and len(plan.trees) == len(documents)
    start = 0
    for tree in plan.trees:
        assert tree.prefix >= 1 and all(branch >= 1 for branch in tree.branches)
        assert len(tree.branches) != 1
        start += tree.tokens


def test_siblings_share_their_prompt():
    # Three documents over one prompt of 20 tokens and a stranger: 20 + 3 * 5 + 9 tokens are computed.
    prompt = list(range(100, 120))
    siblings = [np.array(prompt + [i] * 5) for i in range(3)]
    plan = layout([*siblings, np.arange(9)])
    assert plan.trees == (Tree(prefix=20, branches=(5, 5, 5)), Tree(prefix=9))
    assert plan.trees[0].pairs() == 25**2 + 2 * (25**2 - 20**2)


def test_short_or_unprofitable_beginnings_are_not_shared():
    # Fewer than MIN_SHARED equal tokens, or joining three at the cost of a much longer prefix of two: kept apart.
    assert layout([np.array([1] * 10 + [2]), np.array([1] * 10 + [3])]).trees == (Tree(prefix=11), Tree(prefix=11))
    long, other = [1] * 90, [1] * 17
    plan = layout([np.array([*long, 2]), np.array([*long, 3]), np.array([*other, 4, 4])])
    assert plan.trees == (Tree(prefix=90, branches=(1, 1)), Tree(prefix=19))


def test_equal_documents_keep_a_token_of_their_own():
    # Two identical documents: all but the last token is shared, so both have a branch.
    same = np.arange(40)
    assert common_prefix(same, same) == 39
    assert layout([same, same]).trees == (Tree(prefix=39, branches=(1, 1)),)


def test_the_packer_puts_siblings_side_by_side():
    # Groups of four with a common prompt stay together on one rank and in one row, whatever their lengths.
    rng = np.random.default_rng(0)
    samples = [sample(i, int(rng.integers(20, 60))) for i in range(32)]
    for world_size in (1, 2):
        ranks = pack(samples, run_id="r", step=1, world_size=world_size, max_tokens=512)
        rows = [batch.sample_ids for own in ranks for batch in own]
        group = lambda name: int(name.split("-")[1].split("/")[0]) // 4
        homes = {g: [i for i, row in enumerate(rows) if any(group(name) == g for name in row)] for g in range(8)}
        if world_size == 1:
            assert all(len(home) == 1 for home in homes.values())
        for row in rows:
            runs = [g for i, g in enumerate(map(group, row)) if i == 0 or g != group(row[i - 1])]
            assert world_size > 1 or len(runs) == len(set(runs))
