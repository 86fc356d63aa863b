"""`composer eval RUN`, `composer eval MODEL [MODEL ...] [@ file.toml | --env ENV]`: held-out scores with intervals.

One model after the other is evaluated by a run without steps: `trainer @ FILE --run.max_steps 0`.
"""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from composer_prime.cli.ladder.run import train
from composer_prime.config import Config
from composer_prime.config.load import dump, read_config, resolve
from composer_prime.config.orchestrator import OrchestratorConfig
from composer_prime.console import COMPOSER, pluralize, printable
from composer_prime.errors import ConfigError
from composer_prime.model_source import model_folder, resolve_model
from composer_prime.monitor.rollouts import Scores, failure_text, read_rollouts, scores, task_text
from composer_prime.run.process import exit_text
from composer_prime.run.run_dir import RunDir
from composer_prime.stats.intervals import PASSED, mean_interval, pass_at_k
from composer_prime.view.rollout_index import RolloutIndex
from composer_prime.view.rollout_payload import evaluation_difference
from composer_prime.view.run_payload import evaluation_points

USAGE = """\
usage: composer eval RUN                                    the final model against the initial one
       composer eval MODEL [MODEL ...] @ FILE.toml [--section.key VALUE ...]
       composer eval MODEL [MODEL ...] --env ENV            a verifiers task set: a module or its file

MODEL is a model folder, a run directory (its final/), a Hub id, tiny, or smollm2. All models get the same
tasks with the same seeds. Rollouts go to OUTPUT_DIR/evals/NAME-MODEL[-NUMBER]. `composer report RUN` has
what the run itself has evaluated.

options:
  -h, --help                            show this help message and exit
  --env ENV                             the task set, without a configuration
  --taskset.KEY, --eval_taskset.KEY     its settings
  --orchestrator.eval.tasks 256         tasks of each source
  --orchestrator.eval.samples 4         rollouts of a task
  --orchestrator.eval.pass_k 1 4        k of pass@k
  --section.key VALUE                   any other setting"""

_NAMED = 12
"""Flipped tasks that are named; `composer rollouts` has all."""


def main(words: list[str]) -> int:
    if not words or {"-h", "--help"} & set(words):
        print(USAGE)
        return 0
    models, rest = split_models(words)
    with tempfile.TemporaryDirectory(prefix="composer-eval-") as folder:
        rest = _with_environment(rest, models, Path(folder))
        if not any(word.startswith("@") for word in rest):
            run_dir = run_of_models(models)
            models = [read_config(run_dir.config).model.path, *models] if len(models) == 1 else models
            rest = [*words_of_run(run_dir, rest), *rest]
        config = evaluation_config(rest)
        for model in models:  # check all of them before the first one takes minutes
            resolve_model(model_folder(model))
        evaluations = evaluate_here(models, config, Path(folder))
    print(printable("\n".join(["", *report(evaluations, config)])))
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One model's held-out scores, and the folder with its rollouts."""

    scores: Scores
    folder: Path


def report(evaluations: dict[str, Evaluation], config: Config) -> list[str]:
    """Return the table, pass@k, flipped tasks, and the commands that show rollouts."""
    played = [row for each in evaluations.values() for row in RolloutIndex(RunDir(each.folder)).entries("eval")]
    asked = {f"{row['source']}/{row['task_id']}": task_text(row) for row in played}
    lines = eval_table({model: each.scores for model, each in evaluations.items()}, asked)
    lines += _pass_lines(evaluations, config.orchestrator.eval.pass_k)
    lines += ["", "look at the rollouts of a task:"]
    for model, each in evaluations.items():
        lines.append(f"  {COMPOSER} rollouts {shlex.quote(str(each.folder))} --eval --task TASK    ({model})")
    return lines


def _pass_lines(evaluations: dict[str, Evaluation], ks: list[int]) -> list[str]:
    """Return pass@k with its interval over tasks, for each k that a model's samples allow."""
    lines = []
    for model, each in evaluations.items():
        for k in ks:
            chances = {
                task: [pass_at_k(len(rewards), sum(reward >= PASSED for reward in rewards), k)]
                for task, rewards in each.scores.items()
                if len(rewards) >= k
            }
            if chances:
                lines.append(f"{model}: pass@{k} {mean_interval(chances).text()}")
    return lines


def _with_environment(words: list[str], models: list[str], folder: Path) -> list[str]:
    if "--env" not in words:
        return words
    from composer_prime.cli.environments.try_command import full_names, module_configuration

    index = words.index("--env")
    if index + 1 >= len(words):
        raise ConfigError(f"--env needs an environment\n{USAGE}")
    file = module_configuration(words[index + 1], model_folder(models[0]), folder, held_out=True)
    return ["@", str(file), *full_names(words[:index] + words[index + 2 :])]


def run_of_models(models: list[str]) -> RunDir:
    """Return the first run directory among `models`. Raises ConfigError."""
    for model in models:
        if (Path(model) / "run_id").is_file() and (Path(model) / "config.json").is_file():
            return RunDir(Path(model))
    raise ConfigError(f"no model of {', '.join(models)} is a run directory: give a configuration\n{USAGE}")


def words_of_run(run_dir: RunDir, given: list[str]) -> list[str]:
    """Return the words for a run's configuration, without what made it replace or join others."""
    own = {"--run.overwrite": "false", "--diloco": "None"}
    words = [word for flag, value in own.items() if flag not in given for word in (flag, value)]
    return ["@", str(run_dir.config), *words]


