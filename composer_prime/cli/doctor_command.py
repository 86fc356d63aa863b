"""`composer doctor`: check this machine and installation."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from composer_prime.console import GIB, UV_RUN, columns, fitted, install_command, pluralize
from composer_prime.errors import ComposerError
from composer_prime.host import existing_folder, free_bytes, module_file, this_machine, why_not_writable
from composer_prime.model_source import model_ready
from composer_prime.plan.sandboxes import probe_bubblewrap

Check = tuple[Literal["ok", "note", "bad"], str, str]
"""How it went, name and finding. Without what is bad nothing runs; without what is a note some runs do."""
_PACKAGES = ("torch", "transformers", "verifiers", "renderers", "pyzmq", "msgspec")
_EXTRAS = {
    "vllm": "vllm", "torchft": "diloco", "trackio": "trackio", "wandb": "wandb", "tensorboard": "tensorboard",
    "pytest": "coding", "publicsuffixlist": "traces",
}  # fmt: skip
"""Module -> the extra that installs it."""


def checks(output_dir: Path) -> Iterator[Check]:
    """Yield every check's result. None loads torch, which takes longer than all of them."""
    machine = this_machine()
    yield "ok", "python", f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}"
    memory = f"{machine.memory_bytes / GIB:.1f} GiB"
    text = f"{memory}, {machine.cores} usable cores; the quickstart needs about 6 GiB"
    yield _check(machine.memory_bytes >= 6 * GIB, "memory", text)
    sizes = ", ".join(f"{size / GIB:.0f} GiB" for size in machine.gpus)
    yield _check(sizes != "", "GPUs", sizes or "none visible to CUDA; everything runs on the CPU")
    yield _packages()
    yield _extras()
    for name in ("tiny", "smollm2"):
        try:
            first_step = model_ready(name)
            yield "ok", name, f"model: {f'its first run will {first_step}' if first_step else 'ready'}"
        except ComposerError as error:
            yield "bad" if name == "tiny" else "note", name, str(error)
    reason = why_not_writable(output_dir)
    free = f"{existing_folder(output_dir)} is writable, {free_bytes(output_dir) / GIB:.1f} GiB free"
    yield ("bad", "disk", f"{reason}; set run.output_dir") if reason else ("ok", "disk", free)
    found = probe_bubblewrap()
    yield _check(found.works, "bubblewrap", f"sandbox: {found.text}")


def _check(good: bool, name: str, text: str) -> Check:
    return "ok" if good else "note", name, text


def _extras() -> Check:
    missing = [extra for module, extra in _EXTRAS.items() if module_file(module) is None]
    if missing:
        return "note", "extras", f"missing: {', '.join(missing)}; to add one: {install_command('EXTRA')}"
    return "ok", "extras", "installed"


def _packages() -> Check:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "bad", "packages", f"{package} is not installed; install composer-prime again"
    return "ok", "packages", ", ".join(f"{name} {version}" for name, version in found.items())


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="composer doctor",
        description="Check this machine and installation.",
        epilog="on a GPU, in a checkout:  uv run --group dev pytest -m gpu tests/gpu -n 0",
        allow_abbrev=False,
    )
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"), help="folder for runs")
    bad = []
    for level, name, text in checks(parser.parse_args(words).output_dir):
        bad += [name] if level == "bad" else []
        print(fitted(f"{level:<5} {name:<11} {text}", 18, columns()), flush=True)
    if bad:
        print(f"\n{pluralize(len(bad), 'problem')} to fix before anything can run: {', '.join(bad)}")
        return 1
    print(f"\nnext: {UV_RUN}trainer @ a1")
    return 0
