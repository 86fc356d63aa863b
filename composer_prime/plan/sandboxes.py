"""Whether bubblewrap works on this machine, and how to get it."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from dataclasses import dataclass

INSTALL = "install it (`apt-get install bubblewrap`, `dnf install bubblewrap`)"
USER_NAMESPACES = (
    "bubblewrap needs unprivileged user namespaces: allow them (sysctl kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0, user.max_user_namespaces=10000; in a container run it "
    "with --security-opt seccomp=unconfined)"
)
OTHERWISE = "or set orchestrator.source.runtime.type = 'subprocess', which works everywhere but isolates nothing"
_PROBE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxProbe:
    """Whether sandboxes open here."""

    works: bool
    text: str
    """What was found, and the remedy."""


@functools.cache
def probe_bubblewrap() -> SandboxProbe:
    program = shutil.which("bwrap")
    if program is None:
        text = f"the program bwrap is not installed: {INSTALL}"
        return SandboxProbe(works=False, text=text)
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        text = "as root it needs setpriv (package util-linux)"
        return SandboxProbe(works=False, text=text)
    words = [program, "--unshare-user", "--unshare-all", "--disable-userns", "--ro-bind", "/", "/", "--proc", "/proc"]
    without_root = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"]
    code, message = _run([*(without_root if os.geteuid() == 0 else ()), *words, "true"])
    if code == 0:
        return SandboxProbe(works=True, text="works: namespaces, seccomp, limits, no network")
    return SandboxProbe(works=False, text=why_not_started(message))


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
