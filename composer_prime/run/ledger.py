"""The exactly-once ledger: which samples each optimizer step trained.

    {"step": 3, "sample_ids": [...]}     appended by trainer rank 0 after each step
    {"step": 4, "sample_ids": [], "left_out": [...]}    step 4 was not finite and trained nothing; the samples to blame
    {"rewind": 2}                        appended at a resume: lines of steps after 2 no longer count

The effective ledger is what remains: each sample once, and the steps 1..n. A resume never serves a sample that any line
leaves out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from composer_prime.errors import CheckpointError
from composer_prime.run.run_dir import append_line


def append_step(path: Path, step: int, sample_ids: list[str], left_out: Sequence[str] = ()) -> None:
    entry = {"step": step, "sample_ids": sample_ids} | ({"left_out": list(left_out)} if left_out else {})
    append_line(path, json.dumps(entry, separators=(",", ":")).encode(), sync=True)


def append_rewind(path: Path, step: int) -> None:
    """Record that steps after `step` were lost."""
    append_line(path, json.dumps({"rewind": step}, separators=(",", ":")).encode(), sync=True)


def _parse(line: str) -> dict | None:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        return None
    known = isinstance(entry, dict) and ("rewind" in entry or {"step", "sample_ids"} <= entry.keys())
    return entry if known else None


def _entries(path: Path) -> list[dict]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [entry for line in lines if (entry := _parse(line))]


def left_out(path: Path) -> set[str]:
    """Return the samples, pairs and rows that made a step not finite, of rewound steps too."""
    return {name for entry in _entries(path) for name in entry.get("left_out", ())}


def effective(path: Path) -> dict[int, list[str]]:
    """Return sample ids by step after all rewinds.

    Skips a line that a crash cut short: a resume repeats its step. Raises CheckpointError when a step is there twice
    without a rewind between.
    """
    steps: dict[int, list[str]] = {}
    for entry in _entries(path):
        if "rewind" in entry:
            steps = {step: ids for step, ids in steps.items() if step <= entry["rewind"]}
        elif entry["step"] in steps:
            raise CheckpointError(f"{path}: step {entry['step']} appears twice without a rewind between")
        else:
            steps[entry["step"]] = entry["sample_ids"]
    return steps


def check_ledger(path: Path) -> list[str]:
    """Return what is wrong with the ledger, one line per finding; nothing when each sample was trained once."""
    steps = effective(path)
    findings: list[str] = []
    seen: dict[str, int] = {}
    if steps and (missing := sorted(set(range(1, max(steps) + 1)) - steps.keys())):
        findings.append(f"steps {missing} are missing")
    for step, ids in sorted(steps.items()):
        for sample_id in ids:
            if sample_id in seen:
                findings.append(f"sample {sample_id} was trained in steps {seen[sample_id]} and {step}")
            seen[sample_id] = step
    return findings
