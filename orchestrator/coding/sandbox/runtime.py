"""The two ways between boxes and verifiers' runtimes. Of this folder, only this module imports verifiers.

BubblewrapRuntime   a box as a verifiers runtime, so that harnesses which run a program (mini-swe-agent, codex) do so
                    in a box; a program there reaches the host's model endpoint under the same loopback port
RuntimeBox          a verifiers runtime (docker, podman, modal, ...) as a box, so that coding tasks run there
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import logging
import re
import secrets
import shlex
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

import pydantic
import verifiers.v1 as vf
from packaging.requirements import Requirement
from pydantic_config import BaseConfig
from verifiers.v1 import runtimes
from verifiers.v1.errors import SandboxError as RuntimeSandboxError
from verifiers.v1.runtimes.base import BaseRuntimeInfo, ProgramResult, Runtime

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import ConfigError, SandboxError
from orchestrator.coding.sandbox.box import NOTHING, WORK, Box, CommandResult, inside_path
from orchestrator.coding.sandbox.bubblewrap import BubblewrapBox
from orchestrator.coding.sandbox.python_image import python_image

logger = logging.getLogger(__name__)

ONE_DAY_S = 86_400.0
"""Limit of a harness's program and of its CPU time. The rollout's own deadline is shorter, and cancels it."""
_MIB = 1 << 20
_SLACK_S = 60.0
_HAS_PACKAGES = "import sys; from importlib import metadata\nfor name in sys.argv[1:]: metadata.distribution(name)"
_SCRIPT_HEADER = re.compile(r"^# /// script\n((?:#.*\n)*?)# ///$", re.MULTILINE)
_SIZES = r'for path; do printf "%s %s\0" "$(wc -c <"$path")" "$path"; done'
# The command finds neither its input nor its output by a name: they are open, and their files are gone. A pipe brings
# the input, so that no other process holds it once it was read.
_COMMAND = """d=$(mktemp -d) && exec 4>$d/out 5>$d/err 6<$d/out 7<$d/err 8<$d/out 9<$d/err && rm -rf $d || exit 1
echo {begun}
{feed}(exec 6<&- 7<&- 8<&- 9<&-; cd {cwd} || exit 127
ulimit -c 0; ulimit -t {cpu_s}; ulimit -v {memory_kb}; ulimit -f {file_blocks}
exec timeout -k 1 {wall_s} {command} 4>&- 5>&-) {no_feed}>&4 2>&5
echo $?
wc -c <&6
wc -c <&7
head -c {keep_bytes} <&8 | base64 | tr -d '\\n'; echo
head -c {keep_bytes} <&9 | base64 | tr -d '\\n'; echo"""
_FEED = "{{ rm -f {path}; exec timeout -k 1 {wall_s} cat; }} <{path} | "
_BEGUN = "begun"
_KILLED = 128 + 9


class BubblewrapConfig(BaseConfig):
    """A seat's runtime: a bubblewrap box with the source's settings."""

    type: Literal["bubblewrap"] = "bubblewrap"
    table: RuntimeConfig = RuntimeConfig(type="bubblewrap")
    """[orchestrator.source.runtime]."""


class BubblewrapInfo(BubblewrapConfig, BaseRuntimeInfo):
    """What a trace records of its runtime."""


class BubblewrapRuntime(Runtime):
    """A bubblewrap box. Processes live until the runtime stops, as in a container."""

    def __init__(self, config: BubblewrapConfig, name: str | None = None) -> None:
        super().__init__(name)
        self.config = config
        self.info = BubblewrapInfo(**config.model_dump())
        self._open_box: BubblewrapBox | None = None
        self._wanted_ports: set[int] = set()

    @property
    def box(self) -> BubblewrapBox:
        """The box, between start and stop."""
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

    def cleanup(self) -> None:
        """Nothing to do: the box ends with this process."""

    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        for port in sorted(self._wanted_ports):
            await self.box.ports.forward(port)
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

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        started = await self.run(["sh", "-c", 'log=$1; shift; "$@" >"$log" 2>&1 </dev/null &', "sh", log, *argv], env)
        if started.exit_code != 0:
            raise RuntimeSandboxError(f"the sandbox could not start {argv[0]!r}: {started.stderr}")

    async def prepare_uv_script(
        self, script: str | bytes, env: dict[str, str] | None = None, *, activate: bool = True
    ) -> list[str]:
        """Return the command that runs a harness's script with the box's own Python.

        The box has no network, so that uv could fetch nothing. The script's packages must be in the table's `packages`,
        in whatever version is installed. Raises verifiers' SandboxError for a missing one.
        """
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


class RuntimeBox(Box):
    """A verifiers runtime as a box. Its image needs a shell, coreutils, and Python with pytest."""

    def __init__(self, runtime: Runtime, table: RuntimeConfig, python_path: Sequence[str] = (), *, owned: bool) -> None:
        """`owned`: whether `close` stops the runtime."""
        self.runtime = table
        self._runtime = runtime
        self._owned = owned
        self._env = {"PYTHONDONTWRITEBYTECODE": "1"}
        if python_path:
            self._env["PYTHONPATH"] = ":".join(inside_path(folder) for folder in python_path)
        self._one_at_a_time = asyncio.Lock()

    @classmethod
    async def open(cls, table: RuntimeConfig, python_path: Sequence[str] = ()) -> RuntimeBox:
        """Start a runtime of the table's type. Raises SandboxError, ConfigError for wrong `settings`."""
        runtime = runtimes.make_runtime(runtime_settings(table))
        try:
            await runtime.start()
            box = cls(runtime, table, python_path, owned=True)
            await box._shell(f"mkdir -p {WORK}")
        except BaseException as error:
            await runtime.stop()
            if not isinstance(error, Exception):
                raise
            raise SandboxError(
                f"a sandbox of type {table.type!r} did not start: {type(error).__name__}: {error}; `composer doctor` "
                "lists the types that work here"
            ) from error
        return box

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] = NOTHING,
        stdin: bytes = b"",
        cwd: str = ".",
        timeout_s: float | None = None,
        output_bytes: int | None = None,
    ) -> CommandResult:
        limits = self.runtime.limits
        keep_bytes = int(limits.output_kb * 1024) if output_bytes is None else output_bytes
        wall_s = timeout_s or limits.wall_s
        words = [f"{name}={value}" for name, value in {**self._env, **env}.items()]
        input_path = f"/tmp/.{secrets.token_hex(8)}"
        script = _COMMAND.format(
            begun=_BEGUN,
            feed=_FEED.format(path=input_path, wall_s=wall_s) if stdin else "",
            no_feed="" if stdin else "</dev/null ",
            cwd=shlex.quote(inside_path(cwd)),
            cpu_s=limits.cpu_s,
            memory_kb=int(limits.memory_gb * _MIB),
            file_blocks=int(max(limits.file_mb, limits.output_mb) * 2048),
            wall_s=wall_s,
            command=shlex.join(["env", *words, *argv]),
            keep_bytes=keep_bytes,
        )
        async with self._one_at_a_time:
            started = time.monotonic()
            if stdin:
                await self._runtime.write(input_path, stdin)
            answer = await self._shell(script, timeout_s=wall_s + _SLACK_S, begun=_BEGUN)
            wall_spent_s = time.monotonic() - started
        code, stdout, stderr = _ended(answer)
        out_of_time = code in (124, _KILLED) and wall_spent_s >= wall_s
        return CommandResult(
            exit_code=None if out_of_time else code,
            stdout=stdout,
            stderr=stderr,
            ended_by="wall_s" if out_of_time else "",
            wall_s=wall_spent_s,
        )

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        folders = sorted({inside_path(path).rpartition("/")[0] for path in files})
        await self._shell(f"mkdir -p {shlex.join(folders)}")
        for path, content in files.items():
            await self._runtime.write(inside_path(path), content)

    async def read_file(self, path: str, max_bytes: int) -> bytes:
        name = shlex.quote(inside_path(path))
        kind = (await self._shell(f"[ -f {name} ] && [ ! -L {name} ] && wc -c <{name} || true")).strip()
        if not kind:
            raise FileNotFoundError(f"the sandbox has no regular file {path!r}")
        if int(kind) > max_bytes:
            raise ValueError(f"the sandbox's file {path!r} has more than {max_bytes} bytes")
        return await self._runtime.read(inside_path(path), max_bytes)

    async def list_files(self) -> dict[str, int]:
        listed = await self._shell(f"cd {WORK} && find . -type f -exec sh -c {shlex.quote(_SIZES)} sh {{}} + | base64")
        entries = base64.b64decode(listed).decode(errors="surrogateescape").split("\0")
        sizes = (entry.partition(" ") for entry in entries if entry)
        return {path.removeprefix("./"): int(size) for size, _, path in sizes}

    async def close(self) -> None:
        if self._owned:
            await self._runtime.stop()

    async def _shell(self, script: str, timeout_s: float = 100.0, begun: str = "") -> str:
        """Return a script's output. Raises SandboxError when it fails, unless it printed the line `begun` before."""
        try:
            async with asyncio.timeout(timeout_s):
                result = await self._runtime.run(["sh", "-c", script], {})
        except TimeoutError as error:
            raise SandboxError(f"the sandbox gave no answer within {timeout_s:g} s") from error
        if result.exit_code != 0 and not (begun and result.stdout.startswith(f"{begun}\n")):
            raise SandboxError(f"the sandbox's shell failed: {result.stderr.strip()[-500:]}")
        return result.stdout


