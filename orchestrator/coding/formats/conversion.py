"""A published task file becomes a folder of coding tasks (`composer tasks import`).

    records (SWE-bench's form) -> CodeTask -> proof: the solution passes, an empty patch fails -> tasks.jsonl
                                                └─ refused, with the reason -> refused.jsonl

One bad record does not end an import. tasks.jsonl is written once all records are done.

pytest runs the tests of a record without a test_command. sympy's instances name functions, which are looked up in the
test patch.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import msgspec

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.console import ProgressLines
from composer_prime.errors import ConfigError, SandboxError
from orchestrator.coding.code.grading import grade, hold_back
from orchestrator.coding.git_command import commit_files, git
from orchestrator.coding.sandbox.box import open_box
from orchestrator.coding.task import TASKS_FILE, TREES_FOLDER, CodeTask, Runner, check_path, write_tasks, write_tree

REFUSED_FILE = "refused.jsonl"
_SHOWN_FIELDS = 20
NO_TESTS = ("!**/tests/**", "!**/test/**", "!**/test_*.py", "!**/*_test.py", "!**/tests.py", "!**/test.py")
"""Patterns that leave out what is not editable."""
_COMMIT = re.compile("HEAD|[0-9a-f]{7,64}")
_HEADER = re.compile(r"^(?:(?:---|\+\+\+) (?:[ab]/)?|(?:rename|copy) (?:from|to) )(?P<path>[^\t\n]+)", re.MULTILINE)


Refusal = dict[str, str]


async def import_tasks(
    path: Path,
    folder: Path,
    *,
    repositories: Path,
    runtime: RuntimeConfig,
    timeout_s: float = 300.0,
    jobs: int = 1,
) -> tuple[int, list[Refusal]]:
    if (folder / TASKS_FILE).exists():
        raise ConfigError(f"{folder / TASKS_FILE} exists: name another folder, or remove it")
    records = list(read_records(path))
    async with await open_box(runtime):
        pass  # Without sandboxes every record would be refused for it.
    refusals: list[Refusal] = []
    tasks: dict[str, CodeTask] = {}
    lines = ProgressLines()
    trees = folder / TREES_FOLDER
    outcomes = in_order(lambda record: _outcome(record, trees, runtime, repositories, timeout_s), records, jobs)
    async with aclosing(outcomes):
        async for outcome in outcomes:
            record = records[len(tasks) + len(refusals)]
            if isinstance(outcome, CodeTask) and outcome.id not in tasks:
                tasks[outcome.id] = outcome
            else:
                name = record.values.get("instance_id") or "record"
                reason = outcome if isinstance(outcome, str) else "its id is another record's, too"
                refusals.append({"place": record.place, "reason": f"{name}: {reason}"})
            lines.tell(lambda: f"{len(tasks)} of {len(tasks) + len(refusals)} records are tasks")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / REFUSED_FILE).write_bytes(b"".join(msgspec.json.encode(refusal) + b"\n" for refusal in refusals))
    if not tasks:
        shown = "\n".join(f"{refusal['place']}: {refusal['reason']}" for refusal in refusals[:5])
        raise ConfigError(f"{path}: none of its {len(records)} records became a task:\n{shown}")
    write_tasks(folder, tasks.values())
    return len(tasks), refusals


async def _outcome(
    record: Record, trees: Path, runtime: RuntimeConfig, repositories: Path, timeout_s: float
) -> CodeTask | str:
    try:
        task = await asyncio.to_thread(_instance_task, record, repositories, trees, timeout_s)
        reason = await why_unproven(task, trees, runtime)
        is_open = bool(task.solution) and task.runner is None
        return reason or (await hold_back(task, trees, runtime) if is_open else task)
    except (ConfigError, SandboxError, OSError) as error:  # OSError: its files do not fit.
        return str(error).removeprefix(f"{record.place}: ") or repr(error)  # A TimeoutError has no words.


Item = TypeVar("Item")
Result = TypeVar("Result")


async def in_order(
    work: Callable[[Item], Awaitable[Result]], items: Iterable[Item], jobs: int
) -> AsyncGenerator[Result, None]:
    """Yield what `work` returns for each item, in the items' order, `jobs` at a time. Closing it cancels the rest."""
    free = asyncio.Semaphore(jobs)

    async def one(item: Item) -> Result:
        async with free:
            return await work(item)

    running = [asyncio.create_task(one(item)) for item in items]
    try:
        for job in running:
            yield await job
    finally:
        for job in running:
            job.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def why_unproven(task: CodeTask, trees: Path, runtime: RuntimeConfig) -> str:
    if task.solution:
        solution = {path: text.encode() for path, text in task.solution.items()}
        result = await grade(task, trees, solution, runtime)
        if not result.solved:
            expected = {*task.fail_to_pass, *task.pass_to_pass}
            lost = sorted(expected - result.passed)
            first = f", first {lost[0]}" if lost else ""
            tail = " ".join(result.report.split())[:400]
            return f"its own solution fails {len(lost)} of {len(expected)} tests{first}: {tail}"
    return "its tests pass without any change" if (await grade(task, trees, {}, runtime)).solved else ""


