"""Measure what hints are worth to a model, before any training with them: `composer hints probe RUN|MODEL`.

Turns that went wrong are drawn again: without a hint, with their own, with another task's.
A hint whose redraws score no higher has nothing to teach. What another task's hint lifts is
not the hint's content: a policy can learn that part to do without.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING

from composer_prime.cli.eval_command import run_of_models, split_models, words_of_run
from composer_prime.config import Config
from composer_prime.config.load import resolve
from composer_prime.console import ProgressLines
from composer_prime.errors import ConfigError
from composer_prime.model_source import model_folder, resolve_model
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
    options, rest = parser.parse_known_args(words)
    if not any(word.startswith("@") for word in rest):
        rest = [*words_of_run(run_of_models([options.model]), rest), *rest]
    split_models([options.model, *rest])
    config = resolve([*rest, "--model.path", model_folder(options.model)])
    if config.orchestrator.hints is None:
        raise ConfigError("there is no [orchestrator.hints] table, so no turn gets a hint: name a file with one")
    resolve_model(config.model.path)
    print("\n".join(redraw_lines(asyncio.run(_probe(config, options)))))
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
