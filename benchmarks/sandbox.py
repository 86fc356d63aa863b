"""Sandboxes against plain sub-processes, in one run: python benchmarks/sandbox.py [--boxes 200] [--repeat 30] [--trees]

    launch        until the first command of a new box has ended | until `true` has ended as a sub-process
    round trip    a command in an open box | the same command as a sub-process, of the same interpreter
    graded tasks  a small pytest suite, started as grading starts it, in a new box each time, opened ahead, and closed:
                  warm (a fork that has pytest) | cold (a new interpreter in the box) | a sub-process in a new folder
    memory        proportional set size (PSS) of all processes of the open boxes, and the growth of used memory
    trees         until a box is open and filled: files copied into it | a prepared tree cloned | prepared first;
                  small trees are cloned here, too, which `open_box` does not do. Then the memory of 20 filled boxes.
                  `--trees` measures nothing else.

Each pair is measured alternately, so that other load on the machine meets both sides. Figures are medians.
A container is measured where docker answers.
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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import median

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.plan.sandboxes import probe
from orchestrator.coding.code.grading import ISOLATED
from orchestrator.coding.sandbox.box import open_box, read_tree
from orchestrator.coding.sandbox.bubblewrap import BubblewrapBox
from orchestrator.coding.sandbox.pool import close_pools, shared_pool
from orchestrator.coding.sandbox.python_image import image_cache, python_image
from orchestrator.coding.sandbox.trees import prepared
from orchestrator.coding.sandbox.usage import processes_of

TREES = (
    (10, 20_000),
    (100, 400_000),
    (200, 2_000_000),
    (400, 4_000_000),
    (1000, 10_000_000),
    (12, 12_000_000),
    (5000, 60_000_000),
)
"""Files and bytes of trees."""
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
    before = meminfo_bytes("MemAvailable")
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
    used = before - meminfo_bytes("MemAvailable")
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


def meminfo_bytes(name: str) -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def made_tree(count: int, total_bytes: int, seed: int) -> dict[str, bytes]:
    random = Random(seed)
    return {f"folder{n % 50}/sub{n % 7}/file{n}.py": random.randbytes(total_bytes // count) for n in range(count)}


async def trees(runtime: RuntimeConfig, repeat: int) -> None:
    folder = Path(tempfile.mkdtemp(dir=image_cache().parent))
    as_shipped = prepared.LEAST_FILES, prepared.LEAST_BYTES
    prepared.trees_folder = lambda: folder / "prepared"
    prepared.LEAST_FILES = prepared.LEAST_BYTES = 1
    prepared.SETTLED_S = 0.0
    try:
        for count, total_bytes in TREES:
            await filled(runtime, repeat, count, total_bytes, folder, as_shipped)
        for clones in (False, True):
            await memory_of_trees(runtime, made_tree(*TREES[-1], seed=0), clones=clones)
    finally:
        shutil.rmtree(folder)


async def filled(
    runtime: RuntimeConfig, repeat: int, count: int, total_bytes: int, folder: Path, as_shipped: tuple[int, int]
) -> None:
    """Print the times of one size of tree, from memory as a rollout has it, and from a folder as grading has it."""

    async def copied(tree: Path | None, files: Mapping[str, bytes]) -> None:
        async with await open_box(runtime) as box:
            await box.write_files(files if tree is None else read_tree(tree))

    async def cloned(tree: Path | None, files: Mapping[str, bytes]) -> None:
        async with await open_box(runtime, tree=tree, files=files) as box:
            if not (isinstance(box, BubblewrapBox) and box.tree):
                raise SystemExit("nothing is cloned on this machine; the log says why")

    choice = "cloned" if count >= as_shipped[0] or total_bytes >= as_shipped[1] else "copied"
    for name, from_folder in (("memory", False), ("a folder", True)):
        spent_s = []
        for number in range(repeat):
            files = made_tree(count, total_bytes, seed=number)
            source = (None, files)
            if from_folder:
                source = (folder / f"tree{count}-{total_bytes}-{number}", {})
                write_tree(source[0], files)
            sides = (copied, cloned, cloned)
            spent_s.append([await seconds(lambda side=side, source=source: side(*source)) for side in sides])
        copy_s, first_s, clone_s = map(median, zip(*spent_s, strict=True))
        print(
            f"{count:5} files, {total_bytes / 1e6:5.2f} MB from {name:<8}  copied {copy_s * 1e3:7.1f} ms   "
            f"cloned {clone_s * 1e3:7.1f} ms   ratio {copy_s / clone_s:5.2f}   prepared first {first_s * 1e3:7.1f} ms"
            f"   open_box: {choice}",
            flush=True,
        )


def write_tree(folder: Path, files: Mapping[str, bytes]) -> None:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


async def memory_of_trees(runtime: RuntimeConfig, files: Mapping[str, bytes], *, clones: bool) -> None:
    """Print what open boxes hold in memory once a program has read every file."""
    async with await open_box(runtime, files=files):  # Prepared, and in the page cache.
        shared, kernel = meminfo_bytes("Shmem"), meminfo_bytes("SUnreclaim")
    boxes = []
    for _ in range(20):
        boxes.append(await open_box(runtime, files=files if clones else {}))
        if not clones:
            await boxes[-1].write_files(files)
        await boxes[-1].run(["sh", "-c", "cat $(find . -type f) | wc -c"])
    print(
        f"{len(boxes)} open boxes, {'cloned' if clones else 'copied'}: files in memory (Shmem) "
        f"{(meminfo_bytes('Shmem') - shared) / 2**20:.0f} MiB   the kernel's own (SUnreclaim) "
        f"{(meminfo_bytes('SUnreclaim') - kernel) / 2**20:.0f} MiB",
        flush=True,
    )
    await asyncio.gather(*(box.close() for box in boxes))


async def main(boxes: int, repeat: int, *, trees_only: bool) -> None:
    runtime = RuntimeConfig(type="bubblewrap")
    python_image(())
    load = "/".join(f"{figure:.1f}" for figure in os.getloadavg())
    print(
        f"Python {sys.version.split()[0]}, Linux {platform.release()}, {repeat} repetitions; load {load} on "
        f"{os.cpu_count()} CPUs",
        flush=True,
    )
    if trees_only:
        await trees(runtime, repeat)
        return
    print(f"container: docker {probe('docker').text}")
    await launches(runtime, repeat)
    await round_trips(runtime, repeat)
    await graded(runtime.model_copy(update={"warm": 4}), repeat)
    await memory(runtime, boxes, preload=False)
    await memory(runtime, boxes, preload=True)
    await trees(runtime, repeat)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--boxes", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--trees", action="store_true", help="measure copied and cloned trees only")
    options = parser.parse_args()
    asyncio.run(main(options.boxes, options.repeat, trees_only=options.trees))
