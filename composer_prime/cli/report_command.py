"""`composer report RUN [RUN ...]`: how training went, from metrics.jsonl and the evaluations' rollouts."""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean
from time import localtime, strftime

from composer_prime.console import COMPOSER, columns, fitted, pluralize, printable
from composer_prime.errors import ConfigError
from composer_prime.monitor.events import read_events
from composer_prime.monitor.metrics_file import Line, numeric_field, read_history
from composer_prime.monitor.progress import RunProgress, ends, sparkline
from composer_prime.monitor.rollouts import only_evaluated, open_run, rollout_files, scores
from composer_prime.run.ledger import check_ledger, effective
from composer_prime.run.run_dir import RunDir
from composer_prime.view.run_payload import evaluation_points

_INDENT = " " * 15
_EVENTS_SHOWN = 8
_ROWS = 10
"""Lines of the reward table, at most."""
_COLUMNS = {
    "reward/mean": "8.3f",
    "loss/total": "+9.4f",
    "policy/entropy": "8.3f",
    "policy/mismatch_kl": "12.2e",
    "policy/staleness_max": "10.2f",
    "groups/filtered_share": "9.2f",
}
"""Figures of the reward table, and their formats."""


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="composer report", description="Report how training of runs went.")
    parser.add_argument("run", nargs="+", help="run directory")
    html_help = (
        "write a page for any browser, with charts, rollouts, hints, pairs, rounds, nodes and costs too "
        "(default: report.html in the run)"
    )
    parser.add_argument("--html", nargs="?", type=Path, const=Path(), metavar="FILE", help=html_help)
    options = parser.parse_args(words)
    if options.html is None:
        for folder in options.run:
            lines = printable("\n".join([*report_run(open_run(folder)), ""])).split("\n")
            print("\n".join(fitted(line, len(_INDENT), columns()) for line in lines))
        return 0
    if len(options.run) > 1:
        raise ConfigError(f"--html shows one run, not {len(options.run)}: report them one by one")
    from composer_prime.view.report_html import write_report  # takes a second

    file = None if options.html == Path() else options.html
    try:
        print(f"wrote {write_report(open_run(options.run[0]), file)}")
    except OSError as error:
        raise ConfigError(f"--html {options.html} cannot be written ({error.strerror}): name another file") from None
    return 0


def report_run(run_dir: RunDir) -> list[str]:
    """Return the report of one run, as lines. The page of --html has hints, pairs, rounds, nodes and costs too."""
    lines = read_history(run_dir.metrics)
    progress = RunProgress()
    progress.update(lines)
    trained = [line for line in lines if "loss/total" in line]
    text = [f"{run_dir.root.name}  ({run_dir.root})"]
    if trained:
        text += _curve(trained, progress) + _time(trained, progress)
    else:
        text.append("  no optimizer step yet")
    return text + _ledger(run_dir) + _events(run_dir) + _evaluated(run_dir)


def _curve(trained: list[Line], progress: RunProgress) -> list[str]:
    latest = {line["step"]: line for line in trained}
    steps = sorted(latest)
    text = [f"  steps        {len(steps)}", f"  reward       {sparkline(progress.rewards())}"]
    text += _moved("mean", trained, "reward/mean", ".3f", "training tasks, others at each step")
    text.append("      steps         reward     loss  entropy  mismatch_kl  staleness  filtered")
    size = -(-len(steps) // _ROWS)
    for part in (steps[start : start + size] for start in range(0, len(steps), size)):
        cells = [_mean([latest[step] for step in part], name, shape) for name, shape in _COLUMNS.items()]
        last = f"- {part[-1]}" if len(part) > 1 else ""
        text.append(f"      {part[0]:>5} {last:<7} {' '.join(cells)}")
    return text


def _mean(part: list[Line], name: str, shape: str) -> str:
    values = _values(part, name)
    width = int(shape.strip("+").partition(".")[0])
    return format(fmean(values), shape) if values else "-".rjust(width)


def _time(trained: list[Line], progress: RunProgress) -> list[str]:
    """Return how the time of all steps was spent, and how many attempts failed."""
    text = []
    if whole := sum(_values(trained, "time/step_s")):
        timed = [line for line in trained if numeric_field(line, "time/step_s")]
        names = {"time/wait_s": "waiting for a batch", "time/forward_backward_s": "forward and backward"}
        spent_s = {label: sum(_values(timed, name)) for name, label in names.items()}
        spent_s["the rest"] = max(0.0, whole - sum(spent_s.values()))
        parts = ", ".join(f"{label} {part / len(timed):.2f} s ({part / whole:.0%})" for label, part in spent_s.items())
        text.append(f"  a step       {whole / len(timed):.2f} s on average: {parts}")
    if (rate := progress.tokens_per_s()) is not None:
        text.append(f"  throughput   {rate:,.0f} trained tokens/s, including waits")
    if failed := sum(_values(trained, "rollout/failed")):
        text.append(f"  failures     {failed:.0f} rollout attempts failed ({COMPOSER} rollouts RUN --all --failed)")
    return text


def _moved(label: str, trained: list[Line], name: str, shape: str, unit: str) -> list[str]:
    """Return the means of the first and the last steps that have the figure."""
    first, last = ends(_values(trained, name))
    if not last:
        return []
    before = f"first {len(first)} {format(fmean(first), shape)}, " if first else ""
    return [f"{_INDENT}{label}: {before}last {len(last)} {format(fmean(last), shape)} ({unit})"]


def _values(lines: list[Line], name: str) -> list[float]:
    return [value for line in lines if (value := numeric_field(line, name)) is not None]


def _ledger(run_dir: RunDir) -> list[str]:
    """Report whether every sample was trained exactly once, over all resumes."""
    if not run_dir.ledger.is_file():
        return []
    if errors := check_ledger(run_dir.ledger):
        return [f"  ledger       {line}" for line in errors]
    count = sum(len(ids) for ids in effective(run_dir.ledger).values())
    return [f"  ledger       {count} samples, each trained exactly once"]


def _events(run_dir: RunDir) -> list[str]:
    events = [each for each in read_events(run_dir.root / "events.jsonl") if each.level != "info"]
    if not events:
        return []
    text = [f"  events       {pluralize(len(events), 'warning or error', 'warnings and errors')}"]
    if len(events) > _EVENTS_SHOWN:
        text.append(f"{_INDENT}{len(events) - _EVENTS_SHOWN} earlier ones")
    for each in events[-_EVENTS_SHOWN:]:
        text.append(f"{_INDENT}{strftime('%H:%M:%S', localtime(each.time))} {each.line}")
    return text


def _evaluated(run_dir: RunDir) -> list[str]:
    """Return each source's held-out rewards with intervals, and the paired change since the first."""
    found = rollout_files(run_dir, "eval")
    points = evaluation_points({step: scores(path) for step, path in found.items()})
    text = []
    for source in dict.fromkeys(point.source for point in points):
        never = ", which is never trained on" if source in only_evaluated(run_dir) else ""
        text.append(f"  evaluation on held-out tasks of {source}{never}, mean reward [95 %]")
        for point in (each for each in points if each.source == source):
            change = f"   change {point.change.text(sign=True)}" if point.change else ""
            level = f"{point.level.text()}   {point.level.count} tasks"
            text.append(f"      after {point.step:>5} steps  {level}{change}")
    return text
