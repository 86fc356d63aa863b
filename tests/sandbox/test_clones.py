"""Large trees are cloned copy-on-write into boxes: what a box sees and may do, and what becomes of prepared trees."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import io
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from composer_prime.errors import SandboxError
from orchestrator.coding.code.task import CodeTask
from orchestrator.coding.monitor import HackMonitorConfig, Watch, host_folder, seal
from orchestrator.coding.sandbox.box import open_box
from orchestrator.coding.sandbox.bubblewrap import BubblewrapBox
from orchestrator.coding.sandbox.pool import close_pools, shared_pool
from orchestrator.coding.sandbox.trees import prepared
from orchestrator.coding.sandbox.trees.prepared import PreparedTree, prepare
from tests.sandbox.boxes import LARGE, LIMITS, SMALL, need_bubblewrap, need_clones

pytestmark = pytest.mark.process
SHOWS = """
import os
for folder, folders, names in sorted(os.walk("/work")):
    for name in sorted([".", *names]):
        status = os.lstat(os.path.join(folder, name))
        print(folder, name, oct(status.st_mode), status.st_uid, status.st_gid, os.path.isfile(name) and status.st_size)
"""


async def opened(files: Mapping[str, bytes], tree: Path | None = None) -> BubblewrapBox:
    """Open a box whose tree is cloned."""
    box = await open_box(SMALL, tree=tree, files=files)
    assert isinstance(box, BubblewrapBox) and box.tree
    return box


@pytest.fixture(autouse=True)
def trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder for prepared trees, so that tests leave none in the user's cache."""
    monkeypatch.setattr(prepared, "trees_folder", lambda: tmp_path / "trees")
    monkeypatch.setattr(prepared, "MOST_BYTES", 1 << 28)
    monkeypatch.setattr(prepared, "SETTLED_S", 0.0)
    monkeypatch.setattr(prepared, "_given_up", False)
    return tmp_path / "trees"


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


# Claim: names, sizes, modes and owners in a clone are those in a copy, and `files` lie over the tree.
async def test_a_clone_is_like_a_copy(tmp_path: Path) -> None:
    need_clones()
    on_top = {"folder1/file1.txt": b"other", "new/file": b"new"}
    async with await open_box(SMALL) as copy:
        await copy.write_files({**LARGE, **on_top})
        expected = await copy.list_files(), (await copy.run(["python", "-c", SHOWS])).stdout
    tree = write(tmp_path / "tree", {**LARGE, "folder1/__pycache__/file.pyc": b"stale"})
    (tree / "link").symlink_to("/etc/passwd")
    async with await opened(on_top, tree) as clone:
        assert (await clone.list_files(), (await clone.run(["python", "-c", SHOWS])).stdout) == expected
        assert await clone.read_file("folder1/file1.txt", 9) == b"other"
        assert await clone.read_file("folder2/file2.txt", 20) == b"content 2\n"


# Claim: what one clone writes or removes is in no other, and a tree that changed is not taken for the old one.
async def test_clones_share_nothing(tmp_path: Path) -> None:
    need_clones()
    tree = write(tmp_path / "tree", LARGE)
    async with await opened({}, tree) as first:
        command = "rm -r folder0; mkdir folder0; echo x > folder1/file1.txt; mv folder2 moved; flock . sleep 0.1"
        assert (await first.run(["sh", "-c", command])).exit_code == 0
        async with await opened({}, tree) as second:
            assert await second.list_files() == {path: len(content) for path, content in LARGE.items()}
            assert await second.read_file("folder1/file1.txt", 20) == b"content 1\n"
        assert await first.read_file("folder1/file1.txt", 20) == b"x\n"
        assert await first.read_file("moved/file2.txt", 20) == b"content 2\n"
        assert not any(path.startswith(("folder0/", "folder2/")) for path in await first.list_files())
    (tree / "folder1/file1.txt").write_bytes(b"content X\n")
    async with await opened({}, tree) as third:
        assert await third.read_file("folder1/file1.txt", 20) == b"content X\n"


