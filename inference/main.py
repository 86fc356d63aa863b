"""The console script `inference`: one node that samples. Imports torch only to serve.

Exit status: 0 drained or stopped, 1 failed (the message names what it waited for or what broke), 2 wrong configuration.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from composer_prime.address import tcp_address
from composer_prime.config import load
from composer_prime.config.inference import InferenceConfig
from composer_prime.config.layers import merge_layers, read_with_bases
from composer_prime.console import EXIT_USAGE, GIB, exit_on_version_flag, fail, pluralize
from composer_prime.errors import ComposerError, ConfigError
from composer_prime.model_source import model_ready, resolve_model
from composer_prime.monitor.events import record_events
from composer_prime.plan.machine import gpu_name, visible_gpus
from composer_prime.run.keys import TOKEN_VARIABLE, ClientKeys, RunKeys, join_keys
from composer_prime.run.process import PARENT_POLL, end_with_parent
from composer_prime.run.run_dir import RunDir

if TYPE_CHECKING:
    from inference.engines.base import Engine
    from inference.node import GatewayLink
    from inference.receiver import Receiver
    from inference.sources import RankedSources
from composer_prime.wire.node import ComputeDevice

FAILED = 1
_USAGE = """usage:
inference --run-dir DIR --node-name node-0           as the launcher starts it: config, keys, endpoints in DIR
inference @ file.toml [--node-name NAME]             the role alone, on the machine of the run directory
inference join INVITE                                on any machine: what `orchestrator invite` printed
inference join tcp://HOST:PORT --model PATH ...      the same with a join token and the model at hand
inference audit --run-dir DIR | tcp://HOST:PORT ...  as `orchestrator audit` starts it: checks what nodes sample

More: inference join --help, trainer --help (the keys of file.toml)"""
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
    """Where the gateway listens, None before it is known; called again for each connection."""
    run_dir: RunDir | None
    """The run's directory, where it is on this machine."""
    audits: bool = False
    """Whether it checks what other nodes sampled, and samples nothing."""
    kept: Path | None = None
    """Where weight chunks outlast the process; None keeps none."""
    first: tuple[bytes, bytes, str] | None = None
    """A signed manifest, its verify key and run, in use before the node attaches; None attaches with the folder's."""


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
        if words[:1] == ["join"] and not any(word.startswith("tcp://") for word in words):
            from inference.joining import join

            return join(join_parser().parse_args(words[1:]), words[1:])
        assignment, dry_run = _parse(words)
        if not dry_run:
            end_with_parent(always="--run-dir" in words)
            return run_node(assignment)
        model_ready(assignment.model)
        print(_describe(assignment))
        return 0
    except ConfigError as error:
        fail(error)


