"""`composer eval RUN`, `composer eval MODEL [MODEL ...] [@ file.toml | --env ENV]`: held-out scores with intervals.

This process serves one model after the other with one node. For several nodes, run
`trainer @ FILE --run.max_steps 0`. All models get the same tasks with the same seeds, so two of them are compared task
by task. Without a file the configuration of the run directory counts. What that run has evaluated itself, before its
first step and after its last, is read instead of evaluated again.
"""

from __future__ import annotations

import asyncio
import logging
import re
import tempfile
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import fmean

from composer_prime.config import Config
from composer_prime.config.load import dump, read_config, resolve
from composer_prime.console import COMPOSER, ProgressLines, pluralize, printable
from composer_prime.errors import ConfigError
from composer_prime.model_source import model_folder, resolve_model
from composer_prime.monitor.rollouts import Scores, failure_text, read_rollouts, scores
from composer_prime.run.run_dir import RunDir, write_atomic
from composer_prime.stats.intervals import difference_interval, mean_interval, pass_at_k

USAGE = """\
usage: composer eval RUN                                    the run's final model against its initial model
       composer eval MODEL [MODEL ...] @ FILE.toml [--section.key VALUE ...]
       composer eval MODEL [MODEL ...] --env ENV            any verifiers task set: a module, or a module's file

MODEL is a model folder, a run directory (its final/ is used), a Hugging Face Hub id, tiny, or smollm2. All models
get the same tasks with the same seeds. Rollouts go to OUTPUT_DIR/evals/NAME-MODEL[-NUMBER]. A run's own evaluations are
reused unless a flag changes the evaluation, so `composer eval outputs/a1` may have nothing to run.
Useful flags: --orchestrator.eval.tasks 256 --orchestrator.eval.samples 4 --orchestrator.eval.pass_k 1 4;
with --env also --taskset.KEY VALUE and --eval_taskset.KEY VALUE."""


_NAMED = 12
"""Flipped tasks that are named; `composer rollouts` has all."""


