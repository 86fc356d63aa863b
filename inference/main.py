"""The console script `inference`: one node that samples (inference/assignment.py has its command lines).

Exit status: 0 drained or stopped, 1 failed (the message names what it waited for or what broke), 2 wrong configuration.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path

from composer_prime.console import exit_on_version_flag, fail
from composer_prime.errors import ComposerError, ConfigError
from composer_prime.model_source import model_ready, resolve_model
from composer_prime.run.process import PARENT_POLL, end_with_parent
from inference.assignment import Assignment, describe_assignment, parse_node_command

FAILED = 1
logger = logging.getLogger(__name__)


def main() -> int:
    status = _main()
    if any(thread.daemon and thread.name != PARENT_POLL for thread in threading.enumerate()):
        # An engine still loads, or hangs. The interpreter may crash when it shuts down under that thread.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _main() -> int:
    words = sys.argv[1:]
    exit_on_version_flag(words)
    try:
        assignment, dry_run = parse_node_command(words)
        if not dry_run:
            end_with_parent(always="--run-dir" in words)
            return _run(assignment)
        model_ready(assignment.model)
        print(describe_assignment(assignment))
        return 0
    except ConfigError as error:
        fail(error)


def _run(assignment: Assignment) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
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
        return FAILED


async def _serve(assignment: Assignment, folder: Path) -> None:
    """Serve until drained or stopped by a signal. Raises what Engine.start and InferenceNode.run raise."""
    import torch

    from composer_prime.run.weights import WeightStore
    from inference.engines.base import build_engine
    from inference.node import GatewayLink, InferenceNode
    from inference.receiver import FolderSource, Receiver

    inference = assignment.inference
    torch.set_num_threads(inference.threads)
    engine = build_engine(inference, folder, assignment.max_context or _model_context(folder))
    link = GatewayLink(assignment.address, assignment.keys(), inference.chunk_timeout_s)
    node: InferenceNode | None = None
    stopped = False

    def stop(number: signal.Signals) -> None:
        nonlocal stopped
        stopped = True
        if node is not None:
            node.stop(number.name)
        else:
            starting.cancel()

    starting = asyncio.ensure_future(engine.start())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    try:
        try:
            await starting
        except asyncio.CancelledError:
            if not stopped:
                raise
        if not stopped:
            source = link if assignment.weights is None else FolderSource(WeightStore(assignment.weights))
            on_cuda = inference.device == "cuda" or (inference.device == "auto" and torch.cuda.is_available())
            receiver = Receiver(engine, source, folder, inference.canary_limit(on_cuda=on_cuda))
            node = InferenceNode(assignment.node_name, engine, link, receiver, inference)
            await node.run()
    finally:
        await engine.close()
        await asyncio.to_thread(link.close)


def _model_context(folder: Path) -> int:
    """Return the longest sequence that the model in `folder` was made for. Raises ConfigError without that figure."""
    values = json.loads((folder / "config.json").read_text())
    limit = {**values, **values.get("text_config", {})}.get("max_position_embeddings")
    if limit is None:
        raise ConfigError(f"{folder}/config.json names no max_position_embeddings: pass --max-context")
    return int(limit)


if __name__ == "__main__":
    raise SystemExit(main())
