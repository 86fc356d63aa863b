"""Run tests of a tree in a box: many runs of one job share a box and one interpreter."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import SandboxError
from orchestrator.coding.sandbox.box import open_box

_PROGRAM = Path(__file__).with_name("suite_program.py")
_ANSWER_BYTES = 256 << 20
_ARGUMENTS = ["-q", "-o", "addopts=", "-o", "required_plugins=", "-p", "no:cacheprovider"]
_ARGUMENTS += ["--continue-on-collection-errors", "--rootdir=.", "--tb=native"]
_START_S = 60.0
"""Time for a box and its interpreter to start, beside the runs' own deadlines."""


class SuiteRun(msgspec.Struct, frozen=True, kw_only=True):
    """Tests to run once over a tree with some files replaced."""

    key: str
    tests: list[str]
    """Test files or folders, as pytest gets them; [] for what pytest finds by itself."""
    files: dict[str, str | None] = {}
    """Path -> text written over the tree; None for a file that is not there."""
    timeout_s: float = 60.0
    trace: bool = False


class TestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How one test ended."""

    __test__ = False

    node: str
    outcome: str
    """passed | failed | skipped | xfailed"""
    duration_s: float
    message: str
    """Type and words of the exception, for a failed test."""
    assertion: str
    """The test's own statement that failed."""
    reached: list[str] = []
    """Functions that ran, as "path:first line"."""


@dataclass(slots=True, kw_only=True)
class SuiteResult:
    """How one run ended."""

    tests: dict[str, TestRecord] = field(default_factory=dict)
    collect_errors: dict[str, str] = field(default_factory=dict)
    """File -> message."""
    ended: str
    """"" when pytest finished, else "timeout", "exit status N" """
    running: str | None = None
    """The test that ran when the run ended early."""
    imported: list[str] = field(default_factory=list)
    """Functions that ran while tests were collected."""
    modules: list[str] = field(default_factory=list)
    """Modules from outside the tree that the run loaded."""

    def passed(self) -> set[str]:
        return {node for node, record in self.tests.items() if record.outcome == "passed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSuite:
    """The tests of a tree, and where they run."""

    runtime: RuntimeConfig
    folder: Path
    python_path: Sequence[str]

    async def play(
        self, runs: Sequence[SuiteRun], *, hash_seed: int, preload: Sequence[str] = (), explain: bool = False
    ) -> dict[str, SuiteResult]:
        """Run all `runs` one after the other in one fresh box. Return their results by key.

        `explain` has pytest write what an assertion compared, which takes time. Raises SandboxError where the box
        gives no answer at all.
        """
        job = {
            "runs": [msgspec.to_builtins(run) for run in runs],
            "python_path": list(self.python_path),
            "arguments": [*_ARGUMENTS, "--assert=rewrite" if explain else "--assert=plain"],
            "preload": list(preload),
        }
        async with await open_box(self.runtime, tree=self.folder) as box:
            finished = await box.run(
                ["python", "-P", "-c", _PROGRAM.read_text(encoding="utf-8")],
                env={"PYTHONHASHSEED": str(hash_seed), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
                stdin=json.dumps(job).encode(),
                timeout_s=_START_S + sum(run.timeout_s for run in runs),
                output_bytes=_ANSWER_BYTES,
            )
        try:
            answer = json.loads(finished.stdout)
        except ValueError as error:
            said = finished.stderr.decode(errors="replace").strip()[-800:]
            ended = finished.ended_by or f"exit code {finished.exit_code}"
            raise SandboxError(
                f"the tests of {self.folder.name} gave no report ({ended}): {said or 'nothing was printed'}"
            ) from error
        return {record["key"]: _result(record) for record in answer["runs"]}


def _result(record: Mapping) -> SuiteResult:
    result = SuiteResult(ended=record["ended"])
    for line in record["records"]:
        if "node" in line:
            result.tests[line["node"]] = msgspec.convert(line, TestRecord)
            result.running = None
        elif "start" in line:
            result.running = line["start"]
        elif "collect_error" in line:
            result.collect_errors[line["collect_error"]] = line["message"]
        elif "imported" in line:
            result.imported = line["imported"]
        elif "modules" in line:
            result.modules = line["modules"]
        elif "crash" in line:
            result.ended = result.ended or line["crash"]
    return result
