"""`composer ladder run CONFIG ... -o FOLDER`: plan, register, train and compare the arms of a ladder.

    configurations -> arms -> plan -> preregistration.json
                   -> for each seed, each arm: trainer @ ...    finished: skipped; begun: --resume
                   -> the report of `composer ladder FOLDER`

Seeds are the outer loop, so that after each seed all arms can be compared.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from composer_prime.cli.ladder.arms import ArmCommand, parse, plan_arms, preregistration
from composer_prime.cli.ladder.preregistration import FILE, Preregistration, register
from composer_prime.cli.ladder.verdicts import result_lines
from composer_prime.console import console_script, pluralize, what_is_wrong
from composer_prime.errors import ConfigError
from composer_prime.monitor.metrics_file import read_history
from composer_prime.plan.check_run_dir import earlier_output
from composer_prime.plan.plan import build_plan
from composer_prime.run.process import child_options, exit_text
from composer_prime.run.run_dir import RunDir


def main(words: list[str]) -> int:
    """Plan, register, train and compare."""
    options, common = parse(words)
    commands = plan_arms(options, common)
    folder: Path = options.output
    planned = preregistration(options, [command.arm for command in commands])
    print("\n".join(plan_lines(folder, planned, commands)))
    plans = [build_plan(command.config, starter=None) for command in commands]
    problems = [problem for plan in plans for problem in plan.problems]
    if problems:
        raise ConfigError(f"the ladder cannot start: {what_is_wrong(list(dict.fromkeys(problems)))}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        print(f"{'wrote' if register(folder, planned) else 'matches'} {folder / FILE}", flush=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}; name another with -o") from None
    status = run_all(folder, planned, commands)
    if status == 0:
        print("\n".join(["", *result_lines(folder, planned)]))
    return status


def plan_lines(folder: Path, planned: Preregistration, commands: Sequence[ArmCommand]) -> list[str]:
    """Return the plan: arms, runs, primary outcome."""
    runs = [(command, _run_dir(folder, planned, command, seed)) for command in commands for seed in planned.seeds]
    states = Counter(_state(run_dir, command.arm.steps) for command, run_dir in runs)
    steps = planned.arm(planned.baseline).steps
    names = ", ".join(f"{each.arm.name}{'' if each.arm.steps else ' (not trained)'}" for each in commands)
    return [
        f"arms      {names}; baseline {planned.baseline}",
        f"runs      {pluralize(len(commands), 'arm')} x {pluralize(len(planned.seeds), 'seed')} = {len(runs)}: "
        + ", ".join(f"{count} {state}" for state, count in sorted(states.items())),
        f"compute   equal optimizer steps ({steps}); tokens and seconds may differ and are reported",
        f"outcome   held-out {planned.held_out} after step {steps}; smallest effect {planned.minimal_effect:g}",
    ]


def _run_dir(folder: Path, planned: Preregistration, command: ArmCommand, seed: int) -> RunDir:
    return RunDir(folder / planned.run_name(command.arm.name, seed))


def _state(run_dir: RunDir, steps: int) -> str:
    """Return finished, to resume or new. Finished needs the last evaluation too."""
    if not earlier_output(run_dir):
        return "new"
    ends = [line.get("state") for line in read_history(run_dir.metrics) if line.get("event") == "ended"]
    finished = bool(ends) and ends[-1] == "finished" and run_dir.eval_rollouts(steps).is_file()
    return "finished" if finished else "to resume"


def run_all(folder: Path, planned: Preregistration, commands: Sequence[ArmCommand]) -> int:
    """Train what is not finished, seed by seed. Returns the first failed run's exit status, or 0."""
    for seed in planned.seeds:
        for command in commands:
            run_dir = _run_dir(folder, planned, command, seed)
            state = _state(run_dir, command.arm.steps)
            if state == "finished":
                print(f"{run_dir.root.name}: already finished", flush=True)
                continue
            words = command.run_words(seed, run_dir)
            print(f"\n{run_dir.root.name} ({state}): trainer {' '.join(words)}", flush=True)
            if status := train(words):
                print(
                    f"\n{run_dir.root.name} {exit_text(status)}, so the ladder stops here. Repeat the command "
                    f"to resume it; its logs are in {run_dir.root / 'logs'}",
                    file=sys.stderr,
                )
                return status if status > 0 else 128 - status
    return 0


def train(words: Sequence[str]) -> int:
    """Run `trainer` to its end and return its status. Signals are passed on to it."""
    process = subprocess.Popen([*console_script("trainer"), *words], **child_options())

    def pass_on(number: int, _frame: Any) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
