"""The density report as one SVG: base margins of real, flipped and cross-step pairs, and each gate beside its limit."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from composer_prime.traces.replay.gate.density import MAX_S_A_STEP, MAX_USD_A_TRACE, Density

WIDTH, HEIGHT, TOP, LEFT, PLOT_WIDTH, PLOT_HEIGHT = 760, 420, 50, 40, 400, 300
_OPENING = (
    f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
    'font-size="12">'
)
_COLOURS = {"real": "#1b7837", "flipped": "#b2182b", "cross-step": "#4575b4"}
_BINS = 24


def draw(density: Density) -> str:
    """An SVG document."""
    parts = [
        _OPENING,
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 24, f"{density.pairs} pairs of {density.states} states in {density.traces} traces", size=15),
        *_histograms(density),
        *_gates(density),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def is_chart(line: bytes) -> bool:
    """Whether the first line of a file is that of a chart that was drawn here."""
    return line.rstrip() == _OPENING.encode()


def _histograms(density: Density) -> list[str]:
    """Outlined histograms of the margins over one axis."""
    if density.margins is None:
        return [_text(LEFT, TOP + 20, "base margins were not measured (--base)")]
    real = density.margins.real
    series = {"real": real, "flipped": [-value for value in real], "cross-step": density.margins.cross_step}
    every = np.concatenate([np.asarray(values) for values in series.values()])
    low, high = float(every.min()), float(every.max())
    edges = np.linspace(low, high if high > low else low + 1, _BINS + 1)
    shares = {name: np.histogram(values, edges)[0] / len(values) for name, values in series.items()}
    most = max(float(share.max()) for share in shares.values())
    parts = [_line(LEFT, TOP + PLOT_HEIGHT, LEFT + PLOT_WIDTH, TOP + PLOT_HEIGHT, "#333")]
    for index, (name, share) in enumerate(shares.items()):
        points = _outline(share / most)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{_COLOURS[name]}" stroke-width="2"/>')
        mean = sum(series[name]) / len(series[name])
        parts.append(_text(LEFT + 8, TOP + 14 + 16 * index, f"{name}: mean {mean:+.3f}", colour=_COLOURS[name]))
    parts += [
        _text(
            LEFT + PLOT_WIDTH * share - 16, TOP + PLOT_HEIGHT + 18, f"{edges[0] + share * (edges[-1] - edges[0]):.2f}"
        )
        for share in (0.0, 0.5, 1.0)
    ]
    return [*parts, _text(LEFT, TOP + PLOT_HEIGHT + 40, "log p(chosen) - log p(rejected), nats a token, frozen base")]


def _outline(heights: Sequence[float]) -> str:
    step, points = PLOT_WIDTH / _BINS, []
    for index, height in enumerate(heights):
        y = TOP + PLOT_HEIGHT * (1 - float(height))
        points += [f"{LEFT + index * step:.1f},{y:.1f}", f"{LEFT + (index + 1) * step:.1f},{y:.1f}"]
    return " ".join(points)


def _gates(density: Density) -> list[str]:
    """A bar a gate, on a scale where the limit stands in the middle; cost and time only where they are known."""
    gates = [
        ("pairs a trace", density.pairs_a_trace, density.min_pairs, density.pairs_a_trace >= density.min_pairs),
        ("$ a trace", density.usd_a_trace, MAX_USD_A_TRACE, density.usd_a_trace < MAX_USD_A_TRACE),
        ("s a step, p95", density.s_p95, MAX_S_A_STEP, density.s_p95 < MAX_S_A_STEP),
    ]
    parts, x, width = [], LEFT + PLOT_WIDTH + 50, 220
    for index, (name, value, limit, good) in enumerate(gates if density.votes else gates[:1]):
        y, length = TOP + 20 + 80 * index, min(value / (2 * limit), 1.0) * width
        colour = _COLOURS["real" if good else "flipped"]
        parts += [
            _text(x, y, f"{name}: {value:.3g} (limit {limit:g})"),
            f'<rect x="{x}" y="{y + 8}" width="{length:.1f}" height="18" fill="{colour}"/>',
            _line(x + width / 2, y + 2, x + width / 2, y + 32, "#333"),
        ]
    verdict = "gate passed" if density.passed else "gate missed"
    return [*parts, _text(x, TOP + 280, verdict, size=15, colour=_COLOURS["real" if density.passed else "flipped"])]


def _text(x: float, y: float, words: str, *, size: int = 12, colour: str = "#222") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{colour}">{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}" stroke="{colour}"/>'
