"""Run git: what its commands print, and an error that says what went wrong."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

from composer_prime.errors import ConfigError

GIT_TIMEOUT_S = 600.0
_NO_PROGRAMS = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "log.showSignature=false")
"""The settings of a repository that someone else packed must not start programs of its own."""


def git(folder: Path, *words: str, stdin: bytes = b"") -> bytes:
    """Return what a git command prints in a folder. Raises ConfigError with git's first line where it fails."""
    # A repository above the folder is not meant.
    environment = {**os.environ, "LC_ALL": "C", "GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
    if words[0] == "archive":  # A clone may belong to another user. This command runs no code of it.
        environment |= {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    command = ["git", *_NO_PROGRAMS, "-C", str(folder), *words]
    try:
        done = subprocess.run(command, input=stdin, env=environment, capture_output=True, timeout=GIT_TIMEOUT_S)
    except FileNotFoundError:
        raise ConfigError("git is not installed: install it (`apt install git`)") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"git {words[0]} in {folder} took more than {GIT_TIMEOUT_S:g} s") from None
    if done.returncode:
        said = (done.stderr.decode(errors="replace").strip() or "it failed").splitlines()[0]
        raise ConfigError(f"git {words[0]} in {folder}: {said.removeprefix('error: ')}")
    return done.stdout


def commit_files(repository: Path, commit: str) -> dict[str, bytes]:
    """Return the plain files of a commit. Raises ConfigError where git fails."""
    packed = io.BytesIO(git(repository, "archive", "--format=tar", commit))
    with tarfile.open(fileobj=packed) as archive:
        entries = [(entry.name, archive.extractfile(entry)) for entry in archive if entry.isreg()]
        return {name: file.read() for name, file in entries if file is not None}