def main(words: list[str]) -> int:
    if not words or {"-h", "--help"} & set(words):
        print(USAGE)
        return 0
    models, rest = split_models(words)
    with tempfile.TemporaryDirectory(prefix="composer-eval-") as folder:
        rest = _with_environment(rest, models, Path(folder))
        run_dir = None
        if not any(word.startswith("@") for word in rest):
            run_dir = run_of_models(models)
            if len(models) == 1:
                models = [read_config(run_dir.config).model.path, *models]
            rest = [*_words_of_run(run_dir, rest), *rest]
        config = evaluation_config(rest)
        for model in models:  # check all of them before the first one takes minutes
            resolve_model(model_folder(model))
        may_read = run_dir is not None and rest == _words_of_run(run_dir, [])
        scored: dict[str, Evaluation] = {}
        missing = []
        for model in models:
            recorded = recorded_scores(model, run_dir) if run_dir is not None and may_read else None
            if recorded is None:
                missing.append(model)
            elif run_dir is not None:
                step = 0 if model == models[0] and len(models) > 1 else read_config(run_dir.config).run.max_steps
                scored[model] = Evaluation(scores=recorded, folder=run_dir.root, step=step)
        if missing and config.inference.nodes > 1:
            print(f"note: inference.nodes is {config.inference.nodes}; an evaluation uses one node", flush=True)
        if missing:
            scored |= evaluate_here(missing, config)
    print(printable("\n".join(["", *report({model: scored[model] for model in models}, config)])))
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The held-out scores of one model, and where its rollouts are."""

    scores: Scores
    folder: Path
    """A run directory, or that of the evaluation."""
    step: int = 0


def report(evaluations: dict[str, Evaluation], config: Config) -> list[str]:
    """Return the table, pass@k, flipped tasks, and the commands that show rollouts."""
    settings = config.orchestrator.eval
    lines = eval_table({model: each.scores for model, each in evaluations.items()}, settings.pass_threshold)
    lines += _pass_lines(evaluations, settings.pass_k, settings.pass_threshold)
    lines += ["", "look at the rollouts of a task:"]
    for model, each in evaluations.items():
        lines.append(f"  {COMPOSER} rollouts {each.folder} --eval --step {each.step} --task TASK    ({model})")
    return lines


def _pass_lines(evaluations: dict[str, Evaluation], ks: list[int], threshold: float) -> list[str]:
    """Return pass@k of each model with its interval over tasks, for each k that its samples allow."""
    lines = []
    for model, each in evaluations.items():
        for k in ks:
            chances = {
                task: [pass_at_k(len(rewards), sum(reward >= threshold for reward in rewards), k)]
                for task, rewards in each.scores.items()
                if len(rewards) >= k
            }
            if chances:
                lines.append(f"{model}: pass@{k} {mean_interval(chances).text()}")
    return lines


def _with_environment(words: list[str], models: list[str], folder: Path) -> list[str]:
    """Return `words` with `--env ENV` replaced by a configuration file in `folder`."""
    if "--env" not in words:
        return words
    from composer_prime.cli.environments.try_command import full_names, module_configuration

    index = words.index("--env")
    if index + 1 >= len(words):
        raise ConfigError(f"--env needs an environment\n{USAGE}")
    file = module_configuration(words[index + 1], model_folder(models[0]), folder, held_out=True)
    return ["@", str(file), *full_names(words[:index] + words[index + 2 :])]


def run_of_models(models: list[str]) -> RunDir:
    """Return the first run directory among `models`. Raises ConfigError when there is none."""
    for model in models:
        if (Path(model) / "run_id").is_file() and (Path(model) / "config.json").is_file():
            return RunDir(Path(model))
    raise ConfigError(f"no model of {', '.join(models)} is a run directory, so a configuration is needed\n{USAGE}")


def _words_of_run(run_dir: RunDir, given: list[str]) -> list[str]:
    """Return the words for the configuration of a run, without what made it continue, replace or join others."""
    own = {"--run.overwrite": "false", "--diloco": "None"}
    words = [word for flag, value in own.items() if flag not in given for word in (flag, value)]
    return ["@", str(run_dir.config), *words]


def recorded_scores(model: str, run_dir: RunDir) -> Scores | None:
    """Return what the run's own evaluation gave the model it began with, or its final one; None for any other.

    The final model of a joint run comes out of its last round, which ends after the last evaluation.
    """
    trained = read_config(run_dir.config)
    if model == trained.model.path:
        step = 0
    elif trained.diloco is None and Path(model).resolve() == run_dir.root.resolve():
        step = trained.run.max_steps
    else:
        return None
    path = run_dir.eval_rollouts(step)
    if not path.is_file():
        return None
    print(f"{model}: the evaluation after step {step} of {run_dir.root}", flush=True)
    return _scores_with_notice(path)


def split_models(words: list[str]) -> tuple[list[str], list[str]]:
    """Return (models, the configuration's words). Raises ConfigError when either is missing."""
    start = next((index for index, word in enumerate(words) if word.startswith(("@", "--"))), len(words))
    models, rest = words[:start], words[start:]
    if gone := {"--dry-run", "--resume"}.intersection(rest):
        raise ConfigError(f"composer eval has no {', '.join(sorted(gone))}: leave it out; an evaluation begins anew")
    if not models:
        raise ConfigError(f"give one or more models, then a configuration\n{USAGE}")
    repeated = sorted({model for model in models if models.count(model) > 1})
    if repeated:
        raise ConfigError(f"model {repeated[0]!r} is named twice")
    return models, rest


def evaluation_config(words: list[str]) -> Config:
    """Return the configuration of an evaluation-only run. Raises ConfigError when no source has held-out tasks."""
    config = resolve([*words, *_evaluation_only(words)]).config
    if not any(source.eval_taskset for source in config.orchestrator.source):
        names = ", ".join(repr(source.name) for source in config.orchestrator.source)
        raise ConfigError(
            f"no source of this configuration ({names}) has an eval_taskset, so there are no held-out tasks: "
            'add for example eval_taskset = { split = "eval" } to its [[orchestrator.source]]'
        )
    return config


def evaluate_here(models: list[str], config: Config) -> dict[str, Evaluation]:
    """Return the evaluations of `models`, played by this process one after the other with the same workers."""
    from composer_prime.cli.served_model import held_out_workers, serve
    from composer_prime.run.scratch import Scratch
    from orchestrator.held_out import evaluate as play

    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")

    async def one(model: str, scratch: Path) -> Evaluation:
        served = config.model_copy(update={"model": config.model.model_copy(update={"path": model_folder(model)})})
        run_dir = _evaluation_folder(model, served)
        print(f"evaluating {model} ({run_dir.root})", flush=True)
        lines = ProgressLines()
        folder = scratch / _as_name(model)
        async with (
            serve(served, folder) as (gateway, chat),
            held_out_workers(served, chat, folder / "logs") as pools,
        ):
            await play(
                config.orchestrator, pools, gateway, run_dir, seed=config.run.seed,
                on_progress=lambda done, count: lines.tell(lambda: f"{model}: {done} of {count} rollouts"),
            )  # fmt: skip
        return Evaluation(scores=_scores_with_notice(run_dir.eval_rollouts(0)), folder=run_dir.root)

    async def all_of_them(scratch: Path) -> dict[str, Evaluation]:
        return {model: await one(model, scratch) for model in models}

    scratch = Scratch("eval")
    try:
        return asyncio.run(all_of_them(scratch.path))
    finally:
        scratch.close()


def _evaluation_folder(model: str, config: Config) -> RunDir:
    """Return a new folder for an evaluation, with its config.json, whose model.path is the evaluated model.

    It has the first number that no earlier evaluation has: `a0-tiny-2`.
    """
    evals, name = config.run.output_dir / "evals", f"{config.run.name}-{_as_name(model)}"
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    run_dir = RunDir(evals / next(each for each in names if not (evals / each).exists()))
    write_atomic(run_dir.config, dump(config).encode())
    return run_dir


def _scores_with_notice(path: Path) -> Scores:
    """Return the scores by task, and print how many rollouts failed and have none."""
    failures = [text for rollout in read_rollouts(path) if (text := failure_text(rollout))]
    if failures:
        failed = pluralize(len(failures), "rollout")
        print(f"{failed} failed and left out, the first with: {printable(failures[0])}", flush=True)
    return scores(path)


def eval_table(scores_by_model: dict[str, Scores], threshold: float = 1.0) -> list[str]:
    """Return means with intervals by source; of two models also the paired difference and the tasks that flipped.

    A task is solved when its mean reward is at least `threshold`.
    """
    width = max(map(len, scores_by_model))
    sources = sorted({task.partition("/")[0] for scored in scores_by_model.values() for task in scored})
    lines = [f"{'model':<{width}}  {'source':<14} mean reward [95 %]       tasks"]
    for source in sources:
        for model, scored in scores_by_model.items():
            part = _of_source(scored, source)
            text = mean_interval(part).text() if part else "no scored rollout"
            lines.append(f"{model:<{width}}  {source:<14} {text:<24} {len(part)}")
        if len(scores_by_model) == 2:
            (first, before), (second, after) = scores_by_model.items()
            change = difference_interval(_of_source(before, source), _of_source(after, source))
            count = pluralize(change.count, "task")
            lines.append(f"{source}: {second} - {first} = {change.text(sign=True)}, paired over {count}")
            lines += _flips(first, _of_source(before, source), second, _of_source(after, source), threshold)
    return lines


def _flips(first: str, before: Scores, second: str, after: Scores, threshold: float) -> list[str]:
    """Return which tasks only one of two models solved."""
    lines = []
    for winner, won, loser, lost in ((second, after, first, before), (first, before, second, after)):
        names = [
            task.partition("/")[2].removeprefix(f"{task.partition('/')[0]}/")  # Some ids begin with the source.
            for task in won
            if task in lost and fmean(won[task]) >= threshold > fmean(lost[task])
        ]
        more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        which = f": {', '.join(names[:_NAMED])}{more}" if names else ""
        lines.append(f"  {pluralize(len(names), 'task')} solved by {winner}, not by {loser}{which}")
    return lines


def _of_source(scored: Scores, source: str) -> Scores:
    return {task: values for task, values in scored.items() if task.partition("/")[0] == source}


def _evaluation_only(words: list[str]) -> list[str]:
    has_interval = any(word.startswith("--orchestrator.eval.every") for word in words)
    return ["--run.max_steps", "0", *([] if has_interval else ["--orchestrator.eval.every_steps", "1"])]


def _as_name(model: str) -> str:
    parts = [part for part in Path(model).parts if part not in ("/", "..", "outputs")]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts[-3:])).strip("-") or "model"
