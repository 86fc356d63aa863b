"""`composer ladder RUN [RUN ...]`: arms side by side at equal steps, paired by seed, with intervals over seeds.

Runs whose configurations differ only in seed and name form an arm. The first run's arm is the base of all comparisons.
Intervals are 95 % Student t intervals over seeds, wide when there are few. Two seeds have none: both figures are shown.

`composer ladder run CONFIG ... -o FOLDER` trains arms. `composer ladder FOLDER` adds the verdicts that it announced.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from composer_prime.cli.ladder.compare import BINS, METRICS, compare, report_ladder
from composer_prime.cli.ladder.preregistration import RULE, read_preregistration
from composer_prime.monitor.rollouts import open_run


def main(words: list[str]) -> int:
    if words[:1] == ["run"]:
        from composer_prime.cli.ladder.run import main as run_ladder

        return run_ladder(words[1:])
    options = _parser().parse_args(words)
    shown = {"metrics": options.metric or METRICS, "steps": options.steps, "bins": options.bins}
    registered = read_preregistration(Path(options.run[0])) if len(options.run) == 1 else None
    if registered is not None:
        report_ladder(Path(options.run[0]), registered, **shown)
    else:
        compare([open_run(folder) for folder in dict.fromkeys(options.run)], **shown)
    return 0


def _parser() -> argparse.ArgumentParser:
    rule = f"Verdicts of a ladder that `composer ladder run` trained, by the first line that holds:\n\n{RULE}"
    parser = argparse.ArgumentParser(
        prog="composer ladder", description=__doc__, epilog=rule, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="+", help="run directory, those of the base arm first; or a ladder's folder")
    parser.add_argument("--metric", action="append", help=f"figure of metrics.jsonl (default {' '.join(METRICS)})")
    parser.add_argument("--steps", type=int, help="compare the first STEPS steps (default: those of the shortest run)")
    parser.add_argument("--bins", type=int, default=BINS, help="windows of steps")
    return parser
