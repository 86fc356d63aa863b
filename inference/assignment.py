"""What a node process is to do, from each of its three command lines. Imports no torch.

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
from composer_prime.config.layers import merge, read_with_bases
from composer_prime.console import pluralize
from composer_prime.errors import ConfigError
from composer_prime.run.keys import ClientKeys, RunKeys
from composer_prime.run.run_dir import RunDir

TOKEN_VARIABLE = "COMPOSER_JOIN_TOKEN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One node: who it is, what it runs, where it connects."""

    node_name: str
    inference: InferenceConfig
    model: str
    """As `model.path`."""
    max_context: int | None
    """Tokens; None takes the model's own."""
    keys: Callable[[], ClientKeys]
    """Read when needed: a launcher may still be writing them."""
    address: Callable[[], str | None]
    """Where the gateway listens, None while nobody knows; asked again at each connection."""
    weights: Path | None
    """The run's weight store, where it is on this machine."""
    ends_with_parent: bool


def from_run_dir(words: list[str]) -> Assignment:
    """Raises ConfigError."""
    parser = argparse.ArgumentParser(prog="inference", allow_abbrev=False)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--node-name", default="node-0")
    given = parser.parse_args(words)
    run_dir = RunDir(given.run_dir.absolute())
    return _in_run(load.read_config(run_dir.config), run_dir, given.node_name, ends_with_parent=True)


def from_config(config: Config, node_name: str) -> Assignment:
    return _in_run(config, RunDir(config.run_directory.absolute()), node_name, ends_with_parent=False)


def _in_run(config: Config, run_dir: RunDir, node_name: str, *, ends_with_parent: bool) -> Assignment:
    return Assignment(
        node_name=node_name,
        inference=config.inference,
        model=config.model.path,
        max_context=config.model.max_context,
        keys=lambda: RunKeys(run_dir.keys).client("node"),
        address=lambda: bound_address(run_dir),
        weights=run_dir.weights,
        ends_with_parent=ends_with_parent,
    )


def bound_address(run_dir: RunDir) -> str | None:
    """Where the orchestrator of `run_dir` takes nodes; None while it has not bound its sockets."""
    try:
        return json.loads(run_dir.endpoints.read_text())["node"]
    except (FileNotFoundError, KeyError, json.JSONDecodeError):
        return None


def from_join(words: list[str]) -> tuple[Assignment, bool]:
    """The assignment of `inference join`, and whether it is a dry run. Raises ConfigError."""
    given = _join_parser().parse_args(words)
    address = _checked_address(given.address)
    keys = ClientKeys.from_token(_token(given.token, given.token_file))
    assignment = Assignment(
        node_name=given.name,
        inference=_join_config(given),
        model=given.model,
        max_context=given.max_context,
        keys=lambda: keys,
        address=lambda: address,
        weights=None,
        ends_with_parent=False,
    )
    return assignment, given.dry_run


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


def _checked_address(address: str) -> str:
    """Raises ConfigError for what is no tcp://HOST:PORT."""
    return f"tcp://{tcp_address(address.rstrip('/'), 'the node address')}"


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


def _join_config(given: argparse.Namespace) -> InferenceConfig:
    values: dict = {}
    if given.settings is not None:
        values = merge(read_with_bases(str(given.settings))).get("inference", {})
    for key in ("engine", "device", "dtype", "threads", "max_concurrent"):
        if getattr(given, key) is not None:
            values[key] = getattr(given, key)
    try:
        return InferenceConfig.model_validate(values)
    except ValidationError as error:
        said = "; ".join(f"inference.{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ConfigError(said) from None


def describe_assignment(assignment: Assignment) -> str:
    """What a dry run prints."""
    inference, where = assignment.inference, assignment.weights
    return "\n".join(
        [
            f"node      {assignment.node_name}: {inference.engine} engine on {inference.device}, "
            f"{pluralize(inference.threads, 'thread')}, {inference.max_concurrent} requests at a time",
            f"model     {assignment.model}, context {assignment.max_context or 'as the model has it'}",
            f"weights   {where or 'pulled over the link'}",
        ]
    )


def node_usage() -> str:
    lines = (__doc__ or "").split("\n\n", 1)[1]
    return f"usage:\n{lines}\nMore: inference join --help, trainer --help (the keys of file.toml)"
