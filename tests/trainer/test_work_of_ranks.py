"""Two ranks inside: long work of rank 0 alone, and work that they share."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_process import start_ranks
from torch.distributed.tensor import distribute_tensor

from composer_prime.config import Config, load
from composer_prime.run.run_dir import RunDir
from trainer import optim
from trainer import world as worlds
from trainer.model import build
from trainer.weights import publish

pytestmark = pytest.mark.process

TIMEOUT_S, LONG_S = 4.0, 9.0  # A loaded machine may hold up a rank for a second.


def joined(folder: str) -> tuple[Config, RunDir, worlds.World]:
    config = load.read_config(RunDir(Path(folder)).config)
    return config, RunDir(Path(folder)), worlds.join(config.trainer)


def slow(work):
    def wrapped(*args):
        time.sleep(LONG_S)
        return work(*args)

    return wrapped


def loads(folder: str) -> None:
    config, _, world = joined(folder)
    build._whole_state = slow(build._whole_state)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S))
    build.build_policy(config, Path(config.model.path), world)


def publishes(folder: str) -> None:
    config, run_dir, world = joined(folder)
    policy = build.build_policy(config, Path(config.model.path), world)
    publisher = publish.Publisher(config, run_dir, "run", Path(config.model.path), world, None)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S))
    for step in (0, 1):
        publisher.publish(policy, step, slow(print))


def exports(folder: str) -> None:
    config, run_dir, world = joined(folder)
    policy = build.build_policy(config, Path(config.model.path), world)
    publish.plain_model = slow(publish.plain_model)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S))
    publish.export(policy, config, Path(config.model.path), run_dir.final, world, torch.float32)
    dist.barrier()


@pytest.mark.parametrize("work", [loads, publishes, exports])
def test_long_work_of_rank_0_is_no_silence_in_a_collective(make_run, work):
    # It takes more than twice the time limit of collectives: the other rank waits for it all the same.
    run = make_run()
    ranks = start_ranks([run.dir.root] * 2, work=work)
    assert [rank.wait(100) for rank in ranks] == [0, 0], "".join(rank.output for rank in ranks)


def orthogonalizes(folder: str) -> None:
    config, run_dir, world = joined(folder)
    policy = build.build_policy(config, Path(config.model.path), world)
    optimizer = optim.build_optimizer(policy, config.trainer.optim)
    torch.manual_seed(0)
    for parameter in policy.parameters():
        assert parameter.requires_grad
        parameter.grad = distribute_tensor(torch.randn(parameter.shape), parameter.device_mesh, parameter.placements)
    alone = optim._whole

    def beside_the_other(matrix):
        (run_dir.root / f"busy-{world.rank}").touch()
        deadline = time.monotonic() + 20
        while not (run_dir.root / f"busy-{1 - world.rank}").exists():
            assert time.monotonic() < deadline, "the other rank has no matrix of its own"
            time.sleep(0.01)
        return alone(matrix)

    optim._whole = beside_the_other
    optimizer.step(optimizer.grad_norm())
    os._exit(0)


def test_ranks_orthogonalize_matrices_side_by_side(make_run):
    # Each rank has a matrix of its own in hand while the other has. test_ranks.py compares the results with one rank's.
    run = make_run(trainer={"optim": {"type": "muon"}})
    ranks = start_ranks([run.dir.root] * 2, work=orthogonalizes)
    assert [rank.wait(100) for rank in ranks] == [0, 0], "".join(rank.output for rank in ranks)
