"""Sandboxes against plain sub-processes, in one run: python benchmarks/sandbox.py [--boxes 200] [--repeat 30]

    launch        until the first command of a new box has ended | until `true` has ended as a sub-process
    round trip    a command in an open box | the same command as a sub-process, of the same interpreter
    graded tasks  a small pytest suite: a new box each time, opened ahead, and closed | a sub-process in a new folder
    memory        proportional set size (PSS) of all processes of the open boxes, and the growth of used memory

Each pair is measured alternately, so that other load on the machine meets both sides. Figures are medians.
A container is measured where docker answers.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import median

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.plan.sandboxes import probe
from orchestrator.sandbox.box import open_box
from orchestrator.sandbox.bubblewrap import BubblewrapBox
from orchestrator.sandbox.pool import close_pools, shared_pool
from orchestrator.sandbox.python_image import python_image
from orchestrator.sandbox.usage import processes_of

COMMANDS = (("true",), ("python", "-c", "pass"), ("python", "-m", "pytest", "--version"))
SUITE = {
    "area.py": b"def area(a, b):\n    return a * b\n",
    "test_area.py": b"import pytest\nfrom area import area\n\n"
    b"@pytest.mark.parametrize('n', range(40))\ndef test_area(n):\n    assert area(n, 2) == 2 * n\n",
}
GRADING = ("python", "-m", "pytest", "-q", "-p", "no:cacheprovider")


async def seconds(work: Callable[[], Awaitable[object]]) -> float:
    started = time.perf_counter()
    await work()
    return time.perf_counter() - started


def with_image(argv: Sequence[str]) -> list[str]:
    """Return the command with the interpreter that boxes have, so that both sides start the same program."""
    return [
        python_image(()).folder.joinpath("python/bin/python").as_posix() if argv[0] == "python" else argv[0],
        *argv[1:],
    ]


async def plain(argv: Sequence[str], cwd: str = "/tmp") -> None:
    process = await asyncio.create_subprocess_exec(
        *with_image(argv), cwd=cwd, env={"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    await process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"{argv} ended with {process.returncode}")


def show(name: str, box_s: float, plain_s: float) -> None:
    ratio = box_s / plain_s
    print(
        f"{name:<36} sandbox {box_s * 1e3:8.1f} ms   sub-process {plain_s * 1e3:8.1f} ms   ratio {ratio:5.2f}",
        flush=True,
    )


async def launches(runtime: RuntimeConfig, repeat: int) -> None:
    async def one() -> None:
        async with await open_box(runtime) as box:
            await box.run(["true"])

    pairs = [(await seconds(one), await seconds(lambda: plain(["true"]))) for _ in range(repeat)]
    show("launch, `true`, close", median(a for a, _ in pairs), median(b for _, b in pairs))


async def round_trips(runtime: RuntimeConfig, repeat: int) -> None:
    async with await open_box(runtime) as box:
        for argv in COMMANDS:
            await box.run(argv)
            pairs = []
            for _ in range(repeat):
                started = time.perf_counter()
                await box.run(argv)
                between = time.perf_counter()
                await plain(argv)
                pairs.append((between - started, time.perf_counter() - between))
            show(" ".join(argv), median(a for a, _ in pairs), median(b for _, b in pairs))


async def graded(runtime: RuntimeConfig, repeat: int) -> None:
    async def in_box() -> None:
        async with await open_box(runtime, files=SUITE) as box:
            finished = await box.run(GRADING)
            if b"40 passed" not in finished.stdout:
                raise SystemExit(f"the suite did not pass: {finished}")

    async def in_folder() -> None:
        folder = tempfile.mkdtemp()
        for name, content in SUITE.items():
            Path(folder, name).write_bytes(content)
        await plain(GRADING, folder)
        shutil.rmtree(folder)

    # The pool is refilled while tasks are graded: this is throughput, not latency, so both sides run as a whole.
    box_s, plain_s = [], []
    for _ in range(3):
        await shared_pool(runtime).filled()
        box_s.append(await seconds(lambda: many(in_box, repeat)))
        plain_s.append(await seconds(lambda: many(in_folder, repeat)))
    print(
        f"graded tasks, 40 tests, 2 at a time    sandbox {repeat / median(box_s):8.1f} /s   "
        f"sub-process {repeat / median(plain_s):8.1f} /s   ratio {median(plain_s) / median(box_s):5.2f}",
        flush=True,
    )
    await close_pools()


async def many(work: Callable[[], Awaitable[object]], count: int) -> None:
    left = iter(range(count))

    async def lane() -> None:
        for _ in left:
            await work()

    await asyncio.gather(lane(), lane())


async def memory(runtime: RuntimeConfig, count: int, *, preload: bool) -> None:
    before = available_bytes()
    boxes = []
    started = time.perf_counter()
    for _ in range(count):
        box = await open_box(runtime, files=SUITE)
        assert isinstance(box, BubblewrapBox)
        if preload:
            await box.preload()
        boxes.append(box)
    opened_s = time.perf_counter() - started
    pids = [pid for box in boxes for pid in (*processes_of(box.init_pid), box.launcher_pid)]
    pss = sum(pss_bytes(pid) for pid in pids)
    used = before - available_bytes()
    kind = "pytest imported" if preload else "as opened"
    print(
        f"{count} open boxes, {kind:<16} PSS {pss / 2**20:8.0f} MiB ({pss / count / 2**20:.1f} MiB each)   "
        f"memory used {used / 2**20:.0f} MiB   opened in {opened_s:.1f} s",
        flush=True,
    )
    await asyncio.gather(*(box.close() for box in boxes))


def pss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


async def main(boxes: int, repeat: int) -> None:
    runtime = RuntimeConfig(type="bubblewrap")
    python_image(())
    print(f"Python {sys.version.split()[0]}, {repeat} repetitions; container: docker {probe('docker').text}")
    await launches(runtime, repeat)
    await round_trips(runtime, repeat)
    await graded(runtime.model_copy(update={"warm": 4}), repeat)
    await memory(runtime, boxes, preload=False)
    await memory(runtime, boxes, preload=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--boxes", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=30)
    options = parser.parse_args()
    asyncio.run(main(options.boxes, options.repeat))
