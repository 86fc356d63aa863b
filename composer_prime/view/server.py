"""The web server of `composer view`: loopback only, GET only, JSON and the files in assets/.

What a run directory holds is text of models and environments, so it is hostile. It leaves here as JSON only, the page
writes it as text only, and the Content-Security-Policy forbids inline scripts. A request must name a loopback host: a
page elsewhere whose name was rebound to 127.0.0.1 names its own. A run is named by its id among the found ones, never
by a path.
"""

from __future__ import annotations

import gzip
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec

from composer_prime.errors import ComposerError
from composer_prime.view.workspace import Workspace

logger = logging.getLogger(__name__)

ASSETS = Path(__file__).parent / "assets"
LOOPBACK = "127.0.0.1"
_HOSTS = {"127.0.0.1", "localhost", "::1"}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_IDLE_S = 60.0
_MAX_PATH = 8192
_GZIP_FROM = 4096
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class ViewServer(ThreadingHTTPServer):
    """Serves one workspace on loopback."""

    daemon_threads = True

    def __init__(self, workspace: Workspace, port: int, handler: type[PageHandler] | None = None) -> None:
        """Listen on `port`, 0 for any free one; `handler` answers. Raises OSError when the port is taken."""
        self.answers: dict[str, Callable[[dict[str, str]], Any]] = {
            "/api/runs": lambda query: workspace.run_list(),
            "/api/run": workspace.run,
            "/api/rollouts": workspace.rollouts,
            "/api/rollout": workspace.rollout,
            "/api/evaluation": workspace.evaluation,
            "/api/pairs": workspace.pairs,
        }
        self.assets = {f"/{path.name}": path for path in ASSETS.iterdir() if path.suffix in _TYPES}
        self.assets["/"] = ASSETS / "index.html"
        super().__init__((LOOPBACK, port), handler or PageHandler)

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/"

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """Answer in a thread until the block ends."""
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, name="view", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.shutdown()
            self.server_close()


class PageHandler(BaseHTTPRequestHandler):
    """Answers one connection: GET and HEAD of the page."""

    server: ViewServer
    protocol_version = "HTTP/1.1"
    server_version = "composer-view"
    sys_version = ""
    timeout = _IDLE_S

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        if self.refuse_host(with_body=with_body):
            return
        parts = urlsplit(self.path[:_MAX_PATH])
        if (asset := self.server.assets.get(parts.path)) is not None:
            self.send(HTTPStatus.OK, asset.read_bytes(), _TYPES[asset.suffix], with_body)
        elif (answer := self.server.answers.get(parts.path)) is not None:
            status, body = _result(answer, dict(parse_qsl(parts.query)))
            self.send(status, body, "application/json", with_body)
        else:
            self.send(HTTPStatus.NOT_FOUND, b"there is no such page\n", "text/plain", with_body)

    def refuse_host(self, *, with_body: bool = True) -> bool:
        """Return whether the request was refused because it names no loopback host."""
        if is_foreign := _host_name(self.headers.get("Host", "")) not in _HOSTS:
            self.send(HTTPStatus.FORBIDDEN, b"open this page as localhost or 127.0.0.1\n", "text/plain", with_body)
        return is_foreign

    def send(self, status: HTTPStatus, body: bytes, kind: str, with_body: bool = True) -> None:
        tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
        if status == HTTPStatus.OK and self.headers.get("If-None-Match") == tag:
            status, body = HTTPStatus.NOT_MODIFIED, b""
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("ETag", tag)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        if len(body) > _GZIP_FROM and "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body, compresslevel=1)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


def _result(answer: Callable[[dict[str, str]], Any], query: dict[str, str]) -> tuple[HTTPStatus, bytes]:
    try:
        return HTTPStatus.OK, msgspec.json.encode(answer(query))
    except ComposerError as error:
        return HTTPStatus.NOT_FOUND, msgspec.json.encode({"error": str(error)})
    except Exception as error:  # One run that cannot be read must not end the page.
        logger.exception("a question of the page failed")
        return HTTPStatus.INTERNAL_SERVER_ERROR, msgspec.json.encode({"error": f"{type(error).__name__}: {error}"})


def _host_name(header: str) -> str:
    """Return the host of a Host header without its port."""
    if header.startswith("["):
        return header.partition("]")[0].removeprefix("[")
    return header.partition(":")[0].lower()
