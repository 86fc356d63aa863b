"""The gate's statistics with traces as units: against what is counted out, and their level where pairs are alike."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from composer_prime.stats.intervals import bootstrap_interval
from composer_prime.traces.replay.density import FEWEST_TRACES, MAX_P
from composer_prime.traces.replay.frozen_base import Margins, sign_flip_p, smallest_p

VALUES = [0.9, -0.1, 0.4, 0.8, 0.3, 0.7, -0.2, 0.5]


# Every flip of every cluster, counted out by hand; drawing them gives about the same.
@pytest.mark.parametrize("clusters", ["abcdefgh", "aabbccde"])
def test_the_sign_flip_test_by_enumeration(clusters: str) -> None:
    flips = [dict(zip("abcdefgh", signs, strict=True)) for signs in itertools.product((-1, 1), repeat=8)]
    means = [abs(sum(flip[name] * value for name, value in zip(clusters, VALUES, strict=True))) for flip in flips]
    exact = float(np.mean([mean >= sum(VALUES) - 1e-9 for mean in means]))
    assert sign_flip_p(VALUES, list(clusters)) == pytest.approx(exact)
    many = [*VALUES, *VALUES]
    names = [f"{name}{half}" for half in range(2) for name in clusters]
    drawn = sign_flip_p(many, names, resamples=500)
    assert drawn == pytest.approx(sign_flip_p(many, names, resamples=1 << 16), abs=0.02)


# One trace more halves what can be reached, whatever the margins; from eight on the gate can be passed.
def test_the_smallest_p() -> None:
    for traces in (1, 4, FEWEST_TRACES):
        assert sign_flip_p([1.0, 2.0] * traces, [str(index // 2) for index in range(2 * traces)]) == smallest_p(traces)
    assert smallest_p(FEWEST_TRACES) < MAX_P <= smallest_p(FEWEST_TRACES - 1) and FEWEST_TRACES == 8
    assert sign_flip_p([1.0] * 40, [str(index) for index in range(40)]) == 1 / 10_000
    assert sign_flip_p([0.0, 0.0], ["a", "b"]) == 1


# 12 traces of 15 pairs that are alike within, true mean 0: the level holds where whole traces are flipped. Flipping
# pairs, as if each were a trace, finds an effect in every second replay of noise.
def test_the_level_where_pairs_of_a_trace_are_alike() -> None:
    rng, traces = np.random.default_rng(1), np.repeat(np.arange(12), 15).astype(str).tolist()
    replays = [np.repeat(rng.normal(0, 1, 12), 15) + rng.normal(0, 0.3, 180) for _ in range(400)]
    by_trace = np.mean([sign_flip_p(values.tolist(), traces) < 0.05 for values in replays])
    strict = np.mean([sign_flip_p(values.tolist(), traces) < MAX_P for values in replays])
    assert by_trace <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 400) and strict <= MAX_P + 3 * np.sqrt(MAX_P / 400)
    assert by_trace >= 0.02
    pairs = [str(index) for index in range(180)]
    as_pairs = np.mean([sign_flip_p(values.tolist(), pairs, resamples=199) < MAX_P for values in replays[:40]])
    assert as_pairs > 0.3


# Real and cross-step margins share the chosen answer's score, which differs most between states: it does not blur what
# the rejected answers tell.
def test_cross_step_margins_are_compared_pair_by_pair() -> None:
    rng = np.random.default_rng(2)
    chosen, rejected = rng.normal(0, 5, 60), rng.normal(-1, 0.1, 60)
    stranger = rejected - 0.1 + rng.normal(0, 0.1, 60)
    traces = [str(index // 3) for index in range(60)]
    real, cross_step = (chosen - rejected).tolist(), (chosen - stranger).tolist()
    assert Margins(real=real, cross_step=cross_step, traces=traces).p_cross_step < MAX_P
    assert Margins(real=real, cross_step=real, traces=traces).p_cross_step == 1


# Steps that only repeat their trace's figure say no more than the traces do.
def test_intervals_draw_traces() -> None:
    rng = np.random.default_rng(3)
    seconds = rng.exponential(2.0, 10)
    repeated, traces = np.repeat(seconds, 20).tolist(), np.repeat(np.arange(10), 20).astype(str).tolist()
    assert bootstrap_interval(repeated, clusters=traces) == pytest.approx(bootstrap_interval(seconds.tolist()))
    low, high = bootstrap_interval(repeated) or (0, 0)
    wide = bootstrap_interval(repeated, clusters=traces) or (0, 0)
    assert wide[1] - wide[0] > 3 * (high - low)
    assert bootstrap_interval(repeated, clusters=["a"] * 200) is None
    uneven = bootstrap_interval([1.0, 1.0, 1.0, 5.0], clusters=["a", "a", "a", "b"])
    assert uneven == (1.0, 5.0)
