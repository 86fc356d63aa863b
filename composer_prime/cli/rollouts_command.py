"""List rollouts of a run, or show one turn by turn: `composer rollouts RUN [ID]`."""

from __future__ import annotations

import argparse
import json
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from composer_prime.console import COMPOSER, columns, fitted, pluralize, printable
from composer_prime.data.conversation_rows import rollout_row
from composer_prime.errors import ConfigError
from composer_prime.monitor.rollouts import Rollout, failure_text, open_run, task_text
from composer_prime.view.rollout_index import Entry, RolloutIndex
from composer_prime.view.rollout_payload import passes

_FIGURES = ("step", "status", "reward", "advantage", "parts", "metrics", "policy_versions", "stop_reason", "cost")


def main(words: list[str]) -> int:
    options = _parser().parse_args(words)
    run_dir = open_run(options.run)
    index = RolloutIndex(run_dir)
    if options.id:
        print(printable("\n".join(show(find(index, options.id)))))
        return 0
    chosen = select(index, options)
    if options.messages is not None:
        picked = [rollout for entry in chosen if (rollout := index.read(entry))]
        print(export_rows(picked, options.messages))
        return 0
    shown = chosen[: options.limit]
    lines = [f"{'step':>5} {'rollout':<16} {'reward':>7} {'adv':>7} {'turns':>5} {'tokens':>6} {'versions':<9} task"]
    for entry in shown:
        lines.append(listed(entry))
        rollout = (index.read(entry) if options.hacks else None) or {}
        lines += [f"{'':>6}{_finding(each)}" for each in _findings(rollout) if each.get("severity") != "note"]
    print("\n".join(fitted(printable(line), 6, columns()) for line in lines))
    steps = sorted({entry["step"] for entry in chosen})
    of_step = f" of step {steps[0]}" if len(steps) == 1 else ""
    count = f"{len(shown)} of {pluralize(len(chosen), 'rollout')}{of_step}"
    print(f"{count}; show one with: {COMPOSER} rollouts {shlex.quote(options.run)} ROLLOUT_ID")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="composer rollouts", description=__doc__)
    parser.add_argument("run", help="run directory")
    parser.add_argument("id", nargs="?", help="show this whole rollout")
    parser.add_argument("--step", type=int, help="only the batch of this step (the newest by default)")
    parser.add_argument("--all", action="store_true", help="every step")
    parser.add_argument("--eval", action="store_true", help="held-out evaluations instead of training")
    parser.add_argument("--task", default="", help="only tasks whose id contains this")
    parser.add_argument("--min-reward", type=float, help="only rollouts with at least this reward")
    parser.add_argument("--failed", action="store_true", help="failed rollouts, which have no reward")
    parser.add_argument("--hacks", action="store_true", help="findings of the hack monitor, all steps")
    parser.add_argument("--messages", type=Path, metavar="FILE", help="write the selected ones as SFT rows")
    parser.add_argument("--limit", type=int, default=20, help="lines of the list (default 20)")
    return parser


