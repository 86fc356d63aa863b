"""report.html: a run in one file that opens without a server.

The JSON and the JavaScript are those of the live page, joined into one script. The policy allows exactly that script
and that style, by hash.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from composer_prime.run.run_dir import RunDir, write_atomic
from composer_prime.view.catalog import FoundRun
from composer_prime.view.rollout_index import RolloutIndex
from composer_prime.view.rollout_payload import evaluation_difference, public, read_evaluations, with_tasks
from composer_prime.view.run_payload import run_payload
from composer_prime.view.server import ASSETS

NAME = "report.html"
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([a-z]+\.js)";\n', re.MULTILINE)


def report_page(run_dir: RunDir, state: str | None = None) -> str:
    """Return the report of one run as HTML. `state`: how it ended, for a launcher that lives."""
    index = RolloutIndex(run_dir)
    evaluations = read_evaluations(index)
    found = FoundRun(run_id=run_dir.root.resolve().name, run_dir=run_dir, joint=None)
    run = run_payload(found, evaluations)
    data = {
        # The full path is of no use elsewhere.
        "run": run | {"folder": found.run_id, "state": state or run["state"]},
        "chosen": chosen_rollouts(index),
        "evaluation": with_tasks(evaluation_difference(evaluations, None, None), index),
        "written": time.time(),
        "version": version("composer-prime"),
    }
    return page(f"{found.run_id}: {run['verdict']['text']}", data)


def write_report(run_dir: RunDir, path: Path | None = None, state: str | None = None) -> Path:
    """Write the report to `path`, by default into the run directory, and return it. Raises OSError."""
    target = path or run_dir.root / NAME
    write_atomic(target, report_page(run_dir, state).encode())
    return target


def page(title: str, data: dict[str, Any]) -> str:
    style, script = (ASSETS / "style.css").read_text(), joined_script("report.js")
    text = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    sources = f"script-src {_hash(script)}; style-src {_hash(style)}"
    policy = f"default-src 'none'; {sources}; img-src data:; base-uri 'none'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{html.escape(title)}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<header id="bar"></header>
<main id="main"><p>{html.escape(title)}</p></main>
<script type="application/json" id="data">{text}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def joined_script(entry: str) -> str:
    """Return module `entry` and all that it imports as one script; their top-level names are all different."""
    order: list[str] = []

    def add(name: str) -> None:
        text = (ASSETS / name).read_text()
        for needed in _IMPORT.findall(text):
            if needed not in order:
                add(needed)
        if name not in order:
            order.append(name)

    add(entry)
    parts = [_IMPORT.sub("", (ASSETS / name).read_text()) for name in order]
    return "\n".join(re.sub(r"^export ", "", part, flags=re.MULTILINE) for part in parts)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def chosen_rollouts(index: RolloutIndex) -> list[dict[str, Any]]:
    """Return up to three rollouts, and why, of the last evaluation or else batch."""
    rows = _last_scored(index, "eval") or _last_scored(index, "step")
    if not rows:
        return []
    middle = median(row["tokens"] or 0 for row in rows)
    level = median(row["reward"] for row in rows)
    ranked = {
        "best": min(rows, key=lambda row: (-row["reward"], row["tool_errors"], row["tokens"] or 0)),
        "typical": min(rows, key=lambda row: (abs(row["reward"] - level), abs((row["tokens"] or 0) - middle))),
        "worst": min(rows, key=lambda row: (row["reward"], -row["tool_errors"], -(row["tokens"] or 0))),
    }
    chosen = []
    for why, row in ranked.items():
        if all(row is not earlier for _, earlier, _ in chosen) and (rollout := index.read(row)):
            chosen.append((why, row, rollout))
    return [{"why": why, "entry": public(row), "rollout": rollout} for why, row, rollout in chosen]


def _last_scored(index: RolloutIndex, kind: str) -> list[dict[str, Any]]:
    rows = index.entries(kind)
    scored = [row for row in rows if row["step"] == rows[0]["step"] and row["reward"] is not None]
    return sorted(scored, key=lambda row: row["rollout_id"] or "")
