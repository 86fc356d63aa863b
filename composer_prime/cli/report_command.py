"""`composer report RUN [RUN ...]`: how training went, from metrics.jsonl and the evaluations' rollouts.

Channels 2 and 3 and a joint run have lines of their own where they are on.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from statistics import fmean

from composer_prime.cli.report_channels import hint_lines, pair_lines
from composer_prime.cli.report_joint import joint_lines
from composer_prime.costs import spent
from composer_prime.errors import ConfigError, LedgerError
from composer_prime.intervals import difference_interval, mean_interval
from composer_prime.ledger import check, effective
from composer_prime.monitor.progress import Progress, ends, number, sparkline
from composer_prime.monitor.rollouts import eval_scores, open_run
from composer_prime.monitor.tail import Line, history
from composer_prime.run_dir import RunDir
from composer_prime.wording import gib


def run(words: list[str]) -> int:
    options = parser().parse_args(words)
    for folder in options.run:
        print("\n".join([*report(open_run(folder), options.bins), ""]))
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="composer report", description=__doc__)
    parser.add_argument("run", nargs="+", help="run directory")
    parser.add_argument("--bins", type=int, default=10, help="lines of the reward table")
    return parser


def report(run_dir: RunDir, bins: int) -> list[str]:
    """The report of one run, as lines."""
    lines = history(run_dir.metrics)
    progress = Progress()
    progress.update(lines)
    trained = [line for line in lines if "loss/total" in line]
    text = [f"{run_dir.root.name}  ({run_dir.root})"]
    if not trained:
        text.append("  no optimizer step yet")
    else:
        text += _curve(trained, progress, bins) + _speed(trained, progress) + _health(trained)
        text += hint_lines(trained) + pair_lines(trained, lines) + joint_lines(run_dir, lines)
    total = [value for line in lines if (value := number(line, "memory/total_bytes")) is not None]
    if total:
        text.append(f"  memory       {gib(int(max(total)))} at most in all processes")
    return text + _ledger(run_dir) + _costs(run_dir) + _evaluations(run_dir)


def _costs(run_dir: RunDir) -> list[str]:
    """What hints, processes and links cost; what teachers cost, beside what `composer plan` expected."""
    try:
        paid = spent(run_dir.root / "costs.jsonl")
    except LedgerError as error:
        return [f"  costs        {error}"]
    text = [f"  hints        ${paid.hint_usd:,.4f} in {paid.hint_calls:,} calls"] if paid.hint_calls else []
    if paid.process_s:
        links = "".join(f", {name} {count:,}" for name, count in sorted(paid.link_bytes.items()))
        text.append(f"  compute      {paid.gpu_s:,.0f} GPU s, {paid.process_s:,.0f} process s{links}")
    if not paid.calls:
        return text
    from composer_prime.config.load import read  # a second of CPU time, for runs with teachers only
    from composer_prime.cost_forecast import forecast

    try:
        expected = forecast(read(run_dir.config))
    except ConfigError:  # of another release, or its states file is gone
        expected = None
    each = ", ".join(f"{name} ${usd:,.4f}" for name, usd in sorted(paid.by_teacher.items()))
    beside = f"; the forecast was {expected.text()}" if expected else ""
    state = f"{paid.failed} failed" + (f", {paid.unsettled} without an end" if paid.unsettled else "")
    if paid.failed or paid.unsettled:
        state += " (one whose reply was lost counts at what was held: overcharge_factor times its bound)"
    return [*text, f"  teachers     ${paid.usd:,.4f} in {paid.calls:,} calls ({each}), {state}{beside}"]


def _ledger(run_dir: RunDir) -> list[str]:
    """Whether every trained sample was trained exactly once, over all resumes."""
    if not run_dir.ledger.is_file():
        return []
    wrong = check(run_dir.ledger)
    if wrong:
        return [f"  ledger       {line}" for line in wrong]
    count = sum(len(ids) for ids in effective(run_dir.ledger).values())
    return [f"  ledger       {count} samples, each trained exactly once"]


def _curve(trained: list[Line], progress: Progress, bins: int) -> list[str]:
    latest = {line["step"]: line for line in trained}
    steps = sorted(latest)
    rewards = progress.rewards()
    text = [f"  steps        {len(steps)}", f"  reward       {sparkline(rewards)}"]
    first, last = ends(rewards)
    if first:
        text.append(f"               first {len(first)} {fmean(first):.3f}   last {len(last)} {fmean(last):.3f}")
    text.append("      steps         reward     loss  entropy  mismatch_kl  staleness  filtered")
    count = max(1, min(bins, len(steps)))
    edges = [round(index * len(steps) / count) for index in range(count + 1)]
    for start, end in pairwise(edges):
        part = [latest[step] for step in steps[start:end]]
        cells = [
            _mean(part, "reward/mean", "8.3f"),
            _mean(part, "loss/total", "+9.4f"),
            _mean(part, "policy/entropy", "8.3f"),
            _mean(part, "policy/mismatch_kl", "12.2e"),
            _mean(part, "policy/staleness_max", "10.2f"),
            _mean(part, "groups/filtered_share", "9.2f"),
        ]
        text.append(f"      {steps[start]:>5} - {steps[end - 1]:<5} {' '.join(cells)}")
    return text


def _speed(trained: list[Line], progress: Progress) -> list[str]:
    text = []
    pace = progress.seconds_a_step(window=None)
    if pace is not None:
        text.append(f"  pace         {pace:.2f} s from one step's end to the next one's (median)")
    text += _shares(trained)
    rate = progress.tokens_per_s()
    if rate is not None:
        text.append(f"  throughput   {rate:,.0f} trained tokens/s, waiting included")
    return text


def _shares(trained: list[Line]) -> list[str]:
    """Where the time of all steps went, as means a step: unlike medians, they add up."""
    timed = [line for line in trained if number(line, "time/step_s")]
    whole = sum(line["time/step_s"] for line in timed)
    if not whole:
        return []
    names = {"time/wait_s": "waiting for a batch", "time/forward_backward_s": "forward and backward"}
    spent_s = {label: sum(number(line, name) or 0.0 for line in timed) for name, label in names.items()}
    spent_s["the rest"] = max(0.0, whole - sum(spent_s.values()))
    parts = ", ".join(f"{label} {part / len(timed):.2f} s ({part / whole:.0%})" for label, part in spent_s.items())
    return [f"  a step       {whole / len(timed):.2f} s on average: {parts}"]


def _health(trained: list[Line]) -> list[str]:
    """What a user would want to be warned of."""
    text = []
    staleness = [value for line in trained if (value := number(line, "policy/staleness_max")) is not None]
    if staleness:
        text.append(f"  staleness    {max(staleness):.0f} at most")
    masked = [value for line in trained if (value := number(line, "policy/masked_fraction")) is not None]
    if masked:
        text.append(f"  masked       {fmean(masked):.2%} of tokens by the off-policy correction")
    failed = sum(number(line, "rollout/failed") or 0 for line in trained)
    if failed:
        text.append(f"  failures     {failed:.0f} rollout tries failed (composer rollouts RUN --all --failed)")
    return text


def _evaluations(run_dir: RunDir) -> list[str]:
    scored = {step: scores for step, scores in eval_scores(run_dir).items() if scores}
    if not scored:
        return []
    text = ["  evaluation on held-out tasks, mean reward [95 %]"]
    first = scored[min(scored)]
    for step, scores in scored.items():
        change = ""
        if step != min(scored) and first.keys() & scores.keys():
            change = f"   change {difference_interval(first, scores).text(sign=True)}"
        interval = mean_interval(scores)
        text.append(f"      after {step:>5} steps  {interval.text()}   {interval.count} tasks{change}")
    return text


def _mean(part: list[Line], name: str, shape: str) -> str:
    values = [value for line in part if (value := number(line, name)) is not None]
    width = int(shape.strip("+").partition(".")[0])
    return format(fmean(values), shape) if values else "-".rjust(width)
