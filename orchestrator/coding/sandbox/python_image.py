"""The Python that boxes see: a copy of this interpreter, its standard library, and named packages only.

The image is made once, in a cache folder, and bound read-only into each box:

    IMAGE/python/bin, lib    bound where this interpreter's prefix is (or at /opt/python)
    IMAGE/npm                node_modules, bound at /opt/npm; empty without packages of npm
    IMAGE/etc                passwd, group, hosts, nsswitch.conf
    IMAGE/box_init.py
"""

from __future__ import annotations

import compileall
import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from composer_prime.console import install_command
from composer_prime.errors import SandboxError
from composer_prime.host import own_folder

PREFIX = "/opt/python" if sys.base_prefix == "/usr" else sys.base_prefix
"""Where IMAGE/python is inside a box."""
INIT_SOURCE = Path(__file__).with_name("box_init.py")
NPM = "npm:"
"""Begins the name of a package of npm's; npm:node is Node alone, this machine's."""
_NPM_S = 500.0
_OLDEST_NODE = 20
_NODE = f"Node {_OLDEST_NODE} or newer"
_UNUSED_S = 30 * 86_400.0
_LEFT_OUT = {"test", "idlelib", "ensurepip", "site-packages", "dist-packages", "tkinter", "turtledemo", "lib2to3"}
_ACCOUNTS = {
    "passwd": "root:x:0:0:root:/tmp:/bin/sh\nagent:x:1000:1000:agent:/tmp:/bin/bash\n",
    "group": "root:x:0:\nagent:x:1000:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


def python_image(packages: tuple[str, ...]) -> Path:
    folder, distributions, programs = _image_of(packages)
    if not folder.is_dir():
        _make_once(folder, distributions, programs)
    with contextlib.suppress(OSError):  # Another user made it.
        os.utime(folder)
    return folder


@functools.cache
def _image_of(packages: tuple[str, ...]) -> tuple[Path, list[metadata.Distribution], list[str]]:
    programs = sorted(name.removeprefix(NPM) for name in packages if name.startswith(NPM))
    found = _with_dependencies(["pytest", *(name for name in packages if not name.startswith(NPM))])
    parts = [sys.version, PREFIX, INIT_SOURCE.read_text(), Path(__file__).read_text()]
    parts += [f"{name}=={found[name].version}" for name in sorted(found)] + programs
    # Root's is readable by the user id that boxes have.
    cache = Path("/var/cache") if os.geteuid() == 0 else own_folder("XDG_CACHE_HOME", ".cache")
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return cache / "composer-prime/sandbox" / digest, list(found.values()), programs


def _with_dependencies(names: Sequence[str]) -> dict[str, metadata.Distribution]:
    found: dict[str, metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if canonicalize_name(name) in found:
            continue
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError as error:
            raise SandboxError(
                f"sandboxes need the package {name!r}, which is not installed: `uv pip install {name}`, or take it out "
                f"of orchestrator.source.runtime.packages (pytest is needed: {install_command('coding')})"
            ) from error
        found[canonicalize_name(name)] = distribution
        requirements = map(Requirement, distribution.requires or [])
        waiting += [each.name for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def _make_once(image: Path, distributions: Sequence[metadata.Distribution], programs: Sequence[str]) -> None:
    cache = image.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            for folder in (cache, cache.parent):
                folder.chmod(0o755)  # Boxes have another user id, and the umask may be 077.
        with open(cache / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not image.is_dir():
                _make(image, distributions, programs)
            _remove_unused(cache)
    except OSError as error:
        raise SandboxError(f"the sandboxes' Python could not be copied to {image}: {error}") from error


def _remove_unused(cache: Path) -> None:
    for folder in cache.iterdir():
        with contextlib.suppress(OSError):
            if folder.is_dir() and time.time() - folder.stat().st_mtime > _UNUSED_S:
                shutil.rmtree(folder, ignore_errors=True)


def _make(folder: Path, distributions: Sequence[metadata.Distribution], programs: Sequence[str]) -> None:
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".new-"))
    try:
        _copy_interpreter(made / "python")
        site = made / "python/lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        for distribution in distributions:
            _copy_distribution(distribution, site)
        # Boxes cannot write bytecode, and compile every module at each start without it.
        compileall.compile_dir(site, quiet=2, workers=1, stripdir=str(made / "python"), prependdir=PREFIX)
        _install_programs(programs, made / "npm")
        (made / "etc/alternatives").mkdir(parents=True)
        for name, text in _ACCOUNTS.items():
            (made / "etc" / name).write_text(text)
        shutil.copy(INIT_SOURCE, made / INIT_SOURCE.name)
        for path in [made, *made.rglob("*")]:
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _install_programs(programs: Sequence[str], folder: Path) -> None:
    """Install packages of npm, none of whose scripts run, and the Node that runs them. Raises SandboxError."""
    (folder / "node_modules/.bin").mkdir(parents=True)
    npm, node = shutil.which("npm"), shutil.which("node")
    packages = [name for name in programs if name != "node"]
    if programs and (node is None or (packages and npm is None)):
        raise SandboxError(
            f"{', '.join(programs)} needs {_NODE} with npm, which are not on the PATH: install them "
            "(nodejs.org, or your system's packages nodejs and npm), or choose another harness"
        )
    if not programs or node is None:
        return
    words = ["--prefix", str(folder), "--ignore-scripts", "--no-audit", "--no-fund", "--omit=dev", *packages]
    asked = [node, "-p", "process.execPath + ' ' + process.versions.node"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=_NPM_S, check=True)
        path, _, version = answer.stdout.strip().rpartition(" ")
        if int(version.partition(".")[0]) < _OLDEST_NODE:
            raise SandboxError(f"{', '.join(programs)} needs {_NODE}; {path} is Node {version}: install a newer one")
        shutil.copy(path, folder / "node_modules/.bin/node")
        if packages:
            subprocess.run(["npm", "install", *words], capture_output=True, text=True, timeout=_NPM_S, check=True)
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        said = str(getattr(error, "stderr", None) or error).strip()
        raise SandboxError(f"npm could not install {', '.join(programs)}: {said[-500:]}") from None


def _copy_interpreter(target: Path) -> None:
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    stdlib = Path(sysconfig.get_path("stdlib"))

    def left_out(folder: str, names: list[str]) -> list[str]:
        top = Path(folder) == stdlib
        return [name for name in names if top and (name in _LEFT_OUT or name.startswith("config-"))]

    shutil.copytree(stdlib, target / "lib" / version, ignore=left_out, symlinks=False, ignore_dangling_symlinks=True)
    (target / "bin").mkdir()
    base = Path(sys.base_prefix)
    shutil.copy(Path(sys.executable).resolve(), target / "bin" / version)
    for name in ("python", "python3"):
        (target / "bin" / name).symlink_to(version)
    for library in (base / "lib").glob("libpython*.so*") if base != Path("/usr") else ():
        shutil.copy(library, target / "lib" / library.name)
    script = target / "bin/pytest"
    script.write_text('#!/bin/sh\nexec python -m pytest "$@"\n')
    script.chmod(0o755)


def _copy_distribution(distribution: metadata.Distribution, site: Path) -> None:
    files = [file for file in distribution.files or [] if ".." not in file.parts and not file.is_absolute()]
    if not any(file.suffix == ".py" for file in files):
        raise SandboxError(
            f"sandboxes cannot have the package {distribution.name!r}: it has no installed modules, as an "
            "editable install has none; install it as a wheel"
        )
    for file in files:
        if file.name.endswith(".pth"):
            continue
        source = Path(str(distribution.locate_file(file)))
        if source.is_file():
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, site / file)
