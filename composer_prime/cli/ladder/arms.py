"""The arms that the words of `composer ladder run` describe."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from composer_prime.cli.ladder.preregistration import PlannedArm, Preregistration
from composer_prime.config import Config
from composer_prime.config.load import resolve
from composer_prime.errors import ConfigError
from composer_prime.plan.check_run_dir import earlier_output
from composer_prime.run.run_dir import RunDir


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmCommand:
    """How the runs of an arm are started."""

    arm: PlannedArm
    config: Config
    words: list[str]
    """After `trainer`, without what differs between seeds."""

    def run_words(self, seed: int, run_dir: RunDir) -> list[str]:
        place = ["--run.name", run_dir.root.name, "--run.output_dir", str(run_dir.root.parent)]
        resume = ["--resume"] if earlier_output(run_dir) else []
        return [*self.words, *place, "--run.seed", str(seed), *resume]


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the words for every run: `@ FILE` layers and settings."""
    own: list[str] = []
    common: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        flag = word.startswith("--") and "." in word.partition("=")[0]
        if not (flag or word.startswith("@")):
            own.append(word)
            continue
        common.append(word)
        takes_value = word == "@" or (flag and "=" not in word)
        if takes_value and queue and not queue[0].startswith(("--", "@")):
            common.append(queue.pop(0))
    return parser().parse_intermixed_args(own), common


def parser() -> argparse.ArgumentParser:
    text = argparse.ArgumentParser(
        prog="composer ladder run",
        description="Train several configurations with several seeds, one run after another, and compare "
        "them. Repeat the command to continue.",
        epilog="`@ FILE` and `--section.key VALUE` apply to every run. `composer ladder FOLDER` repeats the "
        "report; its --help explains the verdicts.",
    )
    config_help = "files or folders of them; the first that trains is the baseline"
    text.add_argument("config", nargs="+", type=Path, help=config_help)
    text.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER", help="folder for the runs")
    text.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds 0..N-1 for each arm (default 3)")
    text.add_argument("--steps", type=int, help="optimizer steps of every arm (default: run.max_steps)")
    text.add_argument("--held-out", metavar="SOURCE", help="source of the primary outcome (default: the first)")
    text.add_argument("--effect", type=float, default=0.05, help="smallest effect of interest (default 0.05)")
    return text


def plan_arms(options: argparse.Namespace, common: Sequence[str]) -> list[ArmCommand]:
    """Return the arms. Raises ConfigError for arms that cannot be compared."""
    steps = [] if options.steps is None else ["--run.max_steps", str(options.steps)]
    commands: list[ArmCommand] = []
    for file in _files(options.config):
        words = ["@", str(file), *common]
        config = resolve(words)
        if config.run.max_steps and steps:
            words += steps
            config = resolve(words)
        commands.append(_command(config.run.name, config, words))
    _check_arms(commands)
    return commands


def _files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        files += sorted(path.glob("*.toml")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"{', '.join(map(str, paths))} holds no .toml file: name configuration files")
    return list(dict.fromkeys(files))


def _command(name: str, config: Config, words: list[str]) -> ArmCommand:
    tables = config.model_dump(mode="json")
    settings = {table: values for table, values in tables.items() if table not in ("run", "monitor")}
    return ArmCommand(
        arm=PlannedArm(name=name, settings=settings, steps=config.run.max_steps), config=config, words=words
    )


def _check_arms(commands: Sequence[ArmCommand]) -> None:
    """Raise ConfigError for arms that cannot be compared."""
    for name, count in Counter(command.arm.name for command in commands).items():
        if count > 1:
            raise ConfigError(f"{count} configurations have run.name {name!r}: it names the arm, give each its own")
    for one, other in combinations((command.arm for command in commands), 2):
        if (one.settings, one.steps) == (other.settings, other.steps):
            raise ConfigError(f"arms {one.name} and {other.name} have equal settings: leave one out")
    lengths = {command.arm.name: command.arm.steps for command in commands if command.arm.steps}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {steps}" for name, steps in lengths.items())
        raise ConfigError(f"arms need equal optimizer steps, but run.max_steps is {listed}: set --steps")
    for command in commands:
        _check_arm(command.arm, command.config)


def _check_arm(arm: PlannedArm, config: Config) -> None:
    every = config.orchestrator.eval.every_steps
    if not every or not arm.sources:
        raise ConfigError(
            f"arm {arm.name} is never evaluated on held-out tasks: set orchestrator.eval.every_steps (it is {every}) "
            f"and a source's eval_taskset (sources with one: {', '.join(arm.sources) or 'none'})"
        )
    if config.diloco is not None:
        raise ConfigError(f"arm {arm.name} has a [diloco] table: a ladder runs on one cluster, remove it")


def preregistration(options: argparse.Namespace, arms: list[PlannedArm]) -> Preregistration:
    """Return what the command line plans. Raises ConfigError."""
    trained = [arm for arm in arms if arm.steps]
    if not trained:
        raise ConfigError("no arm trains (run.max_steps is 0 everywhere): add one, or use `composer eval`")
    held_out = options.held_out or trained[0].sources[0]
    for arm in arms:
        if held_out not in arm.sources:
            raise ConfigError(
                f"held-out source {held_out!r} is not evaluated by arm {arm.name}, which has "
                f"{', '.join(arm.sources)}: name one that every arm has with --held-out"
            )
    if options.seeds < 1 or options.effect <= 0:
        raise ConfigError(f"--seeds is {options.seeds} and --effect {options.effect}; give numbers above 0")
    return Preregistration(
        arms=arms,
        baseline=trained[0].name,
        seeds=list(range(options.seeds)),
        held_out=held_out,
        minimal_effect=options.effect,
        written=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    )
