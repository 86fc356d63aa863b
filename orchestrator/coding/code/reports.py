"""Readers of test reports: what a task's test command writes -> test id -> passed, failed or skipped.

    junit   JUnit XML: suites, class name, name                  "mean::test::of two numbers"
    tap     TAP 13 and 14: the tests above a subtest, its name   "mean > of two numbers"
    go      go test -json: package, test                         "example.com/stats::TestMean/two"
    cargo   cargo test                                           "tests::mean", "tests/more.rs::mean" after 2>&1

Each form says somewhere how much it holds. A report that does not agree with that was cut or forged, and is refused.
Text of graded code is in it: nothing is resolved or run, and names and nesting are bounded.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.parsers import expat

import msgspec

MAX_REPORT_BYTES = 2**22
TWICE = "named twice"
_MAX_ID_CHARS = 1000
_MAX_DEPTH = 40
_JUNIT = {"notrun": "skipped", "disabled": "skipped"}
_GO = {"pass": "passed", "fail": "failed", "skip": "skipped"}
_TAP_TEST = re.compile(r"(not )?ok\b(?: +(\d+))?(?: +-)?(?: +(.*))?")
_TAP_PLAN = re.compile(r"1\.\.(\d+)(?: *#.*)?")
_TAP_DIRECTIVE = re.compile(r"(?:^|\s)#\s*(?:(skip|todo)\b|time=)", re.IGNORECASE)
_CARGO_BINARY = re.compile(r"\s+(?:Running(?: unittests)?|Doc-tests) (\S+)(?: \(.*\))?")
_CARGO_COUNT = re.compile(r"running (\d+) tests?")
_CARGO_TEST = re.compile(r"test (.+?)(?: - should panic)? \.\.\. (ok|FAILED|ignored)\b.*")
_CARGO_RESULT = re.compile(r"test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored\b.*")
_CARGO = {"ok": "passed", "FAILED": "failed", "ignored": "skipped"}

Outcomes = Iterable[tuple[str, str]]


def read_report(form: str, content: bytes) -> dict[str, str]:
    """Return test id -> passed, failed or skipped; `TWICE` of two tests. Raises ValueError, RecursionError."""
    if len(content) > MAX_REPORT_BYTES:
        raise ValueError(f"its report is too large: more than {MAX_REPORT_BYTES} bytes")
    if not content.strip():
        raise ValueError("its report is empty")
    outcomes: dict[str, str] = {}
    for name, outcome in _READERS[form](content):
        outcomes[name] = TWICE if name in outcomes else outcome
    if not outcomes:
        raise ValueError(f"its report, {len(content)} bytes, names no test in the form {form!r}")
    return outcomes


def _junit(content: bytes) -> Outcomes:
    suites: list[str] = []
    found: list[tuple[str, str]] = []

    def start(tag: str, attributes: dict[str, str]) -> None:
        if tag == "testsuite":
            suites.append(attributes.get("name", ""))
            if len(suites) > _MAX_DEPTH:
                raise ValueError(f"its report has suites {len(suites)} deep; the limit is {_MAX_DEPTH}")
        elif tag == "testcase":
            names = (*suites, attributes.get("classname"), attributes.get("name"))
            found.append((_bounded("::".join(filter(None, names))), _JUNIT.get(attributes.get("status", ""), "passed")))
        elif tag in ("failure", "error", "skipped") and found:
            name, outcome = found[-1]  # node marks a failed test that is to do as both.
            found[-1] = name, "skipped" if "skipped" in (tag, outcome) else "failed"

    def end(tag: str) -> None:
        if tag == "testsuite":
            suites.pop()

    def refuse(*_: Any) -> None:
        raise ValueError("its report has a DOCTYPE, which may define entities and is never read")

    parser = expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(content, True)
    except (expat.ExpatError, LookupError) as error:  # An encoding may be unknown.
        raise ValueError(f"its report is no whole XML: {error}") from None
    return found


@dataclass(slots=True)
class _Level:
    """The tests of one indentation since the last line above it."""

    found: list[tuple[str, str]] = field(default_factory=list)
    count: int = 0
    plan: int | None = None

    def whole(self) -> list[tuple[str, str]]:
        if self.count != self.plan:
            raise ValueError(f"its report has {self.count} tests where its plan says {self.plan}")
        return self.found


def _tap(content: bytes) -> Outcomes:
    levels: dict[int, _Level] = {0: _Level()}
    for indent, line in _tap_lines(content):
        if plan := _TAP_PLAN.fullmatch(line):
            levels.setdefault(indent, _Level()).plan = int(plan[1])
        elif test := _TAP_TEST.fullmatch(line):
            inner = [levels.pop(deeper) for deeper in sorted(levels) if deeper > indent]
            _add_test(levels.setdefault(indent, _Level()), test, inner)
    if len(levels) > 1 or not content.endswith(b"\n"):
        raise ValueError("its report ends within a subtest or a line")
    return levels[0].whole()


def _add_test(level: _Level, test: re.Match[str], inner: Sequence[_Level]) -> None:
    """Add the test of one line, behind the subtests before it."""
    fails, number, text = test.groups(default="")
    level.count += 1
    if int(number or level.count) != level.count:
        raise ValueError(f"its report has test number {number} in the place of {level.count}: {test[0][:200]!r}")
    directive = _TAP_DIRECTIVE.search(text)
    name = re.sub(r"\\(.)", r"\1", text[: directive.start()] if directive else text).strip()
    level.found += [(_bounded(f"{name} > {each}"), outcome) for part in inner for each, outcome in part.whole()]
    is_left_out = directive is not None and directive[1] is not None
    level.found.append((_bounded(name), "skipped" if is_left_out else "failed" if fails else "passed"))


def _tap_lines(content: bytes) -> Iterator[tuple[int, str]]:
    """Yield indentation and text of lines, without the YAML blocks behind tests: messages of failures may be TAP."""
    block, may_begin = None, False
    for line in content.decode(errors="replace").split("\n"):
        text = line.strip(" \r")
        indent = len(line) - len(line.lstrip(" "))
        if block is None and may_begin and text == "---":
            block = indent
        elif block is None:
            may_begin = _TAP_TEST.fullmatch(text) is not None
            yield indent, text
        elif text == "..." and indent == block:
            block = None


class _GoEvent(msgspec.Struct, rename="pascal"):
    action: str = ""
    package: str = ""
    test: str = ""


_GO_EVENT = msgspec.json.Decoder(_GoEvent)


def _go(content: bytes) -> Outcomes:
    """Return the tests of packages that came to their end, and these."""
    found: list[tuple[str, str, str]] = []
    for line in content.splitlines():
        event = _GO_EVENT.decode(line) if line.startswith(b"{") else _GoEvent()
        if outcome := _GO.get(event.action):
            found.append((event.package, event.test, outcome))
    ended = {package for package, test, _ in found if not test}
    return [("::".join(filter(None, each[:2])), each[2]) for each in found if each[0] in ended]


def _cargo(content: bytes) -> Outcomes:
    found: list[tuple[str, str]] = []
    binary = ""
    lines = iter(content.decode(errors="replace").replace("\r", "").split("\n"))
    for line in lines:
        if named := _CARGO_BINARY.fullmatch(line):
            binary = named[1] + "::"
        elif begun := _CARGO_COUNT.fullmatch(line):
            found += _cargo_tests(lines, int(begun[1]), binary)
    return found


def _cargo_tests(lines: Iterator[str], count: int, binary: str) -> Outcomes:
    """Return the tests of one program, up to the line that counts them."""
    found: list[tuple[str, str]] = []
    is_list = True
    for line in lines:
        is_list = is_list and line != "failures:"  # What failed tests printed follows.
        if is_list and (test := _CARGO_TEST.fullmatch(line)):
            found.append((_bounded(binary + test[1]), _CARGO[test[2]]))
        elif result := _CARGO_RESULT.fullmatch(line):
            counts = Counter(outcome for _, outcome in found)
            if [*map(int, result.groups())] != [counts[each] for each in _CARGO.values()] or len(found) != count:
                raise ValueError(f"its report has {dict(counts)} of {count} tests, and says {line[:200]!r}")
            return found
    raise ValueError(f"its report ends within the {count} tests of {binary or 'a program'}")


def _bounded(name: str) -> str:
    if len(name) > _MAX_ID_CHARS:
        raise ValueError(f"its report has a test id of {len(name)} characters; the limit is {_MAX_ID_CHARS}")
    return name


_READERS: dict[str, Callable[[bytes], Outcomes]] = {"junit": _junit, "tap": _tap, "go": _go, "cargo": _cargo}
