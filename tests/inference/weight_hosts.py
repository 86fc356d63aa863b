"""Hosts of a weight store, one of each kind that a node pulls from."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import fsspec
from aiohttp import web
from aiohttp.test_utils import TestServer

from composer_prime.run.weights import CHUNK_BYTES

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
        files = fsspec.core.url_to_fs(url)[0]
        for path in (root / "chunks").iterdir():
            with path.open("rb") as file:  # An endless chunk is a sparse file.
                files.pipe_file(f"{url}/chunks/{path.name}", file.read(2 * CHUNK_BYTES))
        yield url
