"""What the task factory reads of a package and takes out of it, and the words of a task."""

from __future__ import annotations

import ast
import os
import shutil
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from composer_prime.errors import ConfigError
from orchestrator.coding.factory import source
from orchestrator.coding.factory.candidates import FactorySettings, TaskCandidate, commit_candidates, find_candidates
from orchestrator.coding.factory.factory import symptoms
from orchestrator.coding.factory.source import SourceFunction, SourceTree, edited, find_functions
from orchestrator.coding.factory.suite import Baseline, TestRecord
from orchestrator.coding.git_command import commit_files
from orchestrator.coding.git_command import git as read_by_git
from orchestrator.coding.task import matches, write_tree
from tests.factory.package_made import PACKAGE, SHAPES, git, write_package

PATH = "shapes_made/shapes.py"


def shapes() -> dict[str, SourceFunction]:
    return {function.qualname: function for function in find_functions(PATH, SHAPES)}


def found(**settings: Any) -> tuple[list[TaskCandidate], Counter[str]]:
    node = "tests/test_shapes.py::test_all"
    functions = {function.place: function for function in shapes().values()}
    tested = [place for place, each in functions.items() if each.qualname not in ("never_tested", "register")]
    tree = SourceTree(
        folder=Path("made"),
        repository="made",
        origin="here",
        python_path=(".",),
        texts={PATH: SHAPES},
        sources=(PATH,),
        functions=functions,
        tests=(),
    )
    baseline = Baseline(
        tree=tree,
        stable=frozenset([node]),
        reach={place: frozenset([node]) for place in tested},
        imported=frozenset([shapes()["register"].place]),
        excluded={},
        files={"tests/test_shapes.py": [node]},
        seconds={"tests/test_shapes.py": 0.01},
        collect_errors={},
        missing=[],
    )
    return find_candidates(baseline, FactorySettings(**settings))


# A deleted body is gone with its comments; signature and docstring stay, and the file is still valid.
def test_a_removal_leaves_signature_and_docstring() -> None:
    text = edited(SHAPES, [shapes()["area"].removal, shapes()["Box.put"].removal])
    ast.parse(text)
    assert "secret" not in text and "negative" not in text and "things.append" not in text
    assert "Return the area of a rectangle." in text and "Raises IndexError when the box is full." in text
    assert text.count("raise NotImplementedError") == 2
    assert "half = width + height" in text  # other functions keep theirs


# Functions that run at import or that no test reaches are left out, and counted.
def test_left_out_functions_are_counted() -> None:
    candidates, left_out = found(kinds=("delete",))
    assert left_out["runs when the package is imported"] == 1
    assert left_out["no test reaches it"] == 1
    assert left_out["a body of fewer than 3 lines"] == 2
    assert not [one for one in candidates if "never_tested" in one.id or "register" in one.id]
    assert {one.shape for one in candidates} == {"function", "class", "module"}


# Kinds take turns, so that a limit keeps some of each.
def test_kinds_take_turns() -> None:
    candidates, _ = found()
    assert [one.kind for one in candidates[:8]] == ["delete", "mutate"] * 4
    assert Counter(one.kind for one in candidates)["mutate"] > 4


# Every operator finds its mistake, and all changed files are valid and differ from the original.
@pytest.mark.parametrize(
    ("body", "operator", "expected"),
    [
        ("return a + b", "operator", "return a - b"),
        ("return a < b", "operator", "return a <= b"),
        ("return a is not b", "operator", "return a is b"),
        ("return a and b", "operator", "return a or b"),
        ("return a[1]", "off-by-one", "return a[2]"),
        ("return a[0]", "off-by-one", "return a[-1]"),
        ("if a: return b", "branch", "if not a: return b"),
        ("if not (a or b): return b", "branch", "if a or b: return b"),
        ("if a(b) and b: return b", "branch", "if not a(b) and b: return b"),
        ("a.append(b)  # why\nreturn a", "statement", "return a"),
        ("if a:\n    b = (1,\n      2)\n    return b", "statement", "if a:\n    return b"),
        ("x = 'ä'; return a + b", "operator", "x = 'ä'; return a - b"),
        ("return (a)  +  (b)", "operator", "return (a)  -  (b)"),
    ],
)
def test_mutations(body: str, operator: str, expected: str) -> None:
    text = f"def f(a, b=3):\n{textwrap.indent(body, '    ')}\n"
    (function,) = find_functions(PATH, text)
    texts = [edited(text, [edit]) for edit in function.mistakes if edit.kind == operator]
    assert f"def f(a, b=3):\n{textwrap.indent(expected, '    ')}\n" in texts


# No mutation has what people do not write: a `pass` beside statements, `not (`, `while False`, `- 0`, 256 for 0xff.
@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ("return a - 1", ["return a + 1", "return a - 2"]),
        ("return a & 0xFF", ["return a | 0xFF"]),
        ("while True: a()", []),
        ("while a: a()", []),
        ("if a == b: a()", ["if a != b: a()"]),
        ("if (a := b): a()", []),
        ("if a: a.append(b)", ["if not a: a.append(b)"]),
    ],
)
def test_mutations_are_what_people_write(body: str, texts: list[str]) -> None:
    original, *expected = (f"def f(a, b):\n{textwrap.indent(text, '    ')}\n    return a\n" for text in (body, *texts))
    (function,) = find_functions(PATH, original)
    assert [edited(original, [edit]) for edit in function.mistakes] == expected


