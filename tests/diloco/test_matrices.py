"""Outer Muon where ranks hold shards: any number of them takes the step of one; other layouts are refused."""

from __future__ import annotations

import os
import zlib

import pytest
import torch
from joint_run import Blocks
from peer_process import CONTEXT
from torch import Tensor, nn

from composer_prime.address import free_port
from composer_prime.config.diloco import OuterConfig
from composer_prime.errors import ConfigError
from diloco.fragments import Fragment, partition
from diloco.global_model import GlobalModel
from diloco.muon import matrices_of
from diloco.ranks import Ranks

MUON = OuterConfig(type="muon", lr=0.7, momentum=0.9, muon_lr=1.5)


def fragments_of(model: nn.Module) -> list[Fragment]:
    return partition(model.named_parameters(), 2, "strided")


def advance(model: nn.Module, ranks: Ranks | None, own: int = 0, of: int = 1) -> GlobalModel:
    """Five outer steps of two peers, in one of which no delta counts, on the shards of rank `own` of `of`."""
    globals_ = GlobalModel(fragments_of(model), MUON, ranks)
    for step in range(5):
        fragment = globals_.fragments[step % 2]
        deltas = [
            torch.cat([_delta(step, peer, name, own, of) for name, _ in fragment.parameters]) for peer in range(2)
        ]
        globals_.advance(step % 2, *((deltas, [1.0, 3.0]) if step != 2 else ([], [])))
    globals_.install(globals_.masters)
    return globals_


def _delta(step: int, peer: int, name: str, own: int, of: int) -> Tensor:
    shape = Blocks(width=7).get_parameter(name).shape
    generator = torch.Generator().manual_seed(zlib.crc32(f"{step} {peer} {name}".encode()))
    parts = torch.randn(shape, generator=generator).chunk(of)
    return parts[own].flatten() if own < len(parts) else torch.empty(0)


def rank_main(result: str, rank: int, ranks: int, port: int) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    model = Blocks(width=7)
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    globals_ = advance(model, Ranks(), rank, ranks)
    owners = {matrix.owner for fragment in globals_.fragments for matrix in matrices_of(fragment, Ranks())[0]}
    assert owners == set(range(min(2, ranks))), "two matrices a fragment: two ranks have work"
    whole = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
    torch.save(whole, f"{result}.partial")
    os.rename(f"{result}.partial", result)
    dist.destroy_process_group()


# Two and four ranks end with the bits of one. Of four the last has one row, because 7 rows are dealt out by twos.
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_take_the_step_of_one(tmp_path, ranks):
    port = free_port()
    results = [tmp_path / f"{rank}.pt" for rank in range(ranks)]
    started = [
        CONTEXT.Process(target=rank_main, args=(str(result), rank, ranks, port)) for rank, result in enumerate(results)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(200)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in started] == [0] * ranks
    alone = Blocks(width=7)
    advance(alone, None)
    for result in results:
        found = torch.load(result, weights_only=True)
        assert all(found[name].equal(parameter) for name, parameter in alone.named_parameters())


# The matrices of numbered blocks take Muon's step, and everything else Nesterov's.
def test_what_is_a_matrix_of_a_block():
    fragment, *_ = partition(Blocks(blocks=3).named_parameters(), 1, "strided")
    matrices, rest = matrices_of(fragment, Ranks())
    names = [name for name, _ in fragment.parameters]
    places = sorted([*(matrix.place for matrix in matrices), *rest], key=lambda place: place.start)
    taken = [name for name, place in zip(names, places, strict=True) if place not in rest]
    assert taken == [f"layers.{index}.weight" for index in range(3)]
    assert places[-1].stop == fragment.numel


# A model without such matrices, and one whose ranks hold them otherwise than by rows, are refused by name.
def test_refusals():
    bare = nn.Module()
    bare.embed = nn.Embedding(4, 2)
    with pytest.raises(ConfigError, match=r"no trainable parameter is a matrix of a numbered block .*'nesterov'"):
        GlobalModel(partition(bare.named_parameters(), 1, "strided"), MUON)
    ranks = Ranks()
    ranks.size, ranks.rank = 2, 1
    with pytest.raises(
        ConfigError,
        match=r"rank 1 of 2 holds 8 of the 8 rows of layers.0.weight \(not sharded\), where Shard\(0\) .* 4:",
    ):
        GlobalModel(fragments_of(Blocks()), MUON, ranks)
