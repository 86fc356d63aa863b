"""A line chart as SVG, written by hand: no plotting library for one figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 900, 460, 60, 40, 310, 50
_COLOURS = ("#1b6ca8", "#c1440e", "#3a7d44", "#7b4b94", "#a67c00", "#44546a", "#b0306a", "#008080")


def svg(title: str, x_label: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """`series`: name -> points (x > 0, drawn on a logarithmic axis; y in 0..1, drawn in percent)."""
    xs = [x for points in series.values() for x, _ in points]
    low, high = math.floor(math.log10(min(xs)) + 1e-9), math.ceil(math.log10(max(xs)) - 1e-9)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="16">{escape(title)}</text>',
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 12}" font-size="13" text-anchor="middle">'
        f"{escape(x_label)}</text>",
    ]
    for decade in range(low, high + 1):
        x = _x(10.0**decade, low, high)
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_y(0):.1f}" stroke="#ddd"/>')
        parts.append(_text(x, _y(0) + 18, f"{10.0**decade:g}", "middle"))
    for percent in range(0, 101, 20):
        y = _y(percent / 100)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{percent} %", "end"))
    for index, (name, points) in enumerate(series.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        path = " ".join(f"{_x(x, low, high):.1f},{_y(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = _TOP + 10 + 22 * index
        left = _WIDTH - _RIGHT + 16
        parts.append(f'<line x1="{left}" y1="{y}" x2="{left + 22}" y2="{y}" stroke="{colour}" stroke-width="3"/>')
        parts.append(_text(left + 30, y + 4, name, "start"))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" text-anchor="{anchor}">{escape(words)}</text>'


def _x(value: float, low: int, high: int) -> float:
    return _LEFT + (math.log10(value) - low) / max(1, high - low) * (_WIDTH - _LEFT - _RIGHT)


def _y(value: float) -> float:
    return _TOP + (1 - value) * (_HEIGHT - _TOP - _BOTTOM)
