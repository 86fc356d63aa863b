"""python -m infra.tiny_code.native FOLDER: what configs/code/native.toml needs.

FOLDER/repository    a package of small functions with tests, for `composer tasks make`
FOLDER/rows.jsonl    their like, written by way of Claude Code, for SFT; no row has a template of the repository
"""

import argparse
import ast
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.micro_code.grammar import DefectiveFunction, Split, draw_function
from orchestrator.coding.factory.factory import deletion_prompt
from orchestrator.coding.factory.source import find_functions

MODULE, STUB = "steps/steps.py", "    raise NotImplementedError"
TOOL = {"type": "function", "function": {"name": "Bash", "parameters": {"type": "object", "properties": {}}}}
"""The chat template of native.toml writes names only."""


def functions(split: Split, count: int, seed: int) -> Iterator[DefectiveFunction]:
    """Yield functions of numbers and lists, whose lines have no quotes, and whose values are no exceptions."""
    rng = random.Random(f"native/{split}/{seed}")
    while count:
        function = draw_function(seed=rng.getrandbits(53), difficulty=1, split=split)
        if function.family != "text" and all(map(_is_value, [*function.tests, *function.hidden])):
            count -= 1
            yield function


def _is_value(test: tuple[str, str]) -> bool:
    try:
        ast.literal_eval(test[1])
    except ValueError:
        return False
    return True


def named(function: DefectiveFunction, name: str) -> str:
    head, *body = function.lines
    return "\n".join([head.replace("f(", f"{name}(", 1), f'    """{function.request}"""', *body])


def write_repository(folder: Path, drawn: list[DefectiveFunction]) -> None:
    sources, tests = ['"""Small functions."""'], ["from steps import steps"]
    for number, function in enumerate(drawn):
        sources.append(named(function, f"f{number}"))
        for case, (call, value) in enumerate([*function.tests, *function.hidden]):
            called = call.replace("f", f"steps.f{number}", 1)
            tests.append(f"def test_f{number}_{case}():\n    assert {called} == {value}")
    for path, parts in {MODULE: sources, "tests/test_steps.py": tests, "steps/__init__.py": []}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("\n\n\n".join(parts) + "\n")


def conversation(function: DefectiveFunction, name: str) -> dict[str, Any]:
    """Return the row of a function that one command writes."""
    (place,) = find_functions(MODULE, named(function, name) + "\n")
    question = [*deletion_prompt([place]), "Change the sources only. The tests stay as they are."]
    body = "\\n".join(function.lines[1:])
    arguments = json.dumps({"command": f"sed -i 's|{STUB}|{body}|' {MODULE}"})
    call = {"id": "call_0", "type": "function", "function": {"name": "Bash", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "\n\n".join(question)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": "(Bash completed with no output)"},
        {"role": "assistant", "content": "done"},
    ]
    return {"messages": messages, "tools": [TOOL]}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m infra.tiny_code.native", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--functions", type=int, default=32, help="of the repository")
    parser.add_argument("--rows", type=int, default=768)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write_repository(options.folder / "repository", list(functions("eval", options.functions, options.seed)))
    rows = [
        conversation(function, f"f{number % options.functions}")
        for number, function in enumerate(functions("train", options.rows, options.seed))
    ]
    (options.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
