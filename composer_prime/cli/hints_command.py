"""Measure what hints are worth to a model, before any training with them: `composer hints probe RUN|MODEL`.

Turns that went wrong are drawn again: without a hint, with their own, with another task's. The rest is played without
a hint. A hint whose redraws score no higher has nothing to teach. What another task's hint lifts is not the hint's
content: a policy can learn that part to do without. Then a copy of the model is trained for a few steps by the hints
alone, with the first weights as teacher, and plays held-out tasks without a hint: does it take over what they say?
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from composer_prime.cli.eval_command import run_of_models, split_models, words_of_run
from composer_prime.cli.ladder.run import train
from composer_prime.config import Config
from composer_prime.config.load import resolve
from composer_prime.console import ProgressLines
from composer_prime.errors import ConfigError
from composer_prime.model_source import model_folder, resolve_model
from composer_prime.monitor.licence import write_pairs
from composer_prime.monitor.metrics_file import read_history
from composer_prime.monitor.rollouts import Scores, eval_scores
from composer_prime.run.process import exit_text
from composer_prime.run.run_dir import RunDir
from composer_prime.run.scratch import Scratch
from composer_prime.stats.intervals import difference_interval, mean_interval

if TYPE_CHECKING:
    from orchestrator.hints.probe import KindOfHint


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="composer hints probe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="`@ FILE` and `--section.key VALUE` configure it; without a file RUN's configuration counts.",
    )
    parser.add_argument("model", help="run directory (its final/), model folder, Hub id, tiny, or smollm2")
    parser.add_argument("--groups", type=int, default=16, help="groups of rollouts to play (default 16)")
    parser.add_argument("--draws", type=int, default=2, help="redraws of a turn in each arm (default 2)")
    parser.add_argument("--save", type=Path, help="a new file for the redraws, for orchestrator.hints.licence.file")
    parser.add_argument(
        "--distil", type=int, default=10, help="steps of distilling the hints alone; 0: none (default 10)"
    )
    options, rest = parser.parse_known_args(words)
    if not any(word.startswith("@") for word in rest):
        rest = [*words_of_run(run_of_models([options.model]), rest), *rest]
    split_models([options.model, *rest])
    rest = [*rest, "--model.path", model_folder(options.model)]
    config = resolve(rest)
    if config.orchestrator.hints is None:
        raise ConfigError("there is no [orchestrator.hints] table, so no turn gets a hint: name a file with one")
    if (scope := config.orchestrator.hints.scope) != "turn":
        raise ConfigError(f"orchestrator.hints.scope is {scope!r}, and a probe draws one turn again: set it to 'turn'")
    resolve_model(config.model.path)
    if options.save is not None and (options.save.exists() or not options.save.absolute().parent.is_dir()):
        raise ConfigError(f"--save is {options.save}: name a new file in a folder that is there")
    if options.distil:
        try:
            resolve([*rest, *_alone(config, Path("scratch"), options.distil)])
        except ConfigError as error:
            raise ConfigError(f"the distillation: {error}; --distil 0 leaves it out") from None
    kinds = asyncio.run(_probe(config, options))
    print("\n".join(redraw_lines(kinds)))
    if options.save is not None:
        pairs = [(name, *rewards) for name, kind in sorted(kinds.items()) for rewards in kind.pairs()]
        write_pairs(options.save, config.model.path, pairs)
    if options.distil:
        print("\n".join(["", *_distil(config, rest, options.distil)]))
    return 0


def _alone(config: Config, folder: Path, steps: int) -> list[str]:
    """Return the flags under which a copy in `folder` learns from the hints alone. They beat earlier ones."""
    settings = {
        "run.name": "distil", "run.output_dir": folder, "run.max_steps": steps, "run.resume": False,
        "run.overwrite": False, "diloco": None, "teachers.online": False,
        "orchestrator.eval.every_steps": steps, "orchestrator.hints.licence": None,
        "orchestrator.preferences.pairs_per_step": 0, "orchestrator.demonstrations.files": [],
        "orchestrator.demonstrations.eval_files": [],
        "trainer.checkpoint.every_steps": 0, "trainer.schedule.warmup_steps": 0,
        "channels.policy.weight": 0, "channels.replay_dpo.weight": 0, "channels.sft.weight": 0, "channels.own": [],
        "channels.sdpo.weight": config.channels.sdpo.weight or 1.0, "channels.sdpo.schedule.end_step": None,
        "channels.sdpo.teacher.kind": "frozen",
    }  # fmt: skip
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def _distil(config: Config, words: list[str], steps: int) -> list[str]:
    """Train a copy of the model by the hints alone, and return what became of divergence and held-out rollouts."""
    with closing(Scratch("distil")) as scratch:
        print(f"\n{steps} steps of distilling the hints alone, on a copy:", flush=True)
        status = train([*words, *_alone(config, scratch.path, steps)])
        run_dir = RunDir(scratch.path / "distil")
        scores = eval_scores(run_dir)
        if status or not {0, steps} <= scores.keys():
            raise ConfigError(f"the distillation {exit_text(status)} before its last evaluation; see above")
        return distil_lines(scores, read_history(run_dir.metrics), steps)


def distil_lines(scores: Mapping[int, Scores], history: Sequence[Mapping[str, Any]], steps: int) -> list[str]:
    """Return the held-out reward before and after `steps`, and the divergence by kind of error, first and last."""
    before, after = scores[0], scores[steps]
    change = difference_interval(before, after)
    lines = [
        f"held-out reward {mean_interval(before).text()} -> {mean_interval(after).text()}: {change.text(sign=True)}"
    ]
    of_kind = "sdpo/jsd/"
    for name in sorted({key for line in history for key in line if key.startswith(of_kind)}):
        values = [line[name] for line in history if name in line]
        third = max(1, len(values) // 3)
        first, last = fmean(values[:third]), fmean(values[-third:])
        lines.append(f"{name.removeprefix(of_kind):<20}divergence {first:.4f} -> {last:.4f} nats a token")
    if change.low is None or change.high is None or change.low <= 0 <= change.high:
        return [*lines, f"no change is shown on {change.count} tasks"]
    verb = "teach" if change.low > 0 else "do harm: without a policy loss they lower the reward"
    return [*lines, f"the hints {verb}"]


async def _probe(config: Config, options: argparse.Namespace) -> dict[str, KindOfHint]:
    from composer_prime.cli.served_model import serve_with_workers
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
        stage.distil = True
        async with serve_with_workers(config, scratch.path / "served") as (gateway, pools):
            try:
                return await probe(config, pools, gateway, stage, options.groups, options.draws, tell)
            finally:
                await stage.close()


def redraw_lines(kinds: Mapping[str, KindOfHint]) -> list[str]:
    """Return a table of rewards and one of errors at the turn: without a hint, and each hint's change."""
    from orchestrator.hints.probe import NONE, OTHER, OWN

    lines = []
    for title, figures in (("reward", "rewards"), ("errors at the turn", "errors")):
        lines += ["", f"{title:<20}{'turns':>6}  {NONE:<24}{f'change by its {OWN}':<26}{f'by {OTHER}':<26}lost"]
        for name, kind in sorted(kinds.items()):
            by_arm = getattr(kind, figures)
            before = mean_interval(by_arm[NONE]).text() if by_arm[NONE] else "-"
            cells = [
                difference_interval(by_arm[NONE], by_arm[arm]).text(sign=True)
                if by_arm[NONE].keys() & by_arm[arm].keys()
                else "-"
                for arm in (OWN, OTHER)
            ]
            lines.append(f"{name:<20}{len(kind.turns):>6}  {before:<24}{cells[0]:<26}{cells[1]:<26}{kind.lost}")
    return lines[1:]
