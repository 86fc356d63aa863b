"""Tasks that ask for one function: HumanEval and MBPP records.

Tests of a record import the asked functions from solution.py by name, and nothing else of a solution. Helper functions
of a HumanEval prompt that its test calls come from the prompt. Each assertion of MBPP is a test of its own, for partial
credit.
"""

from __future__ import annotations

import ast
import builtins
import re
import warnings
from typing import Any

from composer_prime.errors import ConfigError
from orchestrator.coding.formats.task_files import Record
from orchestrator.coding.task import CodeTask

SOLUTION = "solution.py"
_TESTS = "test_solution.py"
_TIMEOUT_S = 30.0
_INDENT = "    "


def human_eval_task(record: Record) -> CodeTask:
    """Return the task of a record with prompt, test, entry_point and maybe canonical_solution. Raises ConfigError."""
    prompt, name = record.text("prompt"), record.text("entry_point")
    helpers = [
        ast.unparse(node)
        for node in _parse(record, "prompt", prompt).body
        if not (isinstance(node, ast.FunctionDef) and node.name == name)
    ]
    test = record.text("test")
    if not any(
        isinstance(node, ast.FunctionDef) and node.name == "check" for node in _parse(record, "test", test).body
    ):
        raise ConfigError(f"{record.place}: its 'test' does not define check(candidate), which HumanEval's form needs")
    body = [
        "import random",
        *helpers,
        test.strip(),
        f"def test_{name}():\n"
        f"{_INDENT}global {name}\n"  # Some tests call it by its own name.
        f"{_INDENT}from solution import {name}\n\n"
        f"{_INDENT}random.seed(0)\n"
        f"{_INDENT}check({name})",
    ]
    solution = record.values.get("canonical_solution")
    asked = f"Complete the function `{name}` in {SOLUTION}. It must do what its docstring says."
    return CodeTask(
        id=record.text("task_id", "name"),
        repository="human-eval",
        prompt=f"{asked}\n\n```python\n{prompt.strip()}\n```",
        start={SOLUTION: prompt},
        solution={SOLUTION: prompt + solution} if isinstance(solution, str) else {},
        symbols=[name],
        source=record.place,
        **_grading(body, [f"test_{name}"]),
    )


def mbpp_task(record: Record) -> CodeTask:
    """Return the task of a record with text or prompt, test_list and maybe code. Raises ConfigError.

    The prompt shows the first assertion, which names the function.
    """
    assertions = [assertion.strip() for assertion in record.texts("test_list")]
    if not assertions:
        raise ConfigError(f"{record.place}: its 'test_list' is empty; an MBPP task needs one assertion or more")
    text = record.text("text", "prompt")
    setup = [line for line in record.values.get("test_imports") or [] if isinstance(line, str)]
    setup.append(record.values.get("test_setup_code") or "")
    known = _defined_names(_parse(record, "test_setup_code", "\n".join(setup)))
    solution = record.values.get("code")
    # A problem may ask for a function that is named as a builtin.
    hidden = set(dir(builtins)) - (_defined_functions(solution) if isinstance(solution, str) else set())
    tests = []
    for number, assertion in enumerate(assertions, start=1):
        names = sorted(_used_names(_parse(record, "test_list", assertion)) - known - hidden)
        lines = [f"from solution import {', '.join(names)}", *assertion.splitlines()] if names else [assertion]
        tests.append(f"def test_{number}():\n" + "\n".join(_INDENT + line for line in lines))
    return CodeTask(
        id=f"mbpp/{record.text('task_id')}",
        repository="mbpp",
        prompt=f"{text.strip()}\n\nWrite it in {SOLUTION}.\nFor example:\n\n```python\n{assertions[0]}\n```",
        solution={SOLUTION: solution.replace("\r\n", "\n")} if isinstance(solution, str) else {},
        source=record.place,
        **_grading([*filter(None, setup), *tests], [f"test_{number}" for number in range(1, len(tests) + 1)]),
    )


def with_reply(task: CodeTask, reply: str) -> dict[str, bytes]:
    """Return the files that a reply in words makes: its last Python block, or all of it where it has none.

    A block that defines an asked function goes before later ones. One without it continues what the task gave.
    """
    names = task.symbols
    fences = re.findall(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:```|\Z)", reply, re.DOTALL)
    blocks = [code for language, code in fences if language.lower() in ("", "python", "py", "python3")]
    defining = [code for code in blocks if any(_defines(code, name) for name in names)]
    code = (defining or blocks or [reply])[-1]
    given = task.start.get(SOLUTION, "")
    if given and not all(_defines(code, name) for name in names):
        # Chat templates strip replies, and with them the first line's indentation.
        code = next((given + text for text in (code, _INDENT + code) if _is_python(given + text)), given + code)
    return {SOLUTION: code.encode("utf-8", "replace")}


def _defines(code: str, name: str) -> bool:
    return re.search(rf"^(?:async )?def {re.escape(name)}\b", code, re.MULTILINE) is not None


def _grading(test_parts: list[str], tests: list[str]) -> dict[str, Any]:
    """Return what tasks have in common whose solution is one file."""
    return {
        "kind": "write",
        "editable": [SOLUTION],
        "tests": [_TESTS],
        "test_files": {_TESTS: "\n\n\n".join(test_parts) + "\n"},
        "fail_to_pass": [f"{_TESTS}::{test}" for test in tests],
        "pass_to_pass": [],
        "timeout_s": _TIMEOUT_S,
    }


def _is_python(code: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(code, SOLUTION, "exec")  # ast.parse takes a `return` outside of functions.
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _parse(record: Record, field: str, code: str) -> ast.Module:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{record.place}: its {field!r} is not valid Python: {error}") from None


def _used_names(tree: ast.Module) -> set[str]:
    """Return the names that a statement reads and does not bind itself."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    bound = {node.id for node in names if isinstance(node.ctx, ast.Store)} | {
        node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)
    }
    return {node.id for node in names} - bound


def _defined_functions(code: str) -> set[str]:
    """Return the functions that a solution defines; none if it is not valid Python."""
    body = ast.parse(code).body if _is_python(code) else []
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def _defined_names(tree: ast.Module) -> set[str]:
    defined = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
    return defined
