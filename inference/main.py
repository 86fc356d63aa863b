"""The console script `inference`: one node that samples. Imports torch only to serve.

Exit status: 0 drained or stopped, 1 failed (the message names what it waited for or what broke), 2 wrong configuration,
3 a node that joined did not reach the run in time.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

from composer_prime.address import tcp_address
from composer_prime.config import load
from composer_prime.config.inference import InferenceConfig
from composer_prime.console import EXIT_USAGE, console_main, did_you_mean, exit_on_version_flag, fail, pluralize
from composer_prime.errors import ConfigError
from composer_prime.import_path import PartConfig
from composer_prime.model_source import model_ready
from composer_prime.run.keys import ClientKeys, RunKeys, read_secret
from composer_prime.run.process import end_with_parent
from composer_prime.run.run_dir import RunDir
from inference.joining import join, join_parser
from inference.serving import Assignment, run_node

_USAGE = """usage:
inference --run-dir DIR --node-name node-0           as the launcher starts it: config, keys, endpoints in DIR
inference @ file.toml [--node-name NAME]             a single node, on the machine of the run directory
inference join INVITE                                on any machine, with the output of `orchestrator invite`
inference audit --run-dir DIR [--node-name NAME]     checks what the nodes of a run on this host sample
inference audit tcp://HOST:PORT ...                  the same elsewhere, with a copy of the run's keys/trainer.token

More: inference join --help, inference audit tcp://HOST:PORT --help, trainer --help (the keys of file.toml)"""


def main() -> int:
    return console_main(_main, loads_engines=True)


def _main() -> int:
    words = sys.argv[1:]
    exit_on_version_flag(words)
    try:
        if words[:1] == ["join"]:
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


# ---- the command lines -----------------------------------------------------------------------------------------


def _parse(words: list[str]) -> tuple[Assignment, bool]:
    """Return the assignment, and whether it is a dry run. Raises ConfigError."""
    if words[:1] == ["audit"]:
        return _as_auditor(words[1:])
    if not words or words in (["--help"], ["-h"]):
        print(_USAGE)
        raise SystemExit(0 if words else EXIT_USAGE)
    if words[0].isalpha():
        raise ConfigError(f"unknown command {words[0]!r}{did_you_mean(words[0], ['join', 'audit'])}\n\n{_USAGE}")
    parser = argparse.ArgumentParser(prog="inference", allow_abbrev=False, add_help=False)
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--node-name", default="node-0")
    options, others = parser.parse_known_args(words)
    if options.run_dir is None:
        config, dry_run = load.parse_command_line(others)
        run_dir = RunDir(config.run_directory.absolute())
    else:
        if unknown := [word for word in others if word != "--dry-run"]:
            parser.error(f"with --run-dir, {' '.join(unknown)} is not allowed; only --node-name and --dry-run are")
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
    if words and words[0].startswith("tcp://"):
        return _auditor_elsewhere(words)
    assignment, dry_run = _parse(words)
    run_dir = assignment.run_dir
    assert run_dir is not None
    if not load.read_config(run_dir.config).orchestrator.audit.enabled:
        raise ConfigError(
            f"orchestrator.audit.enabled is false for {run_dir.root}, which then has no work for an auditor: start the "
            "run with --orchestrator.audit.enabled"
        )
    # What the run's nodes compute on says nothing of this machine.
    inference = assignment.inference.model_copy(
        update={"engine": PartConfig(name="local"), "device": "auto", "dtype": "float32"}
    )
    auditor = replace(
        assignment,
        inference=inference,
        node_name=assignment.node_name if "--node-name" in words else "auditor",
        keys=lambda: RunKeys(run_dir.keys).client("trainer"),
        audits=True,
    )
    return auditor, dry_run


def _bound_address(run_dir: RunDir) -> str | None:
    try:
        return json.loads(run_dir.endpoints.read_text())["node"]
    except (FileNotFoundError, KeyError, json.JSONDecodeError):
        return None


def _auditor_elsewhere(words: list[str]) -> tuple[Assignment, bool]:
    parser = argparse.ArgumentParser(prog="inference audit", allow_abbrev=False)
    parser.add_argument("address", metavar="tcp://HOST:PORT", help="orchestrator.node_address of the run")
    parser.add_argument("--model", required=True, help="the run's model.path (a model folder, a Hub id, ...)")
    parser.add_argument("--token-file", type=Path, required=True, help="a copy of the run's keys/trainer.token")
    parser.add_argument("--name", default=f"{socket.gethostname()}-{os.getpid()}", help="this auditor's name")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the engine")
    parser.add_argument("--max-context", type=int, help="the run's model.max_context; default: the model's own limit")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the settings and stop")
    options = parser.parse_args(words)
    address = f"tcp://{tcp_address(options.address.rstrip('/'), 'the audit address')}"
    try:
        token = read_secret(options.token_file.resolve())  # Secrets of a cluster are mounted as links.
        keys = ClientKeys.from_token(token.decode(errors="replace"))
    except OSError as error:
        raise ConfigError(f"--token-file {options.token_file}: {error.strerror}") from None
    assignment = Assignment(
        node_name=options.name,
        inference=InferenceConfig(device=options.device, dtype=options.dtype, threads=max(1, options.threads)),
        model=options.model,
        max_context=options.max_context,
        keys=lambda: keys,
        address=lambda: address,
        run_dir=None,
        audits=True,
    )
    return assignment, options.dry_run


def _describe(assignment: Assignment) -> str:
    inference, kind = assignment.inference, "auditor" if assignment.audits else "node"
    return "\n".join(
        [
            f"{kind:<10}{assignment.node_name}: {inference.engine.name} engine on {inference.device}, "
            f"{pluralize(inference.threads, 'thread')}, {inference.max_concurrent} requests at a time",
            f"model     {assignment.model}, context {assignment.max_context or 'as the model has it'}",
            f"weights   {assignment.run_dir.weights if assignment.run_dir else 'pulled over the link'}",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
