"""`composer doctor`: check this machine and installation, and show what works and what to run next."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from composer_prime.console import GIB, pluralize
from composer_prime.errors import ComposerError
from composer_prime.host import (
    existing_folder,
    free_bytes,
    install_command,
    module_file,
    this_machine,
    why_not_writable,
)
from composer_prime.model_source import model_ready
from composer_prime.plan.sandboxes import probe_all

Level = Literal["ok", "note", "bad"]
_PACKAGES = ("torch", "transformers", "verifiers", "renderers", "pyzmq", "msgspec")
_EXTRAS = ("vllm", "torchft", "trackio", "wandb", "tensorboard")
_TORCH_TIMEOUT_S = 180.0
_TORCH = """
import json, torch
for index in range(torch.cuda.device_count()):
    ones = torch.ones(16, 16, device=index)
    assert (ones @ ones).sum().item() == 16**3
print(json.dumps([torch.__version__, torch.version.cuda, torch.cuda.device_count()]))
"""


class Check(NamedTuple):
    """The result of one check."""

    level: Level
    """ok; note: something is missing that not every run needs; bad: nothing runs without it."""
    name: str
    text: str
    """The finding, and the remedy where there is something to repair."""


def checks(output_dir: Path, *, full: bool) -> Iterator[Check]:
    """Yield the result of every check. Loading torch takes longer than all others, so only `full` does it."""
    machine = this_machine()
    text = f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}"
    yield Check("ok", "python", f"{text}, {machine.cores} usable cores")
    small = machine.memory_bytes < 6 * GIB
    text = f"{machine.memory_bytes / GIB:.1f} GiB{'; the quickstart needs about 6 GiB' if small else ''}"
    yield Check("note" if small else "ok", "memory", text)
    sizes = ", ".join(f"{size / GIB:.0f} GiB" for size in machine.gpus)
    none = "none visible to the CUDA driver; everything runs on the CPU"
    yield Check("ok" if sizes else "note", "GPUs", f"{len(machine.gpus)} visible ({sizes})" if sizes else none)
    yield _packages()
    for module in _EXTRAS:
        extra = "diloco" if module == "torchft" else module
        missing = module_file(module) is None
        text = f"not installed: {install_command(extra)}" if missing else "installed"
        yield Check("note" if missing else "ok", module, text)
    yield from map(_model, ("tiny", "smollm2"))
    reason = why_not_writable(output_dir)
    free = f"{existing_folder(output_dir)} is writable, {free_bytes(output_dir) / GIB:.1f} GiB free"
    yield Check("bad", "disk", f"{reason}; set run.output_dir") if reason else Check("ok", "disk", free)
    for found in probe_all():
        yield Check("ok" if found.works else "note", found.type, f"sandbox: {found.text}")
    if len(machine.gpus) > 1 and Path("/dev/shm").is_dir():
        yield shared_memory(shutil.disk_usage("/dev/shm").total, len(machine.gpus))
    if full:
        yield _torch(len(machine.gpus))


def _packages() -> Check:
    missing = [package for package in _PACKAGES if not _installed(package)]
    if missing:
        return Check("bad", "packages", f"not installed: {', '.join(missing)}; run `uv sync`")
    return Check("ok", "packages", ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES))


def _installed(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


def _model(name: str) -> Check:
    try:
        first_step = model_ready(name)
    except ComposerError as error:
        return Check("bad" if name == "tiny" else "note", name, str(error))
    return Check("ok", name, f"model: {f'its first run will {first_step}' if first_step else 'ready'}")


def shared_memory(size: int, gpus: int) -> Check:
    """Check the `size` in bytes of /dev/shm, which NCCL uses between processes of one machine."""
    if gpus > 1 and size < GIB:
        text = f"/dev/shm has {size / GIB:.2f} GiB; NCCL needs more between {gpus} GPUs: docker run --shm-size 16g"
        return Check("note", "shared mem", text)
    return Check("ok", "shared mem", f"/dev/shm has {size / GIB:.2f} GiB")


def _torch(gpus: int) -> Check:
    """Load torch in another process, so that a broken CUDA installation cannot end this one."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", _TORCH]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TORCH_TIMEOUT_S, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return Check("bad", "torch", f"importing it took longer than {_TORCH_TIMEOUT_S:g} s")
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        return Check("bad", "torch", f"does not run: {last[0]}")
    return torch_check(*json.loads(done.stdout.strip().splitlines()[-1]), visible=gpus)


def torch_check(version: str, cuda: str | None, devices: int, *, visible: int) -> Check:
    """Judge what torch reports of itself; `visible` is the number of GPUs that the CUDA driver shows."""
    text = f"{version} ({f'CUDA {cuda}' if cuda else 'CPU only'})"
    if visible > devices:
        remedy = "its CUDA is newer than the driver: update the driver" if cuda else "install its CUDA build"
        return Check("note", "torch", f"{text} can use {devices} of {pluralize(visible, 'visible GPU')}: {remedy}")
    return Check("ok", "torch", f"{text} computes on {pluralize(devices, 'GPU') if devices else 'the CPU'}")


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="composer doctor",
        description="Check this machine and installation.",
        epilog="on a GPU:  uv run --group dev pytest -m gpu tests/gpu -n 0",
        allow_abbrev=False,
    )
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"), help="folder for runs")
    parser.add_argument("--full", action="store_true", help="also load torch and compute with it (some seconds)")
    options = parser.parse_args(words)
    bad = []
    for check in checks(options.output_dir, full=options.full):
        bad += [check.name] if check.level == "bad" else []
        print(f"{check.level:<5} {check.name:<11} {check.text}", flush=True)
    if bad:
        print(f"\n{pluralize(len(bad), 'problem')} to fix before anything can run: {', '.join(bad)}")
        return 1
    print("\nnext: uv run trainer @ configs/a1.toml")
    return 0
