"""Peers as real processes that can be killed or stopped, each at a step that the test names."""

import itertools
import json
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from waiting import wait_until

from composer_prime.address import free_port

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["diloco.streaming", "torch.distributed.fsdp", "torch._dynamo"])


@dataclass(slots=True)
class PeerProcess:
    process: multiprocessing.Process
    lines: Path

    @property
    def seen(self) -> dict[int, str]:
        """Hash of the global model at each outer step that the peer took part in."""
        text = self.lines.read_text() if self.lines.exists() else ""
        rows = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        return {row["outer_step"]: row["hash"] for row in rows}

    def wait_until(self, outer_step: int, timeout_s: float = 200) -> None:
        wait_until(lambda: max(self.seen, default=-1) >= outer_step, f"{self.lines.name} at {outer_step}", timeout_s)

    def wait_stopped(self) -> None:
        stat = Path(f"/proc/{self.process.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "the process to stop")

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self, timeout_s: float = 200) -> int:
        """Exit code; negative for a signal."""
        self.process.join(timeout_s)
        if self.process.is_alive():
            self.process.kill()
            raise AssertionError(f"{self.lines.name} did not end within {timeout_s} s")
        return self.process.exitcode


def start_peer(
    folder: Path,
    name: str,
    peer: int,
    values: dict[str, Any],
    *,
    failure: tuple[int, int] | None = None,
    until: int | None = None,
    world: tuple[int, int, int] | None = None,
) -> PeerProcess:
    """`values`: rendezvous, key_file and overrides. `failure`: (inner step, signal) that the process sends itself.

    `until`: end when this outer step is reached, however many inner steps it took. `world`: see `start_ranks`.
    """
    lines = folder / f"{name}{world[0] if world else ''}-{time.monotonic_ns()}.jsonl"
    process = CONTEXT.Process(target=_main, args=(str(lines), name, peer, values, failure, until, world))
    process.start()
    return PeerProcess(process, lines)


def start_ranks(
    folder: Path,
    name: str,
    peer: int,
    values: dict[str, Any],
    *,
    ranks: int = 2,
    failure: tuple[int, int, int] | None = None,
    until: int,
) -> list[PeerProcess]:
    """A peer of several FSDP2 ranks on gloo. `failure`: (rank, inner step, signal) that a rank sends itself."""
    port = free_port()
    own = [failure[1:] if failure is not None and failure[0] == rank else None for rank in range(ranks)]
    return [
        start_peer(folder, name, peer, values, failure=own[rank], until=until, world=(rank, ranks, port))
        for rank in range(ranks)
    ]


def shard(model: Any, rank: int, ranks: int, port: int) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _main(
    lines: str, name: str, peer: int, values: dict[str, Any],
    failure: tuple[int, int] | None, until: int | None, world: tuple[int, int, int] | None,
) -> None:  # fmt: skip
    import logging

    import torch
    from joint_run import Blocks, adamw, inner_step, settings

    from diloco.streaming import StreamingDiLoCo

    torch.set_num_threads(1)
    descriptor = os.open(lines + ".log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 2)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    values = dict(values)
    config = settings(values.pop("rendezvous"), values.pop("key_file"), name, **values)
    model = Blocks()
    if world is not None:
        shard(model, *world)
    optimizer = adamw(model)
    with StreamingDiLoCo(model.named_parameters(), optimizer, config) as engine, open(lines, "a", buffering=1) as file:
        last = None
        for step in itertools.count():
            if failure is not None and failure[0] == step:
                os.kill(os.getpid(), failure[1])
            time.sleep(0.03)
            engine.count(tokens=1)
            inner_step(model, optimizer, peer, step)
            if engine.outer_step != last:
                last = engine.outer_step
                file.write(json.dumps({"outer_step": last, "hash": engine.global_model.hash}) + "\n")
            if until is not None and last >= until:
                break
