"""`composer ingest PATHS... -o states.jsonl`: agent sessions to states. The readers are the orchestrator's, so they run
in a process of their own: this package imports no role."""

from __future__ import annotations

import subprocess
import sys


def run(words: list[str]) -> int:
    return run_module("orchestrator.ingest", words)


def run_module(module: str, words: list[str]) -> int:
    """Exit status of `python -m module words...`; Ctrl-C reaches it by itself."""
    process = subprocess.Popen([sys.executable, "-m", module, *words])
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()
        return 130
