"""`composer plan @ file.toml [overrides] [--gpus 8x80]`: what a run would be, here or on a machine with such GPUs.

Without --gpus the same as `trainer @ file.toml --dry-run`.
"""

from __future__ import annotations

import dataclasses
import re

from composer_prime.cli.link_rows import link_rows
from composer_prime.config.load import EXIT_USAGE, parse
from composer_prime.errors import ConfigError
from composer_prime.footprint import GIB
from composer_prime.machine import Machine, look
from composer_prime.plan import build


def run(words: list[str]) -> int:
    machine, words = imagined(words)
    config = parse(words).config
    plan = build(config, machine)
    plan = dataclasses.replace(plan, rows=[*plan.rows, *link_rows(config, words)])
    print(plan.text())
    return EXIT_USAGE if plan.problems else 0


def imagined(words: list[str]) -> tuple[Machine | None, list[str]]:
    """This machine with the GPUs that --gpus COUNTxGIB names, and the other words. None without --gpus.

    Raises ConfigError for a value of another form.
    """
    if "--gpus" not in words:
        return None, words
    place = words.index("--gpus")
    value = words[place + 1] if place + 1 < len(words) else ""
    match = re.fullmatch(r"(\d+)x(\d+)", value)
    if match is None:
        raise ConfigError(f"--gpus is {value!r}; give their number and memory in GiB, for example --gpus 8x80")
    gpus = (int(match[2]) * GIB,) * int(match[1])
    return dataclasses.replace(look(), gpus=gpus, imagined=True), words[:place] + words[place + 2 :]
