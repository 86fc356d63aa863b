"""`composer rollouts RUN`: list rollouts of a run, filter them, show one turn by turn."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from composer_prime.errors import ConfigError
from composer_prime.monitor.rollouts import Rollout, failure_text, open_run, read_rollouts, rollout_files
from composer_prime.run.run_dir import RunDir


def main(words: list[str]) -> int:
    options = _parser().parse_args(words)
    run_dir = open_run(options.run)
    if options.id:
        print("\n".join(show(find(run_dir, options.id))))
        return 0
    chosen = [rollout for rollout in select(run_dir, options) if passes(rollout, options)]
    shown = chosen[-options.limit :] if options.last else chosen[: options.limit]
    print("\n".join(listing(shown)))
    print(f"{len(shown)} of {len(chosen)} rollouts; show one with: composer rollouts {options.run} ROLLOUT_ID")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="composer rollouts", description=__doc__)
    parser.add_argument("run", help="run directory")
    parser.add_argument("id", nargs="?", help="show this rollout whole")
    parser.add_argument("--step", type=int, help="only the batch of this step (the newest by default)")
    parser.add_argument("--all", action="store_true", help="every step")
    parser.add_argument("--eval", action="store_true", help="held-out evaluations instead of training")
    parser.add_argument("--source", help="only this source")
    parser.add_argument("--task", help="only tasks whose id contains this")
    parser.add_argument("--min-reward", type=float, help="only rollouts with at least this reward")
    parser.add_argument("--max-reward", type=float, help="only rollouts with at most this reward")
    parser.add_argument("--failed", action="store_true", help="only rollouts that failed (they have no reward)")
    parser.add_argument("--tool-errors", action="store_true", help="only rollouts in which a tool call was an error")
    parser.add_argument("--status", help="only trained, filtered, stale, failed or evaluated ones")
    parser.add_argument("--limit", type=int, default=20, help="lines of the list (default 20)")
    parser.add_argument("--last", action="store_true", help="the last ones instead of the first")
    return parser


def select(run_dir: RunDir, options: argparse.Namespace) -> Iterator[Rollout]:
    """Yield the rollouts of the chosen step or steps. Raises ConfigError when there is no such file."""
    kind = "eval" if options.eval else "step"
    files = rollout_files(run_dir, kind)
    if not files:
        raise ConfigError(f"{run_dir.root} has no rollouts of this kind yet ({kind}_*.jsonl)")
    steps = list(files) if options.all else [options.step if options.step is not None else max(files)]
    for step in steps:
        if step not in files:
            present = f"steps {min(files)} to {max(files)} ({len(files)} files)"
            raise ConfigError(f"there is no {kind} file of step {step}; there are {present}")
        yield from read_rollouts(files[step])


def find(run_dir: RunDir, rollout_id: str) -> Rollout:
    """Return the newest rollout with this id. Raises ConfigError when the run has none."""
    for kind in ("step", "eval"):
        for path in reversed(rollout_files(run_dir, kind).values()):
            for rollout in read_rollouts(path):
                if rollout.get("rollout_id") == rollout_id:
                    return rollout
    raise ConfigError(f"{run_dir.root} has no rollout {rollout_id!r}: list them with composer rollouts {run_dir.root}")


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
        not options.tool_errors or any(turn.get("error") for turn in rollout.get("turns", [])),
    ]
    return all(checks)


def listing(rollouts: list[Rollout]) -> list[str]:
    """Return a table with one line a rollout."""
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
            f"{_task(rollout)}{'  FAILED: ' + note[:80] if note else _parts(rollout)}"
        )
    return lines


def show(rollout: Rollout) -> list[str]:
    """Return everything about one rollout, turn by turn."""
    lines = [f"rollout {rollout.get('rollout_id')}  ({_task(rollout)})"]
    for name in ("step", "status", "reward", "advantage", "parts", "metrics", "policy_versions", "stop_reason", "cost"):
        value = rollout.get(name)
        if value not in (None, {}, []):
            lines.append(f"  {name:<16} {value}")
    failure = failure_text(rollout)
    if failure:
        lines.append(f"  {'failed':<16} {failure}")
    for index, turn in enumerate(rollout.get("turns", [])):
        count = turn.get("token_count")
        lines += ["", f"[{index}] {turn.get('role')}{f', {count} tokens' if count else ''}"]
        text = str(turn.get("text") or "")
        lines += [f"    {line}" for line in text.splitlines()]
        lines += [f"    -> {call.get('name')}({call.get('arguments')})" for call in turn.get("tool_calls") or []]
        lines += [f"    {kind}: {turn[kind]}" for kind in ("error", "hint") if turn.get(kind)]
    return lines


def _task(rollout: Rollout) -> str:
    source, task = str(rollout.get("source")), str(rollout.get("task_id"))
    return task if task.startswith(f"{source}/") else f"{source}/{task}"


def _parts(rollout: Rollout) -> str:
    parts = rollout.get("parts") or {}
    return "  " + ", ".join(f"{name} {_figure(value)}" for name, value in parts.items()) if len(parts) > 1 else ""


def _figure(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else "-"
