"""Agreement and the permutation test of the density gate, both with traces as units. Numpy only.

Steps of one trace are alike: taken as independent, a few traces would make a p that is far too small.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Interval = tuple[float, float] | None


def fleiss_kappa(counts: Sequence[Sequence[int]]) -> float | None:
    """Agreement beyond chance (Fleiss 1971), with any number of votes a subject.

    `counts` [subjects, categories]: votes for each category. Subjects with one vote say nothing about agreement and
    are left out. None where nothing is left, or all votes fall into one category (chance alone agrees fully).
    """
    terms = _kappa_terms(counts)
    kappa = float(_kappa(terms.sum(axis=0))) if len(terms) else np.nan
    return None if np.isnan(kappa) else kappa


def kappa_interval(
    counts: Sequence[Sequence[int]],
    clusters: Sequence[str],
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap interval of `fleiss_kappa`, drawing whole clusters; one a subject in `clusters`.

    None for fewer than two clusters with a subject of two votes, or where kappa is not defined.
    """
    terms = _kappa_terms(counts)
    kept = [cluster for cluster, row in zip(clusters, counts, strict=True) if sum(row) >= 2]
    if len(set(kept)) < 2:
        return None
    sums = _by_cluster(terms, kept)
    drawn = np.random.default_rng(seed).integers(0, len(sums), size=(resamples, len(sums)))
    kappas = _kappa(sums[drawn].sum(axis=1))
    kappas = kappas[~np.isnan(kappas)]
    if not len(kappas):
        return None
    low, high = np.quantile(kappas, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def sign_flip_p(values: Sequence[float], clusters: Sequence[str], *, resamples: int = 9_999, seed: int = 0) -> float:
    """Two-sided p of "the signs of a cluster's values could as well be exchanged", by the mean of all `values`.

    `values` of one cluster ([values], named in `clusters`) are flipped together, however alike they are: whole-block
    sign flips (Winkler et al. 2015, NeuroImage 123:253; with few clusters Canay, Romano and Shaikh 2017, Econometrica
    85:1013). All flips are counted out where there are at most `resamples`; else so many are drawn, and the p is
    (1 + those at least as extreme) / (1 + resamples), so never 0 (Phipson and Smyth 2010). Not below `smallest_p`.
    """
    sums = _by_cluster(np.asarray(values, dtype=np.float64)[:, None], clusters)[:, 0]
    least = abs(sums.sum()) - 1e-12 * np.abs(sums).sum()
    # Exchanging all signs at once changes no two-sided statistic: the first may stay.
    others = len(sums) - 1
    if 2**others <= resamples:
        flips = np.arange(2**others)[:, None] >> np.arange(others) & 1
        return float((np.abs(sums[0] + (1 - 2 * flips) @ sums[1:]) >= least).mean())
    rng, extreme = np.random.default_rng(seed), 0
    for start in range(0, resamples, 1_000):
        signs = rng.choice((-1.0, 1.0), size=(min(1_000, resamples - start), len(sums)))
        extreme += int((np.abs(signs @ sums) >= least).sum())
    return (1 + extreme) / (1 + resamples)


def smallest_p(clusters: int) -> float:
    """What `sign_flip_p` can reach with so many clusters: of their 2^n flips, two are as extreme as the strongest."""
    return min(2.0 ** (1 - clusters), 1.0)


def _kappa_terms(counts: Sequence[Sequence[int]]) -> np.ndarray:
    """[subjects with two votes or more, 2 + categories]: agreement, 1, and the votes for each category."""
    table = np.asarray([row for row in counts if sum(row) >= 2], dtype=np.float64)
    if not len(table):
        return table
    votes = table.sum(axis=1)
    agreement = ((table**2).sum(axis=1) - votes) / (votes * (votes - 1))
    return np.column_stack([agreement, np.ones(len(table)), table])


def _kappa(sums: np.ndarray) -> np.ndarray:
    """Of summed terms [..., 2 + categories]; nan where chance alone agrees fully."""
    shares = sums[..., 2:] / sums[..., 2:].sum(axis=-1, keepdims=True)
    expected = (shares**2).sum(axis=-1)
    left = np.where(expected < 1, 1 - expected, np.nan)
    return (sums[..., 0] / sums[..., 1] - expected) / left


def _by_cluster(rows: np.ndarray, clusters: Sequence[str]) -> np.ndarray:
    """[clusters, columns]: sums of the rows of each."""
    names, places = np.unique(np.asarray(clusters), return_inverse=True)
    sums = np.zeros((len(names), rows.shape[1]))
    np.add.at(sums, places, rows)
    return sums
