"""`composer plan @ file.toml [overrides] [--gpus 8x80]`: what a run would be, here or on a machine with such GPUs."""

from __future__ import annotations

import dataclasses
import re

from composer_prime.config.load import resolve
from composer_prime.console import EXIT_USAGE, GIB, columns
from composer_prime.errors import ConfigError
from composer_prime.host import Machine, this_machine
from composer_prime.plan.plan import build_plan

USAGE = """\
usage: composer plan @ FILE.toml [@ OVERLAY.toml ...] [--section.key VALUE ...] [--gpus COUNTxGIB] [--resume]

Check a configuration and print its plan: roles and their places, batch sizes, memory, disk, costs of
teachers and the link to other clusters. No role starts, no task set is loaded, nothing is written.

options:
  -h, --help             show this help message and exit
  @ FILE.toml            a configuration; later ones win
  --section.key VALUE    a setting, which wins over files
  --gpus 8x80            assume 8 GPUs of 80 GiB each instead of this machine's
  --resume               check that the run in its folder can continue with this configuration

`trainer @ FILE.toml --dry-run` does the same for this machine; `trainer --help` lists every key.
Exit status: 0 if the run can start here, else 2."""


def main(words: list[str]) -> int:
    if not words or {"-h", "--help"} & set(words):
        print(USAGE)
        return 0 if words else EXIT_USAGE
    machine, words = imagined(words)
    config = resolve(words)
    plan = build_plan(config, machine, starter=None if machine else "launcher")
    from diloco.link_forecast import link_rows

    plan.rows.extend(link_rows(config))
    print(plan.text(columns()))
    return EXIT_USAGE if plan.problems else 0


def imagined(words: list[str]) -> tuple[Machine | None, list[str]]:
    """Return this machine with the GPUs of --gpus COUNTxGIB (None without it), and the other words."""
    place = next((index for index, word in enumerate(words) if word.partition("=")[0] == "--gpus"), None)
    if place is None:
        return None, words
    _, equals, value = words[place].partition("=")
    if not equals:
        value = words[place + 1] if place + 1 < len(words) else ""
    match = re.fullmatch(r"(\d+)x(\d+)", value)
    if match is None:
        raise ConfigError(f"--gpus is {value!r}; give number and GiB of each, for example --gpus 8x80")
    gpus = (int(match[2]) * GIB,) * int(match[1])
    rest = words[:place] + words[place + (1 if equals else 2) :]
    return dataclasses.replace(this_machine(), gpus=gpus), rest
