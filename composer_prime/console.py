"""Shared behavior of the console scripts. Standard library only, so that `composer --help` answers at once."""

from __future__ import annotations

import argparse
import copy
import difflib
import logging
import os
import re
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn, TextIO

_OPEN_FILES = 16384

EXIT_USAGE = 2
"""Of every wrong command line or configuration."""

INTERRUPTED = 128 + signal.SIGINT
"""After Ctrl-C."""

READER_LEFT = 128 + signal.SIGPIPE
"""Of a command whose output was not read to the end, as shells report it."""

CHECKOUT = (Path(__file__).parents[1] / "pyproject.toml").is_file()
"""Whether this is no installed wheel."""

UV_RUN = "uv run " if CHECKOUT else ""
"""Begins printed commands: in a checkout a script may not be on PATH."""

COMPOSER = f"{UV_RUN}composer"

GIB = 1 << 30

PARENT_POLL = "parent-poll"
"""Name of a thread that ends with its process (run/process.py)."""

MAX_WARNINGS, MAX_NOTES = 60, 600
"""Records a minute of one line of code: warnings and errors, and others."""

PROGRESS_INTERVAL_S = 30.0
"""Shortest time between two ProgressLines."""


def install_command(extra: str) -> str:
    return f"`uv sync --extra {extra}`" if CHECKOUT else f"`uv pip install 'composer-prime[{extra}]'`"


def program() -> str:
    """Return the command that the user typed: `trainer`, `composer report`."""
    name = os.path.basename(sys.argv[0] or "trainer").removesuffix(".py")
    if name == "composer" and sys.argv[1:] and re.fullmatch("[a-z]+", sys.argv[1]):
        return f"composer {sys.argv[1]}"
    return name if name != "__main__" else "trainer"


def duration_s(text: str) -> float:
    """Return a duration such as 90s, 45m, 24h or 7d in seconds."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number and a unit, such as 45m, 24h or 7d")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def exit_on_version_flag(words: list[str]) -> None:
    """Print the version and exit with status 0 when `--version` is the first word."""
    if words[:1] == ["--version"]:
        from importlib.metadata import version

        print(f"composer-prime {version('composer-prime')}")
        raise SystemExit(0)


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Return `; did you mean KNOWN?` with what comes closest to `word`, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def fail(error: Exception, *, command: str | None = None) -> NoReturn:
    """Print the message of a wrong input to stderr and exit with status 2. `command`: what the user typed."""
    print(f"{command or program()}: {printable(str(error))}", file=sys.stderr)
    raise SystemExit(EXIT_USAGE)


def console_script(name: str) -> list[str]:
    """Return the words that start console script `name` of this installation."""
    script = Path(sys.executable).parent / name
    if script.is_file():
        return [str(script)]
    return [sys.executable, "-c", f"import sys; from {name}.main import main; sys.exit(main())"]


def _until_the_reader_leaves(work: Callable[[], int]) -> int:
    try:
        try:
            return work()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        silence()
        return READER_LEFT


def console_main(work: Callable[[], int], *, loads_engines: bool = False) -> int:
    """Return the exit status of a console script's `work()`; every script is called through this.

    READER_LEFT when stdout was closed (`composer report RUN | head`). INTERRUPTED after Ctrl-C. With `loads_engines`
    the process ends at once where a daemon thread still loads a model: the interpreter may crash under it. The process
    and what it starts may have _OPEN_FILES open, or as many as the system lets them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _OPEN_FILES:  # -1: no limit
        wanted = _OPEN_FILES if hard < 0 else min(hard, _OPEN_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    try:
        status = _until_the_reader_leaves(work)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        status = INTERRUPTED
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise
        status = end.code
    if loads_engines and any(thread.daemon and thread.name != PARENT_POLL for thread in threading.enumerate()):
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
    return status


def silence() -> None:
    """Redirect stdout to nowhere, and stderr where it is the same pipe, so that no flush raises."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    closed = [sys.stdout.fileno()]
    if os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno()):
        closed.append(sys.stderr.fileno())
    for descriptor in closed:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


class LogHandler(logging.StreamHandler):
    """Writes records so that nothing from outside can begin a line, or fill the disk."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._written: dict[tuple[str, int], tuple[int, int]] = {}
        """By line of code: the last minute in which it logged, and its records."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record)).replace("\n", "\n    ")

    def emit(self, record: logging.LogRecord) -> None:
        place, minute = (record.pathname, record.lineno), int(record.created // 60)
        since, count = self._written.get(place, (minute, 0))
        self._written[place] = minute, count + 1 if since == minute else 1
        left = (MAX_WARNINGS if record.levelno >= logging.WARNING else MAX_NOTES) - self._written[place][1]
        if left == 0:
            record = copy.copy(record)
            record.msg = f"{record.msg} (more of this minute are left out)"
        if left >= 0:
            super().emit(record)


def start_log(level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Log to `stream`, by default stderr."""
    logging.basicConfig(level=level, handlers=[LogHandler(stream)])


class ProgressLines:
    """Progress without a bar, as in a pipe: a line now and then on stderr."""

    def __init__(self) -> None:
        self._next_at = time.monotonic()

    def tell(self, text: Callable[[], str]) -> None:
        """Print `text()`, unless a line was printed just now. Closed output ends the lines, never the work."""
        now = time.monotonic()
        if now < self._next_at:
            return
        self._next_at = now + PROGRESS_INTERVAL_S
        try:
            print(f"[{time.strftime('%H:%M:%S')}] {text()}", file=sys.stderr, flush=True)
        except OSError:
            self._next_at = float("inf")


@contextmanager
def tell_waits(what: str) -> Iterator[None]:
    """Print `what` to stderr when the block takes longer than 5 s."""
    timer = threading.Timer(5.0, print, [f"{what} ..."], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def columns() -> int | None:
    """Return the width of the terminal or COLUMNS, if there is one."""
    return shutil.get_terminal_size((0, 0)).columns or None


def fitted(line: str, indent: int, width: int | None) -> str:
    """Return the line in `width` characters, if given, with whole words; what goes on below is indented.

    The row of a table, by its gaps, stays as it is.
    """
    import textwrap

    if line.strip().count("  ") > 3:
        return line
    wrap = textwrap.TextWrapper(width or 0, subsequent_indent=" " * indent, break_long_words=False)
    wrap.break_on_hyphens = False
    return wrap.fill(line) if width else line


def gib(count: int) -> str:
    """Return bytes in GiB, whatever their size."""
    size = count / GIB
    digits = 2 if size < 10 else 1 if size < 100 else 0
    return "<0.01 GiB" if 0 < size < 0.005 else f"{size:,.{digits}f} GiB"


def clock(seconds: float) -> str:
    """Return `2m 05s` or `1h 02m`."""
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {rest:02d}s"


def pluralize(count: int, noun: str, plural: str | None = None) -> str:
    """Return `1 step` or `2 steps`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


_CONTROLS = (
    {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
    | {127: "\u2421"}
    | dict.fromkeys(range(128, 160), "\ufffd")
)


def printable(text: str) -> str:
    """Return text of a model or an environment without the control characters that could steer a terminal."""
    return text.translate(_CONTROLS)


def what_is_wrong(sentences: list[str]) -> str:
    """Return the one sentence, or the list of them."""
    if len(sentences) == 1:
        return sentences[0]
    return f"{len(sentences)} things are wrong:\n{bulleted(sentences)}"


def bulleted(entries: Iterable[str]) -> str:
    """Return a bullet for each entry."""
    return "\n".join("  - " + entry.replace("\n", "\n    ") for entry in entries)