# -- instances of SWE-bench's form


def _instance_task(record: Record, repositories: Path, trees: Path, timeout_s: float) -> CodeTask:
    name = record.text("instance_id")
    if not record.texts("FAIL_TO_PASS"):
        raise ConfigError("its FAIL_TO_PASS is empty: no test tells a solution from none")
    repo, commit = record.text("repo"), str(record.values.get("base_commit") or "HEAD")
    tree = trees / _add_tree(repo, commit, repositories, trees)
    changed = apply_patch(tree, record.text("patch"), field="patch")
    if not changed:
        raise ConfigError("its 'patch' is empty or changes nothing: there is nothing to solve")
    test_changes = apply_patch(tree, str(record.values.get("test_patch") or ""), field="test_patch")
    test_files = _present(test_changes)
    runner, (fail_to_pass, pass_to_pass) = _tests(record, test_files)
    files = [[] if runner else [test.partition("::")[0] for test in tests] for tests in (fail_to_pass, pass_to_pass)]
    suffixes = sorted({".py", *(PurePosixPath(path).suffix for path in changed)} - {""})
    start, solution = {}, changed
    hidden = [path for path, text in test_changes.items() if text is None]
    if repo.startswith("swesmith/"):  # There `patch` makes the bug.
        start, solution = changed, {path: _text(tree, path, "patch") for path in changed}
        hidden += sorted({*files[0]})
    cause = f"Some tests of {repo} fail. The cause is in {', '.join(sorted(changed))}. Find it and repair it."
    return CodeTask(
        id=name,
        kind="issue",
        repository=repo,
        tree=tree.name,
        prompt=record.values.get("problem_statement") or cause,
        start=_present(start),
        removed=hidden,
        solution=_present(solution),
        editable=[*(f"**/*{suffix}" for suffix in suffixes), *NO_TESTS, "!**/testing/**", *sorted(changed)],
        tests=sorted({*files[0], *files[1], *(test_files if runner else ())}),
        runner=runner,
        test_files=test_files,
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        python_path=[*(folder for folder in ("src", "lib") if (tree / folder).is_dir()), "."],
        timeout_s=timeout_s,
        source=f"{repo}@{commit}",
    )


def _tests(record: Record, test_files: dict[str, str]) -> tuple[Runner | None, list[list[str]]]:
    """Return what runs the tests of an instance, and the ids of FAIL_TO_PASS and PASS_TO_PASS."""
    tests = [record.texts(name) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")]
    if not record.values.get("test_command"):
        return None, [_pytest_ids(ids, test_files) for ids in tests]
    return Runner(command=record.texts("test_command"), report=record.text("report")), tests


def _present(files: dict[str, str | None]) -> dict[str, str]:
    return {path: text for path, text in files.items() if text is not None}


def _pytest_ids(names: Sequence[str], test_files: dict[str, str]) -> list[str]:
    ids = []
    for name in names:
        define = re.compile(rf"^def {re.escape(name)}\(", re.MULTILINE)
        files = [path for path, text in test_files.items() if define.search(text)]
        if "::" not in name and len(files) != 1:
            raise ConfigError(
                f"its test {name!r} is no pytest node id (file::test), and {len(files)} files of its test_patch define "
                "it; give the record a test_command if another program than pytest runs it"
            )
        ids.append(name if "::" in name else f"{files[0]}::{name}")
    return ids


def _add_tree(repo: str, commit: str, repositories: Path, trees: Path) -> str:
    try:
        clone = repositories / check_path(repo).replace("/", "__")
    except ValueError as error:
        raise ConfigError(f"its 'repo' is refused: {error}; give owner/name") from None
    if not clone.is_dir():
        raise ConfigError(f"no clone of {repo}: `git clone URL {clone}`, or correct --repositories")
    if not _COMMIT.fullmatch(commit):
        raise ConfigError(f"its base_commit {commit!r} is no commit of the clone {clone}; give the hexadecimal name")
    tree = re.sub(r"[^\w.-]+", "__", f"{repo}-{commit[:12]}")
    if (trees / tree).is_dir():
        return tree
    trees.mkdir(parents=True, exist_ok=True)
    files = commit_files(clone, commit)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=trees) as scratch:
        made = Path(scratch, "tree")
        write_tree(made, files)
        try:
            made.rename(trees / tree)
        except OSError:
            if not (trees / tree).is_dir():  # Another instance may have made it in the meantime.
                raise
    return tree


