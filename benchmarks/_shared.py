"""What several benchmarks do alike: answer their aims at the end, start other processes, measure their own memory."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def conclude(answers: Iterable[tuple[str, bool]], *, is_quick: bool) -> int:
    """Print each aim beside what was measured. Return the exit status: 1 when one is missed, 0 of a quick run."""
    missed = 0
    for text, is_met in answers:
        missed += not is_met
        print(f"{'met   ' if is_met else 'MISSED'} {text}", flush=True)
    if is_quick:
        print("a quick run shows that the benchmark works; its figures mean nothing")
    return int(missed > 0 and not is_quick)


@contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen]:
    """Run a process until the block ends; `options` are those of Popen."""
    process = subprocess.Popen(command, **options)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Return the most resident memory since `reset_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