def split_models(words: list[str]) -> tuple[list[str], list[str]]:
    """Return (models, the configuration's words). Raises ConfigError."""
    start = next((index for index, word in enumerate(words) if word.startswith(("@", "--"))), len(words))
    models, rest = words[:start], words[start:]
    if gone := {"--dry-run", "--resume"}.intersection(rest):
        raise ConfigError(f"composer eval has no {', '.join(sorted(gone))}: leave it out")
    if not models:
        raise ConfigError(f"give one or more models, then a configuration\n{USAGE}")
    repeated = sorted({model for model in models if models.count(model) > 1})
    if repeated:
        raise ConfigError(f"model {repeated[0]!r} is named twice")
    return models, rest


def evaluation_config(words: list[str]) -> Config:
    """Return the configuration of an evaluation-only run. Raises ConfigError."""
    has_interval = any(word.startswith("--orchestrator.eval.every") for word in words)
    once = [] if has_interval else ["--orchestrator.eval.every_steps", "1"]
    config = resolve([*words, "--run.max_steps", "0", *once])
    if not any(source.eval_taskset for source in config.orchestrator.source):
        names = ", ".join(repr(source.name) for source in config.orchestrator.source)
        raise ConfigError(
            f"no source of this configuration ({names}) has held-out tasks: "
            'add for example eval_taskset = { split = "eval" } to its [[orchestrator.source]]'
        )
    return config


def evaluate_here(models: list[str], config: Config, folder: Path) -> dict[str, Evaluation]:
    """Return the evaluations of `models`, each a run without steps. `folder` takes what they are started from.

    Raises ConfigError for one that fails.
    """
    file = folder / "evaluation.json"
    file.write_text(dump(_alone(config)))
    evaluations = {}
    for model in models:
        run_dir = _evaluation_folder(model, config)
        print(f"\nevaluating {model} ({run_dir.root})", flush=True)
        words = ["@", str(file), "--model.path", model_folder(model), "--run.name", run_dir.root.name]
        if status := train([*words, "--run.output_dir", str(run_dir.root.parent)]):
            raise ConfigError(f"the evaluation of {model} {exit_text(status)}; see above, and {run_dir.root / 'logs'}")
        scored = _scores_with_notice(run_dir.eval_rollouts(0))
        evaluations[model] = Evaluation(scores=scored, folder=run_dir.root)
    return evaluations


def _alone(config: Config) -> Config:
    """Return `config` without what only training needs, on this machine."""
    nothing = OrchestratorConfig(groups_per_step=0)
    dropped = {name: getattr(nothing, name) for name in ("hints", "preferences", "demonstrations", "address", "audit")}
    run = config.run.model_copy(update={"resume": False, "overwrite": False})
    inference = config.inference.model_copy(update={"nodes": max(1, config.inference.nodes)})
    orchestrator = config.orchestrator.model_copy(update=dropped)
    parts = {"run": run, "inference": inference, "orchestrator": orchestrator}
    return Config(model=config.model, trainer=config.trainer, **parts)


def _evaluation_folder(model: str, config: Config) -> RunDir:
    """Return a numbered folder for an evaluation, which is not there yet."""
    evals, name = config.run.output_dir / "evals", f"{config.run.name}-{_as_name(model)}"
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return RunDir(evals / next(each for each in names if not (evals / each).exists()))


def _scores_with_notice(path: Path) -> Scores:
    """Return the scores by task, and print how many rollouts failed."""
    failures = [text for rollout in read_rollouts(path) if (text := failure_text(rollout))]
    if failures:
        failed = pluralize(len(failures), "rollout")
        print(f"{failed} failed and left out, the first: {printable(failures[0])}", flush=True)
    return scores(path)


def eval_table(scores_by_model: dict[str, Scores], asked: Mapping[str, str] | None = None) -> list[str]:
    """Return means with intervals by source, and paired changes from the first model; of two models also flips.

    `asked`: by task, what to say of it besides its id.
    """
    models, by_number = list(scores_by_model), dict(enumerate(scores_by_model.values()))
    width = max(map(len, models))
    head = f"{'model':<{width}}  {'source':<14} {'mean reward [95 %]':<24}"
    lines = [f"{head} tasks  paired change from {models[0]}"]
    for point in sorted(evaluation_points(by_number), key=lambda each: each.source):
        change = f"  {point.change.text(sign=True)}" if point.change else ""
        name = f"{models[point.step]:<{width}}  {point.source:<14}"
        cells = f"{name} {point.level.text():<24} {point.level.count:>5}"
        lines.append(f"{cells}{change}")
    if len(models) == 2 and all(by_number.values()):
        flips = evaluation_difference(by_number, 0, 1)
        lines += _flipped(flips["fixed"], models[1], models[0], asked or {})
        lines += _flipped(flips["broken"], models[0], models[1], asked or {})
    return lines


def _flipped(rows: list[dict[str, Any]], winner: str, loser: str, asked: Mapping[str, str]) -> Iterator[str]:
    """Yield which tasks only one of two models solved."""
    yield f"  {pluralize(len(rows), 'task')} solved by {winner}, not by {loser}"
    for row in rows[:_NAMED]:
        yield f"    {row['task'].partition('/')[2]}  {asked.get(row['task'], '')}".rstrip()
    if len(rows) > _NAMED:
        yield f"    and {len(rows) - _NAMED} more"


def _as_name(model: str) -> str:
    parts = [part for part in Path(model).parts if part not in ("/", "..", "outputs")]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts[-3:])).strip("-") or "model"
