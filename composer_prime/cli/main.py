"""The console script `composer`: everything one does around a run.

A command's module loads only when the command is called, so `composer --help` answers at once.
"""

from __future__ import annotations

import importlib
import sys

from composer_prime.console import fail, until_the_reader_leaves
from composer_prime.errors import ComposerError

COMMANDS = {
    "plan": "check a configuration and say what a run of it would be (@ file.toml ...)",
    "eval": "score one model, or compare two, on a configuration's held-out tasks",
    "report": "reward curve, evaluations, time, hints, pairs, rounds of a joint run, of one or several runs",
    "ladder": "several arms and seeds side by side at equal steps, with intervals over seeds",
    "rollouts": "look at rollouts: list, filter, show one",
    "ingest": "read real agent sessions into states.jsonl (PATHS... -o states.jsonl)",
    "replay": "ask teachers what they would have done, and write preference pairs",
    "pairs": "measure preference pairs: density, agreement, margins, cost (report PAIRS.jsonl)",
    "doctor": "check this machine: Python, torch, GPUs, engines, memory, ports, disk",
}

MODULES = {"ingest": "composer_prime.traces.ingest.command", "replay": "composer_prime.traces.replay.command"}
"""Commands that live beside what they run; the others are modules of this package."""


def main() -> int:
    return until_the_reader_leaves(_main)


def _main() -> int:
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help", "help"):
        print(composer_usage())
        return 0
    if words[0] not in COMMANDS:
        fail(ComposerError(f"unknown command {words[0]!r}{_close(words[0])}\n\n{composer_usage()}"))
    module = importlib.import_module(MODULES.get(words[0], f"composer_prime.cli.{words[0]}_command"))
    try:
        return module.main(words[1:])
    except ComposerError as error:
        fail(error)


def composer_usage() -> str:
    lines = ["usage: composer COMMAND [arguments]   (composer COMMAND --help says more)", ""]
    return "\n".join(lines + [f"  {name:<10} {text}" for name, text in COMMANDS.items()])


def _close(word: str) -> str:
    import difflib

    near = difflib.get_close_matches(word, COMMANDS, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


if __name__ == "__main__":
    raise SystemExit(main())
