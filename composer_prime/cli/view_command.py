"""`composer view [FOLDER ...]`: a web page over all runs below the folders, on this machine only.

It shows live and ended runs, and only reads them. Open the address that it prints in a browser. From another machine:
ssh -L 8410:127.0.0.1:8410 HOST, then the same address.
"""

from __future__ import annotations

import argparse
import errno
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from composer_prime.console import pluralize
from composer_prime.errors import ConfigError

PORT = 8410
ServerT = TypeVar("ServerT")
_PORTS_TRIED = 20


def main(words: list[str]) -> int:
    options = _parser().parse_args(words)
    from composer_prime.view.server import ViewServer
    from composer_prime.view.workspace import Workspace

    workspace = Workspace(options.folder or [Path("outputs")])
    server = listen(lambda port: ViewServer(workspace, port), options.port)
    runs = workspace.runs()
    name = next(iter(runs)) if len(runs) == 1 else None
    address = f"{server.address}#/run/{quote(name, safe='')}" if name else server.address
    print(f"{pluralize(len(runs), 'run')}: {address}   (Ctrl-C ends the page; runs continue)", flush=True)
    if options.open:
        webbrowser.open(address)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="composer view", description=__doc__)
    parser.add_argument("folder", nargs="*", type=Path, help="folder with runs, or one run (default: outputs)")
    parser.add_argument("--port", type=int, help=f"port on 127.0.0.1; 0 for any (default: the first free from {PORT})")
    parser.add_argument("--open", action="store_true", help="open the page in this machine's browser")
    return parser


def listen(make_server: Callable[[int], ServerT], port: int | None) -> ServerT:
    """Return a listening server. Raises ConfigError when the port that was asked for is taken."""
    candidates = [port] if port is not None else range(PORT, PORT + _PORTS_TRIED)
    for candidate in candidates:
        try:
            return make_server(candidate)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    tried = str(port) if port is not None else f"{PORT} to {PORT + _PORTS_TRIED - 1}"
    raise ConfigError(f"port {tried} of 127.0.0.1 is taken: choose another with --port, or 0 for any")
