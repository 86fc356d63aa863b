"""A model served by this process alone, for commands that play episodes or talk.

    serve               Gateway (HTTP for environments) <--CURVE, loopback--> InferenceNode in a task
    serve_with_workers  the same, and the worker processes of the sources

Nothing is trained, so the weights stay those of the model folder (policy version 0).
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from composer_prime.config import Config
from composer_prime.console import tell_waits
from composer_prime.errors import DeadlineError
from composer_prime.model_source import resolve_model
from composer_prime.plan.preflight import check_chat_template
from composer_prime.run.keys import RunKeys
from composer_prime.run.run_dir import RunDir
from composer_prime.run.weights import WeightStore

if TYPE_CHECKING:
    from inference.serving import Assignment
    from orchestrator.gateway import Gateway
    from orchestrator.workers.pool import WorkerPool

READY_S = 300.0
"""How long the engine may take to load the model."""
_POLL_S = 0.05


@asynccontextmanager
async def serve(
    config: Config, folder: Path, on_token: Callable[[str, int, float], None] | None = None
) -> AsyncIterator[tuple[Gateway, Path]]:
    """Serve `config.model` until the block ends. Yield the gateway and the folder with its chat template.

    `folder`: an empty one. `on_token` gets session, token and log-probability of each draw of the local
    engine. Raises ModelNotFoundError, ConfigError, EngineError, and DeadlineError after READY_S.
    """
    from composer_prime.wire.node_messages import GATEWAY_TOKEN_VARIABLE
    from inference.serving import Assignment
    from orchestrator.chat_template import chat_folder
    from orchestrator.gateway.gateway import Gateway

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Workers outlive a gateway when models change, so the token stays.
    os.environ.setdefault(GATEWAY_TOKEN_VARIABLE, secrets.token_urlsafe(24))
    run_dir = RunDir(folder)
    model_dir = resolve_model(config.model.path)
    check_chat_template(config, model_dir)
    chat = chat_folder(model_dir, config.model.chat_template, folder)
    keys = RunKeys.create(run_dir.keys)
    gateway = Gateway(_on_loopback(config), keys, "local", WeightStore(run_dir.weights), model_dir=chat)
    assignment = Assignment(
        node_name="node-0",
        inference=config.inference,
        model=config.model.path,
        max_context=config.model.max_context,
        keys=lambda: keys.client("node"),
        address=lambda: gateway.node_endpoint,
        run_dir=run_dir,
        on_token=on_token,
    )
    await gateway.start()
    try:
        node = asyncio.create_task(_run_node(assignment, model_dir))
        try:
            await _until_served(gateway, node)
            yield gateway, chat
        finally:
            node.cancel()
            await asyncio.gather(node, return_exceptions=True)
    finally:
        await gateway.close()


@asynccontextmanager
async def serve_with_workers(config: Config, folder: Path) -> AsyncIterator[tuple[Gateway, dict[str, WorkerPool]]]:
    """Serve `config.model` and start all sources' workers. Yield the gateway and the workers by source.

    `folder`: an empty one. Raises what `serve` and `WorkerPool.start` raise.
    """
    from orchestrator.chat_template import chat_folder
    from orchestrator.tasks import worker_pools

    chat = chat_folder(resolve_model(config.model.path), config.model.chat_template, folder / "worker")
    pools = worker_pools(config, chat, folder / "logs")
    async with AsyncExitStack() as stack:
        for pool in pools.values():
            stack.push_async_callback(pool.close)
        with tell_waits(f"loading {', '.join(pools)} and {config.model.path}"):
            model = asyncio.ensure_future(stack.enter_async_context(serve(config, folder / "served")))
            loading = [model, *(asyncio.ensure_future(pool.start()) for pool in pools.values())]
            try:
                (gateway, _), *_ = await asyncio.gather(*loading)
            finally:
                for task in loading:
                    task.cancel()
                await asyncio.gather(*loading, return_exceptions=True)
        yield gateway, pools


async def _run_node(assignment: Assignment, model_dir: Path) -> None:
    import torch

    from inference.serving import start_node

    torch.set_num_threads(assignment.inference.threads)
    async with AsyncExitStack() as stack:
        node = await start_node(assignment, model_dir, stack)
        await node.run()


async def _until_served(gateway, node: asyncio.Task[None]) -> None:
    """Return once the node serves. Raises what ended it, or DeadlineError."""
    try:
        async with asyncio.timeout(READY_S):
            while not gateway.router.serving():
                if node.done():
                    node.result()
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise DeadlineError(f"waited {READY_S:g} s for the model to load") from None


def _on_loopback(config: Config) -> Config:
    """Return `config` with free loopback ports, and no audits of this command's own node."""
    audit = config.orchestrator.audit.model_copy(update={"enabled": False})
    addresses = {"node_address": "tcp://127.0.0.1:0", "step_address": "tcp://127.0.0.1:0"}
    orchestrator = config.orchestrator.model_copy(update={**addresses, "audit": audit})
    return config.model_copy(update={"orchestrator": orchestrator})
