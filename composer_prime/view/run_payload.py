"""The JSON of one run's page: verdict, figures by step, evaluations, events, time, money, settings."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any

from composer_prime.console import pluralize
from composer_prime.errors import LedgerError
from composer_prime.monitor.events import read_events
from composer_prime.monitor.metrics_file import Line, ended, numeric_field, read_history
from composer_prime.monitor.node_table import recorded_rows
from composer_prime.monitor.progress import TREND_STEPS, RunProgress
from composer_prime.monitor.rollouts import Scores, only_evaluated, without_sources
from composer_prime.run.costs import Spent, read_costs, spent
from composer_prime.run.run_dir import RunDir
from composer_prime.stats.intervals import Interval, difference_interval, mean_interval
from composer_prime.view.catalog import FoundRun, flatten, max_steps, read_settings, run_state

_NOTHING = "nothing trained or evaluated yet"
_LOG_FOLLOWS = "\nthe end of "
"""Between a failure's cause and the log that shows it."""


def verdict(evaluations: Mapping[int, Scores], rewards: list[float]) -> dict[str, Any]:
    """Return `text` and `tone` (good | bad | open) of a run. `rewards`: of every trained step.

    Only a paired held-out interval without 0 says that the model learned, or got worse.
    """
    scored = {step: scores for step, scores in evaluations.items() if scores}
    first, last = min(scored, default=0), max(scored, default=0)
    if first == last or not scored[first].keys() & scored[last].keys():
        return {"text": _without_comparison(scored, rewards), "tone": "open"}
    change = difference_interval(scored[first], scored[last])
    text = f"held-out {change.text(sign=True)} over {pluralize(change.count, 'task')}"
    levels = f"{mean_of(scored[first]):.3f} after step {first}, {mean_of(scored[last]):.3f} after step {last}"
    if change.low is None or change.high is None:
        return {"text": f"{text}: one task decides nothing ({levels})", "tone": "open"}
    if change.low > 0:
        return {"text": f"{text}: it learned ({levels})", "tone": "good"}
    if change.high < 0:
        return {"text": f"{text}: it got worse ({levels})", "tone": "bad"}
    return {"text": f"{text}: undecided, the interval holds 0 ({levels})", "tone": "open"}


def _without_comparison(scored: Mapping[int, Scores], rewards: list[float]) -> str:
    if scored:
        step = max(scored)
        interval = mean_interval(scored[step])
        text = f"held-out {interval.text()} over {pluralize(interval.count, 'task')} after step {step}"
        return f"{text}: no second evaluation of these tasks to compare with"
    if not rewards:
        return _NOTHING
    if len(rewards) < 2 * TREND_STEPS:
        few = f"mean training reward {fmean(rewards):.3f} of {pluralize(len(rewards), 'step')}"
        return f"no held-out evaluation; {few}: too few for a trend"
    ends = f"{fmean(rewards[:TREND_STEPS]):.3f} in the first, {fmean(rewards[-TREND_STEPS:]):.3f} in the last"
    return f"no held-out evaluation; training reward {ends} {TREND_STEPS} steps, on other tasks: no verdict"


def mean_of(scores: Scores) -> float:
    return fmean(fmean(values) for values in scores.values())


_MAX_POINTS = 1200
"""Steps that reach the page; of a longer run every n-th."""
_MAX_EVENTS = 400
_TOLD = ("problem", "event", "warning")
"""Fields of metrics.jsonl for people."""


def run_payload(found: FoundRun, evaluations: dict[int, Scores]) -> dict[str, Any]:
    run_dir, settings = found.run_dir, read_settings(found.run_dir)
    lines = read_history(run_dir.metrics)
    trained = dict(sorted((line["step"], line) for line in lines if "loss/total" in line))
    paid, problem = _paid(run_dir)
    evaluations = without_sources(evaluations, only_evaluated(run_dir))
    progress = RunProgress()
    progress.update(lines)
    last = progress.last_step or 0
    state = run_state(run_dir, last, settings, ended(lines))
    said = verdict(evaluations, progress.rewards())
    if state == "failed":
        said = {"text": _with_cause(lines, said["text"]), "tone": "bad"}
    return {
        "id": found.run_id,
        "folder": str(run_dir.root),
        "joint": found.joint,
        "state": state,
        "step": last,
        "max_steps": max_steps(settings),
        "trained_tokens": int(sum(numeric_field(line, "tokens/trained") or 0.0 for line in trained.values())),
        "verdict": said,
        "figures": figures(trained),
        "evaluations": evaluation_points(evaluations),
        "waiting": {role: wait.what for role, wait in progress.waiting.items()},
        "events": events(run_dir, lines),
        "nodes": [row.with_rates() for row in recorded_rows(lines, paid.nodes)],
        "span": _span(lines),
        "costs": {"problem": problem} if problem else costs(run_dir, paid),
        "joint_rounds": joint_rounds(lines),
        "settings": flatten(settings),
        "changed": _changed(flatten(settings)),
        "environment": _environment(run_dir),
    }


def _with_cause(lines: list[Line], text: str) -> str:
    """Return why the run failed, then what its figures say."""
    causes = (str(line.get("problem") or "") for line in reversed(lines) if line.get("event") == "ended")
    cause = next(causes, "").partition(_LOG_FOLLOWS)[0]
    return f"failed: {cause}{'' if text == _NOTHING else f' ({text})'}"


