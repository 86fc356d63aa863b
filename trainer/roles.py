"""The processes of a run, as commands: what the launcher starts. Built from the configuration alone."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass, field
from typing import Literal

from composer_prime.config import Config
from composer_prime.config.teachers import MODELS_VARIABLE
from composer_prime.console import console_script
from composer_prime.placement import place, visible
from composer_prime.run_dir import RunDir

Kind = Literal["orchestrator", "node", "rank", "teachers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleCommand:
    """One process to start."""

    name: str
    """Name of its log: orchestrator, node-0, trainer-0, teachers."""
    kind: Kind
    """Nodes and teachers may die and are started again; the end of any other ends the run, and of the last node."""
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    """On top of the launcher's environment."""
    gpus: int = 0
    """That it has for itself."""


def role_commands(config: Config, run_dir: RunDir, *, gpus: int) -> list[RoleCommand]:
    """Every role that runs here, in start order. Raises ConfigError when there are too few GPUs."""
    placement = place(config, gpus)
    where = ["--run-dir", str(run_dir.root)]
    commands = []
    if config.orchestrator.address is None:
        served = config.teachers.models_served(config.model.path) if config.teachers.online else []
        port = free_port() if served else 0
        commands += [_teachers(config, served, port)] if served else []
        env = {**_threads(1), **({MODELS_VARIABLE: f"http://127.0.0.1:{port}/v1"} if served else {})}
        argv = [*console_script("orchestrator"), *where]
        commands.append(RoleCommand(name="orchestrator", kind="orchestrator", argv=argv, env=env))
    for index, devices in enumerate(placement.nodes):
        argv = [*console_script("inference"), *where, "--node-name", f"node-{index}"]
        env = {**_threads(config.inference.threads), **_devices(devices)}
        commands.append(RoleCommand(name=f"node-{index}", kind="node", argv=argv, env=env, gpus=len(devices)))
    if config.run.max_steps and config.trainer.address is None:
        commands += _ranks(config, where, placement.ranks)
    return commands


def _teachers(config: Config, models: list[str], port: int) -> RoleCommand:
    """Local teachers and the frozen base, on a port that stays the same when they are started again."""
    threads = config.teachers.local_threads
    argv = [sys.executable, "-m", "inference.model_server", "--supervised", "--port", str(port)]
    argv += ["--threads", str(threads), *(word for model in models for word in ("--model", model))]
    return RoleCommand(name="teachers", kind="teachers", argv=argv, env=_threads(threads))


def _ranks(config: Config, where: list[str], devices: tuple[int, ...]) -> list[RoleCommand]:
    """torchrun's environment, for ranks on this machine."""
    world, port = config.trainer.ranks, str(free_port())
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    shared = {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback),
        **_threads(config.trainer.threads),
        **_devices(devices),
    }
    argv = [sys.executable, "-m", "trainer.train", *where]
    return [
        RoleCommand(
            name=f"trainer-{rank}",
            kind="rank",
            argv=argv,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            gpus=1 if devices else 0,
        )
        for rank in range(world)
    ]


def free_port() -> int:
    """A port that is free at the moment, for torch's rendezvous on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _threads(count: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(count), "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


def _devices(devices: tuple[int, ...]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": visible(devices)} if devices else {}
