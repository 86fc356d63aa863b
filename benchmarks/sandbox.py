"""Sandboxes against plain sub-processes, in one run: python benchmarks/sandbox.py [--boxes 200] [--repeat 30]

    launch        until the first command of a new box has ended | until `true` has ended as a sub-process
    round trip    a command in an open box | the same command as a sub-process, of the same interpreter
    graded tasks  a small pytest suite, started as grading starts it, in a new box each time | in a new folder
    memory        proportional set size (PSS) of all processes of the open boxes, and the growth of used memory

Each pair is measured alternately, so that other load on the machine meets both sides. Figures are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import median

import psutil

from composer_prime.config.sandbox import RuntimeConfig
from orchestrator.coding.code.grading import ISOLATED
from orchestrator.coding.sandbox.box import open_box
from orchestrator.coding.sandbox.bubblewrap import BubblewrapBox
from orchestrator.coding.sandbox.host_view import processes_of
from orchestrator.coding.sandbox.python_image import python_image

COMMANDS = (("true",), ("python", "-c", "pass"), ("python", "-m", "pytest", "--version"))
SUITE = {
    "area.py": b"def area(a, b):\n    return a * b\n",
    "test_area.py": b"import pytest\nfrom area import area\n\n"
    b"@pytest.mark.parametrize('n', range(40))\ndef test_area(n):\n    assert area(n, 2) == 2 * n\n",
}
PROGRAM = "import sys, pytest; sys.path.insert(0, '.'); sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider']))"
GRADED = ("python", *ISOLATED, "-c", PROGRAM)


async def seconds(work: Callable[[], Awaitable[object]]) -> float:
    started = time.perf_counter()
    await work()
    return time.perf_counter() - started


def with_image(argv: Sequence[str]) -> list[str]:
    """Return the command with the interpreter that boxes have, so that both sides start the same program."""
    return [
        python_image(()).joinpath("python/bin/python").as_posix() if argv[0] == "python" else argv[0],
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
            finished = await box.run(GRADED)
            if b"40 passed" not in finished.stdout:
                raise SystemExit(f"the suite did not pass: {finished}")

    async def in_folder() -> None:
        folder = tempfile.mkdtemp()
        for name, content in SUITE.items():
            Path(folder, name).write_bytes(content)
        await plain(GRADED, folder)
        shutil.rmtree(folder)

    pairs = []
    for _ in range(3):
        pairs.append([await seconds(lambda work=work: many(work, repeat)) for work in (in_box, in_folder)])
    box_s, plain_s = (median(times) / repeat for times in zip(*pairs, strict=True))
    show("a graded task of 40 tests, 2 at a time", box_s, plain_s)


async def many(work: Callable[[], Awaitable[object]], count: int) -> None:
    left = iter(range(count))

    async def lane() -> None:
        for _ in left:
            await work()

    await asyncio.gather(lane(), lane())


async def memory(runtime: RuntimeConfig, count: int) -> None:
    before = psutil.virtual_memory().available
    boxes = []
    started = time.perf_counter()
    for _ in range(count):
        box = await open_box(runtime, files=SUITE)
        assert isinstance(box, BubblewrapBox)
        boxes.append(box)
    opened_s = time.perf_counter() - started
    pids = [pid for box in boxes for pid in (*processes_of(box.init_pid), box.process.pid)]
    pss = sum(pss_bytes(pid) for pid in pids)
    used = before - psutil.virtual_memory().available
    print(
        f"{count} open boxes   PSS {pss / 2**20:8.0f} MiB ({pss / count / 2**20:.1f} MiB each)   "
        f"memory used {used / 2**20:.0f} MiB   opened in {opened_s:.1f} s",
        flush=True,
    )
    await asyncio.gather(*(box.close() for box in boxes))


def pss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


async def main(boxes: int, repeat: int) -> None:
    runtime = RuntimeConfig(type="bubblewrap")
    python_image(())
    load = "/".join(f"{figure:.1f}" for figure in os.getloadavg())
    print(
        f"Python {sys.version.split()[0]}, Linux {platform.release()}, {repeat} repetitions; load {load} on "
        f"{os.cpu_count()} CPUs",
        flush=True,
    )
    await launches(runtime, repeat)
    await round_trips(runtime, repeat)
    await graded(runtime, repeat)
    await memory(runtime, boxes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--boxes", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="4 boxes, 2 repetitions")
    options = parser.parse_args()
    asyncio.run(main(*((4, 2) if options.quick else (options.boxes, options.repeat))))
