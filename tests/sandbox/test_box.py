"""What a box promises its callers: files, commands as a new interpreter runs them, limits, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import SandboxError
from orchestrator.coding.code import code_taskset
from orchestrator.coding.sandbox.box import open_box, read_tree
from orchestrator.coding.sandbox.bubblewrap import BubblewrapBox
from orchestrator.coding.sandbox.host_view import processes_of
from tests.sandbox.boxes import LIMITS, SMALL, need_bubblewrap

pytestmark = pytest.mark.process
BOTH = [pytest.param("bubblewrap", id="bubblewrap"), pytest.param("subprocess", id="subprocess")]


def table(kind: str) -> RuntimeConfig:
    if kind == "bubblewrap":
        need_bubblewrap()
    return SMALL.model_copy(update={"type": kind})


# Claim: both kinds of box copy the tree without caches and links, and give files back as bytes.
@pytest.mark.parametrize("kind", BOTH)
async def test_a_box_holds_the_tree_and_the_files(kind: str, tmp_path: Path) -> None:
    (tmp_path / "package/__pycache__").mkdir(parents=True)
    (tmp_path / "package/code.py").write_text("x = 1\n")
    (tmp_path / "package/__pycache__/code.pyc").write_bytes(b"stale")
    (tmp_path / "link").symlink_to("/etc/passwd")
    async with await open_box(table(kind), files={**read_tree(tmp_path), "data/b": b"\x00\xff"}) as box:
        assert await box.list_files() == {"data/b": 2, "package/code.py": 6}
        assert await box.read_file("data/b", 2) == b"\x00\xff"
        with pytest.raises(ValueError, match="more than 1 bytes"):
            await box.read_file("data/b", 1)
        with pytest.raises(FileNotFoundError, match="no regular file"):
            await box.read_file("data", 100)
        finished = await box.run(["sh", "-c", "cat; pwd >&2; exit 3"], stdin=b"in")
        assert (finished.exit_code, finished.stdout, finished.ended_by) == (3, b"in", "")
        assert finished.stderr.endswith(b"work\n")


# Claim: a list that is cut short, and what is read back by it, have all files that the host wrote. None seems deleted.
@pytest.mark.parametrize("kind", BOTH)
async def test_many_files_hide_none_that_was_given(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"src/m.py": b"x = 1\n", "tests/test_m.py": b"assert True\n", "z": b"z"}
    fill = "import os; os.mkdir('a'); [open(f'a/{i}', 'w').write('x') for i in range(2500)]; open('src/new.py', 'w')"
    async with await open_box(table(kind), files=given) as box:
        await box.run(["python", "-c", fill])
        listed = await box.list_files()
        assert given.keys() <= listed.keys() and 2000 <= len(listed) <= 2003
        monkeypatch.setattr(code_taskset, "MAX_TREE_BYTES", -10)
        assert await code_taskset.read_files(box, given) == given
        await box.run(["python", "-c", "open('z', 'w').truncate(2**23)"])  # What is too large to read is no deletion.
        assert await code_taskset.read_files(box, given) == given


# Claim: both kinds end a command at its deadline and at its output's bound, and say what was cut.
@pytest.mark.parametrize("kind", BOTH)
async def test_a_command_ends_at_its_limits(kind: str) -> None:
    async with await open_box(table(kind)) as box:
        assert (await box.run(["sleep", "1000"], timeout_s=0.2)).ended_by == "wall_s"
        flood = await box.run(["yes"])
        assert flood.ended_by == "output_mb" and flood.exit_code is None and len(flood.stdout) < 20_000
        cut = await box.run(["sh", "-c", "printf 0123456789"], output_bytes=4)
        assert cut.stdout == b"01\n[... 6 bytes cut ...]\n89"
        assert (await box.run(["sh", "-c", "kill -11 $$"])).exit_code == 139
        assert (await box.run(["no-such-program"])).exit_code == 127
        assert (await box.run(["echo", "works"])).stdout == b"works\n"


# Claim: words that are too long end the command, not the box.
@pytest.mark.parametrize("kind", BOTH)
async def test_a_command_that_cannot_start_is_data(kind: str) -> None:
    async with await open_box(table(kind)) as box:
        assert (await box.run(["echo", "x" * 3_000_000])).exit_code == 126
        for path in ("\ud800", "folder/\ud800"):
            with pytest.raises(ValueError, match="path inside a sandbox"):
                await box.write_files({path: b""})
        odd = await box.run(["python", "-c", "pass"], env={"PYTHONPATH": "a\udcff"})
        assert odd.exit_code == 0, odd


# Claim: code that takes the permissions of its own folder away stops neither the limits nor the box.
@pytest.mark.parametrize("kind", BOTH)
async def test_a_work_folder_without_permissions_is_data(kind: str) -> None:
    async with await open_box(table(kind), files={"a": b""}) as box:
        assert (await box.run(["sh", "-c", "chmod 0 .; sleep 1"])).exit_code == 0
        assert set(await box.list_files()) <= {"a"}
        with contextlib.suppress(FileNotFoundError):
            assert await box.read_file("a", 1) == b""
        with pytest.raises(FileNotFoundError):
            await box.read_file("missing", 1)


# Claim: a file that does not fit leaves the old one, and permissions stay.
async def test_a_file_that_does_not_fit_leaves_the_old_one() -> None:
    need_bubblewrap()
    async with await open_box(SMALL, files={"a": b"old", "b": b"old"}) as box:
        await box.run(["chmod", "700", "b"])
        with pytest.raises(OSError, match="No space left"):
            await box.write_files({"a": bytes(40 << 20)})
        await box.write_files({"b": b"new"})
        assert await box.read_file("a", 9) == b"old" and await box.read_file("b", 9) == b"new"
        assert (await box.run(["stat", "-c", "%a", "b"])).stdout == b"700\n"
        assert await box.list_files() == {"a": 3, "b": 3}


# Claim: where processes may outlive their command, the end of one command ends nothing of another.
async def test_a_limit_ends_only_its_own_command() -> None:
    need_bubblewrap()
    limits = LIMITS.model_copy(update={"cpu_s": 1})
    async with await open_box(SMALL.model_copy(update={"limits": limits})) as box:
        assert isinstance(box, BubblewrapBox)
        box.keeps_others = True
        spin = "import time\nwhile time.process_time() < 3: pass"
        program = asyncio.ensure_future(box.run(["python", "-c", spin], timeout_s=200, cpu_s=100))
        assert (await box.run(["sh", "-c", "sleep 1000 & sleep 1000"], timeout_s=0.5)).ended_by == "wall_s"
        assert (await box.run(["sh", "-c", "cat /proc/[0-9]*/comm"])).stdout.count(b"sleep") == 0
        finished = await program
        assert (finished.exit_code, finished.ended_by) == (0, "")
        assert (await box.run(["sh", "-c", "while :; do :; done"])).ended_by == "cpu_s"


# Claim: a box of a process with more than 1024 open descriptors works, and its commands have none of them.
async def test_many_open_descriptors() -> None:
    need_bubblewrap()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"the hard limit of open files is {hard}, below 2048")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        with contextlib.ExitStack() as many:
            for _ in range(1100):
                many.enter_context(open(os.devnull))
            async with await open_box(SMALL, files={"a": b"x"}) as box:
                assert (await box.run(["python", "-c", "print(7)"])).stdout == b"7\n"
                listed = await box.run(["sh", "-c", "ls /proc/self/fd"])
                assert listed.stdout.split() == [b"0", b"1", b"2", b"3"], listed
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# Claim: when the process that opened a subprocess box is killed, its command ends.
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv (util-linux)")
def test_a_command_ends_with_its_owner() -> None:
    code = """
