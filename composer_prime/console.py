"""What console scripts do alike: how they name and start one another, how they end on wrong input or unread output.

Imports nothing but the standard library, so that `composer --help` answers at once.

Sizes, times, counts and lists as people read them.

Progress where no bar can be drawn, as in a pipe or a log file: a line now and then, on standard error.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

EXIT_USAGE = 2
"""Exit status of every wrong command line or configuration."""

INTERRUPTED = 128 + signal.SIGINT
"""Exit status of what Ctrl-C stopped."""

READER_LEFT = 128 + signal.SIGPIPE
"""Exit status of a command whose output nobody read to the end, as a shell reports it of any other program."""


def program() -> str:
    """What the user typed to get here, for messages: `trainer`, `composer plan`."""
    name = os.path.basename(sys.argv[0] or "trainer").removesuffix(".py")
    named = name == "composer" and sys.argv[1:] and re.fullmatch("[a-z]+", sys.argv[1])
    return f"composer {sys.argv[1]}" if named else name if name != "__main__" else "trainer"


def fail(error: Exception, *, command: str | None = None) -> NoReturn:
    """Print a wrong input's message to stderr, without a traceback, and exit with status 2. `command`: what the user
    typed, where the name of the process does not tell."""
    print(f"{command or program()}: {error}", file=sys.stderr)
    raise SystemExit(EXIT_USAGE)


def console_script(name: str) -> list[str]:
    """The words that start the console script `name`: of this installation, else on the path, else its entry point."""
    found = Path(sys.executable).parent / name
    if found.is_file() and os.access(found, os.X_OK):
        return [str(found)]
    on_path = shutil.which(name)
    if on_path:
        return [on_path]
    return [sys.executable, "-c", f"import sys; from {name}.main import main; sys.exit(main())"]


def columns() -> int | None:
    """Characters a line of the terminal; None where the output is no terminal and COLUMNS does not say."""
    return shutil.get_terminal_size((0, 0)).columns or None


def until_the_reader_leaves(work: Callable[[], int]) -> int:
    """Exit status of `work()`, which prints; READER_LEFT where standard output was closed on it, without a traceback:
    `composer report RUN | head`."""
    try:
        try:
            return work()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        silence()
        return READER_LEFT


def silence() -> None:
    """Let standard output lead nowhere from now on, so that neither a print nor the flush at the end raises.

    Standard error too, where it is the same pipe (`2>&1 |`).
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    left = [sys.stdout.fileno()]
    if os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno()):
        left.append(sys.stderr.fileno())
    for descriptor in left:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


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


def pluralize(count: int, noun: str, plural: str | None = None) -> str:
    """`1 step`, `2 steps`; `plural` where it is not the noun with an s."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def what_is_wrong(sentences: list[str]) -> str:
    """The one sentence, or how many there are and the list of them."""
    return sentences[0] if len(sentences) == 1 else f"{len(sentences)} things are wrong:\n{bulleted(sentences)}"


def bulleted(entries: Iterable[str]) -> str:
    """A line for each of `entries`; where one has several, they stand below its first."""
    return "\n".join("  - " + entry.replace("\n", "\n    ") for entry in entries)


EVERY_S = 30.0


class ProgressLines:
    """The first line comes at once. Output that nobody takes ends the lines, never the work."""

    def __init__(self) -> None:
        self._due = time.monotonic()

    def tell(self, text: Callable[[], str]) -> None:
        """Print `text()` after the time of day, unless a line was printed within the last `EVERY_S` seconds."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + EVERY_S
        try:
            print(f"[{time.strftime('%H:%M:%S')}] {text()}", file=sys.stderr, flush=True)
        except OSError:
            self._due = float("inf")