def run_node(assignment: Assignment) -> int:
    """Serve; return the exit status. Raises ConfigError."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
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
        return FAILED


async def _serve(assignment: Assignment, folder: Path) -> None:
    """Serve until drained or stopped by a signal. Raises what Engine.start and InferenceNode.run raise."""
    import torch

    from composer_prime.wire.audit import ToAuditor
    from composer_prime.wire.node import ToNode
    from inference.audit import Auditor
    from inference.engines.base import build_engine
    from inference.node import GatewayLink, InferenceNode

    inference = assignment.inference
    torch.set_num_threads(inference.threads)
    max_context = assignment.max_context or _model_context(folder)
    engine = build_engine(inference, folder, max_context)
    messages = ToAuditor if assignment.audits else ToNode
    link = GatewayLink(assignment.address, assignment.keys(), inference.chunk_timeout_s, messages)
    node: InferenceNode | None = None
    weights = AsyncExitStack()
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
            on_cuda = inference.device == "cuda" or (inference.device == "auto" and torch.cuda.is_available())
            tolerance = inference.canary_limit(on_cuda=on_cuda)
            receiver, sources, relay_port = await _receive(assignment, engine, link, folder, tolerance, weights)
            if assignment.first is not None:
                await receiver.install(*assignment.first)
            make = Auditor if assignment.audits else partial(InferenceNode, sources=sources, relay_port=relay_port)
            device = _device(inference, on_cuda=on_cuda)
            node = make(assignment.node_name, engine, link, receiver, inference, max_context=max_context, device=device)
            if not stopped:
                await node.run()
    finally:
        await engine.close()
        await asyncio.to_thread(link.close)
        await weights.aclose()


async def _receive(
    assignment: Assignment, engine: Engine, link: GatewayLink, folder: Path, tolerance: float, stack: AsyncExitStack
) -> tuple[Receiver, RankedSources | None, int]:
    """Return what brings weights to `engine`, its sources elsewhere, and the port of the relay (0: there is none).

    With the run's directory at hand its store is read; else the gateway's link is the last of several sources. `stack`
    closes all. Raises ConfigError.
    """
    from composer_prime.run.weights import WeightStore
    from composer_prime.wire.weight_server import WeightServer
    from inference.receiver import Receiver
    from inference.sources import RankedSources
    from inference.versions import FolderSource

    inference, run_dir = assignment.inference, assignment.run_dir
    if run_dir is not None:
        receiver = Receiver(engine, FolderSource(WeightStore(run_dir.weights)), folder, tolerance)
        stack.callback(receiver.close)
        return receiver, None, 0
    relays = inference.relay is not None
    sources = RankedSources(link, inference.chunk_timeout_s, inference.weights_from, relays)
    receiver = Receiver(engine, sources, folder, tolerance, relays=relays, kept=assignment.kept)
    stack.callback(receiver.close)
    stack.push_async_callback(sources.close)
    if inference.relay is None:
        return receiver, sources, 0
    server = WeightServer(receiver.chunks)
    stack.push_async_callback(server.close)
    await server.start(tcp_address(inference.relay, "inference.relay", bind=True, scheme=""))
    logger.info("serving this node's weight chunks to others at %s", server.url)
    return receiver, sources, server.port


def _device(inference: InferenceConfig, *, on_cuda: bool) -> ComputeDevice:
    """Return what the node computes on, for its Hello. Asks the driver: torch would take GPU memory for the answer."""
    if not on_cuda:
        return ComputeDevice(name="cpu", count=inference.threads)
    count = inference.vllm.tensor_parallel if inference.engine == "vllm" else 1
    memory_gib = sum(visible_gpus()[:count]) / GIB
    return ComputeDevice(name=gpu_name(), count=count, memory_gib=round(memory_gib, 1))


def _model_context(folder: Path) -> int:
    """Return the longest sequence that the model in `folder` was made for. Raises ConfigError without that figure."""
    values = json.loads((folder / "config.json").read_text())
    limit = {**values, **values.get("text_config", {})}.get("max_position_embeddings")
    if limit is None:
        raise ConfigError(f"{folder}/config.json names no max_position_embeddings: pass --max-context")
    return int(limit)


# ---- the three command lines ---------------------------------------------------------------------------------------


def _parse(words: list[str]) -> tuple[Assignment, bool]:
    """Return what the command line asks for, and whether it is a dry run. Raises ConfigError."""
    if words[:1] == ["join"]:
        return _from_join(words[1:])
    if words[:1] == ["audit"]:
        return _as_auditor(words[1:])
    if not words or words in (["--help"], ["-h"]):
        print(_USAGE)
        raise SystemExit(0 if words else EXIT_USAGE)
    parser = argparse.ArgumentParser(prog="inference", allow_abbrev=False, add_help=False)
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--node-name", default="node-0")
    options, others = parser.parse_known_args(words)
    if options.run_dir is None:
        command = load.parse_command_line(others)
        config, run_dir, dry_run = command.config, RunDir(command.config.run_directory.absolute()), command.dry_run
    else:
        if unknown := [word for word in others if word != "--dry-run"]:
            parser.error(f"with --run-dir, {' '.join(unknown)} is not understood: give --node-name or --dry-run only")
        run_dir, dry_run = RunDir(options.run_dir.absolute()), bool(others)
        config = load.read_config(run_dir.config)
        load.make_importable(config)
    assignment = Assignment(
        node_name=options.node_name,
        inference=config.inference,
        model=config.model.path,
        max_context=config.model.max_context,
        keys=lambda: RunKeys(run_dir.keys).client("node"),
        address=lambda: _bound_address(run_dir),
        run_dir=run_dir,
    )
    return assignment, dry_run


def _as_auditor(words: list[str]) -> tuple[Assignment, bool]:
    """Return the assignment of a node as that of an auditor: the local engine, the trainer's keys, its own listener."""
    joins = bool(words) and words[0].startswith("tcp://")
    assignment, dry_run = _from_join(words) if joins else _parse(words)
    inference = assignment.inference.model_copy(update={"engine": "local"})
    assignment, run_dir = replace(assignment, inference=inference, audits=True), assignment.run_dir
    if run_dir is None:
        return assignment, dry_run
    # What the run's nodes compute on says nothing of this machine.
    inference = inference.model_copy(update={"device": "auto"})
    keys, address = lambda: RunKeys(run_dir.keys).client("trainer"), lambda: _bound_address(run_dir, "audit")
    name = assignment.node_name if "--node-name" in words else "auditor"
    return replace(assignment, inference=inference, node_name=name, keys=keys, address=address), dry_run


