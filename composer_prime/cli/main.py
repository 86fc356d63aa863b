"""The console script `composer`. A command's module is imported only when it is called, so --help is quick."""

from __future__ import annotations

import importlib
import sys

from composer_prime.console import console_main, did_you_mean, exit_on_version_flag, fail
from composer_prime.errors import ComposerError

COMMANDS = {
    "plan": ("composer_prime.cli.plan_command", "check a configuration and print its plan (@ file.toml ...)"),
    "try": ("composer_prime.cli.environments.try_command", "play a few episodes of an environment (ENV)"),
    "new": ("composer_prime.cli.environments.new_command", "write an environment, a hint or a reward (KIND NAME)"),
    "chat": ("composer_prime.cli.chat_command", "talk to a trained model in the terminal (RUN|MODEL)"),
    "serve": ("composer_prime.cli.serve_command", "serve a model to clients of OpenAI's API (RUN|MODEL)"),
    "eval": ("composer_prime.cli.eval_command", "score a model, or compare two, on held-out tasks (MODEL RUN)"),
    "report": ("composer_prime.cli.report_command", "report on runs: rewards, time, events, evaluations"),
    "ladder": ("composer_prime.cli.ladder_command", "train and compare arms with several seeds (run CONFIGS -o)"),
    "view": ("composer_prime.cli.view_command", "open a web page with all runs, live and finished (outputs/)"),
    "rollouts": ("composer_prime.cli.rollouts_command", "list, filter and show rollouts"),
    "ingest": ("composer_prime.traces.ingest.ingest", "read agent sessions (PATHS... -o states.zst)"),
    "replay": ("composer_prime.traces.replay.replay", "let teachers vote on states, and write preference pairs"),
    "hints probe": ("composer_prime.cli.hints_command", "measure what hints will teach, before training (RUN|MODEL)"),
    "tasks": ("orchestrator.coding.tasks_command", "make and import coding tasks"),
    "doctor": ("composer_prime.cli.doctor_command", "check this machine: packages, GPUs, memory, disk, sandboxes"),
}
"""Each command's module, with main(words), and its line in the help."""


def main() -> int:
    return console_main(_main, loads_engines=True)


def composer_usage() -> str:
    lines = ["usage: composer COMMAND [arguments]   (composer COMMAND --help for details)", ""]
    return "\n".join(lines + [f"  {name:<13} {text}" for name, (_, text) in COMMANDS.items()])


def _main() -> int:
    words = sys.argv[1:]
    exit_on_version_flag(words)
    if not words or words[0] in ("-h", "--help", "help"):
        print(composer_usage())
        return 0
    length = 2 if " ".join(words[:2]) in COMMANDS else 1
    name, arguments = " ".join(words[:length]), words[length:]
    if name not in COMMANDS:
        fail(ComposerError(f"unknown command {name!r}{did_you_mean(name, COMMANDS)}\n\n{composer_usage()}"))
    try:
        return importlib.import_module(COMMANDS[name][0]).main(arguments)
    except ComposerError as error:
        fail(error)


if __name__ == "__main__":
    raise SystemExit(main())
