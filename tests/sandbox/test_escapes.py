"""Attempts to leave a bubblewrap box or to bring it down. Each is contained, and the next command works."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import re
import socket
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator.coding.sandbox import isolation
from orchestrator.coding.sandbox.box import NO_FILES, Box, CommandResult, open_box
from orchestrator.coding.sandbox.bubblewrap import BubblewrapBox
from orchestrator.coding.sandbox.host_view import processes_of
from tests.sandbox.boxes import SMALL, need_bubblewrap

pytestmark = pytest.mark.process

SCRIPTS = tomllib.loads(Path(__file__).with_name("attempts.toml").read_text())
AREAS = ("read", "write", "network", "processes", "privileges")
ATTEMPTS = [
    *(pytest.param(script, {""}, id=f"{area}: {name}") for area in AREAS for name, script in SCRIPTS[area].items()),
    *(pytest.param(bomb["script"], set(bomb["ends"]), id=f"bomb: {name}") for name, bomb in SCRIPTS["bomb"].items()),
]


@dataclass
class Host:
    """What the host has and a box must not reach."""

    secret: Path
    listening: socket.socket
    abstract: socket.socket

    def fill(self, script: str) -> str:
        column = {"x86_64": 0, "aarch64": 1}[platform.machine()]
        numbers = {**isolation.NUMBERS, **isolation.MISSING, "clone": isolation.CLONE}
        table = {name: pair[column] for name, pair in numbers.items() if pair[column] > 0 and name != "clone"}
        script = re.sub(r"@nr:(\w+)@", lambda match: str(numbers[match[1]][column]), SCRIPTS["preamble"] + script)
        for name, value in (
            ("@SECRET@", str(self.secret)),
            ("@PORT@", str(self.listening.getsockname()[1])),
            ("@ABSTRACT@", self.abstract.getsockname()[1:].decode()),
            ("@TABLE@", repr(table)),
        ):
            script = script.replace(name, value)
        return script


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    need_bubblewrap()
    secret = tmp_path / "secret"
    secret.write_text("secret of the host")
    monkeypatch.setenv("COMPOSER_TEST_SECRET", "1")
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0composer-test-{os.getpid()}")
        abstract.listen()
        yield Host(secret, listening, abstract)


def start_times(pids: Iterable[int]) -> dict[int, str]:
    """Return when each process began, as the kernel's clock says. Those that have ended are left out."""
    return {pid: began for pid in pids if (began := _start_time(pid))}


def still_there(started: dict[int, str]) -> list[int]:
    """Return which of these processes exist. Another one that got the same pid since is none of them."""
    return [pid for pid, began in started.items() if _start_time(pid) == began]


def _start_time(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        return ""


async def works(box: Box) -> bool:
    finished = await box.run(["sh", "-c", "ls -d /proc/[0-9]*; rm -rf /work/* /tmp/* 2>/dev/null; echo works"])
    # The first process, the shell, and ls.
    return finished.exit_code == 0 and finished.stdout.endswith(b"works\n") and finished.stdout.count(b"/proc/") <= 3


async def attempt(script: str, files: Mapping[str, bytes] = NO_FILES, **limits: float) -> CommandResult:
    """Run a script in a box under limits of its own, check that the box works, and close it: nothing may be left."""
    box = await open_box(SMALL, files=files)
    assert isinstance(box, BubblewrapBox)
    async with box:
        finished = await box.run(["python", "-c", f"files = {sorted(files)}\n{script}"], **limits)
        if finished.ended_by != "box":
            assert await works(box), await box.run(["ps", "axf"])
        started = start_times(processes_of(box.init_pid))
    assert not still_there(started)
    return finished


def check_contained(finished: CommandResult, ends: set[str]) -> None:
    assert b"ESCAPED" not in finished.stdout, finished
    assert b"SyntaxError" not in finished.stderr and b"NameError" not in finished.stderr, finished.stderr.decode()
    assert finished.ended_by in ends, finished


# Claim: no attempt reaches the host, each ends as data, the next command works, and nothing is left of the box.
@pytest.mark.parametrize(("script", "ends"), ATTEMPTS)
def test_an_attempt_is_contained(script: str, ends: set[str], host: Host) -> None:
    sooner = {"timeout_s": 10, "cpu_s": 3} if "wall_s" in ends else {}
    check_contained(asyncio.run(attempt(host.fill(script), **sooner)), ends)


# Claim: whatever lies in the place of a file, the host neither follows it nor waits for it, reading or writing.
@pytest.mark.parametrize("script", SCRIPTS["link"].values(), ids=SCRIPTS["link"])
async def test_the_host_follows_no_link_of_a_box(script: str, host: Host) -> None:
    async with await open_box(SMALL) as box:
        finished = await box.run(["python", "-c", host.fill(script)])
        assert finished.exit_code == 0, finished
        name = host.secret.name
        for path in ("leak", f"folder/{name}", f"folder{host.secret}", "leak/x", "/etc/shadow"):
            with contextlib.suppress(FileNotFoundError, ValueError):
                assert b"secret" not in await box.read_file(path, 1 << 20)
        sizes = await box.list_files()
        assert not any(name in path for path in sizes)
        with contextlib.suppress(OSError):
            await box.write_files({"leak": b"new", f"folder/{name}": b"new"})
        assert host.secret.read_text() == "secret of the host"


# Claim: a path given by an agent cannot name what is above the root folder, and a NUL is refused.
@pytest.mark.parametrize("path", ["../../etc/passwd", "/work/../../etc/passwd", "a\0b"])
async def test_a_path_with_dots_or_a_nul_is_refused(path: str) -> None:
    need_bubblewrap()
    async with await open_box(SMALL) as box:
        with pytest.raises(ValueError, match="path inside a sandbox"):
            await box.read_file(path, 100)
        with pytest.raises(ValueError, match="path inside a sandbox"):
            await box.write_files({path: b""})


# Claim: words that no command can have are an error of the caller or of the command, and the box lives.
async def test_huge_and_impossible_arguments() -> None:
    need_bubblewrap()
    async with await open_box(SMALL) as box:
        huge = await box.run(["echo", "x" * 3_000_000], env={"HUGE": "y" * 3_000_000})
        assert huge.exit_code == 126 and b"too long" in huge.stderr
        with pytest.raises(ValueError, match="NUL"):
            await box.run(["echo", "a\0b"])
        with pytest.raises(ValueError, match="words"):
            await box.run([])
        odd = await box.run(["printf", "%s", "\udcff\n\x1b"])
        assert odd.stdout == b"\xff\n\x1b"
        assert (await box.run(["/etc/passwd"])).exit_code == 126


# Claim: ending the first process from the host ends its box only; the next command says so, and another box works.
async def test_the_end_of_the_first_process_is_data() -> None:
    need_bubblewrap()
    box = await open_box(SMALL)
    assert isinstance(box, BubblewrapBox)
    running = asyncio.ensure_future(box.run(["sleep", "1000"]))
    await asyncio.sleep(0.3)
    os.kill(box.init_pid, 9)
    assert (await running).ended_by == "box"
    async with await open_box(SMALL) as other:
        assert await works(other)
    await box.close()
