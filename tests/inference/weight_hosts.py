"""Hosts of a weight store, one of each kind that a node pulls from."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import fsspec
from aiohttp import web
from aiohttp.test_utils import TestServer

KINDS = ["server", "folder", "bucket"]


@asynccontextmanager
async def served(kind: str, root: Path) -> AsyncIterator[str]:
    """Serve the weight store in `root` as it is now; yield its URL."""
    if kind == "server":
        app = web.Application()
        app.router.add_static("/", root)
        async with TestServer(app) as server:
            yield f"http://127.0.0.1:{server.port}"
    elif kind == "folder":
        yield root.as_uri()
    else:
        url = f"memory://{uuid.uuid4().hex}/run"
        fsspec.core.url_to_fs(url)[0].put(f"{root}/", f"{url}/", recursive=True)
        yield url
