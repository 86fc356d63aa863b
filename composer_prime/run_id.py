"""The run's identity: made once with the run directory, carried by every message, kept over resumes."""

from __future__ import annotations

import secrets

from composer_prime.errors import ConfigError
from composer_prime.run_dir import RunDir, write_atomic


def create(run_dir: RunDir, name: str) -> str:
    """The run's id; made on the first call, read back afterwards."""
    path = run_dir.root / "run_id"
    if not path.exists():
        write_atomic(path, f"{name}-{secrets.token_hex(4)}\n".encode())
    return path.read_text().strip()


def read(run_dir: RunDir) -> str:
    """Raises ConfigError when the directory was never prepared."""
    try:
        return (run_dir.root / "run_id").read_text().strip()
    except FileNotFoundError:
        raise ConfigError(f"{run_dir.root} is not a run directory: start the run with `trainer @ file.toml`") from None
