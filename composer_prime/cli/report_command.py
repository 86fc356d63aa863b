"""`composer report RUN [RUN ...]`: how training went, from metrics.jsonl and the evaluations' rollouts."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from statistics import fmean
from time import localtime, strftime

from composer_prime.console import COMPOSER, columns, fitted, gib, pluralize, printable
from composer_prime.errors import ConfigError, LedgerError
from composer_prime.monitor.events import read_events
from composer_prime.monitor.metrics_file import Line, numeric_field, read_history
from composer_prime.monitor.node_table import recorded_rows, table_lines
from composer_prime.monitor.progress import RunProgress, ends, sparkline
from composer_prime.monitor.rollouts import only_evaluated, open_run, rollout_files, scores
from composer_prime.run.costs import Spent, spent
from composer_prime.run.ledger import check_ledger, effective
from composer_prime.run.run_dir import RunDir
from composer_prime.view.run_payload import evaluation_points, joint_rounds

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
    html_help = "write a page with charts and rollouts for any browser (default: report.html in the run)"
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
    """Return the report of one run, as lines."""
    lines = read_history(run_dir.metrics)
    progress = RunProgress()
    progress.update(lines)
    trained = [line for line in lines if "loss/total" in line]
    text = [f"{run_dir.root.name}  ({run_dir.root})"]
    if trained:
        text += _curve(trained, progress) + _time(trained, progress) + hint_lines(trained)
        text += pair_lines(trained, lines) + joint_lines(lines, progress)
    else:
        text.append("  no optimizer step yet")
    if total := _values(lines, "memory/total_bytes"):
        text.append(f"  memory       {gib(int(max(total)))} at most in all processes")
    text += _ledger(run_dir)
    try:
        paid = spent(run_dir.root / "costs.jsonl")
        text += _costs(paid)
        if rows := recorded_rows(lines, paid.nodes):
            text.append(f"  nodes        {pluralize(len(rows), 'inference node')}")
            text += [f"      {line}" for line in table_lines(rows)]
    except LedgerError as error:
        text.append(f"  costs        {error}")
    return text + _events(run_dir) + _evaluated(run_dir)


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


def hint_lines(trained: list[Line]) -> list[str]:
    """Describe hints and SDPO; empty when SDPO was off."""
    if not any("loss/sdpo" in line for line in trained):
        return []
    wrong_turns, hinted = sum(_values(trained, "hints/found")), sum(_values(trained, "hints/hinted"))
    share = f" ({hinted / wrong_turns:.0%})" if wrong_turns else ""
    turns = _values(trained, "sdpo/turns")
    distilled = f"{sum(turns):,.0f} distilled, in {sum(count > 0 for count in turns)} of"
    text = [
        f"  hints        {hinted:,.0f} of {pluralize(int(wrong_turns), 'error turn')} got a hint{share}; "
        f"{distilled} {pluralize(len(trained), 'step')}"
    ]
    text += _counts("kinds", trained, "hints/kind/") + _counts("left out", trained, "hints/skipped/")
    text += _moved("jsd", trained, "sdpo/jsd", ".4f", "nats a token, of the steps that had such turns")
    return text + _moved("turn errors", trained, "rollout/turn_error_rate", ".3f", "of assistant turns")


def pair_lines(trained: list[Line], lines: list[Line]) -> list[str]:
    """Describe replay-DPO, and from the `lines` of all roles online replay; empty when both were off."""
    text = []
    if any("loss/replay_dpo" in line for line in trained):
        last = next((line for line in reversed(trained) if "pairs/in_file" in line), {})
        held, refused = (numeric_field(last, f"pairs/{name}") or 0 for name in ("in_file", "refused"))
        trained_pairs = f"{sum(_values(trained, 'dpo/pairs')):,.0f} trained"
        text.append(f"  pairs        {trained_pairs}; {held:,.0f} in the file, {refused:,.0f} of them refused")
        text += _counts("refused", [last], "pairs/refused/")
        text += _moved("accuracy", trained, "dpo/accuracy", ".3f", "of the pairs agree with the teachers")
    return text + _replay_lines(lines)


def _replay_lines(lines: list[Line]) -> list[str]:
    last = next((line for line in reversed(lines) if "replay/states" in line or "replay/failed" in line), None)
    if last is None:
        return []
    pairs, states, calls = (numeric_field(last, f"replay/{name}") or 0 for name in ("pairs", "states", "calls"))
    early = last.get("replay/stopped") or last.get("replay/failed")
    stopped = "; stopped early, see logs/orchestrator.log" if early else ""
    return [f"  replay       {pairs:,.0f} pairs of {states:,.0f} states; {calls:,.0f} calls{stopped}"]


def joint_lines(lines: list[Line], progress: RunProgress) -> list[str]:
    """Describe a joint run as this peer logged it; empty before its first round."""
    rounds = joint_rounds(lines)
    if not rounds:
        return []
    last = next(line for line in reversed(lines) if "diloco/outer_step" in line)
    by_peer = Counter(peer for each in rounds for peer in each["peers"])
    shares = ", ".join(f"{peer} {count}" for peer, count in sorted(by_peer.items()))
    alone = sum(len(each["peers"]) == 1 for each in rounds)
    waited_s = sum(each["sync_s"] or 0.0 for each in rounds)
    sent, received = (last.get(f"diloco/bytes_{way}", 0) / 1e6 for way in ("sent", "received"))
    return [
        f"  joint run    outer step {rounds[-1]['round']:.0f}; {pluralize(len(rounds), 'round')} taken, "
        f"{last.get('diloco/missed_rounds', 0):.0f} missed; the peers' models are equal in each of them",
        f"{_INDENT}peers: rounds with the work of {shares}; {alone} with one peer alone",
        f"{_INDENT}link: {sent:,.1f} MB sent, {received:,.1f} MB received per rank since the last start; "
        f"waited {waited_s:,.1f} s for rounds to end",
        *([f"{_INDENT}joint model: {progress.joint_model}"] if progress.joint_model is not None else []),
    ]


def _counts(label: str, lines: list[Line], prefix: str) -> list[str]:
    """Return the totals of all figures below `prefix`, the largest first."""
    totals: Counter[str] = Counter()
    for line in lines:
        for name in (name for name in line if name.startswith(prefix)):
            totals[name.removeprefix(prefix)] += line[name]
    listed = ", ".join(f"{name} {count:,.0f}" for name, count in totals.most_common() if count)
    return [f"{_INDENT}{label}: {listed}"] if listed else []


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


def _costs(paid: Spent) -> list[str]:
    """Return the costs of hints, processes, links and teachers."""
    text = [f"  hints        ${paid.hint_usd:,.4f} in {paid.hint_calls:,} calls"] if paid.hint_calls else []
    if paid.process_s:
        links = "".join(f", {name} {count:,}" for name, count in sorted(paid.link_bytes.items()))
        price = f", ${paid.machine_usd:,.4f} for the machine" if paid.machine_usd else ""
        text.append(f"  compute      {paid.gpu_s:,.0f} GPU s, {paid.process_s:,.0f} process s{price}{links}")
    if paid.calls:
        by_teacher = ", ".join(f"{name} ${usd:,.4f}" for name, usd in sorted(paid.by_teacher.items()))
        lost = ""
        if paid.failed or paid.unsettled:
            lost = f", {paid.failed} failed, {paid.unsettled} without an end"
            lost += " (a call with a lost reply counts as its reservation, the most that it may cost)"
        text.append(f"  teachers     ${paid.usd:,.4f} in {paid.calls:,} calls ({by_teacher}){lost}")
    return text


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
