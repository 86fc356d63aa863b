"""The published rule of drawing, and what an auditor makes of given tokens."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_prime.wire.node_messages import Sampling
from inference.engines.sampling import SamplingRows, draw_misses, rule_of, sample, uniforms

VECTORS = [
    (0, 0, 1210155558),
    (0, 1, 1202080610),
    (1, 0, 3705938940),
    (7, 4096, 2731820251),
    (2**53, 12, 779733617),
    (2**64 - 1, 2**31, 4114364638),
]
"""Seed, position and 2^32 times the uniform number: those of docs/reference/generate-contract.md."""


def rows(count: int, *, seed: int = 0, **options) -> SamplingRows:
    return SamplingRows.of([rule_of(Sampling(max_tokens=1, **options), seed)] * count, np.arange(count))


def logits_of(count: int, vocab: int, seed: int) -> torch.Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def test_the_uniform_numbers_are_those_of_the_documentation():
    # Another implementation of the rule can be checked against these.
    seeds, positions, numbers = (np.array(column, dtype=np.uint64) for column in zip(*VECTORS, strict=True))
    assert (uniforms(seeds, positions) * 2.0**32).astype(np.uint64).tolist() == numbers.tolist()


def test_a_worked_example_draws_what_the_documentation_says():
    # Three tokens with probabilities 1/2, 1/4, 1/4: u below 1/2 draws token 0, from 3/4 on token 2.
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log().repeat(4, 1)
    u = uniforms(np.zeros(4, np.uint64), np.arange(4, dtype=np.uint64))
    expected = [0 if number < 0.5 else 1 if number < 0.75 else 2 for number in u]
    assert sample(logits, rows(4))[0].tolist() == expected


OPTIONS = {
    "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.8]),
    "top_k": st.sampled_from([0, 1, 17]),
    "top_p": st.sampled_from([0.3, 0.9, 1.0]),
}


@settings(max_examples=60, deadline=None)
@given(st.fixed_dictionaries(OPTIONS), st.integers(0, 2**63), st.sampled_from([3, 40, 700]))
def test_what_the_rule_draws_never_misses(options, seed, vocab):
    # A node with the same logits is never blamed, whatever the settings, and its logprobs are the auditor's.
    settings_, logits = rows(16, seed=seed, **options), logits_of(16, vocab, seed % 1000)
    tokens, logprobs = sample(logits, settings_)
    misses, scored = draw_misses(logits, settings_, tokens)
    assert (misses == 0).all()
    assert np.array_equal(logprobs, scored)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**63), st.floats(0.001, 0.5))
def test_a_miss_is_at_most_the_total_variation_distance(seed, noise):
    # Rounding moves an honest draw out of its interval by no more than it moves the distribution.
    exact = logits_of(16, 60, seed % 1000)
    rounded = exact + noise * torch.randn(16, 60, generator=torch.Generator().manual_seed(seed % 997))
    tokens, _ = sample(rounded, rows(16, seed=seed))
    misses, _ = draw_misses(exact, rows(16, seed=seed), tokens)
    distance = 0.5 * (exact.softmax(-1).double() - rounded.softmax(-1).double()).abs().sum(-1).numpy()
    assert (misses <= distance + 1e-6).all()


def test_other_tokens_miss_by_their_distance_in_the_cdf():
    # With u = 0.28 and probabilities 1/4 each, token 1 is the draw; token 3 begins at 3/4.
    logits = torch.zeros(1, 4)
    u = float(uniforms(np.zeros(1, np.uint64), np.zeros(1, np.uint64))[0])
    assert 0.25 < u < 0.5
    for token, expected in ((0, u - 0.25), (1, 0.0), (2, 0.5 - u), (3, 0.75 - u)):
        misses, _ = draw_misses(logits, rows(1), np.array([token]))
        assert abs(misses[0] - expected) < 1e-9


def test_a_token_outside_of_the_nucleus_has_no_probability():
    # Top-k 1 keeps one token; any other is scored as impossible.
    logits = torch.tensor([[1.0, 0.0, -1.0]])
    misses, logprobs = draw_misses(logits, rows(1, top_k=1), np.array([2]))
    assert logprobs[0] == -np.inf and 0 < misses[0] <= 1


def test_a_near_tie_at_the_edge_is_decided_for_the_draw():
    # Tokens 1 and 2 tie but for a rounding error, and top-k or top-p keeps one of them beside token 0, or alone. A node
    # that keeps the other one draws as the rule says, with it; a token far below the edge stays impossible.
    for first, options in ((0.0, {"top_k": 1}), (1.5, {"top_k": 2}), (1.5, {"top_p": 0.6}), (0.3, {"top_p": 0.3})):
        logits = torch.tensor([[first, 1.0, 1.0, -9.0]]).repeat(64, 1)
        auditors = logits + torch.tensor([0.0, 0.01, 0.0, 0.0])
        nodes = logits + torch.tensor([0.0, 0.0, 0.01, 0.0])
        settings_ = rows(64, **options)
        tokens, _ = sample(nodes, settings_)
        assert 2 in tokens
        exact, _ = draw_misses(auditors, settings_, tokens)
        tolerant, _ = draw_misses(auditors, settings_, tokens, 0.02)
        assert exact.max() > 0.1 and tolerant.max() < 0.02
        assert (draw_misses(auditors, settings_, np.full(64, 3), 0.02)[0] > 0.1).sum() > 30


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([{"top_k": 1}, {"top_k": 3}, {"top_p": 0.3}, {"top_p": 0.9}]), st.integers(0, 2**63))
def test_rounding_at_the_edge_blames_no_honest_node(options, seed):
    # Errors of up to 0.03 nats in logits move what top-k and top-p keep, and no draw out of the tolerance.
    exact, settings_ = logits_of(64, 60, seed % 1000), rows(64, seed=seed, **options)
    noise = torch.rand(64, 60, generator=torch.Generator().manual_seed(seed % 997))
    tokens, _ = sample(exact + 0.06 * (noise - 0.5), settings_)
    assert draw_misses(exact, settings_, tokens, 0.05)[0].max() < 0.05


def test_draws_of_another_seed_are_found_for_all_the_tolerance():
    # What is let pass at the edge is no licence: most draws of another seed miss.
    logits = logits_of(512, 60, 3)
    for options in ({"top_k": 3}, {"top_p": 0.9}):
        tokens, _ = sample(logits, rows(512, seed=1, **options))
        misses, _ = draw_misses(logits, rows(512, seed=2, **options), tokens, 0.02)
        assert (misses > 0.02).mean() > 0.3


def test_draws_over_a_large_vocabulary_are_checked_in_parts():
    # The float work is bounded: of a million tokens 16 rows at a time, with the same result.
    logits, settings_ = torch.zeros(17, 1 << 20), rows(17, seed=4)
    tokens, logprobs = sample(logits, settings_)
    misses, scored = draw_misses(logits, settings_, tokens)
    assert misses.shape == scored.shape == (17,)
    assert (misses == 0).all() and np.array_equal(scored, logprobs)


def test_a_greedy_row_misses_by_what_it_leaves_behind():
    # Temperature 0 has no draw: another token than the likeliest is wrong, unless it is as likely.
    logits = torch.tensor([[0.0, 0.0, -20.0]])
    for token, expected in ((0, 0.0), (1, 0.0), (2, 0.5)):
        misses, _ = draw_misses(logits, rows(1, temperature=0.0), np.array([token]))
        assert abs(misses[0] - expected) < 1e-6