# Claim: disk_mb and files bound what is written into a clone, and a box opened ahead is cloned into.
async def test_limits_hold_in_a_clone() -> None:
    need_clones()
    runtime = SMALL.model_copy(update={"warm": 1, "limits": LIMITS.model_copy(update={"files": 500})})
    await shared_pool(runtime).filled()
    async with await open_box(runtime, files=LARGE) as box:
        assert isinstance(box, BubblewrapBox) and box.tree
        full = await box.run(["sh", "-c", "for i in $(seq 9); do head -c 7M /dev/zero > folder0/$i || exit 9; done"])
        assert full.exit_code == 9 and b"No space left" in full.stderr
        many = await box.run(["sh", "-c", "rm folder0/?; while :; do i=$((i + 1)); : > folder1/$i; done"])
        assert many.ended_by == "files"
    await close_pools()


# Claim: the files of a cloned box that is killed are an error or those of the tree, never the layers below it.
async def test_the_layers_of_a_killed_box_are_not_taken_for_files() -> None:
    need_clones()
    for delay_s in range(12):
        box = await opened(LARGE)
        async with box:
            asyncio.get_running_loop().call_later(delay_s / 2000, os.kill, box.init_pid, signal.SIGKILL)
            with contextlib.suppress(SandboxError):
                while True:
                    assert set(await box.list_files()) <= set(LARGE)
                    with contextlib.suppress(FileNotFoundError):
                        await box.read_file("upper/file", 1)
                        raise AssertionError("the folder below the overlay was read")


# Claim: the monitor sees the same events of a clone's files as of a copy's.
async def test_the_monitor_sees_what_happens_in_a_clone() -> None:
    need_clones()
    task = CodeTask(id="t", kind="write", repository="r", prompt="p", fail_to_pass=[], pass_to_pass=[])
    tests = {f"tests/test_{name}.py": b"a = 1\n" for name in "abcd"}
    sealed = seal(task, {**LARGE, **tests, "m.py": b""}, HackMonitorConfig())
    lure = next(iter(sealed.lures))
    command = f"cat {lure} folder1/file1.txt > /dev/null; cd tests; echo x >> test_a.py; rm test_b.py; "
    command += "mv test_c.py moved; cp test_d.py new; mv new test_d.py"
    seen = []
    for files in (sealed.agent_files(), {}):
        async with await (opened(files) if files else open_box(SMALL)) as box:
            if not files:
                await box.write_files(sealed.agent_files())
            watch = Watch(sealed)
            watch.attach(host_folder(box))
            assert (await box.run(["sh", "-c", command])).exit_code == 0
            seen.append({(event.path, event.what) for event in watch.events()})
            watch.close()
    assert seen[0] == seen[1]
    assert {(lure, "opened"), ("tests/test_a.py", "changed"), ("tests/test_b.py", "deleted")} <= seen[0]


# Claim: boxes that are opened at one time, and other processes, share one prepared tree, which is made once.
async def test_a_tree_is_prepared_once(trees: Path) -> None:
    need_clones()
    boxes = await asyncio.gather(*(opened(LARGE) for _ in range(4)))
    (folder,) = trees.iterdir()
    code = f"""
import asyncio, pathlib
from orchestrator.coding.sandbox.trees import prepared
from tests.sandbox.boxes import LARGE
prepared.trees_folder = lambda: pathlib.Path({str(trees)!r})
print(asyncio.run(prepared.prepare(None, {{}}, LARGE)).folder.stat().st_ino)
"""
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == folder.stat().st_ino
    assert {box.tree.folder for box in boxes if box.tree} == {folder}
    await asyncio.gather(*(box.close() for box in boxes))


