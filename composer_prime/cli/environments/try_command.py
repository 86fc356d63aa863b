"""`composer try ENV`: play a few episodes of an environment as in training, and print everything about them."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Any

from composer_prime.cli.rollouts_command import show
from composer_prime.config import Config
from composer_prime.config.layers import shipped
from composer_prime.config.load import read_config, resolve
from composer_prime.console import pluralize, printable
from composer_prime.errors import ConfigError
from composer_prime.model_source import model_folder, resolve_model, text_settings
from composer_prime.monitor.events import VARIABLE, read_events
from composer_prime.monitor.rollouts import failure_text
from composer_prime.run.run_dir import RunDir

FAILED = 1
_CONTEXT = 2048
"""Tokens of an episode where no configuration gives a number."""
_SHOWN = 4
"""Transcripts that are printed without --all."""
_TELL_S, _TURN_CHARS = 5.0, 120
"""Seconds between notices that episodes still play; characters of a turn that are shown at once."""
_OF_A_RUN = ("step", "status", "policy_versions")
"""Fields of a rollout that say nothing outside a run."""
_USAGE = """\
composer try ENV [-n 4] [--model MODEL] [--task I] [--section.key VALUE ...]

  ENV   a module that is installed (orchestrator.environments.toolsmith), a module's file (my_env.py) or folder,
        a configuration (file.toml, or a shipped one: a1) or a run directory
"""
_EXAMPLES = """\
examples:
  composer try orchestrator.environments.toolsmith
  composer try my_env.py -n 8 --taskset.split eval       a setting of the task set
  composer try a1 --task 3 -n 8                          a group: one task, eight episodes
  composer try outputs/a1                                the run's environment, with the model that it trained
Other flags are those of the trainer: --orchestrator.sampling.temperature 0.7."""


def main(words: list[str]) -> int:
    options, rest = _parser().parse_known_args(words)
    _report(f"reading the configuration of {options.env} ...")
    config = trial_config(options, rest)
    resolve_model(config.model.path)
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("orchestrator.workers.pool").setLevel(logging.WARNING)  # names code that blocks
    return asyncio.run(_try(config, options))


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="composer try",
        usage=_USAGE,
        description="Play episodes and print transcripts, rewards by parts, tools, tokens and tracebacks.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("env", metavar="ENV", help=argparse.SUPPRESS)
    parser.add_argument("-n", "--episodes", type=int, default=4, help="concurrent episodes (default 4)")
    model_help = "model folder, Hub id, tiny, smollm2, or run directory (default: ENV's, or tiny)"
    parser.add_argument("--model", help=model_help)
    parser.add_argument("--task", type=int, help="play this task every time (default: the first n once each)")
    parser.add_argument("--eval", action="store_true", help="held-out tasks instead of training tasks")
    parser.add_argument("--all", action="store_true", help=f"print all transcripts (default: {_SHOWN} at most)")
    return parser


def trial_config(options: argparse.Namespace, rest: list[str]) -> Config:
    """Return a configuration with the first source alone. Raises ConfigError."""
    if options.episodes < 1:
        raise ConfigError(f"-n is {options.episodes}: play one episode or more")
    with tempfile.TemporaryDirectory(prefix="composer-try-") as folder:
        words = [*_configuration(options, Path(folder)), *full_names(rest)]
        if options.model is not None:
            words += ["--model.path", model_folder(options.model)]
        config = resolve(words)
    source = config.orchestrator.source[0]
    if options.eval and not source.eval_taskset:
        raise ConfigError(f"--eval: the source {source.name!r} has no eval_taskset")
    update = {"orchestrator": config.orchestrator.model_copy(update={"source": [source]})}
    return config.model_copy(update=update)


def _configuration(options: argparse.Namespace, folder: Path) -> list[str]:
    path = Path(options.env)
    if path.suffix == ".toml" or shipped(options.env) != options.env:
        return ["@", options.env]
    if (path / "run_id").is_file():
        run = RunDir(path)
        model = str(run.final) if run.final.is_dir() else read_config(run.config).model.path
        return ["@", str(run.config), "--run.resume", "false", "--diloco", "None", "--model.path", model]
    model = model_folder(options.model or "tiny")
    return ["@", str(module_configuration(options.env, model, folder, held_out=options.eval))]


def module_configuration(env: str, model: str, folder: Path, *, held_out: bool) -> Path:
    """Write a configuration into `folder` around an environment's module alone, and return its path.

    With `held_out` the same task set gives the held-out tasks.
    """
    module, home = _module(env)
    name = module.rpartition(".")[2]
    source: dict[str, Any] = {"name": name, "taskset": {"id": module}}
    if held_out:
        source["eval_taskset"] = {"id": module} | _held_out_settings(module, home)
    values: dict[str, Any] = {
        "run": {"name": name, "max_steps": 1, "import_from": [str(home)]},
        "model": {"path": model, "max_context": (context := _context(model))},
        "orchestrator": {"source": [source], "sampling": {"max_tokens": min(512, context // 4)}},
        "trainer": {"micro_batch_tokens": max(4096, context)},
    }
    file = folder / "module.json"
    file.write_text(json.dumps(values))
    return file


def _held_out_settings(module: str, home: Path) -> dict[str, str]:
    """Return `split` where the task set has that setting."""
    from orchestrator.workers.verifiers_adapter import taskset_settings

    sys.path += [str(home)] if str(home) not in sys.path else []
    try:
        settings = taskset_settings(module)
    except Exception:
        return {}
    return {"split": "eval"} if "split" in settings else {}


def _module(env: str) -> tuple[str, Path]:
    """Return the module's name and the folder to import it from. Raises ConfigError."""
    path = Path(env)
    if path.suffix == ".py" or path.is_dir():
        if not path.exists():
            raise ConfigError(f"there is no file {path}")
        if path.is_dir() and not (path / "__init__.py").is_file():
            text = f"{path} is neither a Python package (no __init__.py) nor a run directory (no run_id)"
            raise ConfigError(text)
        return path.resolve().stem, path.resolve().parent
    return env, Path.cwd()


