"""The table [orchestrator.source.runtime]: what it refuses, its errors, and its way to verifiers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import ConfigError, SandboxError
from orchestrator.coding.sandbox.box import box_class, open_box
from orchestrator.coding.sandbox.isolation import seccomp_filter
from orchestrator.coding.sandbox.python_image import _install_programs, _remove_unused, python_image
from tests.sandbox.boxes import SMALL, need_bubblewrap


# Claim: settings in conflict are refused, with both values and the remedy.
@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"type": "subprocess", "settings": {"image": "x"}}, "has settings \\['image'\\] for 'subprocess'"),
        ({"type": "chroot"}, "bubblewrap"),
        ({"limits": {"memory_gb": 0}}, "greater than 0"),
    ],
)
def test_a_wrong_table_is_refused(table: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RuntimeConfig.model_validate(table)


# Claim: a runtime of verifiers' is refused where a box is opened.
def test_a_runtime_for_programs_is_no_box() -> None:
    with pytest.raises(ConfigError, match=r"runtime\.type is 'docker'"):
        box_class("docker")


# Claim: without the program, the error names the package and what works otherwise.
@pytest.mark.process
def test_without_bubblewrap_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"apt-get install bubblewrap.*'subprocess'"):
        asyncio.run(open_box(SMALL))


# Claim: where bwrap may not make namespaces, the error names the kernel's settings and what works otherwise.
@pytest.mark.process
def test_without_user_namespaces_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, script in (
        ("bwrap", "echo 'bwrap: No permissions to create new namespace' >&2; exit 1"),
        ("setpriv", 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"unprivileged_userns_clone.*'subprocess'"):
        asyncio.run(open_box(SMALL))


# Claim: a package that is not installed is named, with the way to install it.
def test_a_missing_package_is_named() -> None:
    with pytest.raises(
        SandboxError, match="'no-such-package', which is not installed: `uv pip install no-such-package`"
    ):
        python_image(("no-such-package",))


# Claim: Node missing or too old, and a package that npm cannot install, are named with what is needed.
@pytest.mark.process
@pytest.mark.parametrize(
    ("scripts", "named"),
    [
        ({}, "no-such-agent needs Node 20 or newer with npm, which are not on the PATH"),
        (
            {"npm": "exit 1", "node": "echo /bin/sh 18.19.1"},
            "no-such-agent needs Node 20 or newer; /bin/sh is Node 18.19",
        ),
        ({"npm": "echo E404 >&2; exit 1", "node": "echo /bin/sh 22.1.0"}, "npm could not install no-such-agent: E404"),
    ],
)
def test_a_program_that_cannot_be_installed_is_named(tmp_path: Path, monkeypatch, scripts, named) -> None:
    for name, script in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=named):
        _install_programs(["no-such-agent"], tmp_path / "image")


# Claim: images that nobody used for a month are removed, and those in use stay.
def test_old_images_are_removed(tmp_path: Path) -> None:
    for name, age_s in (("old", 40 * 86_400), (".new-half", 40 * 86_400), ("used", 60)):
        (tmp_path / name / "python").mkdir(parents=True)
        used_at = time.time() - age_s
        os.utime(tmp_path / name, (used_at, used_at))
    _remove_unused(tmp_path)
    assert os.listdir(tmp_path) == ["used"]


# Claim: named packages are in the box with their dependencies, and the site-packages of this environment are not.
@pytest.mark.process
async def test_a_box_has_what_the_table_names() -> None:
    need_bubblewrap()
    runtime = SMALL.model_copy(update={"packages": ["jinja2"]})
    async with await open_box(runtime) as box:
        code = "import importlib.util as u, sys; print(*[bool(u.find_spec(name)) for name in sys.argv[1:]])"
        assert (
            await box.run(["python", "-c", code, "jinja2", "markupsafe", "yaml", "pydantic"])
        ).stdout == b"True True False False\n"
        assert (await box.run(["env"])).stdout.count(b"\n") == 6


# Claim: the filter is made for both architectures, and no box opens on another one.
def test_the_filter_knows_its_architectures() -> None:
    assert len(seccomp_filter("x86_64")) % 8 == 0 and len(seccomp_filter("x86_64")) > len(seccomp_filter("aarch64"))
    with pytest.raises(SandboxError, match="x86_64 and aarch64, not on riscv64"):
        seccomp_filter("riscv64")


VERIFIERS = """
import asyncio, os
from composer_prime.config.sandbox import RuntimeConfig
from orchestrator.coding.sandbox import runtime as ours
from verifiers.v1 import runtimes

async def bubblewrap():
    runtime = runtimes.make_runtime(ours.runtime_settings(RuntimeConfig(type="bubblewrap")))
    async def answer(reader, writer):
        await reader.readuntil(b"\\r\\n\\r\\n")
        writer.write(b"HTTP/1.1 200 OK\\r\\nConnection: close\\r\\n\\r\\nhello"); await writer.drain(); writer.close()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    await runtime.start()
    code = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{port}/v1').read())"
    assert "refused" in (await runtime.run(["python", "-c", code], {})).stderr
    assert runtime.host_url(f"http://127.0.0.1:{port}/v1") == f"http://127.0.0.1:{port}/v1"
    done = await runtime.run(["python", "-c", code], {"X": "1"})
    assert done.stdout == "b'hello'\\n", done
    await runtime.write("folder/file", b"\\x00")
    assert await runtime.read("folder/file") == b"\\x00"
    await runtime.run(["sh", "-c", "sleep 1000 >/dev/null 2>&1 &"], {})
    assert (await runtime.run(["sh", "-c", "cat /proc/[0-9]*/comm"], {})).stdout.count("sleep") == 1
    pid = runtime.box.init_pid
    await runtime.stop()
    assert not os.path.exists(f"/proc/{pid}")
    server.close()

asyncio.run(bubblewrap())
print("done")
"""


# Claim: a harness's program runs in a box and reaches the host's endpoint.
@pytest.mark.slow
@pytest.mark.process
def test_a_box_is_a_runtime_of_verifiers() -> None:
    need_bubblewrap()
    done = subprocess.run([sys.executable, "-c", VERIFIERS], capture_output=True, text=True, timeout=250, check=False)
    assert done.stdout.endswith("done\n"), done.stderr
