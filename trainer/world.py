"""This rank's place among the trainer ranks; what they gather; the stop signal.

gloo carries CPU tensors (everything on CPU runs, status words on GPU runs), nccl those on GPUs.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composer_prime.config.trainer import TrainerConfig
from composer_prime.errors import ComposerError, ConfigError, WeightError

logger = logging.getLogger(__name__)

_COLLECTIVE_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This rank and its place."""

    rank: int
    size: int
    device: torch.device
    compute_dtype: torch.dtype
    """Forward and backward; masters are float32."""
    mesh: DeviceMesh
    """`shard`, FSDP2 over all ranks; with replicas `replicate` before it (HSDP)."""
    context: DeviceMesh | None
    """The neighbors that share each row; the first gets the batches and reports. None: each has rows of its own."""
    experts: DeviceMesh | None
    """`efsdp` x `ep`: each rank of `ep` owns a part of each layer's experts, cut over `efsdp`. None: as the rest."""

    @property
    def first(self) -> bool:
        return self.rank == 0


def join(config: TrainerConfig) -> World:
    """Join the other ranks that torchrun's environment describes; without one this is the only rank.

    A collective. Raises ConfigError when the device is missing, or when the settings do not fit so many ranks.
    """
    torch.set_num_threads(config.threads)
    device = _device(config)
    if config.compute_dtype == "auto":
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # bfloat16 is slower on the CPU
    else:
        dtype = getattr(torch, config.compute_dtype)
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if problem := config.mesh_problem(size):
        raise ConfigError(problem)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.HashStore()
        if size == 1
        else None,  # a rank alone needs no port; others find each other by torchrun's
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=_COLLECTIVE_TIMEOUT_S),
    )
    dense = {"replicate": config.replicas, "shard": size // config.replicas}
    if config.replicas == 1:
        del dense["replicate"]
    sharers, context = config.context_parallel, None
    if sharers > 1:
        context = init_device_mesh(device.type, (size // sharers, sharers), mesh_dim_names=("rows", "part"))["part"]
    owners, experts = config.expert_parallel, None
    if owners > 1:
        experts = init_device_mesh(device.type, (size // owners, owners), mesh_dim_names=("efsdp", "ep"))
        experts._flatten("experts")  # sums over both go in one collective, alike on all ranks
    return World(
        rank=rank,
        size=size,
        device=device,
        compute_dtype=dtype,
        mesh=init_device_mesh(device.type, tuple(dense.values()), mesh_dim_names=tuple(dense)),
        context=context,
        experts=experts,
    )


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def gather_words(words: list[int], group: dist.ProcessGroup | None = None) -> list[list[int]]:
    """Return every rank's integers, [world][len(words)], over gloo on the CPU: no accelerator is synchronized.

    A collective of `group`: of all ranks; None is that of the main threads.
    """
    of_rank = torch.tensor(words, dtype=torch.int64)
    rows = [torch.empty_like(of_rank) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, of_rank, group)
    return [row.tolist() for row in rows]


def gather_texts(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Return every rank's text, of any length, as plain bytes: nothing is unpickled. A collective."""
    raw = text.encode()
    lengths = [row[0] for row in gather_words([len(raw)], group)]
    padded = torch.zeros(max(1, *lengths), dtype=torch.uint8)
    padded[: len(raw)] = torch.from_numpy(np.frombuffer(raw, dtype=np.uint8).copy())
    rows = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(rows, padded, group)
    return [row[:length].numpy().tobytes().decode() for row, length in zip(rows, lengths, strict=True)]


def broadcast_bytes(raw: bytes, group: dist.ProcessGroup) -> bytes:
    """Return the bytes of the group's first rank, over gloo; others give none. A collective of `group`."""
    size = torch.tensor([len(raw)])
    dist.broadcast(size, group=group, group_src=0)
    data = torch.frombuffer(bytearray(raw) or bytearray(int(size)), dtype=torch.uint8)
    dist.broadcast(data, group=group, group_src=0)
    return data.numpy().tobytes()


def _device(config: TrainerConfig) -> torch.device:
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("trainer.device is 'cuda', but torch sees no GPU here: use trainer.device = 'cpu' or 'auto'")
    local_rank, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"local trainer rank {local_rank} has no GPU of its own: this machine shows {count}; lower trainer.ranks "
            f"to {count} or set trainer.device = 'cpu'"
        )
    return torch.device("cuda", local_rank)


POLL_S = 0.2
"""The longest that a rank looks for news before it hears of the others."""


class Background:
    """One piece of work at a time beside training, on a thread. A failure is raised by the next call, on this one."""

    def __init__(self, threads: int) -> None:
        """`threads` is torch's number of threads for the work."""
        self._threads = threads
        self._thread: threading.Thread | None = None
        self._failure: ComposerError | None = None
        self._closing = threading.Event()

    def start(self, what: str, work: Callable[[], None]) -> None:
        """Begin `work` once nothing else is under way; `what` names it in an error: "it failed"."""

        def run() -> None:
            try:
                torch.set_num_threads(self._threads)  # an OpenMP setting of each thread
                work()
            except ComposerError as error:
                self._failure = error
            except Exception as error:
                if not self.is_closing():
                    logger.exception("%s failed", what)
                    self._failure = WeightError(f"{what} failed: {type(error).__name__}: {error}")
                    self._failure.__cause__ = error

        self._thread = threading.Thread(target=run, name="publication", daemon=True)
        self._thread.start()

    def is_idle(self) -> bool:
        """Return, within POLL_S, whether no work is under way. Raises as `check`."""
        if self._thread is not None:
            self._thread.join(POLL_S)
        idle = self._thread is None or not self._thread.is_alive()
        self.check()
        return idle

    def check(self) -> None:
        """Raise what failed: a ComposerError of the work, WeightError for any other."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End the thread before its process leaves; a version that is not complete stays unannounced."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def is_closing(self) -> bool:
        """Return whether the work should give up."""
        return self._closing.is_set()


SIGNALS = (signal.SIGTERM, signal.SIGINT)
LEAVE_S = 3.0
"""Patience while there is nothing to save."""


class StopSignal:
    """Stops this rank on SIGTERM or SIGINT, also while a collective blocks the main thread.

        signal -> watcher thread: sets the request; the main thread sees it when it next checks, and leaves in order
                                  not within patience_s: the process ends at once with 128 + signal number

    Python runs handlers in the main thread, which never returns from a collective whose other ranks are gone. So the
    watcher reads the wake-up pipe that the interpreter writes each signal's number to. Any thread may take the signal:
    libraries start some before a mask could be set.
    """

    def __init__(self) -> None:
        self._requested = threading.Event()
        self.patience_s = LEAVE_S
        """How long the main thread may take to leave; may change at any time."""
        self.save_s = 0.0
        """The patience while a step is not saved; 0 saves none."""
        self.exit_code = 0
        """128 + the signal that came; 0 before."""
        receiver, sender = os.pipe()
        os.set_blocking(sender, False)
        signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
            signal.siginterrupt(number, False)
        threading.Thread(target=self._watch, args=(receiver,), name="stop-signal", daemon=True).start()

    def is_requested(self) -> bool:
        return self._requested.is_set()

    def _watch(self, receiver: int) -> None:
        number = 0
        while number not in SIGNALS:  # the interpreter writes the number of any signal that has a Python handler
            number = os.read(receiver, 1)[0]
        self.exit_code = 128 + number
        logger.info("%s: stopping", signal.Signals(number).name)
        came_at = time.monotonic()
        self._requested.set()
        while time.monotonic() - came_at < self.patience_s:
            time.sleep(0.1)
        if self.patience_s > LEAVE_S:
            logger.warning("no checkpoint within %.0f s: leaving without one", self.patience_s)
        os._exit(self.exit_code)
