"""Readers of test reports: what a task's test command writes -> test id -> passed, failed or skipped.

    junit   JUnit XML: suites, class name, name                  "mean::test::of two numbers"
    tap     TAP 13 and 14: the tests above a subtest, its name   "mean > of two numbers"
    go      go test -json: package, test                         "example.com/stats::TestMean/two"
    cargo   cargo test, libtest's text or JSON                   "tests::mean", "tests/more.rs::mean" after 2>&1

Each form says somewhere how much it holds. A report that does not agree with that was cut or forged, and is refused.
Text of graded code is in it: nothing is resolved or run, and names and nesting are bounded.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from xml.parsers import expat

import msgspec

MAX_REPORT_BYTES = 2**23
TWICE = "named twice"
_MAX_ID_CHARS = 1000
_MAX_DEPTH = 40
_GO = {"pass": "passed", "fail": "failed", "skip": "skipped"}
_TAP_TEST = re.compile(r"(not )?ok\b(?: +(\d+))?(?: +-)?(?: +(.*))?")
_TAP_PLAN = re.compile(r"1\.\.(\d+)(?: *#.*)?")
_TAP_DIRECTIVE = re.compile(r"(?:^|\s)#\s*(?:(skip|todo)\b|time=)", re.IGNORECASE)
_CARGO_BINARY = re.compile(r"\s+(?:Running(?: unittests)?|Doc-tests) (\S+)(?: \(.*\))?")
_CARGO_COUNT = re.compile(r"running (\d+) tests?")
_CARGO_TEST = re.compile(r"test (.+?) \.\.\. (ok|failed|ignored)\b.*", re.IGNORECASE)
_CARGO_RESULT = re.compile(r"test result: .*?(\d+) passed; (\d+) failed; (\d+) ignored\b.*")
_CARGO = {"ok": "passed", "failed": "failed", "ignored": "skipped"}

Outcomes = Iterable[tuple[str, str]]


def read_report(form: str, content: bytes) -> dict[str, str]:
    """Return test id -> passed, failed or skipped; `TWICE` for the id of two tests. Raises ValueError."""
    if len(content) > MAX_REPORT_BYTES:
        raise ValueError(f"its report is too large: more than {MAX_REPORT_BYTES} bytes")
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
            found.append((_bounded("::".join(filter(None, names))), "passed"))
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
    except expat.ExpatError as error:
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
        if line.startswith("Bail out!"):
            raise ValueError(f"its report ends with {line[:200]!r}")
        plan, test = _TAP_PLAN.fullmatch(line), _TAP_TEST.fullmatch(line)
        if plan or test:
            level = levels.setdefault(indent, _Level())
        if plan:
            level.plan = int(plan[1])
        elif test:
            level.count += 1
            if int(test[2] or level.count) != level.count:
                raise ValueError(f"its report has test number {test[2]} in the place of {level.count}: {line[:200]!r}")
            directive = _TAP_DIRECTIVE.search(text := test[3] or "")
            name = re.sub(r"\\(.)", r"\1", text[: directive.start()] if directive else text).strip()
            inner = [levels.pop(deeper) for deeper in sorted(levels) if deeper > indent]
            for each, outcome in itertools.chain.from_iterable(part.whole() for part in inner):
                level.found.append((_bounded(f"{name} > {each}"), outcome))
            is_left_out = directive is not None and directive[1] is not None
            level.found.append((_bounded(name), "skipped" if is_left_out else "failed" if test[1] else "passed"))
    if len(levels) > 1:
        raise ValueError("its report ends within a subtest")
    return levels[0].whole()


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


def _go(content: bytes) -> Outcomes:
    """Return the tests of packages that came to their end, and these. A test that ended a process has none."""
    found: list[tuple[str, str, str]] = []
    for line in content.decode(errors="replace").split("\n"):
        event = _json(line)
        if outcome := _GO.get(str(event.get("Action"))):
            found.append((str(event.get("Package", "")), str(event.get("Test", "")), outcome))
    ended = {package for package, test, _ in found if not test}
    return [("::".join(filter(None, each[:2])), each[2]) for each in found if each[0] in ended]


def _cargo(content: bytes) -> Outcomes:
    found: list[tuple[str, str]] = []
    binary, count, own = "", None, []
    is_listed = False
    for line in map(_libtest_line, content.decode(errors="replace").split("\n")):
        if count is None and (named := _CARGO_BINARY.fullmatch(line)):
            binary = named[1] + "::"
        elif count is None and (begun := _CARGO_COUNT.fullmatch(line)):
            count, own, is_listed = int(begun[1]), [], True
        elif is_listed and (test := _CARGO_TEST.fullmatch(line)):
            own.append((binary + test[1].removesuffix(" - should panic"), _CARGO[test[2].lower()]))
        elif line == "failures:":
            is_listed = False  # What failed tests printed follows.
        elif count is not None and (result := _CARGO_RESULT.fullmatch(line)):
            counts = Counter(outcome for _, outcome in own)
            if [*map(int, result.groups())] != [counts[each] for each in _CARGO.values()] or len(own) != count:
                raise ValueError(
                    f"its report has {len(own)} tests, {dict(counts)}, of {count}, and says {line[:200]!r}"
                )
            found, count, is_listed = found + own, None, False
    if count is not None:
        raise ValueError(f"its report ends within the {count} tests of {binary or 'a program'}")
    return found


def _libtest_line(line: str) -> str:
    """Return a line of libtest's JSON as the line of its text."""
    match _json(line):
        case {"type": "suite", "event": "started", "test_count": count}:
            return f"running {count} tests"
        case {"type": "test", "event": "ok" | "failed" | "ignored" as outcome, "name": name}:
            return f"test {name} ... {outcome}"
        case {"type": "suite", "passed": passed, "failed": failed, "ignored": ignored}:
            return f"test result: {passed} passed; {failed} failed; {ignored} ignored"
    return line.rstrip("\r")


def _json(line: str) -> dict[str, Any]:
    """Return the object of a line; {} for other text, which tools print among them."""
    try:
        value = msgspec.json.decode(line) if line.startswith("{") else {}
    except (msgspec.DecodeError, RecursionError):
        raise ValueError(f"its report has a line that is no whole JSON: {line[:200]!r}") from None
    return value if isinstance(value, dict) else {}


def _bounded(name: str) -> str:
    if len(name) > _MAX_ID_CHARS:
        raise ValueError(f"its report has a test id of {len(name)} characters; the limit is {_MAX_ID_CHARS}")
    return name


_READERS: dict[str, Callable[[bytes], Outcomes]] = {"junit": _junit, "tap": _tap, "go": _go, "cargo": _cargo}