def figures(trained: dict[int, Line]) -> dict[str, Any]:
    """Return the trainer's figures as columns: `steps`, `times`, `tokens` by then, and others by name."""
    steps = list(trained)
    stride = -(-len(steps) // _MAX_POINTS) or 1
    kept = steps[::stride]
    if steps and kept[-1] != steps[-1]:
        kept.append(steps[-1])
    names = sorted({name for step in kept for name in trained[step]} - {"step", "time", "role"})
    columns = {}
    for name in names:
        column = [_rounded(numeric_field(trained[step], name)) for step in kept]
        if any(value is not None for value in column):
            columns[name] = column
    times = [_rounded(numeric_field(trained[step], "time")) for step in kept]
    sums = accumulate(numeric_field(line, "tokens/trained") or 0.0 for line in trained.values())
    tokens = dict(zip(steps, sums, strict=True))
    return {"steps": kept, "times": times, "tokens": [tokens[step] for step in kept], "columns": columns}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPoint:
    """One evaluation of one source."""

    step: int
    source: str
    level: Interval
    change: Interval | None
    """Paired by task with the source's first evaluation."""


def evaluation_points(evaluations: dict[int, Scores]) -> list[EvaluationPoint]:
    points = []
    first: dict[str, Scores] = {}
    for step, scored in sorted(evaluations.items()):
        for source in sorted({task.partition("/")[0] for task in scored}):
            part = {task: values for task, values in scored.items() if task.startswith(f"{source}/")}
            start = first.setdefault(source, part)
            is_paired = start is not part and bool(start.keys() & part.keys())
            change = difference_interval(start, part) if is_paired else None
            points.append(EvaluationPoint(step=step, source=source, level=mean_interval(part), change=change))
    return points


def events(run_dir: RunDir, lines: Iterable[Line]) -> list[dict[str, Any]]:
    """Return what metrics.jsonl and events.jsonl say in words, newest last."""
    found = []
    for line in lines:
        for name in _TOLD:
            if isinstance(text := line.get(name), str) and text:
                known = {"resume": f"resumed after step {line['step']}", "ended": f"the run {line.get('state')}"}
                found.append(_event(line, name, known.get(text, text)))
    for each in read_events(run_dir.root / "events.jsonl"):
        times = f" ({each.count:,} times)" if each.count > 1 else ""
        line = {"time": each.time, "role": each.role}
        kind = each.kind if each.level == "info" else each.level
        extra = {name: value for name in ("where", "cause") if (value := getattr(each, name))}
        found.append({**_event(line, kind, f"{each.text}{times}"), **extra})
    found.sort(key=lambda event: event["time"] or 0)
    return found[-_MAX_EVENTS:]


def _event(line: dict[str, Any], kind: str, text: str) -> dict[str, Any]:
    return {
        "time": numeric_field(line, "time"),
        "step": line.get("step"),
        "role": str(line.get("role", "")),
        "kind": kind,
        "text": text[:2000],
    }


def _span(lines: list[Line]) -> list[float] | None:
    times = [value for line in (*lines[:1], *lines[-1:]) if (value := numeric_field(line, "time")) is not None]
    return [times[0], times[-1]] if times else None


def _paid(run_dir: RunDir) -> tuple[Spent, str]:
    """Return the sums of costs.jsonl, and why there are none, or ""."""
    try:
        return spent(run_dir.root / "costs.jsonl"), ""
    except LedgerError as error:
        return Spent(), str(error)


def costs(run_dir: RunDir, paid: Spent) -> dict[str, Any]:
    by_role: defaultdict[str, float] = defaultdict(float)
    for line in read_costs(run_dir.root / "costs.jsonl"):
        if line.get("kind") == "seconds":
            by_role[str(line.get("role"))] += round(numeric_field(line, "seconds") or 0.0, 1)
    return {
        "teacher_usd": paid.usd,
        "teacher_calls": paid.calls,
        "failed_calls": paid.failed,
        "by_teacher": paid.by_teacher,
        "hint_usd": paid.hint_usd,
        "hint_calls": paid.hint_calls,
        "gpu_s": paid.gpu_s,
        "machine_usd": paid.machine_usd,
        "node_usd": sum(node.usd or 0.0 for node in paid.nodes.values()),
        "seconds_by_role": by_role,
        "bytes_by_link": paid.link_bytes,
    }


def joint_rounds(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """Return one entry a round of a joint run, by this cluster's trainer."""
    joined = [line for line in lines if "diloco/outer_step" in line and line.get("role") == "trainer"]
    rounds = []
    for before, line in pairwise([{}, *joined]):
        if line["diloco/outer_step"] == before.get("diloco/outer_step"):
            continue
        peers = {}
        for name in line:
            if name.startswith("diloco/") and name.endswith("/inner_steps") and name.count("/") == 2:
                peers[name.split("/")[1]] = line[name]
        names = ("sync_s", "bytes_sent", "bytes_received", "rejected", "missed_rounds", "sweep", "cosine")
        figures = {name: numeric_field(line, f"diloco/{name}") for name in names}
        rounds.append({"step": line["step"], "round": line["diloco/outer_step"], "peers": peers, **figures})
    return rounds


def _changed(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings that are not at a default."""
    from composer_prime.config.problems import key_defaults, names_of

    defaults = key_defaults()
    keys = {name: ".".join(names_of(name.split("."))) for name in settings}
    return [name for name, key in keys.items() if key not in defaults or settings[name] != defaults[key]]


def _environment(run_dir: RunDir) -> dict[str, Any]:
    try:
        recorded = json.loads((run_dir.root / "environment.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return recorded if isinstance(recorded, dict) else {}


def _rounded(value: float | None) -> float | None:
    """Return six significant digits."""
    if value is None or value - value != 0:
        return None
    return float(f"{value:.12g}" if value > 1e8 else f"{value:.6g}")
