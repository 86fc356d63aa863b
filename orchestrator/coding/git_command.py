"""Run git: what its commands print, and an error that says what went wrong."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from functools import partial
from pathlib import Path

from composer_prime.errors import ConfigError

GIT_TIMEOUT_S = 600.0
_GIT = ("git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "log.showSignature=false", "-C")


def git(folder: Path, *words: str, stdin: bytes = b"") -> bytes:
    # A repository above the folder is not meant. To fetch what one lacks would start programs, too.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.resolve().parent), "GIT_ALLOW_PROTOCOL": "none"}
    environment |= {"LC_ALL": "C", "NOTHING": ""}
    begun = [*_GIT, str(folder), *(("-c", "safe.directory=*") if words[0] == "archive" else ())]  # Of other users, too.
    start = partial(subprocess.run, input=stdin, env=environment, capture_output=True, timeout=GIT_TIMEOUT_S)
    try:
        listed = start([*begun, "config", "-z", "--show-scope", "--name-only", "--get-regexp", r"^filter\."])
        scopes, names = (os.fsdecode(listed.stdout).split("\0")[at::2] for at in (0, 1))
        own = [name for scope, name in zip(scopes, names, strict=False) if scope in ("local", "worktree")]
        done = start([*begun, *(f"--config-env={name}=NOTHING" for name in own), *words])
    except FileNotFoundError:
        raise ConfigError("git is not installed: install it (`apt install git`)") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"git {words[0]} in {folder} took more than {GIT_TIMEOUT_S:g} s") from None
    if done.returncode:
        said = (done.stderr.decode(errors="replace").strip() or "it failed").splitlines()[0]
        raise ConfigError(f"git {words[0]} in {folder}: {said.removeprefix('error: ')}")
    return done.stdout


def commit_files(repository: Path, commit: str) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(git(repository, "archive", "--format=tar", commit))) as archive:
        entries = [(entry.name, archive.extractfile(entry)) for entry in archive if entry.isreg()]
        return {name: file.read() for name, file in entries if file is not None}
