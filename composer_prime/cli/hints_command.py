"""`composer hints probe RUN|MODEL`: what hints will teach, before any training with them.

Turns that went wrong are drawn again: without a hint, with their own, with another task's. Then each kind of hint is
distilled alone for a few steps on a scratch copy of the model. A kind teaches when its own hint lifts the reward, and
when its divergence on tasks that were not distilled falls: then the policy does without the hint what it did with it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import subprocess
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from composer_prime.cli.eval_command import run_of_models, split_models, words_of_run
from composer_prime.config import Config
from composer_prime.config.load import resolve
from composer_prime.console import ProgressLines, console_script
from composer_prime.errors import ConfigError
from composer_prime.model_source import model_folder, resolve_model
from composer_prime.monitor.metrics_file import read_history
from composer_prime.run.run_dir import RunDir

if TYPE_CHECKING:
    from orchestrator.hints.probe import KindOfHint

_FALLEN = 0.7
"""A divergence that falls to this share of its start is being taken over."""


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="composer hints probe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="`@ FILE` and `--section.key VALUE` give the configuration; without a file that of RUN counts.",
    )  # fmt: skip
    parser.add_argument("model", help="run directory (its final/ is used), model folder, Hub id, tiny, or smollm2")
    parser.add_argument("--groups", type=int, default=16, help="groups of rollouts to play (default 16)")
    parser.add_argument("--draws", type=int, default=2, help="redraws of a turn in each arm (default 2)")
    parser.add_argument("--steps", type=int, default=10, help="steps of each distillation; 0: none (default 10)")
    parser.add_argument("-o", "--output", type=Path, default=Path("outputs/probe"), help="folder of the distillations")
    options, rest = parser.parse_known_args(words)
    if not any(word.startswith("@") for word in rest):
        rest = [*words_of_run(run_of_models([options.model]), rest), *rest]
    split_models([options.model, *rest])
    config = resolve([*rest, "--model.path", model_folder(options.model)])
    if config.orchestrator.hints is None or not config.channels.sdpo.weight:
        raise ConfigError(
            f"channels.sdpo.weight is {config.channels.sdpo.weight:g} and [orchestrator.hints] is "
            f"{'absent' if config.orchestrator.hints is None else 'there'}: a probe needs a weight and the table"
        )
    resolve_model(config.model.path)
    kinds = asyncio.run(_probe(config, options))
    print("\n".join(redraw_lines(kinds)), flush=True)
    for name in kinds if options.steps else ():
        print(verdict(name, kinds[name], _distilled(config, rest, options, name, [*kinds])), flush=True)
    return 0


async def _probe(config: Config, options: argparse.Namespace) -> dict[str, KindOfHint]:
    from composer_prime.cli.served_model import serve_with_workers
    from composer_prime.run.scratch import Scratch
    from orchestrator.chat_template import chat_folder
    from orchestrator.hints.probe import probe
    from orchestrator.hints.stage import build_hints

    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    lines = ProgressLines()

    def tell(done: int, count: int) -> None:
        lines.tell(lambda: f"{done} of {count} redraws")

    with closing(Scratch("probe")) as scratch:
        chat = chat_folder(resolve_model(config.model.path), config.model.chat_template, scratch.path / "chat")
        stage = await asyncio.to_thread(build_hints, config, chat, scratch.path)
        assert stage is not None
        async with serve_with_workers(config, scratch.path / "served") as (gateway, pools):
            try:
                return await probe(
                    config.orchestrator,
                    pools,
                    gateway,
                    stage,
                    seed=config.run.seed,
                    groups=options.groups,
                    draws=options.draws,
                    on_progress=tell,
                )
            finally:
                await stage.close()


def redraw_lines(kinds: dict[str, KindOfHint]) -> list[str]:
    """Return the table of redraws: the reward without a hint, and what each hint adds, over tasks."""
    from orchestrator.hints.probe import NONE, OTHER, OWN

    lines = [f"{'kind of error':<18}{'turns':>6}  {'reward without a hint':<24}{'own hint':<26}{OTHER:<26}lost"]
    for name, kind in kinds.items():
        mean, own, other = kind.mean(NONE), kind.lift(OWN), kind.lift(OTHER)
        cells = [each.text(sign=True) if each else "-" for each in (own, other)]
        lines.append(
            f"{name:<18}{kind.turns:>6}  {mean.text() if mean else '-':<24}{cells[0]:<26}{cells[1]:<26}{kind.lost}"
        )
    return lines


def _distilled(config: Config, words: list[str], options: argparse.Namespace, kind: str, kinds: list[str]) -> Path:
    """Distil the hints of `kind` alone into a copy of the model. Return the run's metrics. Raises ConfigError."""
    run_dir = RunDir(options.output / kind)
    weights = {name: 0.0 for name in kinds if name != kind}
    own = {
        "--run.name": kind, "--run.output_dir": str(options.output), "--run.overwrite": "true",
        "--run.max_steps": str(options.steps), "--model.path": model_folder(options.model),
        "--channels.policy.weight": "0", "--channels.replay_dpo.weight": "0",
        "--orchestrator.preferences.pairs_per_step": "0", "--orchestrator.hints.weights": json.dumps(weights),
        "--orchestrator.eval.every_steps": str(options.steps), "--trainer.checkpoint.every_steps": "0",
    }  # fmt: skip
    command = [*console_script("trainer"), *words, *(word for pair in own.items() for word in pair)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise ConfigError(f"the distillation of {kind} ended with {done.returncode}: {done.stderr[-600:].strip()}")
    return run_dir.metrics


def verdict(name: str, kind: KindOfHint, metrics: Path) -> str:
    """Return what the term will do with this kind of hint, and the figures that say so."""
    from orchestrator.hints.probe import OWN

    lines = read_history(metrics)
    divergence = [line["sdpo/jsd"] for line in lines if "sdpo/jsd" in line]
    errors = [
        line[key] for line in lines for key in line if key.endswith("/turn_error_rate") and key.startswith("eval/")
    ]
    lift = kind.lift(OWN)
    lifts = lift is not None and lift.low is not None and lift.low > 0
    part = max(len(divergence) // 5, 1)
    first, last = (fmean(each) for each in (divergence[:part], divergence[-part:])) if divergence else (0.0, 0.0)
    falls = bool(divergence) and last <= _FALLEN * first
    if not lifts:
        says = "teaches nothing: its own hint does not lift the reward beyond doubt"
    elif not falls:
        says = "is not taken over: it lifts the reward, but the policy does not learn to do without it"
    else:
        says = "teaches: it lifts the reward, and the policy learns to do without it"
    change = f", held-out turn errors {errors[0]:.3f} -> {errors[-1]:.3f}" if len(errors) > 1 else ""
    return f"{name}: {says} (divergence {first:.4f} -> {last:.4f}{change})"
