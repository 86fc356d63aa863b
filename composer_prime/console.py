"""What console scripts do alike: how they name and start one another, how they end on wrong input or unread output.

Imports nothing but the standard library, so that `composer --help` answers at once.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
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


def run_module(module: str, words: list[str]) -> int:
    """Exit status of `python -m module words...`, as a shell gives it. Ctrl-C reaches it by itself, SIGTERM is passed
    on; how it then ends is its matter."""
    process = subprocess.Popen([sys.executable, "-m", module, *words])
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        while True:
            try:
                status = process.wait()
                return status if status >= 0 else 128 - status
            except KeyboardInterrupt:
                continue
    finally:
        signal.signal(signal.SIGTERM, before)


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