def export_rows(rollouts: list[Rollout], file: Path) -> str:
    """Write `rollouts` as JSON Lines of messages and return what was written. Raises ConfigError."""
    rows = [row for rollout in rollouts if (row := rollout_row(rollout)) is not None]
    if not rows:
        raise ConfigError(
            f"none of {pluralize(len(rollouts), 'chosen rollout')} can be a row: choose others, see --help"
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    except OSError as error:
        raise ConfigError(f"--messages {file} cannot be written: {error.strerror}") from None
    left_out = pluralize(len(rollouts) - len(rows), "rollout")
    return f"{pluralize(len(rows), 'row')} in {file}; {left_out} branched, failed or cut short, left out"


def select(index: RolloutIndex, options: argparse.Namespace) -> list[Entry]:
    """Return the chosen entries, the newest first. Raises ConfigError."""
    kind = "eval" if options.eval else "step"
    entries = _failed(index, kind) if options.failed else index.entries(kind)
    query = {"step": _step(entries, options), "task": options.task, "min": options.min_reward}
    texts = {name: str(value) for name, value in query.items() if value is not None}
    found = [entry for entry in entries if passes(entry, texts)]
    return [entry for entry in found if not options.hacks or entry["verdict"] in ("hack", "suspicious")]


def _step(entries: list[Entry], options: argparse.Namespace) -> int | None:
    """Return the step whose rollouts are listed; None for all. Raises ConfigError for an empty one."""
    if options.failed or (options.step is None and (options.all or options.hacks)):
        return options.step
    steps = [entry["step"] for entry in entries]
    step = options.step if options.step is not None else max(steps, default=0)
    if step not in steps:
        present = f"steps {min(steps)} to {max(steps)}" if steps else "none"
        raise ConfigError(f"{options.run} has no such rollouts of step {step}; there are {present}")
    return step


def _failed(index: RolloutIndex, kind: str) -> list[Entry]:
    """Return the failed rollouts of `kind`; failed.jsonl has them before their step's batch."""
    failed = [entry for entry in index.entries("failed") if (entry["grp"] is None) == (kind == "eval")]
    return failed or [entry for entry in index.entries(kind) if entry["error"]]


def find(index: RolloutIndex, rollout_id: str) -> Rollout:
    """Return the newest rollout with this id. Raises ConfigError."""
    for kind in ("step", "eval", "failed"):
        for entry in index.entries(kind):
            if entry["rollout_id"] == rollout_id and (rollout := index.read(entry)):
                return rollout
    raise ConfigError(f"there is no rollout {rollout_id!r}: leave it out to list them")


def listed(entry: Entry) -> str:
    tokens = "-" if entry["tokens"] is None else entry["tokens"]
    found = dict.fromkeys((entry["version_min"], entry["version_max"]))
    versions = "-".join(str(each) for each in found if each is not None) or "-"
    text = f"  FAILED: {entry['error'][:200]}" if entry["error"] else f"  {task_text(entry)}".rstrip()
    return (
        f"{entry['step'] or 0:>5} {entry['rollout_id'] or '':<16} {_figure(entry['reward']):>7} "
        f"{_figure(entry['advantage']):>7} {entry['turns']:>5} {tokens:>6} {versions:<9} {_task(entry)}{text}"
    )


def _findings(rollout: Rollout) -> list[dict[str, Any]]:
    return (rollout.get("verdict") or {}).get("findings") or []


def _finding(finding: dict[str, Any]) -> str:
    return f"{finding.get('severity')} {finding.get('rule')} at {finding.get('place')}: {finding.get('evidence')}"


def show(rollout: Rollout) -> list[str]:
    """Return everything about one rollout: figures, tools, failures, then turn by turn."""
    shown = {name: value for name in (*_FIGURES, "expected") if (value := rollout.get(name)) not in (None, {}, [])}
    lines = [f"rollout {rollout.get('rollout_id')}  ({_task(rollout)})"]
    lines += [f"  {name:<16} {_value(value)}" for name, value in shown.items()]
    lines += [f"  {'failed':<16} {text}" for text in _failures(rollout)]
    lines += [f"    {line}" for line in str((rollout.get("error") or {}).get("detail") or "").splitlines()]
    lines += [f"  {'monitor':<16} {_finding(finding)}" for finding in _findings(rollout)]
    lines += [f"  {'' if index else 'tool':<16} {text}" for index, text in enumerate(_tools(rollout))]
    for index, turn in enumerate(rollout.get("turns", [])):
        lines += ["", *_turn(index, turn)]
    return lines


def _turn(index: int, turn: dict[str, Any]) -> Iterator[str]:
    """Yield a message: text, calls, error and hint. A failed call's text says its error."""
    count, error, text = turn.get("token_count"), turn.get("error"), str(turn.get("text") or "")
    is_failed_call = bool(error) and text.lstrip().startswith(str(error))
    notes = [f"{count} tokens"] if count else []
    notes += ["a failed call"] if is_failed_call else []
    yield f"[{index}] {', '.join([str(turn.get('role')), *notes])}"
    yield from (f"    {line}" for line in text.splitlines())
    yield from (f"    -> {call.get('name')}({call.get('arguments')})" for call in turn.get("tool_calls") or [])
    if error and not is_failed_call:
        yield f"    error: {error}"
    if turn.get("hint"):
        yield f"    hint: {turn['hint']}"


def _failures(rollout: Rollout) -> Iterator[str]:
    """Yield each failure of the rollout and its earlier tries, equal ones once with their number."""
    failures = [*(rollout.get("failed_attempts") or []), rollout.get("error")]
    counted = Counter(text for failure in failures if (text := failure_text({"error": failure})))
    for text, count in counted.items():
        yield text if count == 1 else f"{count} x {text}"


def _tools(rollout: Rollout) -> Iterator[str]:
    """Yield `name(parameter, optional?)  description` for each tool on offer."""
    for tool in rollout.get("tools") or []:
        function = tool.get("function") or tool
        schema = function.get("parameters") or {}
        required = schema.get("required") or []
        names = schema.get("properties") or {}
        parameters = ", ".join(f"{name}{'' if name in required else '?'}" for name in names)
        first_line = next(iter(str(function.get("description") or "").splitlines()), "")
        yield f"{function.get('name')}({parameters})  {first_line}".rstrip()


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_value(each)}" for name, each in value.items() if each is not None)
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _task(rollout: Rollout | Entry) -> str:
    source, task = str(rollout.get("source")), str(rollout.get("task_id"))
    return task if task.startswith(f"{source}/") else f"{source}/{task}"


def _figure(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else "-"
