"""Which types of [orchestrator.source.runtime] work on this machine, and how to get those that do not."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from dataclasses import dataclass

from composer_prime.host import module_file

INSTALL = "install it (`apt-get install bubblewrap`, `dnf install bubblewrap`)"
USER_NAMESPACES = (
    "bubblewrap needs unprivileged user namespaces: allow them (sysctl kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0, user.max_user_namespaces=10000; in a container run it "
    "with --security-opt seccomp=unconfined)"
)
OTHERWISE = (
    "or set orchestrator.source.runtime.type to one that `composer doctor` lists as working here "
    "('subprocess' works everywhere but isolates nothing)"
)
_PROBE_TIMEOUT_S = 30.0
_CLOUDS = {
    "modal": ("modal", "uv pip install modal; modal setup"),
    "e2b": ("e2b", "uv pip install e2b; export E2B_API_KEY"),
    "prime": ("prime_sandboxes", "uv pip install prime-sandboxes; prime login"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxProbe:
    """Whether one runtime type works here."""

    type: str
    works: bool
    text: str
    """What was found, and the remedy."""


def probe_all() -> list[SandboxProbe]:
    """Try every runtime type that costs nothing. Takes a second or two."""
    return [probe(kind) for kind in ("bubblewrap", "subprocess", "docker", "podman", "apptainer", *_CLOUDS)]


@functools.cache
def probe(kind: str) -> SandboxProbe:
    if ":" in kind:
        return SandboxProbe(type=kind, works=True, text="a class of your own; not tried")
    if kind == "subprocess":
        return SandboxProbe(type=kind, works=True, text="works, but isolates nothing: for trusted code only")
    if kind == "bubblewrap":
        return _bubblewrap()
    if kind in _CLOUDS:
        module, remedy = _CLOUDS[kind]
        works = module_file(module) is not None
        text = "package installed; not tried" if works else f"get it: {remedy}"
        return SandboxProbe(type=kind, works=works, text=text)
    program = shutil.which(kind)
    if program is None:
        return SandboxProbe(type=kind, works=False, text=f"the program {kind} is not installed")
    words = [program, "--version"] if kind == "apptainer" else [program, "info", "--format", "{{json .}}"]
    code, message = _run(words)
    text = "answers" if code == 0 else f"does not answer: {message}"
    return SandboxProbe(type=kind, works=code == 0, text=text)


def _bubblewrap() -> SandboxProbe:
    program = shutil.which("bwrap")
    if program is None:
        text = f"the program bwrap is not installed: {INSTALL}"
        return SandboxProbe(type="bubblewrap", works=False, text=text)
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        text = "as root it needs setpriv (package util-linux)"
        return SandboxProbe(type="bubblewrap", works=False, text=text)
    words = [program, "--unshare-user", "--unshare-all", "--disable-userns", "--ro-bind", "/", "/", "--proc", "/proc"]
    without_root = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"]
    code, message = _run([*(without_root if os.geteuid() == 0 else ()), *words, "true"])
    if code == 0:
        return SandboxProbe(type="bubblewrap", works=True, text="works: namespaces, seccomp, limits, no network")
    return SandboxProbe(type="bubblewrap", works=False, text=why_not_started(message))


def why_not_started(stderr: str) -> str:
    """Return what bwrap's message means, with a remedy."""
    refused = any(word in stderr.lower() for word in ("namespace", "uid map", "permitted", "userns", "no space left"))
    remedy = USER_NAMESPACES if refused else f"If it is too old: {INSTALL}"
    reason = stderr.rstrip(".") or "it gave no reason"
    return f"bubblewrap did not start a sandbox: {reason}. {remedy}, {OTHERWISE}"


def _run(words: list[str]) -> tuple[int, str]:
    """Return a program's exit status, and the last line of its errors."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return 1, f"no answer within {_PROBE_TIMEOUT_S:g} s"
    except OSError as error:
        return 1, str(error)
    return done.returncode, (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
