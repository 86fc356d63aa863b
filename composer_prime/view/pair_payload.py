"""The preference pairs of a run, a page of them at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from composer_prime.run.run_dir import RunDir

_PAGE = 25
_EMBEDDED = Path(__file__).parent.parent / "assets" / "tiny" / "pairs.jsonl"
_MAX_LINE_BYTES = 4_000_000


def pair_list(run_dir: RunDir, settings: dict[str, Any], offset: int) -> dict[str, Any]:
    """Return _PAGE pairs from the `offset`-th on, and how many there are. A file that is not there has none."""
    path = _pairs_file(run_dir, settings)
    pairs: list[dict[str, Any]] = []
    total = 0
    try:
        with path.open("rb") as file:
            for raw in file:
                if not raw.strip():
                    continue
                if offset <= total < offset + _PAGE and len(raw) <= _MAX_LINE_BYTES and (pair := _pair(raw)):
                    pairs.append(pair)
                total += 1
    except OSError:
        return {"pairs": [], "total": 0, "offset": 0, "file": None}
    return {"pairs": pairs, "total": total, "offset": offset, "file": path.name, "page": _PAGE}


def _pairs_file(run_dir: RunDir, settings: dict[str, Any]) -> Path:
    """Return the run's own pairs.jsonl, or the one that ships with the tiny model where the run trained on that."""
    own = run_dir.root / "pairs.jsonl"
    if own.is_file():
        return own
    table = settings.get("orchestrator")
    preferences = table.get("preferences") if isinstance(table, dict) else None
    named = preferences.get("pairs") if isinstance(preferences, dict) else None
    return _EMBEDDED if named == "tiny" else own


def _pair(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict):
        return None
    state = line.get("state")
    messages = state.get("messages") if isinstance(state, dict) else []
    return {
        "trace": line.get("trace"),
        "messages": messages[-4:] if isinstance(messages, list) else [],
        "earlier": max(0, len(messages) - 4) if isinstance(messages, list) else 0,
        **{name: line.get(name) for name in ("chosen", "rejected", "epsilon", "teachers", "cost_usd", "density")},
    }