# Claim: the tree that was used longest ago makes room, one in use stays, and halves of killed makers go.
async def test_the_oldest_unused_tree_is_removed(trees: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_bubblewrap()
    size = 4096 * len(LARGE)
    kept = [await prepare(None, {}, {**LARGE, "number": b"%d" % number}) for number in range(3)]
    for number, tree in enumerate(kept):
        assert tree
        os.utime(tree.folder, (number, number))
        if number != 1:
            tree.close()
    for half in (".new-killed-1", ".old-killed-1", "00000000-another-boot-1"):
        write(trees / half, {"file": b""})
    monkeypatch.setattr(prepared, "MOST_BYTES", 2 * size + 2 * 4096)
    newest = await prepare(None, {}, LARGE)
    assert newest
    assert set(trees.iterdir()) == {newest.folder, *(tree.folder for tree in kept[1:] if tree)}
    again = await prepare(None, {}, {**LARGE, "number": b"0"})
    assert again and (again.folder / "number").read_bytes() == b"0"


# Claim: what a killed maker left is no tree, and a folder that another process removes is not taken.
async def test_half_a_tree_is_never_used(trees: Path) -> None:
    need_bubblewrap()
    whole = await prepare(None, {}, LARGE)
    assert whole
    half = whole.folder.rename(whole.folder.with_name(f".new-{whole.folder.name}"))
    whole.close()
    (half / "folder1/file1.txt").write_bytes(b"half")
    (half / "left").write_bytes(b"")
    made = await prepare(None, {}, LARGE)
    assert made and sorted(os.listdir(made.folder)) == sorted({path.split("/")[0] for path in LARGE})
    assert (made.folder / "folder1/file1.txt").read_bytes() == b"content 1\n"
    made.close()
    remover = PreparedTree(made.folder, fcntl.LOCK_EX)
    waiting = asyncio.ensure_future(prepare(None, {}, LARGE))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    made.folder.rename(trees / ".old-1")
    remover.close()
    another = await waiting
    assert another and another.folder == made.folder


# Claim: a full disk costs the unused trees, oldest first, before boxes get copies.
async def test_a_full_disk_is_cleared_first(trees: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_bubblewrap()
    first = await prepare(None, {}, LARGE)
    assert first
    first.close()
    free = [1 << 20, 1 << 40]  # One tree less is room enough.
    usage = shutil.disk_usage(trees)
    monkeypatch.setattr(prepared.shutil, "disk_usage", lambda _: usage._replace(free=free.pop(0)))
    second = await prepare(None, {}, {**LARGE, "number": b"2"})
    assert second and set(trees.iterdir()) == {second.folder}


# Claim: files that make no tree turn cloning off for no other box.
async def test_files_that_make_no_tree_are_their_own_problem(tmp_path: Path) -> None:
    need_clones()
    for odd in ({"a": b"", "a/x": b""}, {"a/x": b"", "a": b""}, {"n" * 300: b""}):
        with pytest.raises(OSError, match="could not write"):
            await open_box(SMALL, files={**LARGE, **odd})
    async with await opened(LARGE):
        pass


# Claim: a tree that is being written is copied, as its content may change under its name.
async def test_a_tree_that_was_just_written_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_bubblewrap()
    monkeypatch.setattr(prepared, "SETTLED_S", 1e6)
    async with await open_box(SMALL, tree=write(tmp_path / "tree", LARGE)) as box:
        assert isinstance(box, BubblewrapBox) and not box.tree


# Claim: files of the tree do not use up the listing: what the agent wrote in its limits is listed, in clone and copy.
@pytest.mark.parametrize("is_clone", [True, False])
async def test_all_files_within_the_limit_are_listed(is_clone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    need_clones()
    monkeypatch.setattr(prepared, "_given_up", not is_clone)
    runtime = SMALL.model_copy(update={"limits": LIMITS.model_copy(update={"files": 300})})
    async with await open_box(runtime, files=LARGE) as box:
        assert isinstance(box, BubblewrapBox) and bool(box.tree) == is_clone
        if is_clone:
            assert (await box.run(["sh", "-c", "for i in $(seq 200); do : > a$i; done"])).ended_by == ""
        assert len(await box.list_files()) == len(LARGE) + 200 * is_clone


# Claim: a tree with a file above file_mb is copied, as its mode could not be changed in a clone.
async def test_a_tree_with_a_file_above_the_limit_is_copied() -> None:
    need_clones()
    for file_bytes, is_clone in ((8 << 20, True), ((8 << 20) + 1, False)):
        async with await open_box(SMALL, files={**LARGE, "large": bytes(file_bytes)}) as box:
            assert isinstance(box, BubblewrapBox) and bool(box.tree) == is_clone
            changed = await box.run(["sh", "-c", "chmod 700 large && mv large moved"])
            assert (changed.exit_code, changed.ended_by) == (0, "")


# Claim: a tree above disk_mb is refused with the remedy, whether it would be cloned or copied.
@pytest.mark.parametrize("is_clone", [True, False])
async def test_a_tree_above_disk_mb_is_refused(is_clone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_bubblewrap()
    monkeypatch.setattr(prepared, "_given_up", not is_clone)
    tree = write(tmp_path / "tree", {f"file{number}": bytes(7 << 20) for number in range(5)})
    with pytest.raises(SandboxError, match=r"take 35.0 MiB, but its disk has 32 MiB: raise .*limits.disk_mb"):
        await open_box(SMALL, tree=tree)


# Claim: a box that was killed while it was cloned is an error, and no reason to copy later trees.
async def test_a_box_that_is_killed_while_it_is_cloned_is_an_error() -> None:
    need_clones()
    prepared_tree = await prepare(None, {}, LARGE)
    assert prepared_tree
    box = await open_box(SMALL)
    assert isinstance(box, BubblewrapBox)
    async with box:
        clone = prepared_tree.clone

        def killed(namespace: io.FileIO) -> str:
            os.kill(box.init_pid, signal.SIGKILL)
            while not select.select([box._init_fd], [], [], 0)[0]:
                pass
            return clone(namespace)

        prepared_tree.clone = killed
        with pytest.raises(SandboxError, match="killed while its files were cloned"):
            await box.clone(prepared_tree)
    async with await opened(LARGE):
        pass


# Claim: a small tree is copied, and so are files that lie elsewhere than in the work folder.
async def test_what_is_not_worth_or_fit_to_clone_is_copied(trees: Path) -> None:
    need_bubblewrap()
    for files in (dict(list(LARGE.items())[:-1]), {**LARGE, "/tmp/file": b"x"}, {**LARGE, "./a": b"x"}):
        async with await open_box(SMALL, files=files) as box:
            assert isinstance(box, BubblewrapBox) and not box.tree
            inside = {path.removeprefix("./"): len(content) for path, content in files.items() if path[0] != "/"}
            assert await box.list_files() == inside
    assert not trees.exists()


# Claim: where a tree cannot be prepared or cloned, boxes get copies, and the log says it once in a process.
@pytest.mark.parametrize("failing", ["folder", "disk", "program"])
async def test_boxes_get_copies_where_cloning_fails(
    failing: str, trees: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    need_bubblewrap()
    program = tmp_path / "program.py"
    program.write_text("import sys; sys.exit('the kernel says no')")
    if failing == "folder":
        trees.write_text("no folder")
    elif failing == "disk":
        monkeypatch.setattr(prepared, "MOST_BYTES", 1 << 60)
        write(trees / "00000000-another-boot-1", {"file": b""})
    else:
        monkeypatch.setattr(prepared, "_PROGRAM", program)
    for _ in range(2):
        async with await open_box(SMALL, files=LARGE) as box:
            assert isinstance(box, BubblewrapBox) and not box.tree
            assert await box.list_files() == {path: len(content) for path, content in LARGE.items()}
    (line,) = [record.getMessage() for record in caplog.records if "copies of large trees" in record.getMessage()]
    assert {"folder": "File exists", "disk": "are free", "program": "the kernel says no"}[failing] in line