def apply_patch(tree: Path, patch: str, *, field: str) -> dict[str, str | None]:
    if not patch.strip():
        return {}
    paths = _touched(patch, field)
    with tempfile.TemporaryDirectory(prefix="composer-patch-") as scratch:
        copy = Path(scratch, "tree")
        copy.mkdir()
        before = {path: _text(tree, path, field) for path in paths}
        for path, text in _present(before).items():
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            (copy / path).write_bytes(text.encode())
        try:
            whole = patch if patch.endswith("\n") else patch + "\n"
            git(copy, "apply", "--whitespace=nowarn", "-", stdin=whole.encode())
        except ConfigError as error:
            raise ConfigError(f"its {field!r} does not apply: {error}") from None
        after = {path: _text(copy, path, field) for path in paths}
    return {path: text for path, text in after.items() if text != before[path]}


def _touched(patch: str, field: str) -> list[str]:
    if "GIT binary patch" in patch:
        raise ConfigError(f"its {field!r} changes a binary file; tasks hold text only")
    try:
        paths = [check_path(match["path"]) for match in _HEADER.finditer(patch) if match["path"] != "/dev/null"]
    except ValueError as error:
        raise ConfigError(f"its {field!r} is refused: {error}") from None
    if not paths:
        raise ConfigError(f"its {field!r} is not a unified diff: it has no line that begins with '--- ' or '+++ '")
    return sorted(set(paths))


def _text(tree: Path, path: str, field: str) -> str | None:
    """Return a file's text, None where there is none. A link may lead out of the tree."""
    for part in (PurePosixPath(path), *PurePosixPath(path).parents[:-1]):
        if (tree / part).is_symlink():
            raise ConfigError(f"its {field!r} changes {path}, but {part} is a link; tasks hold plain files only")
    try:
        return (tree / path).read_bytes().decode() if (tree / path).is_file() else None
    except UnicodeDecodeError:
        raise ConfigError(f"its {field!r} changes {path}, which is not UTF-8 text; tasks hold UTF-8 only") from None


# -- task files: JSON lines or Parquet


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One record of a task file."""

    place: str
    values: dict[str, Any]

    def text(self, name: str) -> str:
        value = self.value(name)
        if isinstance(value, str):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        raise ConfigError(f"{self.place}: {name!r} is a {type(value).__name__}, but must be text")

    def texts(self, name: str) -> list[str]:
        value = self.value(name)
        if isinstance(value, str):
            try:
                value = msgspec.json.decode(value)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{self.place}: {name!r} is text that is not a JSON list: {error}") from None
        if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
            return value
        raise ConfigError(f"{self.place}: {name!r} is a {type(value).__name__}, but must be a list of texts")

    def value(self, name: str) -> Any:
        if (value := self.values.get(name)) is not None:
            return value
        filled = [name for name, value in self.values.items() if value is not None]
        shown = ", ".join(filled[:_SHOWN_FIELDS]) or "none"
        raise ConfigError(f"{self.place}: no field {name!r}; the record's fields are: {shown}")


def read_records(path: Path) -> Iterator[Record]:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give the path of a .jsonl or .parquet file")
    count = 0
    for number, values in _rows(path):
        count += 1
        if not isinstance(values, dict):
            raise ConfigError(f"{path}:{number}: a {type(values).__name__}, but each record must be a JSON object")
        yield Record(place=f"{path}:{number}", values=values)
    if not count:
        raise ConfigError(f"{path} is empty: it holds no record")


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    if path.suffix == ".parquet":
        yield from _parquet(path)
        return
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            yield number, _json(line, f"{path}:{number}")


def _json(content: bytes, place: str) -> Any:
    try:
        return msgspec.json.decode(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}: not UTF-8 (byte {error.start} of the text); save the file as UTF-8") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{place}: not JSON: {error}") from None


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError:
        raise ConfigError(f"{path}: reading Parquet needs `uv pip install pyarrow`, or save it as .jsonl") from None
    try:
        yield from enumerate(parquet.read_table(path).to_pylist(), start=1)
    except (ArrowInvalid, OSError) as error:
        raise ConfigError(f"{path}: no Parquet file: {error}") from error
