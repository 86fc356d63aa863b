"""A hint for a compiler error: python examples/own_hint.py

Hints come from templates: a pattern that is searched in a tool's answer, and a text with fields. own_hint.toml adds two
for compiler errors. This file shows what they find. A run uses them with

    uv run trainer @ configs/a2.toml @ examples/own_hint.toml
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from orchestrator.hints.generate import ErrorTurn, Templates

TABLES = tomllib.loads(Path(__file__).with_name("own_hint.toml").read_text())["orchestrator"]["hints"]["template"]
ANSWERS = [
    "main.c:7:5: error: use of undeclared identifier 'total'\n    total += x;\n    ^\n1 error generated.",
    "src/lib.rs:3: error: expected `;`, found `}`",
    "error[E0425]: cannot find value `count` in this scope\n --> src/main.rs:9:13",
    "0 errors, 0 warnings",
]


def hint_for(answer: str, templates: Templates) -> tuple[str, str] | None:
    """Return (kind of error, hint) for a tool's answer; None when no template finds an error in it."""
    kind = templates.detected(answer, {"exception", "test_failure"})
    if kind is None:
        return None
    hint = templates.fill(ErrorTurn(message=1, turn=0, kind=kind, text=answer, tool="bash"))
    return None if hint is None else (kind, hint)


def main() -> None:
    templates = Templates.load(TABLES)
    for answer in ANSWERS:
        print(answer.splitlines()[0], "\n   ->", hint_for(answer, templates))


if __name__ == "__main__":
    main()
