"""Hosts of a weight store, one of each kind that a node pulls from."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from composer_prime.address import Address
from composer_prime.run.bucket import Bucket
from composer_prime.run.weights import CHUNK_BYTES, WeightStore
from orchestrator.swarm.weight_server import WeightServer

KINDS = ["server", "folder", "bucket"]


@asynccontextmanager
async def served(kind: str, root: Path) -> AsyncIterator[str]:
    """Serve the weight store in `root` as it is now; yield its URL."""
    if kind == "server":
        server = WeightServer(WeightStore(root))
        await server.start(Address("127.0.0.1", 0))
        try:
            yield server.url
        finally:
            await server.close()
    elif kind == "folder":
        yield root.as_uri()
    else:
        bucket = Bucket(f"memory://{uuid.uuid4().hex}/run")
        for path in (root / "chunks").iterdir():
            with path.open("rb") as file:
                bucket.put_chunks({path.name: file.read(2 * CHUNK_BYTES)})
        yield bucket.url
