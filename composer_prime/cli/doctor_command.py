"""`composer doctor`: check this machine and installation, and show what works and what to run next."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
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
_EXTRAS = ("vllm", "trackio", "wandb", "tensorboard")


class Check(NamedTuple):
    """The result of one check."""

    level: Level
    """ok; note: something is missing that not every run needs; bad: nothing runs without it."""
    name: str
    text: str
    """The finding, and the remedy where there is something to repair."""


def checks(output_dir: Path) -> Iterator[Check]:
    """Yield the result of every check. None loads torch, which takes longer than all of them."""
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
        missing = module_file(module) is None
        text = f"not installed: {install_command(module)}" if missing else "installed"
        yield Check("note" if missing else "ok", module, text)
    yield from map(_model, ("tiny", "smollm2"))
    reason = why_not_writable(output_dir)
    free = f"{existing_folder(output_dir)} is writable, {free_bytes(output_dir) / GIB:.1f} GiB free"
    yield Check("bad", "disk", f"{reason}; set run.output_dir") if reason else Check("ok", "disk", free)
    for found in probe_all():
        yield Check("ok" if found.works else "note", found.type, f"sandbox: {found.text}")


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


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="composer doctor",
        description="Check this machine and installation.",
        epilog="on a GPU:  uv run --group dev pytest -m gpu tests/gpu -n 0",
        allow_abbrev=False,
    )
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"), help="folder for runs")
    options = parser.parse_args(words)
    bad = []
    for check in checks(options.output_dir):
        bad += [check.name] if check.level == "bad" else []
        print(f"{check.level:<5} {check.name:<11} {check.text}", flush=True)
    if bad:
        print(f"\n{pluralize(len(bad), 'problem')} to fix before anything can run: {', '.join(bad)}")
        return 1
    print("\nnext: uv run trainer @ configs/a1.toml")
    return 0
