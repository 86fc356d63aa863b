"""The web server of `composer view`: loopback only, GET only, JSON and the files in assets/.

What a run directory holds is text of models and environments, so it is hostile. It leaves here as JSON only, the page
writes it as text only, and the Content-Security-Policy forbids inline scripts. A request must name a loopback host: a
page elsewhere whose name was rebound to 127.0.0.1 names its own. A run is named by its id, never by a path.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
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
    daemon_threads = True

    def __init__(self, workspace: Workspace, port: int) -> None:
        """Listen on `port`, 0 for any free one. Raises OSError."""
        self.answers: dict[str, Callable[[dict[str, str]], Any]] = {
            "/api/runs": lambda query: workspace.run_list(),
            "/api/run": workspace.run,
            "/api/rollouts": workspace.rollouts,
            "/api/rollout": workspace.rollout,
            "/api/evaluation": workspace.evaluation,
        }
        self.assets = {f"/{path.name}": path for path in ASSETS.iterdir() if path.suffix in _TYPES}
        self.assets["/"] = ASSETS / "index.html"
        super().__init__((LOOPBACK, port), PageHandler)

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/"


class PageHandler(BaseHTTPRequestHandler):
    """Answers one connection."""

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
        parts = urlsplit(self.path[:_MAX_PATH])
        if _host_name(self.headers.get("Host", "")) not in _HOSTS:
            self._send(HTTPStatus.FORBIDDEN, b"open this page as localhost or 127.0.0.1\n", "text/plain", with_body)
        elif (asset := self.server.assets.get(parts.path)) is not None:
            self._send(HTTPStatus.OK, asset.read_bytes(), _TYPES[asset.suffix], with_body)
        elif (answer := self.server.answers.get(parts.path)) is not None:
            status, body = _result(answer, dict(parse_qsl(parts.query)))
            self._send(status, body, "application/json", with_body)
        else:
            self._send(HTTPStatus.NOT_FOUND, b"there is no such page\n", "text/plain", with_body)

    def _send(self, status: HTTPStatus, body: bytes, kind: str, with_body: bool) -> None:
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
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
    except Exception as error:  # an unreadable run must not end the page
        logger.exception("a question of the page failed")
        text = f"{type(error).__name__}: {error}"
        return HTTPStatus.INTERNAL_SERVER_ERROR, msgspec.json.encode({"error": text})


def _host_name(header: str) -> str:
    if header.startswith("["):
        return header.partition("]")[0].removeprefix("[")
    return header.partition(":")[0].lower()
