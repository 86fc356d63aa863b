"""Readers that leave early: `composer report RUN | head` must end without a traceback."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

READER_LEFT = 128 + signal.SIGPIPE
"""Exit status of a command whose output nobody read to the end, as a shell reports it of any other program."""


def until_the_reader_leaves(work: Callable[[], int]) -> int:
    """Exit status of `work()`, which prints; READER_LEFT where standard output was closed on it."""
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
