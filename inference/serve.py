"""An assignment put to work: engine, link, receiver and node built, run, and taken down again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from composer_prime.config.inference import InferenceConfig
from composer_prime.errors import ConfigError
from composer_prime.run.weights import WeightStore
from inference.assignment import Assignment
from inference.engines.base import Engine
from inference.engines.build import build_engine
from inference.link import GatewayLink, LinkSource
from inference.node import InferenceNode
from inference.receiver import ChunkSource, FirstOf, FolderSource, Receiver

_PARENT_POLL_S = 1.0


async def serve_assignment(assignment: Assignment, folder: Path) -> None:
    """Serve until drained or stopped by a signal. Raises what the engine's start and Node.run raise."""
    inference = assignment.inference
    torch.set_num_threads(inference.threads)
    engine = build_engine(inference, folder, assignment.max_context or context_of(folder))
    stopping: list[str] = []
    node: InferenceNode | None = None

    def stop(reason: str) -> None:
        stopping.append(reason)
        if node is not None:
            node.stop(reason)
        else:
            starting.cancel()

    starting = asyncio.ensure_future(engine.start())
    watch = asyncio.create_task(_watch_signals(stop, with_parent=assignment.ends_with_parent))
    link = GatewayLink(assignment.address, assignment.keys())
    try:
        with suppress(asyncio.CancelledError):
            await starting
        if not stopping:
            node = _build_node(assignment, folder, engine, link)
            await node.run()
    finally:
        watch.cancel()
        await engine.close()
        await asyncio.to_thread(link.close)


def _build_node(assignment: Assignment, folder: Path, engine: Engine, link: GatewayLink) -> InferenceNode:
    inference = assignment.inference
    over_link = LinkSource(link, inference.chunk_timeout_s)
    source: ChunkSource = over_link
    if assignment.weights is not None:
        source = FirstOf(FolderSource(WeightStore(assignment.weights)), over_link)
    receiver = Receiver(engine, source, folder, inference.canary_limit(on_cuda=_on_cuda(inference)))
    return InferenceNode(assignment.node_name, engine, link, over_link, receiver, inference)


def _on_cuda(inference: InferenceConfig) -> bool:
    return inference.device == "cuda" or (inference.device == "auto" and torch.cuda.is_available())


async def _watch_signals(stop: Callable[[str], None], *, with_parent: bool) -> None:
    """SIGTERM and Ctrl-C drain; so does the end of the launcher, where the node is one of its children."""
    loop, parent = asyncio.get_running_loop(), os.getppid()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, signal.Signals(number).name)
    while not with_parent or os.getppid() == parent:
        await asyncio.sleep(_PARENT_POLL_S)
    stop("the launcher is gone")


def context_of(folder: Path) -> int:
    """The longest sequence that the model in `folder` was made for. Raises ConfigError when its config has none."""
    values = json.loads((folder / "config.json").read_text())
    limit = {**values, **values.get("text_config", {})}.get("max_position_embeddings")
    if limit is None:
        raise ConfigError(f"{folder}/config.json names no max_position_embeddings: pass --max-context")
    return int(limit)
