"""Temperature, top-k, top-p and draws against transformers' warpers, row by row."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_prime.wire.node_messages import Sampling
from inference.engines import sampling
from inference.engines.sampling import SamplingRows, rule_of, sample
from tests.engines.reference import warp


def rows(settings_: list[Sampling], seed: int = 0) -> SamplingRows:
    rules = [rule_of(one, seed + index) for index, one in enumerate(settings_)]
    return SamplingRows.of(rules, np.full(len(rules), 3))


OPTIONS = st.builds(
    Sampling,
    max_tokens=st.just(1),
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.8]),
    top_k=st.sampled_from([0, 1, 2, 17, 700, 5000]),
    top_p=st.sampled_from([0.01, 0.3, 0.9, 0.999, 1.0]),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(OPTIONS, min_size=1, max_size=8), st.integers(0, 2**31), st.sampled_from([40, 700, 1500]))
def test_logprobs_are_the_warped_distributions(options, seed, vocab):
    # Mixed settings side by side: each row draws inside its own support and reports the warped log-probability.
    logits = torch.randn(len(options), vocab, generator=torch.Generator().manual_seed(seed)) * 3
    tokens, logprobs = sample(logits, rows(options, seed))
    for row, one in enumerate(options):
        if one.temperature == 0.0:
            expected = logits[row].log_softmax(-1)
            assert tokens[row] == int(logits[row].argmax())
        else:
            expected = warp(logits[row : row + 1].clone(), one)[0].log_softmax(-1)
        assert abs(float(expected[tokens[row]]) - float(logprobs[row])) < 1e-4


def test_tied_tokens_at_the_edge_of_a_nucleus_stay_together():
    # Else the order in which equal logits are sorted decides, which changes with the rows beside.
    one = Sampling(max_tokens=1, top_p=0.9)
    logits = torch.randn(9, 32_000, generator=torch.Generator().manual_seed(4)).mul(3).bfloat16().float()
    logits[8] = 0.0  # makes the nucleus of one row the whole vocabulary
    logits[0, :5] = torch.tensor([50.0, 50.0, 50.0, 49.0, 49.0])
    beside = sampling.warp(logits, rows([one] * 9)).isfinite()
    for row in range(8):
        alone = sampling.warp(logits[row : row + 1], rows([one])).isfinite()[0]
        assert (alone == beside[row]).all()
        assert alone[logits[row] == logits[row, alone].min()].all()
    assert beside[0].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert beside[8].all()


def test_impossible_tokens_are_never_drawn():
    # Tokens at -inf have no mass, at either end of the vocabulary and for extreme uniforms.
    logits = torch.full((2000, 9), float("-inf"))
    logits[:, [3, 5]] = 0.0
    tokens, logprobs = sample(logits, rows([Sampling(max_tokens=1)] * 2000))
    assert set(tokens) == {3, 5} and np.allclose(logprobs, np.log(0.5), atol=1e-6)


def test_the_smallest_temperature_is_greedy():
    # Dividing by a temperature near 0 must not give infinities: that would fail the request and blame the weights.
    logits = torch.tensor([[20.0, 30.0, -5.0]]).expand(3, -1)
    cold = [Sampling(max_tokens=1, temperature=heat) for heat in (1e-20, 1e-39, 1e-45)]
    tokens, logprobs = sample(logits, rows(cold))
    assert tokens.tolist() == [1, 1, 1] and logprobs.tolist() == [0.0, 0.0, 0.0]


def test_non_finite_logits_show_in_the_logprob():
    # NaN or +inf in a row makes that row's log-probability non-finite, and no other's.
    logits = torch.zeros(3, 10)
    logits[0, 4], logits[2, 4] = float("nan"), float("inf")
    _, logprobs = sample(logits, rows([Sampling(max_tokens=1)] * 3))
    assert np.isfinite(logprobs).tolist() == [False, True, False]
