"""`composer eval MODEL [MODEL ...] [@ file.toml]`: held-out scores with confidence intervals.

The same roles evaluate a model as in training: `trainer` with run.max_steps = 0. All models get the same tasks with the
same seeds, so two of them are compared task by task. Without a file the configuration of the run directory counts. What
that run has evaluated itself, before its first step and after its last, is read instead of evaluated again.
"""

from __future__ import annotations

import re
import subprocess
from itertools import count
from pathlib import Path
from statistics import fmean

from composer_prime.config import Config
from composer_prime.config.load import read_config, resolve
from composer_prime.console import INTERRUPTED, console_script, pluralize
from composer_prime.errors import ConfigError, RoleFailedError
from composer_prime.model_source import resolve_model
from composer_prime.monitor.rollouts import Scores, failure_text, read_rollouts, scores
from composer_prime.run.run_dir import RunDir
from composer_prime.stats.intervals import difference_interval, mean_interval

USAGE = """\
usage: composer eval MODEL [MODEL ...] [@ FILE.toml] [--section.key VALUE ...]

MODEL is a model folder, a run directory (its final/ is taken), tiny, or smollm2. The configuration's sources with an
eval_taskset are evaluated; each evaluation keeps its rollouts in OUTPUT_DIR/evals/NAME-MODEL[-NUMBER]. Without FILE the
first run directory's configuration counts; without overrides too, the run's own evaluations of its start model and its
final one are shown as they are. So `composer eval tiny outputs/a1` starts nothing.
Useful overrides: --orchestrator.eval.tasks 256 --orchestrator.eval.samples 4; --run.overwrite true replaces the
evaluation of the same name instead of numbering."""


_NAMED = 12
"""Flipped tasks that are named; `composer rollouts` has all."""


def main(words: list[str]) -> int:
    if not words or {"-h", "--help"} & set(words):
        print(USAGE)
        return 0
    models, rest = split_models(words)
    run_dir = None
    if not any(word.startswith("@") for word in rest):
        run_dir = run_of_models(models)
        rest = [*_words_of_run(run_dir, rest), *rest]
    config = evaluation_config(rest)
    for model in models:  # check all of them before the first one takes minutes
        resolve_model(model_folder(model))
    may_read = run_dir is not None and rest == _words_of_run(run_dir, [])
    scores_by_model = {}
    for model in models:
        scored = recorded_scores(model, run_dir) if run_dir is not None and may_read else None
        scores_by_model[model] = evaluate(model, rest, config) if scored is None else scored
    print("\n".join(["", *eval_table(scores_by_model, config.orchestrator.eval.pass_threshold)]))
    return 0


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
    models, rest = words[:start], [word for word in words[start:] if word not in ("--resume", "--dry-run")]
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


def evaluate(model: str, words: list[str], config: Config) -> Scores:
    """Return the scores of one model by task. Raises RoleFailedError when the evaluation run failed."""
    evals = config.run.output_dir / "evals"
    name = f"{config.run.name}-{_as_name(model)}"
    if not config.run.overwrite:
        name = unused_name(evals, name)
    argv = [
        *console_script("trainer"),
        *words,
        *_evaluation_only(words),
        *("--model.path", model_folder(model), "--run.name", name),
        *("--run.output_dir", str(evals), "--run.resume", "false", "--monitor.view", "plain"),
    ]
    print(f"evaluating {model} (run directory {evals / name})", flush=True)
    run_dir = RunDir(evals / name)
    status = _follow(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True))
    if status != 0:
        raise RoleFailedError(f"the evaluation of {model} ended with exit status {status}; see {run_dir.root / 'logs'}")
    path = run_dir.eval_rollouts(0)
    if not path.is_file():
        raise RoleFailedError(f"the evaluation of {model} wrote no {path}")
    return _scores_with_notice(path)


def _scores_with_notice(path: Path) -> Scores:
    """Return the scores by task, and print how many rollouts failed and have none."""
    failures = [text for rollout in read_rollouts(path) if (text := failure_text(rollout))]
    if failures:
        failed = pluralize(len(failures), "rollout")
        print(f"{failed} failed and left out, the first with: {failures[0]}", flush=True)
    return scores(path)


def unused_name(folder: Path, name: str) -> str:
    """Return `name`, or `name` with the first number that no earlier evaluation has: `a0-tiny-2`."""
    candidates = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(candidate for candidate in candidates if not (folder / candidate).exists())


def _follow(process: subprocess.Popen[str]) -> int:
    """Print the launcher's events without its summary, and return its exit status. Ctrl-C reaches it by itself."""
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("["):
                print(line, end="", flush=True)
        return process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        process.terminate()
        process.wait()
        raise


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


def model_folder(model: str) -> str:
    """Return `model`, or the final/ folder of a run directory. Raises ConfigError for a run that has not finished."""
    final = Path(model) / "final"
    if (Path(model) / "run_id").is_file():
        if not final.is_dir():
            raise ConfigError(f"{model} is a run directory without final/: the run has not finished")
        return str(final)
    return model


def _of_source(scored: Scores, source: str) -> Scores:
    return {task: values for task, values in scored.items() if task.partition("/")[0] == source}


def _evaluation_only(words: list[str]) -> list[str]:
    has_interval = any(word.startswith("--orchestrator.eval.every") for word in words)
    return ["--run.max_steps", "0", *([] if has_interval else ["--orchestrator.eval.every_steps", "1"])]


def _as_name(model: str) -> str:
    parts = [part for part in Path(model).parts if part not in ("/", "..", "outputs")]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts[-3:])).strip("-") or "model"