def script_packages(script: str) -> list[str]:
    """Return the names of the packages that a script's PEP 723 header asks for."""
    header = _SCRIPT_HEADER.search(script)
    if header is None:
        return []
    lines = [line.removeprefix("#").removeprefix(" ") for line in header[1].splitlines()]
    return [Requirement(line).name for line in tomllib.loads("\n".join(lines)).get("dependencies", [])]


def _ended(answer: str) -> tuple[int, bytes, bytes]:
    """Return exit code, stdout and stderr. The command may have ended its shell, or spoiled what that says."""
    try:
        _, code, stdout_bytes, stderr_bytes, stdout, stderr = answer.split("\n")[:6]
        return int(code), _kept(stdout, int(stdout_bytes)), _kept(stderr, int(stderr_bytes))
    except ValueError:
        return _KILLED, b"", b""


def _kept(encoded: str, total_bytes: int) -> bytes:
    content = base64.b64decode(encoded)
    cut = total_bytes - len(content)
    return content + (b"\n[... %d bytes cut ...]\n" % cut if cut else b"")


def box_of(runtime: Runtime, table: RuntimeConfig) -> Box:
    """Return the box of a rollout's runtime. The rollout closes it."""
    return runtime.box if isinstance(runtime, BubblewrapRuntime) else RuntimeBox(runtime, table, owned=False)


def runtime_settings(table: RuntimeConfig) -> Any:
    """Return verifiers' configuration of a runtime table. Raises ConfigError for settings that it does not have."""
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
    """Copy the Python of bubblewrap runtimes: with large packages this outlasts a rollout's deadline.

    Each rollout that needs a missing package reports it, like any failure of a sandbox.
    """
    for config in settings:
        if isinstance(config, BubblewrapConfig):
            with contextlib.suppress(SandboxError):
                await asyncio.to_thread(python_image, tuple(config.table.packages))


@functools.cache
def register() -> None:
    """Teach verifiers the runtime type `bubblewrap`. Its own table of types is fixed."""
    stock = runtimes._runtime_cls

    def class_of(config: Any) -> type[Runtime]:
        return BubblewrapRuntime if isinstance(config, BubblewrapConfig) else stock(config)

    runtimes._runtime_cls = class_of
