"""`composer rollouts RUN`: list rollouts of a run, filter them, show one turn by turn."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from composer_prime.console import COMPOSER, pluralize, printable
from composer_prime.data.conversation_rows import rollout_row
from composer_prime.errors import ConfigError
from composer_prime.monitor.rollouts import Rollout, failure_text, open_run, read_rollouts, rollout_files
from composer_prime.run.run_dir import RunDir


def main(words: list[str]) -> int:
    options = _parser().parse_args(words)
    run_dir = open_run(options.run)
    if options.id:
        print(printable("\n".join(show(find(run_dir, options.id)))))
        return 0
    chosen = [rollout for rollout in select(run_dir, options) if passes(rollout, options)]
    if options.messages is not None:
        print(export_rows(chosen, options.messages))
        return 0
    shown = chosen[-options.limit :] if options.last else chosen[: options.limit]
    print(printable("\n".join(listing(shown, with_findings=options.hacks))))
    count = f"{len(shown)} of {pluralize(len(chosen), 'rollout')}"
    print(f"{count}; show one with: {COMPOSER} rollouts {options.run} ROLLOUT_ID")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="composer rollouts", description=__doc__)
    parser.add_argument("run", help="run directory")
    parser.add_argument("id", nargs="?", help="show this whole rollout")
    parser.add_argument("--step", type=int, help="only the batch of this step (the newest by default)")
    parser.add_argument("--all", action="store_true", help="every step")
    parser.add_argument("--eval", action="store_true", help="held-out evaluations instead of training")
    parser.add_argument("--source", help="only this source")
    parser.add_argument("--task", help="only tasks whose id contains this")
    parser.add_argument("--min-reward", type=float, help="only rollouts with at least this reward")
    parser.add_argument("--max-reward", type=float, help="only rollouts with at most this reward")
    parser.add_argument("--failed", action="store_true", help="every rollout that failed (it has no reward)")
    parser.add_argument("--tool-errors", action="store_true", help="only rollouts in which a tool call was an error")
    parser.add_argument("--hacks", action="store_true", help="findings of the hack monitor, all steps")
    parser.add_argument("--status", help="only trained, filtered, stale, failed or evaluated ones")
    parser.add_argument("--messages", type=Path, metavar="FILE", help="write all selected ones to FILE as SFT rows")
    parser.add_argument("--limit", type=int, default=20, help="lines of the list (default 20)")
    parser.add_argument("--last", action="store_true", help="the last ones instead of the first")
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
    left_out = len(rollouts) - len(rows)
    return (
        f"{pluralize(len(rows), 'row')} in {file}; {pluralize(left_out, 'rollout')} with branches or failures, or "
        "cut short, left out"
    )


def select(run_dir: RunDir, options: argparse.Namespace) -> Iterator[Rollout]:
    """Yield the rollouts of the chosen step or steps. Raises ConfigError when there is no such file."""
    if options.failed and run_dir.failed_rollouts.is_file():
        yield from _select_failed(run_dir, options)
        return
    kind = "eval" if options.eval else "step"
    files = rollout_files(run_dir, kind)
    if not files:
        raise ConfigError(f"{run_dir.root} has no rollouts of this kind yet ({kind}_*.jsonl)")
    every = options.all or ((options.failed or options.hacks) and options.step is None)
    steps = list(files) if every else [options.step if options.step is not None else max(files)]
    for step in steps:
        if step not in files:
            present = f"steps {min(files)} to {max(files)} ({pluralize(len(files), 'file')})"
            raise ConfigError(f"there is no {kind} file of step {step}; there are {present}")
        yield from read_rollouts(files[step])


def _select_failed(run_dir: RunDir, options: argparse.Namespace) -> list[Rollout]:
    """Return failures by step, from failed.jsonl, which has them before their batch."""
    failed = [
        rollout
        for rollout in read_rollouts(run_dir.failed_rollouts)
        if (rollout.get("group") is None) == options.eval and options.step in (None, rollout.get("step"))
    ]
    return sorted(failed, key=lambda rollout: rollout.get("step") or 0)


def find(run_dir: RunDir, rollout_id: str) -> Rollout:
    """Return the newest rollout with this id. Raises ConfigError when the run has none."""
    paths = [path for kind in ("step", "eval") for path in reversed(rollout_files(run_dir, kind).values())]
    for path in [*paths, run_dir.failed_rollouts]:
        for rollout in read_rollouts(path) if path.is_file() else ():
            if rollout.get("rollout_id") == rollout_id:
                return rollout
    raise ConfigError(
        f"{run_dir.root} has no rollout {rollout_id!r}: list them with {COMPOSER} rollouts {run_dir.root}"
    )


def passes(rollout: Rollout, options: argparse.Namespace) -> bool:
    """Return whether `rollout` passes every filter."""
    reward = rollout.get("reward")
    checks = [
        options.source is None or rollout.get("source") == options.source,
        options.task is None or options.task in str(rollout.get("task_id")),
        options.status is None or rollout.get("status") == options.status,
        options.min_reward is None or (reward is not None and reward >= options.min_reward),
        options.max_reward is None or (reward is not None and reward <= options.max_reward),
        not options.failed or failure_text(rollout) is not None,
        not options.hacks or bool(_findings(rollout)),
        not options.tool_errors or any(turn.get("error") for turn in rollout.get("turns", [])),
    ]
    return all(checks)


def listing(rollouts: list[Rollout], *, with_findings: bool = False) -> list[str]:
    """Return a table with one line a rollout, and below each what the hack monitor found, without mere notes."""
    lines = [f"{'step':>5} {'rollout':<16} {'reward':>7} {'adv':>7} {'turns':>5} {'tokens':>6} {'versions':<9} task"]
    for rollout in rollouts:
        turns = sum(turn.get("role") == "assistant" for turn in rollout.get("turns", []))
        tokens = (rollout.get("cost") or {}).get("sampled_tokens")
        versions = rollout.get("policy_versions")
        note = failure_text(rollout)
        lines.append(
            f"{rollout.get('step', '')!s:>5} {rollout.get('rollout_id', '')!s:<16} {_figure(rollout.get('reward')):>7} "
            f"{_figure(rollout.get('advantage')):>7} {turns:>5} {tokens if tokens is not None else '-':>6} "
            f"{'-'.join(map(str, dict.fromkeys(versions))) if versions else '-':<9} "
            f"{_task(rollout)}{'  FAILED: ' + note[:200] if note else _parts(rollout)}"
        )
        lines += [f"{'':>6}{_finding(each)}" for each in _findings(rollout) if with_findings]
    return lines


def _findings(rollout: Rollout) -> list[dict[str, Any]]:
    findings = (rollout.get("verdict") or {}).get("findings") or []
    return [finding for finding in findings if finding.get("severity") != "note"]


def _finding(finding: dict[str, Any]) -> str:
    return f"{finding.get('severity')} {finding.get('rule')} at {finding.get('place')}: {finding.get('evidence')}"


def show(rollout: Rollout) -> list[str]:
    """Return everything about one rollout: its figures, the tools on offer, the failure, then turn by turn."""
    lines = [f"rollout {rollout.get('rollout_id')}  ({_task(rollout)})"]
    for name in ("step", "status", "reward", "advantage", "parts", "metrics", "policy_versions", "stop_reason", "cost"):
        value = rollout.get(name)
        if value not in (None, {}, []):
            lines.append(f"  {name:<16} {_value(value)}")
    lines += [f"  {'failed':<16} {text}" for text in _failures(rollout)]
    detail = (rollout.get("error") or {}).get("detail")
    lines += [f"    {line}" for line in str(detail).splitlines()] if detail else []
    lines += [
        f"  {'monitor':<16} {_finding(finding)}" for finding in (rollout.get("verdict") or {}).get("findings") or []
    ]
    lines += [f"  {'tool' if index == 0 else '':<16} {text}" for index, text in enumerate(_tools(rollout))]
    for index, turn in enumerate(rollout.get("turns", [])):
        count, error, text = turn.get("token_count"), turn.get("error"), str(turn.get("text") or "")
        is_failed_call = bool(error) and text.lstrip().startswith(str(error))  # The text says it in full.
        notes = [f"{count} tokens"] if count else []
        notes += ["a failed call"] if is_failed_call else []
        lines += ["", f"[{index}] {', '.join([str(turn.get('role')), *notes])}"]
        lines += [f"    {line}" for line in text.splitlines()]
        lines += [f"    -> {call.get('name')}({call.get('arguments')})" for call in turn.get("tool_calls") or []]
        lines += [f"    error: {error}"] if error and not is_failed_call else []
        lines += [f"    hint: {turn['hint']}"] if turn.get("hint") else []
    return lines


def _failures(rollout: Rollout) -> Iterator[str]:
    """Yield each failure of the rollout and of its earlier tries, equal ones once with their number."""
    failures = [*(rollout.get("failed_attempts") or []), rollout.get("error")]
    counted = Counter(text for failure in failures if (text := failure_text({"error": failure})))
    for text, count in counted.items():
        yield text if count == 1 else f"{count} x {text}"


def _tools(rollout: Rollout) -> Iterator[str]:
    """Yield `name(parameter: type, optional?: type)  description` for each tool on offer."""
    for tool in rollout.get("tools") or []:
        function = tool.get("function") or tool
        schema = function.get("parameters") or {}
        required = schema.get("required") or []
        parameters = ", ".join(
            f"{name}{'' if name in required else '?'}: {each.get('type', 'any') if isinstance(each, dict) else 'any'}"
            for name, each in (schema.get("properties") or {}).items()
        )
        first_line = next(iter(str(function.get("description") or "").splitlines()), "")
        yield f"{function.get('name')}({parameters})  {first_line}".rstrip()


def _value(value: Any) -> str:
    """Return a figure, or the figures of a table, as text for people."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_value(each)}" for name, each in value.items() if each is not None)
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _task(rollout: Rollout) -> str:
    source, task = str(rollout.get("source")), str(rollout.get("task_id"))
    return task if task.startswith(f"{source}/") else f"{source}/{task}"


def _parts(rollout: Rollout) -> str:
    parts = rollout.get("parts") or {}
    return "  " + ", ".join(f"{name} {_figure(value)}" for name, value in parts.items()) if len(parts) > 1 else ""


def _figure(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else "-"
