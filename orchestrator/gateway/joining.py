"""What somebody has to type so that a node joins this run."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path
from urllib.parse import urlsplit

_ANY = ("0.0.0.0", "::", "*")
"""A bound interface that is no address to connect to."""


def how_to_join(endpoint: str, model: str, token: Path) -> str:
    """The whole `inference join` command, and where it works.

    `endpoint`: tcp://HOST:PORT as bound; `model`: model.path; `token`: the file that holds the run's join token.
    """
    bound = urlsplit(endpoint)
    host = socket.gethostname() if bound.hostname in _ANY else bound.hostname or ""
    address = f"tcp://[{host}]:{bound.port}" if ":" in host else f"tcp://{host}:{bound.port}"
    command = shlex.join(["inference", "join", address, "--model", model, "--token-file", str(token)])
    if host == "127.0.0.1":
        return f"run `{command}` on this machine (others need orchestrator.node_address on a public interface)"
    return f"run `{command}` on a machine that has a copy of that file"
