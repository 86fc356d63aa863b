"""A node or an auditor in this process, as inference/main.py builds it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from composer_prime.config.inference import InferenceConfig
from composer_prime.run.keys import ClientKeys
from inference.engines.base import Engine
from inference.node import GatewayLink, InferenceNode
from inference.receiver import Receiver


@asynccontextmanager
async def live_node(
    name: str, engine: Engine, folder: Path, config: InferenceConfig, address: Callable[[], str], keys: ClientKeys,
    *, role: type[InferenceNode] = InferenceNode, link: Mapping[str, Any] = {}, source: Any = None, **options: Any,
) -> AsyncIterator[tuple[InferenceNode, asyncio.Future[None]]]:  # fmt: skip
    """Yield it and the future of its end. `link`: options of GatewayLink. `source`: link -> where chunks come from."""
    await engine.start()
    gateway = GatewayLink(address, keys, **link)
    chunks = source(gateway) if source else gateway
    receiver = Receiver(engine, chunks, folder, 1e-3)
    node = role(name, engine, gateway, receiver, config, **options)
    ended = asyncio.ensure_future(node.run())
    try:
        yield node, ended
    finally:
        ended.cancel()
        await asyncio.gather(ended, return_exceptions=True)
        await engine.close()
        if source:
            await chunks.close()
        await asyncio.to_thread(gateway.close)
        receiver.close()
