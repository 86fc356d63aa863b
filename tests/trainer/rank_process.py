"""Trainer ranks as real processes that start in milliseconds: forked from a server that has imported torch already.

Each child sets torchrun's environment, sends its output to a file and runs trainer.train.main, as `python -m` would, or
other work of a test.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from composer_prime.address import free_port

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["trainer.train", "torch.distributed.tensor", "transformers.models.qwen3"])


@dataclass(slots=True)
class RankProcess:
    process: multiprocessing.Process
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait(self, timeout_s: float) -> int:
        """Exit code; negative for a signal. The process is killed when it takes longer."""
        self.process.join(timeout_s)
        if self.process.is_alive():
            self.process.kill()
            raise AssertionError(f"rank did not end within {timeout_s} s; its output:\n{self.output}")
        return self.process.exitcode

    def wait_for(self, text: str, timeout_s: float = 200) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.output:
            assert time.monotonic() < deadline and self.process.is_alive(), f"no {text!r} in:\n{self.output}"
            time.sleep(0.05)


def start_ranks(
    run_dirs: Sequence[Path], file_limit_bytes: int | None = None, work: Callable[[str], None] | None = None
) -> list[RankProcess]:
    """Start a rank for each folder, which is the run directory as that rank sees it.

    `file_limit_bytes`: no file of the ranks may grow larger; the write that would fails, as on a full disk. `work`:
    what a rank does in place of a run, given its folder.
    """
    port, ranks = free_port(), len(run_dirs)
    started = []
    for rank, run_dir in enumerate(run_dirs):
        environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1",
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
        log = run_dir / "logs" / f"trainer-{rank}-{time.monotonic_ns()}.log"
        log.parent.mkdir(exist_ok=True)
        process = _CONTEXT.Process(target=_main, args=(str(run_dir), environment, str(log), file_limit_bytes, work))
        process.start()
        started.append(RankProcess(process, log))
    return started


def _main(
    run_dir: str, environment: dict[str, str], log: str, file_limit_bytes: int | None,
    work: Callable[[str], None] | None,
) -> None:  # fmt: skip
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    if file_limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit_bytes, file_limit_bytes))
    if work is not None:
        return work(run_dir)
    from trainer.train import main

    sys.exit(main(["--run-dir", run_dir]))
