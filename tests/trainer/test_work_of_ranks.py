"""Two ranks inside: long work of rank 0 alone, and work that they share."""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_process import start_ranks
from safetensors.torch import load_file
from torch.distributed.tensor import Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

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


def peak_bytes(work, peaks: list[int]):
    """`work`, counting the largest growth of tensors on the CPU that its thread sees."""

    def wrapped(*args):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            result = work(*args)
        events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
        sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
        peaks.append(max(itertools.accumulate(sizes)))
        return result

    return wrapped


def weighs(folder: str) -> None:
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # transformers reads on this thread
    config, run_dir, world = joined(folder)
    model, peaks = Path(config.model.path), []
    build._whole_state = peak_bytes(build._whole_state, peaks)
    policy = build.build_policy(config, model, world)
    publisher = publish.Publisher(config, run_dir, "run", model, world, None)

    def publishes_all() -> None:
        publisher.publish(policy, 0)
        publisher.settle()
        publisher.export(policy, run_dir.final)

    peak_bytes(publishes_all, peaks)()
    size = sum(parameter.numel() for parameter in policy.parameters())
    loading, publishing = [peak / size for peak in peaks] if world.first else (3.0, 2.0 + peaks[0] / size)
    assert 2.0 <= loading < 3.1 and 2.0 <= publishing < 2.5, peaks
    start = load_file(model / "model.safetensors")
    assert all(torch.equal(p.full_tensor(), start[name].float()) for name, p in policy.lm.named_parameters())
    os._exit(0)


def test_rank_0_never_holds_the_model_in_float32(make_run, tmp_path):
    # Of a bfloat16 folder rank 0 holds, in bytes a parameter of the whole: while loading the folder's weights (2) and
    # a block in float32, while publishing and writing final/ the version (2) and a tensor. Rank 1 holds a tensor.
    torch.manual_seed(0)
    shape = Qwen3Config(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=8, head_dim=64,
                        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)  # fmt: skip
    Qwen3ForCausalLM(shape).to(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    run = make_run(model={"path": str(tmp_path / "bf16")}, inference={"dtype": "bfloat16"})
    ranks = start_ranks([run.dir.root] * 2, work=weighs)
    assert [rank.wait(100) for rank in ranks] == [0] * 2, "".join(rank.output for rank in ranks)


class SentBytes(TorchDispatchMode):
    """Counts the bytes that this rank hands to each kind of collective."""

    def __init__(self):
        super().__init__()
        self.by_kind = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            given = args[1] if func.overloadpacket._qualified_op_name.endswith("alltoall_base_") else args[0]
            self.by_kind[func.overloadpacket._qualified_op_name] += given.nbytes
        return func(*args, **(kwargs or {}))


HEAD = 4
SHAPES = [(12, 5), (4, 9), (6 * HEAD, 10), (3 * HEAD, 10), (3, 6, 4), (3, 7, 4)]
"""Two matrices, projections with 6 and with 3 heads, 3 experts whole and 3 cut."""


def orthogonalizes(folder: str) -> None:
    _, _, world = joined(folder)
    draw = torch.Generator().manual_seed(0)
    start, *steps = ([torch.randn(shape, generator=draw) for shape in SHAPES] for _ in range(4))
    cuts = [Shard(int(shape == SHAPES[-1])) for shape in SHAPES]

    def shards(tensors):
        return [distribute_tensor(whole, world.mesh, [cut]) for whole, cut in zip(tensors, cuts, strict=True)]

    def matrices(tensors):
        rows = [HEAD if shape[1:] == (10,) else shape[-2] for shape in SHAPES]
        split = [whole.view(-1, count, whole.shape[-1]) for whole, count in zip(tensors, rows, strict=True)]
        return [matrix for stack in split for matrix in stack.unbind()]

    ours, theirs = (list(map(torch.nn.Parameter, tensors)) for tensors in (shards(start), matrices(start)))
    heads = {ours[index]: HEAD for index in (2, 3)}
    given = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    muon, reference, sent = optim.ShardedMuon(ours, head_rows=heads, **given), torch.optim.Muon(theirs, **given), []
    for step in steps:
        for parameters, grads in ((ours, shards(step)), (theirs, matrices(step))):
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
        reference.step()
        with SentBytes() as counted:
            muon.step()
        sent.append(counted.by_kind)
    gathered = matrices([parameter.full_tensor() for parameter in ours])
    assert all(torch.equal(one, other) for one, other in zip(gathered, theirs, strict=True))
    cut = {2: [0, 1, 3, 5], 3: [0, 1, 5]}[world.size]  # on two ranks 6 heads are 3 + 3, and 3 heads 1.5 + 1.5
    total = torch.tensor([kinds["c10d::alltoall_base_"] for kinds in sent])
    dist.all_reduce(total)
    assert total.tolist() == [4 * sum(ours[index].numel() for index in cut)] * 3  # 2 bytes there and 2 back
    assert all(len(kinds) == 1 for kinds in sent), sent
    os._exit(0)


@pytest.mark.parametrize("count", [2, 3])
def test_muon_of_shards_is_torch_s_muon_of_each_matrix(make_run, count):
    # To the last bit, on ranks that cut matrices, heads and experts, evenly and not. Shards of whole heads or experts
    # are not communicated. The rest travels once to the rank that orthogonalizes it and once back, in bfloat16.
    run = make_run()
    ranks = start_ranks([run.dir.root] * count, work=orthogonalizes)
    assert [rank.wait(100) for rank in ranks] == [0] * count, "".join(rank.output for rank in ranks)
