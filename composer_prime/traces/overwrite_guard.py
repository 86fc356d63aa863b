"""Checks before a command appends to or replaces a file: a file of something else is left as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from composer_prime.errors import ConfigError

_MOST_BYTES = 1 << 26
"""Of a first line that is read."""
_SHOWN_BYTES = 60


def check_own(path: Path, is_own: Callable[[bytes], bool], what: str) -> None:
    """Raise ConfigError where the first line of `path` shows that it does not hold `what`, or cannot be read.

    A file that does not exist or is blank passes.
    """
    if not path.is_file():
        return
    try:
        with path.open("rb") as file:
            line = b"\n"
            while line and not line.strip():
                line = file.readline(_MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): name another file") from None
    if line and not is_own(line):
        shown = line[:_SHOWN_BYTES].decode("utf-8", "replace").rstrip()
        raise ConfigError(
            f"{path} does not hold {what}, for it begins with {shown!r}. It was left as it is: name another file, or "
            "move this one elsewhere"
        )


def lines_of(kind: Any, *, beginning: bytes = b"") -> Callable[[bytes], bool]:
    """Return a check for `check_own`: whether a line is JSON of that `kind`.

    A line that a crash cut short passes by the `beginning` of whole lines.
    """
    decoder = msgspec.json.Decoder(kind)

    def is_own(line: bytes) -> bool:
        try:
            decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            torn = not line.endswith(b"\n") and bool(beginning)
            return torn and (line.startswith(beginning) or beginning.startswith(line))
        return True

    return is_own


def same_file(one: Path, other: Path) -> bool:
    """Return whether both paths name one file, by whatever spelling or link."""
    try:
        return one.samefile(other)
    except OSError:  # one of them does not exist
        return one.resolve() == other.resolve()