def _bound_address(run_dir: RunDir, role: str = "node") -> str | None:
    """Return the orchestrator's address for nodes or auditors, None before it has bound its sockets."""
    try:
        return json.loads(run_dir.endpoints.read_text())[role]
    except (FileNotFoundError, KeyError, json.JSONDecodeError):
        return None


def _from_join(words: list[str]) -> tuple[Assignment, bool]:
    options = join_parser().parse_args(words)
    if options.model is None:
        raise ConfigError("--model is missing: with an address the node needs the run's model.path; an invite has it")
    address = f"tcp://{tcp_address(options.address.rstrip('/'), 'the node address')}"
    keys = join_keys(options.token, options.token_file, "node")
    assignment = Assignment(
        node_name=options.name or f"{socket.gethostname()}-{os.getpid()}",
        inference=join_config(options, {}),
        model=options.model,
        max_context=options.max_context,
        keys=lambda: keys,
        address=lambda: address,
        run_dir=None,
    )
    return assignment, options.dry_run


def join_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="inference join",
        allow_abbrev=False,
        description="Serve a run from this machine. The node connects outwards, pulls weights over the same encrypted "
        "link, and may leave at any time.",
    )
    parser.add_argument("address", nargs="?", metavar="INVITE | tcp://HOST:PORT",
                        help="what `orchestrator invite` printed (default: $COMPOSER_INVITE), nothing else is needed; "
                        "or the orchestrator's node address, with --model and a join token")  # fmt: skip
    parser.add_argument(
        "--state-dir", type=Path, help="with an invite: where the node keeps its key, model and weights"
    )
    parser.add_argument("--connect-timeout", type=float, default=60.0, metavar="S",
                        help="with an invite: how long to try to reach the run; default 60")  # fmt: skip
    parser.add_argument("--model", help="with an address: the run's model.path: a model folder, a Hub id, ...")
    parser.add_argument("--token", help=f"join token (keys/node.token of the run); better in ${TOKEN_VARIABLE}")
    parser.add_argument("--token-file", type=Path, help="file that holds the join token")
    parser.add_argument("--name", help="this node's name in the run")
    parser.add_argument("--settings", type=Path, help="TOML file whose [inference] table is used; flags here win")
    parser.add_argument("--engine", choices=["local", "vllm"])
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--threads", type=int, help="CPU threads of the engine")
    parser.add_argument("--max-concurrent", type=int, help="requests taken at a time")
    parser.add_argument("--max-context", type=int, help="the run's model.max_context; default: the model's own limit")
    parser.add_argument("--price", type=float, dest="usd_per_hour", metavar="USD",
                        help="dollars an hour: with an invite of one GPU of this machine (of a machine without GPUs as "
                        "a whole), else of this node")  # fmt: skip
    parser.add_argument(
        "--weights-from", action="append", metavar="URL", help="pull weights there: http(s)://, s3://, ..."
    )
    parser.add_argument(
        "--relay",
        metavar="HOST:PORT",
        help="serve the weights that this node holds to others, over HTTP; further "
        "nodes of the machine take the ports behind it",
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the settings and stop")
    parser.add_argument("--slot", type=int, help=argparse.SUPPRESS)  # Which node of the machine this process is.
    parser.add_argument("--tensor-parallel", type=int, help=argparse.SUPPRESS)
    return parser


def join_config(options: argparse.Namespace, values: dict) -> InferenceConfig:
    """Return `values`, the run's own settings, with those of the options on top. Raises ConfigError."""
    if options.settings is not None:
        values = values | merge_layers(read_with_bases(str(options.settings))).get("inference", {})
    for key in ("engine", "device", "dtype", "threads", "max_concurrent", "usd_per_hour", "weights_from", "relay"):
        if getattr(options, key) is not None:
            values[key] = getattr(options, key)
    if options.tensor_parallel is not None:
        values["vllm"] = {**values.get("vllm", {}), "tensor_parallel": options.tensor_parallel}
    try:
        return InferenceConfig.model_validate(values)
    except ValidationError as error:
        faults = [f"inference.{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
        raise ConfigError("; ".join(faults)) from None


def _describe(assignment: Assignment) -> str:
    """Return what a dry run prints."""
    inference, kind = assignment.inference, "auditor" if assignment.audits else "node"
    return "\n".join(
        [
            f"{kind:<10}{assignment.node_name}: {inference.engine} engine on {inference.device}, "
            f"{pluralize(inference.threads, 'thread')}, {inference.max_concurrent} requests at a time",
            f"model     {assignment.model}, context {assignment.max_context or 'as the model has it'}",
            f"weights   {assignment.run_dir.weights if assignment.run_dir else 'pulled over the link'}",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
