"""The rows of a plan that say what a link gives a joint run. The simulator is diloco's, so it runs in a process of its
own: this package imports no role."""

from __future__ import annotations

import json
import subprocess
import sys

from composer_prime.config import Config
from composer_prime.errors import ComposerError

_TIMEOUT_S = 60.0


def link_rows(config: Config, words: list[str]) -> list[tuple[str, str]]:
    """(label, text) by the configuration `words`, whose `config` is given; none without [diloco].

    Raises ComposerError when the simulator fails.
    """
    if config.diloco is None:
        return []
    argv = [sys.executable, "-m", "diloco.simulate.forecast", *words]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ComposerError(f"the forecast of the link was not there within {_TIMEOUT_S:g} s") from None
    if done.returncode:
        raise ComposerError(f"no forecast of the link: {done.stderr.strip()}")
    return [(label, text) for label, text in json.loads(done.stdout)]
