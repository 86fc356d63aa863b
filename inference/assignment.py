"""What a node process has to do, from each of its three command lines. Imports no torch.

inference --run-dir DIR --node-name node-0           as the launcher starts it: config, keys, endpoints in DIR
inference @ file.toml [--node-name NAME]             the role alone, on the machine of the run directory
inference join tcp://HOST:PORT --model PATH ...      on a rented machine: needs a join token, nothing else
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from composer_prime.address import tcp_address
from composer_prime.config import Config, load
from composer_prime.config.inference import InferenceConfig
from composer_prime.config.layers import merge_layers, read_with_bases
from composer_prime.console import EXIT_USAGE, pluralize
from composer_prime.errors import ConfigError
from composer_prime.run.keys import ClientKeys, RunKeys
from composer_prime.run.run_dir import RunDir

TOKEN_VARIABLE = "COMPOSER_JOIN_TOKEN"


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
    weights: Path | None
    """The run's weight store, where it is on this machine."""


def parse_node_command(words: list[str]) -> tuple[Assignment, bool]:
    """Return what the command line asks for, and whether it is a dry run. Raises ConfigError."""
    if words[:1] == ["join"]:
        return _from_join(words[1:])
    if not words or words in (["--help"], ["-h"]):
        print(_usage())
        raise SystemExit(0 if words else EXIT_USAGE)
    if any(word.split("=")[0] == "--run-dir" for word in words):
        return _from_run_dir([word for word in words if word != "--dry-run"]), "--dry-run" in words
    name = "node-0"
    if "--node-name" in words[:-1]:
        at = words.index("--node-name")
        name = words[at + 1]
        words = words[:at] + words[at + 2 :]
    command = load.parse_command_line(words)
    return _in_run(command.config, RunDir(command.config.run_directory.absolute()), name), command.dry_run


def _from_run_dir(words: list[str]) -> Assignment:
    parser = argparse.ArgumentParser(prog="inference", allow_abbrev=False)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--node-name", default="node-0")
    options = parser.parse_args(words)
    run_dir = RunDir(options.run_dir.absolute())
    return _in_run(load.read_config(run_dir.config), run_dir, options.node_name)


def _in_run(config: Config, run_dir: RunDir, node_name: str) -> Assignment:
    return Assignment(
        node_name=node_name,
        inference=config.inference,
        model=config.model.path,
        max_context=config.model.max_context,
        keys=lambda: RunKeys(run_dir.keys).client("node"),
        address=lambda: _bound_address(run_dir),
        weights=run_dir.weights,
    )


def _bound_address(run_dir: RunDir) -> str | None:
    """Return the orchestrator's address for nodes, None before it has bound its sockets."""
    try:
        return json.loads(run_dir.endpoints.read_text())["node"]
    except (FileNotFoundError, KeyError, json.JSONDecodeError):
        return None


def _from_join(words: list[str]) -> tuple[Assignment, bool]:
    options = _join_parser().parse_args(words)
    address = f"tcp://{tcp_address(options.address.rstrip('/'), 'the node address')}"
    keys = ClientKeys.from_token(_token(options.token, options.token_file))
    assignment = Assignment(
        node_name=options.name,
        inference=_join_config(options),
        model=options.model,
        max_context=options.max_context,
        keys=lambda: keys,
        address=lambda: address,
        weights=None,
    )
    return assignment, options.dry_run


def _join_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="inference join",
        allow_abbrev=False,
        description="Serve a run from this machine. The node connects outwards, pulls weights over the same encrypted "
        "link, and may leave at any time.",
    )
    parser.add_argument("address", help="the orchestrator's node address, tcp://HOST:PORT")
    parser.add_argument("--model", required=True, help="model folder, `tiny` or `smollm2`: the run's model.path")
    parser.add_argument("--token", help=f"join token (keys/node.token of the run); better in ${TOKEN_VARIABLE}")
    parser.add_argument("--token-file", type=Path, help="file that holds the join token")
    parser.add_argument("--name", default=f"{socket.gethostname()}-{os.getpid()}", help="this node's name in the run")
    parser.add_argument("--settings", type=Path, help="TOML file whose [inference] table is used; flags here win")
    parser.add_argument("--engine", choices=["local", "vllm"])
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--threads", type=int, help="CPU threads of the engine")
    parser.add_argument("--max-concurrent", type=int, help="requests taken at a time")
    parser.add_argument("--max-context", type=int, help="the run's model.max_context; default: the model's own limit")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the settings and stop")
    return parser


def _token(token: str | None, file: Path | None) -> str:
    if token and file:
        raise ConfigError("--token and --token-file are both given: use one")
    if file is not None:
        try:
            return file.read_text()
        except OSError as error:
            raise ConfigError(f"--token-file {file}: {error.strerror}") from None
    token = token or os.environ.get(TOKEN_VARIABLE)
    if not token:
        raise ConfigError(
            f"no join token: set ${TOKEN_VARIABLE}, or pass --token-file (the run keeps it in keys/node.token)"
        )
    return token


def _join_config(options: argparse.Namespace) -> InferenceConfig:
    values: dict = {}
    if options.settings is not None:
        values = merge_layers(read_with_bases(str(options.settings))).get("inference", {})
    for key in ("engine", "device", "dtype", "threads", "max_concurrent"):
        if getattr(options, key) is not None:
            values[key] = getattr(options, key)
    try:
        return InferenceConfig.model_validate(values)
    except ValidationError as error:
        faults = [f"inference.{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
        raise ConfigError("; ".join(faults)) from None


def describe_assignment(assignment: Assignment) -> str:
    """Return what a dry run prints."""
    inference = assignment.inference
    return "\n".join(
        [
            f"node      {assignment.node_name}: {inference.engine} engine on {inference.device}, "
            f"{pluralize(inference.threads, 'thread')}, {inference.max_concurrent} requests at a time",
            f"model     {assignment.model}, context {assignment.max_context or 'as the model has it'}",
            f"weights   {assignment.weights or 'pulled over the link'}",
        ]
    )


def _usage() -> str:
    lines = (__doc__ or "").split("\n\n", 1)[1]
    return f"usage:\n{lines}\nMore: inference join --help, trainer --help (the keys of file.toml)"
