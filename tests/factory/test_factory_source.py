"""Sources of the task factory: folders, and what is wrong with some."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer_prime.errors import ConfigError
from orchestrator.coding.factory import source
from tests.factory.package_made import PACKAGE, write_package


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
    assert source.editable_patterns(tree) == ["shapes_made/*.py"]
    assert (tmp_path / "shapes_made-1.0.dist-info/METADATA").is_file()  # the package may ask for its own version


# Tests beside the sources are no part of what may be edited.
def test_editable_patterns_leave_tests_out(tmp_path: Path) -> None:
    write_package(tmp_path, shapes_made__test_inside="def test_it(): pass")
    tree = source.describe_tree(tmp_path, "a", "here")
    assert source.editable_patterns(tree) == ["shapes_made/__init__.py", "shapes_made/shapes.py"]


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
