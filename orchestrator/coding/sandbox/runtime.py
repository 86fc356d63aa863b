"""A box as a verifiers runtime, for harnesses that run a program of their own, such as mini-swe-agent.

The program reaches the host's model endpoint under the same loopback port. Of this folder, only this module imports
verifiers.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import re
import tomllib
from collections.abc import Iterable
from typing import Any, Literal
from urllib.parse import urlsplit

import pydantic
import verifiers.v1 as vf
from packaging.requirements import Requirement
from verifiers.v1 import runtimes
from verifiers.v1.errors import SandboxError as RuntimeSandboxError
from verifiers.v1.runtimes.base import BaseRuntimeInfo, ProgramResult, Runtime

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import ConfigError, SandboxError
from orchestrator.coding.sandbox.bubblewrap import BubblewrapBox
from orchestrator.coding.sandbox.python_image import python_image

ONE_DAY_S = 86_400.0
"""Limit of a harness's program and of its CPU time."""
_MIB = 1 << 20
_HAS_PACKAGES = "import sys; from importlib import metadata\nfor name in sys.argv[1:]: metadata.distribution(name)"
_SCRIPT_HEADER = re.compile(r"^# /// script\n((?:#.*\n)*?)# ///$", re.MULTILINE)


class BubblewrapConfig(BaseRuntimeInfo):
    """A seat's runtime: a bubblewrap box. A trace records it with the box's `id`."""

    type: Literal["bubblewrap"] = "bubblewrap"
    table: RuntimeConfig = RuntimeConfig(type="bubblewrap")


class BubblewrapRuntime(Runtime):
    """A bubblewrap box, which ends with this process. Processes live until the runtime stops, as in a container."""

    def __init__(self, config: BubblewrapConfig, name: str | None = None) -> None:
        super().__init__(name)
        self.config = config
        self.info = config.model_copy()
        self._open_box: BubblewrapBox | None = None
        self._wanted_ports: set[int] = set()

    @property
    def box(self) -> BubblewrapBox:
        if self._open_box is None:
            raise SandboxError("the sandbox is not started")
        return self._open_box

    async def start(self) -> None:
        try:
            self._open_box = await BubblewrapBox.open(self.config.table)
        except SandboxError as error:
            raise RuntimeSandboxError(str(error)) from error
        self._open_box.keeps_others = True
        self.info.id = str(self._open_box.init_pid)

    async def teardown(self) -> None:
        if self._open_box is not None:
            await self._open_box.close()

    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        for port in sorted(self._wanted_ports):
            await self.box.control.forward(port)
        finished = await self.box.run(
            argv,
            env=self.process_env(env),
            timeout_s=ONE_DAY_S,
            cpu_s=ONE_DAY_S,
            output_bytes=int(self.config.table.limits.output_mb * _MIB),
        )
        if finished.ended_by == "box":
            raise RuntimeSandboxError("the sandbox ended while a program ran")
        note = f"\nended by the limit {finished.ended_by}\n" if finished.ended_by else ""
        return ProgramResult(
            exit_code=137 if finished.exit_code is None else finished.exit_code,
            stdout=finished.stdout.decode(errors="replace"),
            stderr=finished.stderr.decode(errors="replace") + note,
        )

    async def prepare_uv_script(
        self, script: str | bytes, env: dict[str, str] | None = None, *, activate: bool = True
    ) -> list[str]:
        data = script.encode() if isinstance(script, str) else script
        names = script_packages(data.decode())
        check = await self.run(["python", "-c", _HAS_PACKAGES, *names], {"PYTHONDONTWRITEBYTECODE": "1"})
        if check.exit_code != 0:
            raise RuntimeSandboxError(
                f"the harness's program needs the packages {', '.join(names)}; install them (`uv pip install`) and "
                f"name them in orchestrator.source.runtime.packages: {check.stderr.strip()[-300:]}"
            )
        path = f"{self.scripts_dir}/{hashlib.sha256(data).hexdigest()}.py"
        await self.write(path, data)
        return ["python", path]

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        most = int(self.config.table.limits.file_mb * _MIB)
        try:
            content = await self.box.read_file(path, max(most, max_bytes or 0))
        except (OSError, ValueError) as error:
            raise RuntimeSandboxError(f"read {path!r}: {error}") from error
        return content if max_bytes is None else content[:max_bytes]

    async def write(self, path: str, data: bytes) -> None:
        try:
            await self.box.write_files({path: data})
        except (OSError, SandboxError) as error:
            raise RuntimeSandboxError(f"write {path!r}: {error}") from error

    def host_url(self, url: str) -> str:
        """Make the port of a loopback URL reachable in the box. The URL stays the same."""
        parts = urlsplit(url)
        if parts.hostname in ("127.0.0.1", "localhost") and parts.port:
            self._wanted_ports.add(parts.port)
        return url


def script_packages(script: str) -> list[str]:
    header = _SCRIPT_HEADER.search(script)
    if header is None:
        return []
    lines = [line.removeprefix("#").removeprefix(" ") for line in header[1].splitlines()]
    return [Requirement(line).name for line in tomllib.loads("\n".join(lines)).get("dependencies", [])]


def box_of(runtime: Runtime) -> BubblewrapBox:
    if not isinstance(runtime, BubblewrapRuntime):
        raise SandboxError(
            f"a harness's program plays coding tasks in a bubblewrap sandbox, not in {runtime.type!r}: set "
            "orchestrator.source.runtime.type to 'bubblewrap'"
        )
    return runtime.box


def runtime_settings(table: RuntimeConfig) -> Any:
    if table.type == "bubblewrap":
        register()
        return BubblewrapConfig(table=table)
    try:
        return pydantic.TypeAdapter(vf.RuntimeConfig).validate_python({"type": table.type, **table.settings})
    except pydantic.ValidationError as error:
        lines = [
            f"{'.'.join(str(part) for part in problem['loc'][1:])}: {problem['msg']}" for problem in error.errors()
        ]
        raise ConfigError(f"orchestrator.source.runtime.settings of type {table.type!r}: {'; '.join(lines)}") from error


async def make_images(settings: Iterable[Any]) -> None:
    """Make the images of bubblewrap runtimes: with large packages this outlasts a rollout's deadline.

    Raises SandboxError.
    """
    for config in settings:
        if isinstance(config, BubblewrapConfig):
            await asyncio.to_thread(python_image, tuple(config.table.packages))


@functools.cache
def register() -> None:
    """Teach verifiers the runtime type `bubblewrap`. Its own table of types is fixed."""
    stock = runtimes._runtime_cls

    def class_of(config: Any) -> type[Runtime]:
        return BubblewrapRuntime if isinstance(config, BubblewrapConfig) else stock(config)

    runtimes._runtime_cls = class_of
