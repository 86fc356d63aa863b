"""What a command appends to or replaces may be somebody else's file: it is looked at first, and kept where it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from composer_prime.errors import ConfigError

_MOST_BYTES = 1 << 26
"""Of a first line that is looked at."""
_SHOWN_BYTES = 60


def check_own(path: Path, is_own: Callable[[bytes], bool], what: str) -> None:
    """Raises ConfigError where the first line of `path` is none of `what`, or cannot be read. A file that is
    not there or blank is anybody's."""
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
            f"{path} does not hold {what}, for it begins with {shown!r}: it was left as it is; name another file, or "
            "move this one elsewhere"
        )


def lines_of(kind: Any, *, beginning: bytes = b"") -> Callable[[bytes], bool]:
    """Whether a line is JSON of that `kind`. One that a crash cut short is known by the `beginning` of whole ones."""
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
    """Whether both name one file, by whatever spelling or link."""
    try:
        return one.samefile(other)
    except OSError:  # one of them is not there
        return one.resolve() == other.resolve()
