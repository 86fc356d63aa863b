"""Serve one node: model -> engine -> weights -> link to the gateway, until drained or stopped by a signal.

Imports torch only in `run_node`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from composer_prime.config.inference import InferenceConfig
from composer_prime.console import EXIT_USAGE, GIB, start_log
from composer_prime.errors import ComposerError, ConfigError, LostRunError, RunMismatchError
from composer_prime.host import gpu_name, visible_gpus
from composer_prime.model_source import resolve_model, text_settings
from composer_prime.monitor.events import record_events
from composer_prime.run.keys import ClientKeys
from composer_prime.run.run_dir import RunDir
from composer_prime.wire.node_messages import ComputeDevice

if TYPE_CHECKING:
    from inference.node import GatewayLink, InferenceNode
    from inference.receiver import ChunkSource

FAILED = 1
DISCONNECTED = 4
"""Exit status of a node that served and lost the run: another start is no crash."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One node: its name, what it runs, where it connects."""

    node_name: str
    inference: InferenceConfig
    model: str
    """As `model.path`."""
    max_context: int | None
    """Tokens; None takes the model's own."""
    keys: Callable[[], ClientKeys]
    """Read when needed: a launcher may still be writing them."""
    address: Callable[[], str | None]
    """Where the gateway listens, None before it is known."""
    run_dir: RunDir | None
    """The run's directory, where it is on this machine."""
    audits: bool = False
    """Whether it checks what other nodes sampled, and samples nothing."""
    kept: Path | None = None
    """Where weight chunks outlast the process; None keeps none."""
    first: tuple[bytes, bytes, str] | None = None
    """A signed manifest, its verify key and run, in use before the node attaches."""
    on_token: Callable[[str, int, float], None] | None = None
    """As of the local engine."""


def run_node(assignment: Assignment) -> int:
    start_log()
    if assignment.run_dir is not None:
        record_events(assignment.run_dir, assignment.node_name)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logger.info("node %s: loading %s", assignment.node_name, assignment.model)
    folder = resolve_model(assignment.model)
    import torch  # noqa: F401 - a Ctrl-C while this loads must not cancel a task

    try:
        asyncio.run(_serve(assignment, folder))
        return 0
    except ConfigError:
        raise
    except (ComposerError, OSError) as error:
        print(f"inference: {assignment.node_name}: {error}", file=sys.stderr)
        if assignment.run_dir is not None:  # For a node of its own the launcher would end the run at other statuses.
            return FAILED
        if isinstance(error, RunMismatchError):
            return EXIT_USAGE  # Another start would be refused too.
        return DISCONNECTED if isinstance(error, LostRunError) else FAILED


async def _serve(assignment: Assignment, folder: Path) -> None:
    import torch

    torch.set_num_threads(assignment.inference.threads)

    def stop(number: signal.Signals) -> None:
        starting.cancel()
        if starting.done() and not starting.cancelled() and starting.exception() is None:
            starting.result().stop(number.name)

    async with AsyncExitStack() as stack:
        starting = asyncio.ensure_future(start_node(assignment, folder, stack))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        with suppress(asyncio.CancelledError):
            node = await starting
            await node.run()


async def start_node(assignment: Assignment, folder: Path, stack: AsyncExitStack) -> InferenceNode:
    """Return the node, its first version in use. `stack` closes its parts."""
    import torch

    from composer_prime.wire.node_messages import ToAuditor, ToNode
    from inference.audit import Auditor
    from inference.engines.base import build_engine
    from inference.engines.local.local_engine import LocalEngine
    from inference.node import GatewayLink, InferenceNode
    from inference.receiver import Receiver

    inference = assignment.inference
    if assignment.audits:  # It samples nothing, so it needs no cache.
        inference = inference.model_copy(update={"local": inference.local.model_copy(update={"max_batch": 1})})
    max_context = assignment.max_context or _model_context(folder)
    messages = ToAuditor if assignment.audits else ToNode
    link = GatewayLink(assignment.address, assignment.keys(), messages=messages)
    source = _weights(assignment, link, stack)
    stack.push_async_callback(asyncio.to_thread, link.close)
    engine = build_engine(inference, folder, max_context)
    if isinstance(engine, LocalEngine):
        engine.on_token = assignment.on_token
    on_cuda = inference.device == "cuda" or (inference.device == "auto" and torch.cuda.is_available())
    tolerance = inference.canary_limit(on_cuda=on_cuda)
    stack.push_async_callback(engine.close)
    await engine.start()
    # What is kept is hashed: minutes for a large model.
    receiver = await asyncio.to_thread(Receiver, engine, source, folder, tolerance, kept=assignment.kept)
    stack.callback(receiver.close)
    if assignment.first is not None:
        await receiver.install(*assignment.first)
    make = Auditor if assignment.audits else InferenceNode
    device = _device(inference, on_cuda=on_cuda)
    return make(assignment.node_name, engine, link, receiver, inference, max_context=max_context, device=device)


def _weights(assignment: Assignment, link: GatewayLink, stack: AsyncExitStack) -> ChunkSource:
    from composer_prime.run.weights import WeightStore
    from inference.receiver import FolderSource
    from inference.weight_sources import WeightSources

    if assignment.run_dir is not None:
        return FolderSource(WeightStore(assignment.run_dir.weights))
    sources = WeightSources(link)
    stack.push_async_callback(sources.close)
    return sources


def _device(inference: InferenceConfig, *, on_cuda: bool) -> ComputeDevice:
    """Ask the driver: torch would take GPU memory for the answer."""
    dtype = inference.dtype_used(on_cuda=on_cuda)
    if not on_cuda:
        return ComputeDevice(name="cpu", count=inference.threads, dtype=dtype)
    count = inference.vllm.tensor_parallel if inference.engine.name == "vllm" else 1
    memory_gib = sum(visible_gpus()[:count]) / GIB
    return ComputeDevice(name=gpu_name(), count=count, memory_gib=round(memory_gib, 1), dtype=dtype)


def _model_context(folder: Path) -> int:
    """Raises ConfigError when the model does not say for how many tokens it was made."""
    limit = text_settings(folder).get("max_position_embeddings")
    if limit is None:
        raise ConfigError(f"{folder}/config.json names no max_position_embeddings: pass --max-context")
    return int(limit)