def _context(model: str) -> int:
    limit = text_settings(resolve_model(model)).get("max_position_embeddings") or _CONTEXT
    return min(_CONTEXT, int(limit))


def full_names(rest: list[str]) -> list[str]:
    """Return flags with `--taskset.x` and the like spelled as keys of the first source."""
    short = ("--taskset.", "--eval_taskset.", "--eval-taskset.", "--harness.")
    return [f"--orchestrator.source.0.{word[2:]}" if word.startswith(short) else word for word in rest]


async def _try(config: Config, options: argparse.Namespace) -> int:
    source, began = config.orchestrator.source[0], time.monotonic()
    from composer_prime.cli.served_model import serve_with_workers
    from composer_prime.event_loop import end
    from composer_prime.run.scratch import Scratch
    from orchestrator.chat_renderer import read_tokenizer
    from orchestrator.outside_run import play_episodes, trial_warnings
    from orchestrator.rollouts.rollout_log import rollout_line
    from orchestrator.workers.pool import EVAL, TRAIN

    taskset = EVAL if options.eval else TRAIN
    with closing(Scratch("try")) as scratch:
        os.environ[VARIABLE] = str(scratch.path)
        async with serve_with_workers(config, scratch.path) as (gateway, pools):
            pool = pools[source.name]
            loaded = time.monotonic()
            _report(f"playing {pluralize(options.episodes, 'episode')} ...")
            tokenizer = await asyncio.to_thread(read_tokenizer, pool.spec.model_path)

            def tell(record: Any) -> None:
                text = " ".join(tokenizer.decode(record.answer.ids).split())
                _report(f"  {record.session}: {printable(text[:_TURN_CHARS])}")

            gateway.records.on_record = tell
            heartbeat = asyncio.create_task(_tell_waits(pool))
            try:
                rollouts = await play_episodes(
                    pool,
                    gateway,
                    config.orchestrator,
                    seed=config.run.seed,
                    tasks=_tasks(options, pool.num_tasks(taskset)),
                    taskset=taskset,
                )
            finally:
                await end([heartbeat])
            ended = time.monotonic()
        told = [each.line for each in read_events(scratch.path / "events.jsonl") if each.level != "info"]
    lines = [rollout_line(0, source.name, rollout, "played") for rollout in rollouts]
    shown = lines if options.all else chosen(lines)
    print(printable("\n".join([*_transcripts(shown), *_summary(lines)])))
    if left_out := len(lines) - len(shown):
        print(f"{pluralize(left_out, 'transcript')} not shown; --all prints every one")
    print(f"loaded in {loaded - began:.1f} s, played in {ended - loaded:.1f} s")
    for warning in [*told, *trial_warnings(rollouts, pool.ready.notes if pool.ready else [])]:
        print(f"warning: {printable(warning)}")
    return 0 if any(line["reward"] is not None for line in lines) else FAILED


async def _tell_waits(pool: Any) -> None:
    began = time.monotonic()
    while True:
        await asyncio.sleep(_TELL_S)
        running = sum(player.running for player in pool.players)
        _report(f"{pluralize(running, 'episode')} still playing after {time.monotonic() - began:.0f} s")


def _tasks(options: argparse.Namespace, count: int) -> list[int]:
    """Return the index of each episode's task. Raises ConfigError."""
    if options.task is not None:
        if not 0 <= options.task < count:
            raise ConfigError(f"--task {options.task}: there are {pluralize(count, 'task')}, counted from 0")
        return [options.task] * options.episodes
    return [number % count for number in range(options.episodes)]


def chosen(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines to print: all of a few, else the best, the worst and the first failed."""
    if len(lines) <= _SHOWN:
        return lines
    scored = sorted((line for line in lines if line["reward"] is not None), key=lambda line: line["reward"])
    failed = [line for line in lines if line["reward"] is None]
    picked = [*scored[-1:], *scored[:1], *failed[:1]]
    return [line for line in lines if any(line is one for one in picked)]


def _transcripts(lines: list[dict[str, Any]]) -> Iterator[str]:
    for line in lines:
        yield from [*show({name: value for name, value in line.items() if name not in _OF_A_RUN}), ""]


def _summary(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Yield rewards, means of their parts, tokens, and each cause of failure with its count."""
    scored = [line for line in lines if line["reward"] is not None]
    rewards = [line["reward"] for line in scored]
    yield f"{pluralize(len(lines), 'episode')}, {len(rewards)} with a reward"
    if rewards:
        yield f"  reward    {', '.join(f'{reward:g}' for reward in rewards)}   mean {fmean(rewards):.3f}"
    parts: dict[str, list[float]] = {}
    for line in scored:
        for name, value in line["parts"].items():
            parts.setdefault(name, []).append(value)
    for name, values in parts.items():
        yield f"  {name:<9} mean {fmean(values):.3f}, {min(values):g} to {max(values):g}"
    sampled = sum(line["cost"]["sampled_tokens"] or 0 for line in lines)
    prompt = sum(line["cost"]["prompt_tokens"] or 0 for line in lines)
    yield f"  tokens    {sampled:,} sampled, {prompt:,} of prompts and tools"
    failures = Counter(text for line in lines if (text := failure_text(line)) is not None)
    yield from (f"  failed    {count} x {text}" for text, count in failures.most_common())