import asyncio
from orchestrator.coding.sandbox.box import open_box
from composer_prime.config.sandbox import RuntimeConfig
async def main():
    box = await open_box(RuntimeConfig(type="subprocess"))
    running = asyncio.ensure_future(box.run(["sleep", "1000"]))
    while box._process is None: await asyncio.sleep(0.05)
    print(box._process.pid, flush=True)
    await running
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        while b"sleep" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            subprocess.run(["sleep", "0.05"], check=True)
        owner.kill()
    for _ in range(1000):
        if not alive(pid):
            return
        subprocess.run(["sleep", "0.1"], check=True)
    raise AssertionError(f"process {pid} outlived its owner")


# Claim: a module in the work folder that has the name of another one is imported.
@pytest.mark.parametrize("path", ["src/json.py", "src/pluggy.py", "src/sitecustomize.py", "pytest.py"])
async def test_a_module_in_the_way_is_not_passed_over(path: str) -> None:
    need_bubblewrap()
    files = {path: b"import os; os.write(1, b'own module\\n'); os._exit(3)"}
    async with await open_box(SMALL, files=files, python_path=["src"]) as box:
        finished = await box.run(["python", "-m", "pytest", "--version"])
    assert finished.exit_code == 3 and finished.stdout.startswith(b"own module")