# Mutations of a real file are valid wherever they are, and differ from it.
def test_all_mutations_of_a_file_are_valid() -> None:
    texts = [edited(SHAPES, [edit]) for function in shapes().values() for edit in function.mistakes]
    assert len(texts) > 20 and SHAPES not in texts
    for text in texts:
        ast.parse(text)


# A symptom names the test and its assertion, and no address that changes from run to run.
def test_symptoms() -> None:
    record = TestRecord(
        node="tests/test_shapes.py::test_area",
        outcome="failed",
        duration_s=0.0,
        message="assert <Box at 0x7f00deadbeef> == 6",
        assertion="assert shapes.area(2, 3) == 6",
    )
    (text,) = symptoms([record])
    assert "tests/test_shapes.py::test_area" in text and "assert shapes.area(2, 3) == 6" in text
    assert "7f00deadbeef" not in text


# A copy leaves out links and everything that gives deleted code away.
def test_copies_leave_caches_builds_and_links_out(tmp_path: Path) -> None:
    folder = write_package(tmp_path / "shapes_made")
    extra = ["shapes_made/__pycache__/shapes.cpython-311.pyc", ".git/HEAD", "build/lib/shapes.py", "dist/a.whl", "x.so"]
    for path in extra:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("x")
    (folder / "link.py").symlink_to("/etc/passwd")
    assert set(source.source_files(folder)) == set(PACKAGE)


# A tree tells its sources and tests.
def test_describe_tree(tmp_path: Path) -> None:
    write_package(tmp_path, setup="")
    tree = source.describe_tree(tmp_path, "shapes_made", "here")
    assert tree.sources == ("shapes_made/__init__.py", "shapes_made/shapes.py")
    assert tree.tests == ("tests/test_shapes.py",) and tree.python_path == (".",)
    assert source.editable_patterns(tree)[0] == "shapes_made/**"
    assert (tmp_path / "shapes_made-1.0.dist-info/METADATA").is_file()  # the package may ask for its own version


# What is new in a package may be edited: modules, packages and data, also beside tests. Tests may not, nor data that is
# there already, which they may read. Modules beside the package are no part of it.
@pytest.mark.parametrize("root", ["", "src/"])
def test_editable_patterns_leave_tests_out(tmp_path: Path, root: str) -> None:
    package = f"{root}shapes_made"
    made = ("__init__.py", "shapes.py", "test_inside.py", "tests/__init__.py", "table.json")
    write_tree(tmp_path, {f"{package}/{name}": b"" for name in made} | {"tests/test_shapes.py": b"", "setup.py": b""})
    patterns = source.editable_patterns(source.describe_tree(tmp_path, "a", "here"))
    for name in ("__init__.py", "shapes.py", "new.py", "inner/__init__.py", "new.json", "testing/new.py"):
        assert matches(f"{package}/{name}", patterns), name
    for name in (*made[2:], "test_new.py", "inner/new_test.py", "tests/data.json", "../re.py", "../tests/a.py"):
        assert not matches(os.path.normpath(f"{package}/{name}"), patterns), name


# A tree without a package, or without tests, is refused with the reason.
def test_describe_tree_refuses(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_it.py").write_text("def test_it(): pass")
    with pytest.raises(ConfigError, match="here: "):
        source.describe_tree(tmp_path, "a", "here")
    (tmp_path / "package.py").write_text("")
    (tmp_path / "tests/test_it.py").unlink()
    with pytest.raises(ConfigError, match="here: "):
        source.describe_tree(tmp_path, "a", "here")


# Whoever packs a repository writes its settings: reading it starts no program that they name.
@pytest.mark.process
def test_settings_of_a_repository_start_no_program(tmp_path):
    source, ran = write_package(tmp_path / "shapes"), tmp_path / "ran"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {ran}\n")
    program.chmod(0o755)
    (source / ".gitattributes").write_text("*.py filter=own=x\n")
    git(source, "init", "-q")
    git(source, "add", ".")
    git(source, "commit", "-q", "-m", "First")
    signed = git(source, "cat-file", "commit", "HEAD").replace("\n\n", "\ngpgsig -----BEGIN PGP SIGNATURE-----\n\n", 1)
    (tmp_path / "commit").write_text(signed)
    git(source, "update-ref", "HEAD", git(source, "hash-object", "-wt", "commit", str(tmp_path / "commit")).strip())
    programs = ("core.fsmonitor", "gpg.program", "filter.own=x.clean", "filter.own=x.smudge", "filter.own=x.process")
    for name in (*programs, "remote.far.uploadpack"):
        git(source, "config", name, str(program))
    for name in ("log.showSignature", "filter.own=x.required"):
        git(source, "config", name, "true")
    shutil.copy(program, source / ".git/hooks/post-index-change")
    for path in source.rglob("*.py"):
        os.utime(path, (0, 0))
    read_by_git(source, "status", "--porcelain")
    assert len(commit_candidates(source, 5)) == 1
    assert commit_files(source, "HEAD")[PATH] == (source / PATH).read_bytes()
    assert not ran.exists()
    blob = git(source, "rev-parse", f"HEAD:{PATH}").strip()
    (source / ".git/objects" / blob[:2] / blob[2:]).unlink()
    for name, value in (("core.repositoryformatversion", "1"), ("extensions.partialClone", "far"), ("url", tmp_path)):
        git(source, "config", name if "." in name else f"remote.far.{name}", str(value))
    with pytest.raises(ConfigError, match="'file' not allowed"):  # A fetch of what it lacks.
        commit_files(source, "HEAD")
    assert not ran.exists()
