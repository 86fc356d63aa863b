"""Sizes, times, counts and lists as people read them."""

from __future__ import annotations

from collections.abc import Iterable

GIB = 1 << 30


def gib(count: int) -> str:
    """Bytes in GiB, whatever their size, so that two figures can be compared at a glance."""
    size = count / GIB
    if 0 < size < 0.005:
        return "<0.01 GiB"
    return f"{size:,.{2 if size < 10 else 1 if size < 100 else 0}f} GiB"


def clock(seconds: float) -> str:
    """`2m 05s`, `1h 02m`."""
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {rest:02d}s"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """`1 step`, `2 steps`; `plural` where it is not the noun with an s."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def what_is_wrong(sentences: list[str]) -> str:
    """The one sentence, or how many there are and the list of them."""
    return sentences[0] if len(sentences) == 1 else f"{len(sentences)} things are wrong:\n{bulleted(sentences)}"


def bulleted(entries: Iterable[str]) -> str:
    """A line for each of `entries`; where one has several, they stand below its first."""
    return "\n".join("  - " + entry.replace("\n", "\n    ") for entry in entries)