# Claim: pytest in a box collects, fails, and rewrites assertions as usual, in each run anew.
async def test_pytest_in_a_box() -> None:
    need_bubblewrap()
    files = {"src/m.py": b"x = 1\n", "test_m.py": b"from m import x\ndef test_x(): assert x == 1\n"}
    async with await open_box(SMALL, files=files, python_path=["src"]) as box:
        argv = ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        assert b"1 passed" in (await box.run(argv)).stdout
        await box.write_files({"src/m.py": b"x = 22\n"})
        failed = await box.run(argv)
        assert failed.exit_code == 1 and b"assert 22 == 1" in failed.stdout
        assert set(await box.list_files()) == set(files)


# Claim: a cancelled command ends, and its box serves the next one.
async def test_a_cancelled_command_leaves_a_working_box() -> None:
    need_bubblewrap()
    async with await open_box(SMALL) as box:
        running = asyncio.ensure_future(box.run(["sleep", "1000"]))
        await asyncio.sleep(0.2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        listed = await box.run(["sh", "-c", "cat /proc/[0-9]*/comm"])
        assert b"sleep" not in listed.stdout and listed.exit_code == 0


# Claim: the files of a box that was killed are an error, never an empty folder, also before its end was heard of.
async def test_the_files_of_a_killed_box_are_not_taken_for_removed() -> None:
    async with await open_box(table("bubblewrap"), files={"f.py": b"x"}) as box:
        assert isinstance(box, BubblewrapBox)
        os.kill(box.init_pid, signal.SIGKILL)
        until = time.monotonic() + 100
        # No await: this loop does not hear of the end.
        while os.stat("work", dir_fd=box.view.root_fd).st_dev != os.fstat(box.view.root_fd).st_dev:
            assert time.monotonic() < until
            time.sleep(0.001)
        with pytest.raises(SandboxError, match="killed while its files were read"):
            await box.read_file("f.py", 1)
        with pytest.raises(SandboxError, match=r"was killed|has ended"):
            await box.list_files()


# Claim: a closed box refuses commands with an error that says what to do.
@pytest.mark.parametrize("kind", BOTH)
async def test_a_closed_box_says_so(kind: str) -> None:
    box = await open_box(table(kind))
    await box.close()
    await box.close()
    with pytest.raises(SandboxError, match="open another one"):
        await box.run(["true"])


# Claim: when the process that opened boxes is killed, its boxes and everything in them end.
def test_boxes_end_with_their_owner() -> None:
    need_bubblewrap()
    code = """
import asyncio
from orchestrator.coding.sandbox.box import open_box
from orchestrator.coding.sandbox.host_view import processes_of
from composer_prime.config.sandbox import RuntimeConfig
async def main():
    boxes = [await open_box(RuntimeConfig(type="bubblewrap")) for _ in range(3)]
    runs = [asyncio.ensure_future(box.run(["sh", "-c", "setsid sleep 1000 & sleep 1000"])) for box in boxes]
    while any(len(processes_of(box.init_pid)) < 3 for box in boxes): await asyncio.sleep(0.05)
    print(*[box.init_pid for box in boxes], flush=True)
    await asyncio.wait(runs)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        inits = [int(word) for word in owner.stdout.readline().split()]
        pids = [pid for init in inits for pid in processes_of(init)]
        owner.kill()
    assert len(inits) == 3 and len(pids) >= 9
    for _ in range(1000):
        if not [pid for pid in pids if alive(pid)]:
            return
        subprocess.run(["sleep", "0.1"], check=True)
    raise AssertionError(f"still there: {[pid for pid in pids if alive(pid)]}")


def alive(pid: int) -> bool:
    """Whether a process runs. One that ended, and that its new parent did not collect yet, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# Claim: of 256 boxes, with seeded kills of their processes in mid-command, each gives a result and nothing is left.
@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_256_boxes_with_random_kills() -> None:
    need_bubblewrap()
    draw = random.Random(0)
    started: list[int] = []
    places = asyncio.Semaphore(64)

    async def one(number: int) -> str:
        async with places, await open_box(SMALL.model_copy(update={"limits": LIMITS})) as box:
            assert isinstance(box, BubblewrapBox)
            running = asyncio.ensure_future(box.run(["sh", "-c", "setsid sleep 300 & sleep 0.5; echo done"]))
            if number % 3 == 0:
                await asyncio.sleep(draw.random())
                victims = [*processes_of(box.init_pid), box.process.pid]
                started.extend(victims)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(draw.choice(victims), signal.SIGKILL)
            finished = await running
            started.extend(processes_of(box.init_pid))
            return finished.ended_by or str(finished.exit_code)

    results = await asyncio.gather(*(one(number) for number in range(256)))
    assert len(results) == 256 and set(results) <= {"0", "137", "box", "143"}
    assert sum(result == "0" for result in results) >= 170
    for _ in range(100):
        if not [pid for pid in started if alive(pid)]:
            break
        await asyncio.sleep(0.1)
    assert not [pid for pid in started if alive(pid)]
