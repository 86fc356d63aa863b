"""`composer ladder run CONFIG ... -o FOLDER`: plan, register, train and compare the arms of a ladder.

    configurations -> arms -> preregistration.json   refused where an earlier start said otherwise
                   -> plan: runs, hours, dollars -> asks
                   -> for each seed, each arm: trainer @ ...         finished: skipped; begun: --resume; else: new
                   -> the report of `composer ladder FOLDER`

Seeds are the outer loop, so that after each seed all arms can be compared. Each run is one `trainer` process, as a user
could have started it. Ctrl-C and SIGTERM are passed on to it. It then saves, and the same command continues later.
"""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from composer_prime.cli.ladder.arms import ArmCommand, parse, plan_arms, preregistration
from composer_prime.cli.ladder.compare import report_ladder
from composer_prime.cli.ladder.preregistration import FILE, STOPPING, Preregistration, read_preregistration, register
from composer_prime.cli.ladder.verdicts import decided, run_compute
from composer_prime.console import INTERRUPTED, clock, console_script, pluralize, tell_waits, what_is_wrong
from composer_prime.errors import ConfigError, LedgerError
from composer_prime.monitor.metrics_file import read_history
from composer_prime.plan.plan import build_plan
from composer_prime.plan.sources import held_out_tasks, load_sources
from composer_prime.run.check_run_dir import earlier_output
from composer_prime.run.process import child_options, exit_text
from composer_prime.run.run_dir import RunDir

_LAUNCHER_ENDS_S = 120.0
_LAUNCHER_POLL_S = 5.0


def main(words: list[str]) -> int:
    try:
        return _plan_and_run(words)
    except (KeyboardInterrupt, EOFError):
        print("\ninterrupted: repeat the command to continue", file=sys.stderr)
        return INTERRUPTED


def _plan_and_run(words: list[str]) -> int:
    """Plan, register, train and compare. Raises EOFError where the question is answered with Ctrl-D."""
    options, common = parse(words)
    commands = plan_arms(options, common)
    folder: Path = options.output
    planned = preregistration(options, [command.arm for command in commands])
    problems: list[str] = []
    if (registered := read_preregistration(folder)) is not None:
        planned = msgspec.structs.replace(planned, tasks=registered.tasks)
        register(folder, planned)
    else:
        with tell_waits("loading the task sets"):
            base = next(command.config for command in commands if command.arm.name == planned.baseline)
            loaded = load_sources(base, "orchestrator.check_sources")
        problems = loaded.problems
        num_tasks = held_out_tasks(base, loaded.tasks).get(planned.held_out, planned.tasks)
        planned = msgspec.structs.replace(planned, tasks=num_tasks)
        for warning in loaded.warnings:
            print(f"note: {warning}", file=sys.stderr)
    print("\n".join(plan_lines(folder, planned, commands)))
    problems += [problem for command in commands for problem in build_plan(command.config, starter=None).problems]
    if problems:
        raise ConfigError(f"the ladder cannot start: {what_is_wrong(list(dict.fromkeys(problems)))}")
    if not (options.yes or _confirmed()):
        return 0
    with _only_ladder_in(folder):
        print(f"{'wrote' if register(folder, planned) else 'matches'} {folder / FILE}", flush=True)
        status = run_all(folder, planned, commands)
    if status == 0 and (registered := read_preregistration(folder)) is not None:
        report_ladder(folder, registered)
    return status


def plan_lines(folder: Path, planned: Preregistration, commands: Sequence[ArmCommand]) -> list[str]:
    """Return the plan: runs, hours and dollars, primary outcome."""
    states = Counter(
        _state(_run_dir(folder, planned, command, seed), command.arm.steps)
        for command in commands
        for seed in planned.seeds
    )
    steps = planned.arm(planned.baseline).steps
    names = ", ".join(f"{command.arm.name}{'' if command.arm.steps else ' (not trained)'}" for command in commands)
    return [
        f"arms      {names}; baseline {planned.baseline}",
        f"runs      {pluralize(len(commands), 'arm')} x {pluralize(len(planned.seeds), 'seed')} = "
        f"{len(commands) * len(planned.seeds)}: "
        + ", ".join(f"{count} {state}" for state, count in sorted(states.items())),
        f"compute   equal optimizer steps ({steps}); trained tokens and seconds may differ and are reported",
        f"time      {forecast_text(folder, planned, commands)}",
        f"outcome   held-out {planned.held_out} after step {steps}: {planned.tasks} tasks, rewards from "
        f"{planned.reward_range[0]:g} to {planned.reward_range[1]:g}, smallest effect of interest "
        f"{planned.minimal_effect:g}, alpha {planned.alpha:g}, stop: {planned.stopping}",
    ]


