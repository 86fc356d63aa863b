"""Serve a web page over all runs below the folders, on this machine only: `composer view [FOLDER ...]`.

It only reads the runs. From another machine: ssh -L 8410:127.0.0.1:8410 HOST, then the same address.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from urllib.parse import quote

from composer_prime.console import pluralize
from composer_prime.errors import PortInUseError

PORT = 8410
DEMO = Path(__file__).parents[1] / "assets" / "demo.tar.xz"
"""Made by infra/make_demo.py."""


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="composer view", description=__doc__)
    parser.add_argument("folder", nargs="*", type=Path, help="folder with runs, or one run (default: outputs)")
    parser.add_argument("--port", type=int, default=PORT, help=f"port on 127.0.0.1 (default {PORT}; 0: a free one)")
    parser.add_argument("--demo", action="store_true", help="show a small recorded run that ships")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="composer-demo-") as scratch:
        if options.demo:
            shutil.unpack_archive(DEMO, scratch)
        return _serve([Path(scratch)] if options.demo else options.folder or [Path("outputs")], options.port)


def _serve(folders: list[Path], port: int) -> int:
    """Serve the page until Ctrl-C."""
    from composer_prime.view.server import ViewServer
    from composer_prime.view.workspace import Workspace

    workspace = Workspace(folders)
    try:
        server = ViewServer(workspace, port)
    except OSError as error:
        raise PortInUseError(f"port {port}: {error.strerror}; choose another with --port") from None
    runs = workspace.runs()
    name = next(iter(runs)) if len(runs) == 1 else None
    address = f"{server.address}#/run/{quote(name, safe='')}" if name else server.address
    print(f"{pluralize(len(runs), 'run')}: {address}   (Ctrl-C ends the page; runs continue)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()
    return 0
