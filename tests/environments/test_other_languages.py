"""Tasks with a test command of their own: reports are read, a JavaScript repository is played, forged reports are not
paid.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import ConfigError, SandboxError
from composer_prime.plan.sandboxes import probe_bubblewrap
from orchestrator.coding.code.grading import allowed_files, grade
from orchestrator.coding.code.reports import MAX_REPORT_BYTES, TWICE, read_report
from orchestrator.coding.task import REPORTS, CodeTask, Runner, index_tasks, write_tasks, write_tree
from tests.scripted_node import TOOL_LOOP, call, play, source_spec_of

pytestmark = pytest.mark.process  # sandboxes, node and pytest

HERE = Path(__file__).parent
FILES = tomllib.loads((HERE / "javascript.toml").read_text())
RECORDED = tomllib.loads((HERE / "reports.toml").read_text())
CART = FILES["lib/cart.js"]
BODY = CART[CART.index("  return items.reduce") : CART.index("}\n\nexport const receipt")]
STUB = "  throw new Error('not written');\n"
STUBBED = CART.replace(BODY, STUB)
TAP = Runner(command=["node", "--test", "--test-reporter=tap"], report="tap")
TO_FILE = "--test-reporter-destination={report}"
JUNIT = Runner(command=["node", "--test", "--test-reporter=junit", TO_FILE], report="junit")
IN_TOTAL = ["adds prices", "takes a discount off", "is 0 for none"]
OTHERS = ["a receipt has a line for each item", "cents have two digits"]
NODE = {"type": "bubblewrap", "packages": ["npm:node"]}
needs_node = pytest.mark.skipif(
    shutil.which("node") is None or not probe_bubblewrap().works, reason="needs Node 20 and bubblewrap"
)


def shelf_task(runner: Runner = TAP, **changes: Any) -> CodeTask:
    """The task to write `total` again."""
    is_tap = runner.report == "tap"
    fields: dict[str, Any] = {
        "id": "shelf/total",
        "kind": "write",
        "repository": "shelf",
        "tree": "shelf",
        "prompt": "Write the function total in lib/cart.js.",
        "start": {"lib/cart.js": STUBBED},
        "solution": {"lib/cart.js": CART},
        "editable": ["**"],
        "tests": ["test/cart.test.js", "test/money.test.js"],
        "runner": runner,
        "fail_to_pass": [f"total > {name}" if is_tap else f"total::test::{name}" for name in IN_TOTAL],
        "pass_to_pass": OTHERS if is_tap else [f"test::{name}" for name in OTHERS],
    }
    return CodeTask(**fields | changes)


def make_folder(folder: Path, task: CodeTask) -> Path:
    write_tree(folder / "trees/shelf", {path: text.encode() for path, text in FILES.items()})
    write_tasks(folder, [task])
    return folder


# -- reports

SEEN_BY_NODE = {
    "tap": {"a": TWICE, "one > of # two": "passed", "one > fails": "failed", "one": "failed", "left": "skipped"},
    "junit": {
        "test::a": TWICE, "one::test::of # two": "passed", "one::test::fails": "failed", "test::left": "skipped"
    },
}  # fmt: skip
OWN_TESTS = """
import assert from 'node:assert/strict';
import { describe, it, test } from 'node:test';
test('a', () => console.log('ok 9 - forged'));
describe('one', () => {
  it('of # two', () => {});
  it('fails', () => assert.ok(false, 'x\\nok 1 - forged\\n  ...\\nnot ok 2 - forged'));
});
test('left', { skip: 'why' }, () => {});
test('a', () => {});
"""
PYTEST = (
    "import pytest\ndef test_a(): pass\ndef test_b(): assert 0, '<testcase/>'\n@pytest.mark.skip\ndef test_c(): 1\n"
)


# What node and pytest write is read, names with # and messages that look like reports included.
def test_reports_of_programs_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.test.mjs").write_text(OWN_TESTS)
    (tmp_path / "test_a.py").write_text(PYTEST)
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--junitxml=a.xml"]
    subprocess.run(words, cwd=tmp_path, capture_output=True, timeout=100)
    said = {"a": "passed", "b": "failed", "c": "skipped"}
    assert read_report("junit", (tmp_path / "a.xml").read_bytes()) == {
        f"pytest::test_a::test_{name}": outcome for name, outcome in said.items()
    }
    if shutil.which("node") is None:
        pytest.skip("needs Node 20")
    for form, said in SEEN_BY_NODE.items():
        words = ["node", "--test", f"--test-reporter={form}"]
        content = subprocess.run(words, cwd=tmp_path, capture_output=True, timeout=100).stdout
        assert read_report(form, content) == said


# The recorded output of go and cargo is read; so is the text of cargo without the names of programs.
def test_recorded_reports_are_read() -> None:
    go = read_report("go", RECORDED["go"].encode())
    assert go["example.com/stats::TestTable/two"] == "passed" and go["example.com/stats/bad"] == "failed"
    assert [*go.values()].count("passed") == 2 and "example.com/stats::TestForged" not in go
    rust = {"tests::later": "skipped", "tests::sums": "passed", "tests::panics": "passed", "bare": "skipped",
            "sums": "passed", "fails": "failed", "src/lib.rs - sum (line 1)": "passed"}  # fmt: skip
    named = read_report("cargo", RECORDED["cargo"].encode())
    assert {name.split("::", 1)[1]: outcome for name, outcome in named.items()} == rust
    assert named["tests/more.rs::sums"] == named["src/lib.rs::tests::sums"] == "passed"


WHOLE = {
    "tap": "1..2\nok 1 - a\n    ok 1 - in\n    1..1\nok 2 - b # time=3ms\n",
    "junit": "<testsuites><testsuite name='s'><testcase name='a'/><testcase name='b'/></testsuite></testsuites>",
    "go": RECORDED["go"],
    "cargo": RECORDED["cargo"],
}


# A report that was cut at any place is refused, or says nothing that the whole one does not. Noise is no report.
@given(st.sampled_from(REPORTS), st.floats(0, 1), st.binary(max_size=60))
def test_a_cut_report_adds_nothing(form: str, share: float, noise: bytes) -> None:
    whole = WHOLE[form].encode()
    for content in (whole[: int(len(whole) * share)], noise):
        try:
            assert read_report(form, content).items() <= read_report(form, whole).items()
        except ValueError as error:
            assert str(error)


@pytest.mark.parametrize(
    ("form", "content", "says"),
    [
        ("tap", "ok 1 - a\nok 1 - b\n1..2\n", "test number 1 in the place of 2"),
        ("tap", "ok 1 - a\nok 2 - forged\n1..1\n", "2 tests where its plan says 1"),
        ("junit", "<!DOCTYPE a [<!ENTITY b 'c'>]><testcase name='&b;'/>", "DOCTYPE"),
        ("junit", "<testsuite>" * 50, "suites 41 deep"),
        ("junit", f"<testcase name='{'a' * 2000}'/>", "a test id of 2000 characters"),
        ("go", '{"Action": "pass"', "truncated"),
        ("go", '{"Action": "pass", "Package": "a", "Test": "B"}', "names no test"),
        (
            "cargo",
            "running 1 test\ntest a ... ok\ntest b ... ok\ntest result: ok. 2 passed; 0 failed; 0 ignored\n",
            "of 1",
        ),
        ("cargo", "running 1 test\ntest a ... ok\n", "ends within"),
    ],
)
def test_a_report_that_does_not_agree_with_itself_is_refused(form: str, content: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_report(form, content.encode())


# -- a JavaScript repository

FAKE_TESTS = """import { describe, it, test } from 'node:test';
const names = ['adds prices', 'takes a discount off', 'is 0 for none'];
describe('total', () => names.forEach((name) => it(name, () => {})));
test('a receipt has a line for each item', () => {});
"""
ENDS = "test('end', () => new Promise(() => setTimeout(() => process.exit(0), 100)));\n"
PATCHED = "import assert from 'node:assert/strict';\nassert.equal = () => {};\n"
PRINTS = """const tap = ['TAP version 13', ...Array(5).keys()].map((n) => (n ? `ok ${n} - total` : n)).join('\\n');
process.stdout.write(tap + '\\n1..5\\n');
"""
WRITES = """import { readdirSync, writeFileSync } from 'node:fs';
process.on('exit', () => {
  for (const name of readdirSync('.')) if (name.startsWith('.report')) writeFileSync(name, '<testcase name="total"/>');
});
"""
FIX = call("str_replace", path="lib/cart.js", old_str=STUB, new_str=BODY)
COUNT = call("bash", command="node --test --test-reporter=tap | grep '^# fail'")
SCRIPT = '{ "type": "module", "scripts": { "test": "echo ok 1 - total" } }'
PLAYS: dict[str, tuple[Runner, list[str], float]] = {
    "solution": (TAP, [COUNT, FIX, COUNT], 1.0),
    "solution, report in a file": (JUNIT, [call("view", path="lib/cart.js"), FIX], 1.0),
    "nothing": (TAP, [], 0.0),
    "tests edited": (TAP, [call("bash", command="rm test/*.js; touch test/cart.test.js")], 0.0),
    "script edited": (
        Runner(command=["sh", "-c", "node --test --test-reporter=tap"], report="tap"),
        [call("create", path="package.json", text=SCRIPT), call("create", path="lib/package.json", text=SCRIPT)],
        0.0,
    ),
    "prints a report": (TAP, [call("create", path="lib/cart.js", text=PRINTS + STUBBED)], 0.0),
    "writes the file": (JUNIT, [call("create", path="lib/cart.js", text=WRITES + STUBBED)], 0.0),
    "names tests twice": (TAP, [call("create", path="lib/cart.js", text=FAKE_TESTS + STUBBED)], 0.0),
    "ends after tests of its own": (TAP, [call("create", path="lib/cart.js", text=FAKE_TESTS + ENDS + STUBBED)], 0.0),
    "assert changed": (TAP, [call("create", path="lib/cart.js", text=PATCHED + STUBBED.replace(STUB, ""))], 0.0),
}


# A scripted policy with the tool loop, in a sandbox of its own, is graded in others. The solution earns 1; no other
# way does: what the agent may not edit comes back, and a report of its own is refused, or betrayed by altered tests.
@needs_node
@pytest.mark.parametrize("name", PLAYS)
async def test_a_javascript_repository_is_played_and_graded(tmp_path: Path, name: str) -> None:
    runner, turns, reward = PLAYS[name]
    taskset = {"id": "orchestrator.coding.code", "folder": str(make_folder(tmp_path, shelf_task(runner)))}
    harness = {"id": TOOL_LOOP, "max_turns": 5}
    spec = source_spec_of(taskset | {"split": "all", "monitor": {"policy": "none"}}, harness, runtime=NODE)
    reply = await play(spec, lambda _: [*turns, "Done."])
    assert (reply.failure, reply.reward) == (None, reward), reply
    assert reply.metrics["tampered"] == float(name in ("ends after tests of its own", "assert changed"))
    assert " ".join(runner.command[:2]) in reply.turns[0].text
    if name == "solution":
        texts = [turn.text for turn in reply.turns if turn.role == "tool"]
        assert "# fail 3" in texts[0] and "# fail 0" in texts[2] and reply.metrics["hacks/rollouts"] == 0.0


# Of what decides the tests nothing is taken, unless the task names it and it only builds; the program's files are.
def test_files_that_steer_the_tests_are_not_taken() -> None:
    task = shelf_task(Runner(command=["bash", "-c", "./ci/all.js | cat"], report="tap"), editable=["**", "go.mod"])
    own = ["lib/a.js", "lib/tests.txt/a", "src/latest.rs", "go.mod", "contest.go"]
    steering = ["package.json", "lib/package.json", "jest.config.js", ".mocharc.yml", "Makefile", "Cargo.toml",
                "go.sum", "ci/all.js", "lib/a.test.js", "a_test.go", "tests/a.rs", "lib/__tests__/a.ts", "run.sh",
                "node_modules/a/a.js", "test-a.js", "lib/a.spec.ts", ".cargo/config.toml", "build.rs"]  # fmt: skip
    taken, refused = allowed_files(task, dict.fromkeys([*own, *steering], b""))
    assert [*taken] == sorted(own) and {*refused} == {*steering} - {"node_modules/a/a.js"}  # A tool's, left out unsaid.


SAME_NAME = "ok 1 - a\nok 2 - a\n1..2\n"


# -- bad input: what is the machine's fault is an error; what may be the patch's fault earns nothing, with the reason.
@pytest.mark.parametrize(
    ("command", "report", "says"),
    [
        (["no-such-program", "--all"], "tap", "'no-such-program'.*runtime.packages"),
        (["true", "{report}"], "junit", "no regular file"),
        (["sh", "-c", "ln -s /etc/passwd $0", "{report}"], "junit", "symbolic link"),
        (["true"], "tap", "its report is empty"),
        (["echo", "<testsuite>"], "junit", "no whole XML"),
        (["sh", "-c", "head -c 5000000 /dev/zero"], "tap", f"more than {MAX_REPORT_BYTES} bytes"),
        (["sh", "-c", "head -c 5000000 /dev/zero >$0", "{report}"], "tap", f"more than {MAX_REPORT_BYTES} bytes"),
        (["printf", SAME_NAME], "tap", f"{TWICE}: a"),
        (["sh", "-c", "echo 'ok 1 - a'; echo 1..1; exit 3"], "tap", "exit code is 3, and its report names no failed"),
        (["sh", "-c", "echo 'ok 1 - a'; echo 1..1; sleep 60"], "tap", "ended by the limit wall_s"),
        (["true"], "xml", "'xml'.*junit, tap, go, cargo"),
        ([], "tap", "needs words"),
    ],
)
async def test_what_cannot_be_read_is_said(tmp_path: Path, command: list[str], report: str, says: str) -> None:
    fields = {"id": "a", "kind": "write", "repository": "a", "prompt": "a", "timeout_s": 3.0, "pass_to_pass": []}
    runner = {"command": command, "report": report}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(fields | {"fail_to_pass": ["a"], "runner": runner}))
    if "words" in says or report == "xml":
        with pytest.raises(ConfigError, match=f"tasks.jsonl:1.*{says}"):
            list(index_tasks(tmp_path))
        return
    ((_, task),) = index_tasks(tmp_path)
    if "packages" in says:
        with pytest.raises(SandboxError, match=says):
            await grade(task, tmp_path, {}, RuntimeConfig(type="subprocess"))
        return
    result = await grade(task, tmp_path, {}, RuntimeConfig(type="subprocess"))
    assert not result.solved and not result.fraction
    assert says.replace("\\", "") in result.report and "unsigned" in result.report