def forecast_text(folder: Path, planned: Preregistration, commands: Sequence[ArmCommand]) -> str:
    """Return hours and dollars that are left, by finished runs of the ladder."""
    paces = _paces(folder, planned, commands)
    if not paces:
        return f"unknown until a run has finished; {_price_text(commands)}"
    left_s = usd = 0.0
    for command in commands:
        for seed in planned.seeds:
            run_dir = _run_dir(folder, planned, command, seed)
            if _state(run_dir, command.arm.steps) == "finished":
                continue
            done = (run_dir.complete_checkpoints() or [0])[-1]
            share = 1 - done / command.arm.steps if command.arm.steps else 1.0
            seconds = share * paces.get(command.arm.name, max(paces.values()))
            left_s, usd = left_s + seconds, usd + seconds / 3600 * command.config.run.usd_per_hour
    of_arms = ", ".join(f"{name} {clock(pace)}" for name, pace in paces.items())
    price = f"${usd:,.2f}" if usd else _price_text(commands)
    return f"about {clock(left_s)} left, {price} (a run so far: {of_arms})"


def _price_text(commands: Sequence[ArmCommand]) -> str:
    price = max(command.config.run.usd_per_hour for command in commands)
    return f"${price:g} an hour" if price else "set run.usd_per_hour for a cost in dollars"


def _paces(folder: Path, planned: Preregistration, commands: Sequence[ArmCommand]) -> dict[str, float]:
    """Return the mean seconds of a finished run, by arm."""
    paces = {}
    for command in commands:
        run_dirs = [_run_dir(folder, planned, command, seed) for seed in planned.seeds]
        if seconds := [wall_s for run_dir in run_dirs if (wall_s := _wall_s(run_dir, command.arm.steps))]:
            paces[command.arm.name] = sum(seconds) / len(seconds)
    return paces


def _wall_s(run_dir: RunDir, steps: int) -> float:
    """Return how long a finished run took; 0 for any other."""
    try:
        return run_compute(run_dir).wall_s if _state(run_dir, steps) == "finished" else 0.0
    except LedgerError:
        return 0.0


def _run_dir(folder: Path, planned: Preregistration, command: ArmCommand, seed: int) -> RunDir:
    return RunDir(folder / planned.run_name(command.arm.name, seed))


def _state(run_dir: RunDir, steps: int) -> str:
    """Return finished, to resume or new. Finished needs the launcher's word and the last evaluation."""
    if not earlier_output(run_dir):
        return "new"
    ends = [line.get("state") for line in read_history(run_dir.metrics) if line.get("event") == "ended"]
    finished = bool(ends) and ends[-1] == "finished" and run_dir.eval_rollouts(steps).is_file()
    return "finished" if finished else "to resume"


def run_all(folder: Path, planned: Preregistration, commands: Sequence[ArmCommand]) -> int:
    """Train what is not finished, seed by seed. Returns the exit status of the first run that did not finish, or 0."""
    for seed in planned.seeds:
        for command in commands:
            run_dir = _run_dir(folder, planned, command, seed)
            state = _state(run_dir, command.arm.steps)
            if state == "finished":
                print(f"{run_dir.root.name}: already finished", flush=True)
                continue
            words = command.run_words(seed, run_dir)
            print(f"\n{run_dir.root.name} ({state}): trainer {' '.join(words)}", flush=True)
            _await_launcher(run_dir)
            if status := train(words):
                print(
                    f"\n{run_dir.root.name} {exit_text(status)}, so the ladder stops here. Repeat the command to "
                    f"resume it; its logs are in {run_dir.root / 'logs'}",
                    file=sys.stderr,
                )
                return status if status > 0 else 128 - status
            print(f"time      {forecast_text(folder, planned, commands)}", flush=True)
        if planned.stopping == STOPPING[1] and decided(folder, planned) and seed != planned.seeds[-1]:
            print(f"\nevery arm is VALIDATED or REFUTED after seed {seed}: no further seeds, as registered")
            break
    return 0


def _await_launcher(run_dir: RunDir) -> None:
    """Wait for a launcher that still saves, because its ladder was killed. Raises ConfigError when it does not end."""
    lock = run_dir.root / ".launcher.lock"
    deadline = time.monotonic() + _LAUNCHER_ENDS_S
    while lock.is_file():
        with lock.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                holder = file.read().decode(errors="replace").strip()
        if time.monotonic() > deadline:
            raise ConfigError(
                f"process {holder} has trained in {run_dir.root} for {_LAUNCHER_ENDS_S:g} s: stop it first"
            )
        print(f"{run_dir.root.name}: waiting for process {holder}, which is still saving", flush=True)
        time.sleep(_LAUNCHER_POLL_S)


def train(words: Sequence[str]) -> int:
    """Run `trainer` with `words` to its end and return its status. Signals are passed on to it."""
    process = subprocess.Popen([*console_script("trainer"), *words], **child_options())

    def pass_on(number: int, _frame: Any) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _only_ladder_in(folder: Path) -> Iterator[None]:
    """Hold the lock of the folder. Raises ConfigError when another ladder has it, or nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".ladder.lock").open("a")
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}; name another folder with -o") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another `composer ladder run` is running in {folder}: wait for it, or stop it"
            ) from None
        yield


def _confirmed() -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("cannot ask for confirmation without a terminal: add --yes")
    return input("start? [y/N] ").strip().lower() in ("y", "yes")
