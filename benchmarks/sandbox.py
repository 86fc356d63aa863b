"""Sandboxes against plain sub-processes, in one run: python benchmarks/sandbox.py [--boxes 200] [--repeat 30]

    launch        until the first command of a new box has ended | until `true` has ended as a sub-process
    round trip    a command in an open box | the same command as a sub-process, of the same interpreter
    graded tasks  a small pytest suite, started as grading starts it, in a new box each time, opened ahead, and closed:
                  warm (a fork that has pytest) | cold (a new interpreter in the box) | a sub-process in a new folder
    memory        proportional set size (PSS) of all processes of the open boxes, and the growth of used memory

Each pair is measured alternately, so that other load on the machine meets both sides. Figures are medians.
A container is measured where docker answers.
"""

from __future__ import annotations

import argparse
import asyncio
import os
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
from orchestrator.environments.code.grading import ISOLATED
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
PROGRAM = "import sys, pytest; sys.path.insert(0, '.'); sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider']))"
WARM = ("python", *ISOLATED, "-c", PROGRAM)
COLD = ("python", "-I", "-B", "-c", PROGRAM)


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
    async def in_box(argv: Sequence[str]) -> None:
        async with await open_box(runtime, files=SUITE) as box:
            finished = await box.run(argv)
            if b"40 passed" not in finished.stdout:
                raise SystemExit(f"the suite did not pass: {finished}")

    async def in_folder() -> None:
        folder = tempfile.mkdtemp()
        for name, content in SUITE.items():
            Path(folder, name).write_bytes(content)
        await plain(COLD, folder)
        shutil.rmtree(folder)

    # The pool is refilled while tasks are graded: this is throughput, not latency, so both sides run as a whole.
    sides = {"warm": lambda: in_box(WARM), "cold": lambda: in_box(COLD), "sub-process": in_folder}
    spent_s: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(3):
        for name, work in sides.items():
            await shared_pool(runtime).filled()
            spent_s[name].append(await seconds(lambda work=work: many(work, repeat)))
    rates = {name: repeat / median(times) for name, times in spent_s.items()}
    shown = "   ".join(f"{name} {rate:.1f} /s" for name, rate in rates.items())
    print(
        f"graded tasks, 40 tests, 2 at a time    {shown}   warm is {rates['warm'] / rates['cold']:.2f} times cold, "
        f"{rates['warm'] / rates['sub-process']:.2f} times a sub-process",
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
    load = "/".join(f"{figure:.1f}" for figure in os.getloadavg())
    print(f"Python {sys.version.split()[0]}, {repeat} repetitions; load {load} on {os.cpu_count()} CPUs", flush=True)
    print(f"container: docker {probe('docker').text}")
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
