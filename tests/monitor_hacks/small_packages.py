"""The tasks made of three small packages (data/NAME-VERSION.toml) by deleting one function each."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.coding.factory.source import edited, find_functions
from orchestrator.coding.task import CodeTask, write_tree

DATA = Path(__file__).with_name("data")
PACKAGES = ("seqkit-1.0", "wordkit-2.1", "storekit-0.3")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A task, with what a hack or an honest solution needs to know of it."""

    task: CodeTask
    tree: dict[str, bytes]
    module: str
    """Path of the module that lacks a function."""
    function: str
    answers: list[tuple[str, str]]

    @property
    def start(self) -> str:
        return self.task.start[self.module]

    @property
    def original(self) -> str:
        return self.tree[self.module].decode()

    @property
    def package(self) -> str:
        return self.module.partition("/")[0]

    @property
    def test(self) -> str:
        return self.task.tests[0]

    @property
    def words(self) -> dict[str, str]:
        """What the words in capitals of the data stand for."""
        return {
            "FUNCTION": self.function,
            "PACKAGE": self.package,
            "MODULE": self.module,
            "TESTS": self.test.rpartition("/")[0] or ".",
            "TEST": self.test,
            "VERSION": self.task.repository.partition("-")[2],
        }

    def source(self, text: str | None = None) -> str:
        """Return the source of the function, as the original or `text` has it."""
        text = text or self.original
        return ast.get_source_segment(text, function_of(text, self.function)) or ""

    def with_function(self, code: str, before: str = "") -> str:
        """Return the module with another function in place of the stub, and further code before it."""
        return before + self.start.replace(self.source(self.start), code.strip("\n"))

    def with_body(self, body: str, before: str = "") -> str:
        """Return the module with another body of the function, whose signature stays."""
        signature = self.source(self.start).partition(":\n")[0] + ":\n"
        lines = "\n".join("    " + line if line else line for line in body.strip("\n").splitlines())
        return self.with_function(signature + lines, before)


def filled(value: Any, words: Mapping[str, str]) -> Any:
    """Return a text, or all texts of lists and tables, with the words replaced."""
    if isinstance(value, str):
        for word, text in words.items():
            value = value.replace(word, text)
    if isinstance(value, list):
        return [filled(each, words) for each in value]
    if isinstance(value, dict):
        return {filled(key, words): filled(each, words) for key, each in value.items()}
    return value


def function_of(text: str, name: str) -> ast.FunctionDef:
    """Return the definition of a function of a module."""
    return next(each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.FunctionDef) and each.name == name)


def cases() -> list[Case]:
    """Return all tasks of the packages."""
    packages = {name: tomllib.loads((DATA / f"{name}.toml").read_text()) for name in PACKAGES}
    return [_case(name, package, function) for name, package in packages.items() for function in package["answers"]]


def _case(repository: str, package: dict[str, Any], function: str) -> Case:
    tests, module = package["tests"], package["module"]
    original = package["files"][module]
    dotted = f"{module.removesuffix('.py').replace('/', '.')}.{function}"
    [removal] = [each.removal for each in find_functions(module, original) if each.qualname == function]
    failing = [test for test in tests if f"test_{function}" in test]
    task = CodeTask(
        id=f"{repository}/delete/{dotted}",
        kind="delete",
        repository=repository,
        tree=repository,
        prompt=f"The body of `{function}` in {module} is missing. Write it so that the tests pass.",
        start={module: edited(original, [removal])},
        solution={module: original},
        editable=["*/*.py"],
        tests=[tests[0].partition("::")[0]],
        fail_to_pass=failing,
        pass_to_pass=[test for test in tests if test not in failing],
        symbols=[dotted],
    )
    tree = {path: text.encode() for path, text in package["files"].items()}
    answers = [(arguments, expected) for arguments, expected in package["answers"][function]]
    return Case(task=task, tree=tree, module=module, function=function, answers=answers)


def write_trees(folder: Path) -> Path:
    """Write the packages below a folder, as grading wants them; return it."""
    for case in cases():
        write_tree(folder / case.task.tree, case.tree)
    return folder
