"""Sources of the task factory: archives, folders, and what is wrong with some."""

from __future__ import annotations

import io
import random
import tarfile
from pathlib import Path
from typing import Literal

import pytest

from composer_prime.errors import ConfigError
from orchestrator.coding.factory import source
from tests.factory.package_made import PACKAGE, write_archive, write_package


# Unpacking leaves out the root folder and everything that gives deleted code away.
def test_unpack_drops_caches_and_builds(tmp_path: Path) -> None:
    extra = ["shapes_made/__pycache__/shapes.cpython-311.pyc", ".git/HEAD", "build/lib/shapes.py", "dist/a.whl", "x.so"]
    archive = write_archive(tmp_path / "shapes_made-1.0.tar.gz", {**PACKAGE, **dict.fromkeys(extra, "x")})
    source.unpack(archive, tmp_path / "tree")
    found = {
        path.relative_to(tmp_path / "tree").as_posix() for path in (tmp_path / "tree").rglob("*") if path.is_file()
    }
    assert found == set(PACKAGE)


# A path that leaves the root is refused, and nothing is written.
@pytest.mark.parametrize("name", ["../outside.py", "/outside.py", "a/../../outside.py"])
def test_unpack_refuses_paths_that_leave_the_root(tmp_path: Path, name: str) -> None:
    archive = write_archive(tmp_path / "a.tar.gz", {name: "x"}, root="")
    with pytest.raises(ConfigError, match="must not leave its folder"):
        source.unpack(archive, tmp_path / "tree")
    assert not (tmp_path / "outside.py").exists() and not (tmp_path / "tree").exists()


# Links of an archive are not written, wherever they point.
def test_unpack_writes_no_links(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        for name, kind in (("a/soft", tarfile.SYMTYPE), ("a/hard", tarfile.LNKTYPE), ("a/fifo", tarfile.FIFOTYPE)):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, "/etc/passwd"
            archive.addfile(entry)
        entry = tarfile.TarInfo("a/plain.py")
        archive.addfile(entry, io.BytesIO(b""))
    source.unpack(tmp_path / "a.tar.gz", tmp_path / "tree")
    assert [path.name for path in (tmp_path / "tree").iterdir()] == ["plain.py"]


# An archive of too many files is refused before they are all read.
def test_unpack_refuses_a_bomb(tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "a.tar.gz", {f"{number}.py": "" for number in range(source.MAX_FILES + 1)})
    with pytest.raises(ConfigError, match="more than 20000 files"):
        source.unpack(archive, tmp_path / "tree")


# A file that is no archive is refused with its name.
def test_unpack_refuses_what_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(b"no archive")
    with pytest.raises(ConfigError, match=r"a\.tar\.gz cannot be unpacked"):
        source.unpack(tmp_path / "a.tar.gz", tmp_path / "tree")


def spoiled(path: Path, mode: Literal["w:gz", "w:xz"]) -> Path:
    """Write an archive whose compressed bytes are wrong in the middle."""
    with tarfile.open(path, mode) as archive:
        entry = tarfile.TarInfo("a/noise.py")
        noise = random.Random(0).randbytes(20_000).hex().encode()
        entry.size = len(noise)
        archive.addfile(entry, io.BytesIO(noise))
    content = bytearray(path.read_bytes())
    content[1000:1200] = bytes(200)
    content[-1000:-800] = bytes(200)
    path.write_bytes(content)
    return path


# Every way in which an archive can be broken is a refusal that names it, so that other sources go on.
@pytest.mark.parametrize("kind", ["gz", "xz", "file and folder"])
def test_unpack_refuses_broken_archives(tmp_path: Path, kind: str) -> None:
    if kind == "gz":
        path = spoiled(tmp_path / "a.tar.gz", "w:gz")
    elif kind == "xz":
        path = spoiled(tmp_path / "a.tar.xz", "w:xz")
    else:
        path = write_archive(tmp_path / "a.tar.gz", {"a": "x", "a/b.py": "x"})
    with pytest.raises(ConfigError, match=rf"{path.name} cannot be unpacked: \S"):
        source.unpack(path, tmp_path / "tree")


# A tree tells its sources, tests, license and parts that would have to be compiled.
def test_describe_tree(tmp_path: Path) -> None:
    write_package(tmp_path, setup="")
    (tmp_path / "shapes_made/fast.pyx").write_text("")
    tree = source.describe_tree(tmp_path, "shapes_made-1.0", "here")
    assert tree.sources == ("shapes_made/__init__.py", "shapes_made/shapes.py")
    assert tree.tests == ("tests/test_shapes.py",) and tree.license == "MIT" and tree.python_path == (".",)
    assert tree.compiled == ("shapes_made/fast.pyx",)
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
    with pytest.raises(ConfigError, match="no Python package"):
        source.describe_tree(tmp_path, "a", "here")
    (tmp_path / "package.py").write_text("")
    (tmp_path / "tests/test_it.py").unlink()
    with pytest.raises(ConfigError, match="no tests in it"):
        source.describe_tree(tmp_path, "a", "here")


# An archive that was downloaded before is taken from the cache, whatever the form of its name; no network is used.
@pytest.mark.parametrize("requirement", ["shapes-made==1.0", "shapes.made", "Shapes_Made"])
def test_fetch_archive_takes_the_cached_one(tmp_path: Path, requirement: str) -> None:
    archive = write_archive(tmp_path / "shapes_made-1.0.tar.gz", PACKAGE)
    write_archive(tmp_path / "shapes_made_other-1.0.tar.gz", PACKAGE)
    assert source.fetch_archive(requirement, tmp_path) == archive
