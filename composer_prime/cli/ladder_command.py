"""Train arms: `composer ladder run CONFIG ... -o FOLDER`. Print their verdicts: `composer ladder FOLDER`.

An arm is a configuration that is trained with several seeds.
What is compared, and by which rule, is registered before the first run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from composer_prime.cli.ladder.preregistration import FILE, RULE, read_preregistration
from composer_prime.cli.ladder.verdicts import result_lines
from composer_prime.errors import ConfigError


def main(words: list[str]) -> int:
    if words[:1] == ["run"]:
        from composer_prime.cli.ladder.run import main as run_ladder

        return run_ladder(words[1:])
    rule = f"Verdicts, by the first line that holds:\n\n{RULE}"
    parser = argparse.ArgumentParser(
        prog="composer ladder",
        description=__doc__,
        epilog=rule,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="folder of a ladder, or `run` to train one")
    folder = parser.parse_args(words).folder
    registered = read_preregistration(folder)
    if registered is None:
        raise ConfigError(f"{folder} has no {FILE}: name the folder given to `composer ladder run` with -o")
    print("\n".join(result_lines(folder, registered)))
    return 0
