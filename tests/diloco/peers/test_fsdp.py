"""Two clusters of two FSDP2 ranks each, on gloo: shards are exchanged rank by rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from joint_run import Blocks, adamw, inner_step, settings
from peer_process import CONTEXT, shard
from test_streaming import oracle

from composer_prime.address import free_port

VALUES = {"sync_every": 4, "fragments": 2, "delay": 1, "outer": {"lr": 0.7, "momentum": 0.9}}


def rank_main(result: str, name: str, peer: int, rank: int, port: int, values: dict[str, Any], steps: int) -> None:
    import torch.distributed as dist

    from diloco.streaming import StreamingDiLoCo

    torch.set_num_threads(1)
    model = Blocks(width=7)  # odd, so that shards are uneven
    shard(model, rank, 2, port)
    optimizer = adamw(model)
    values = dict(values)
    config = settings(values.pop("rendezvous"), Path(values.pop("key_file")), name, **values)
    with StreamingDiLoCo(model.named_parameters(), optimizer, config) as engine:
        for step in range(steps):
            engine.count(tokens=1)
            inner_step(model, optimizer, peer, step)
        facts = {"outer_step": engine.outer_step, "hash": engine.global_model.hash, "metrics": engine.metrics}
        engine.global_model.install(engine.global_model.masters)
    whole = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
    torch.save({"facts": facts, "parameters": whole}, f"{result}.partial")
    os.rename(f"{result}.partial", result)
    dist.destroy_process_group()


def run(folder: Path, values: dict[str, Any], steps: int = 12) -> dict[tuple[str, int], dict[str, Any]]:
    started = []
    for peer, name in enumerate("ab"):
        port = free_port()
        for rank in range(2):
            result = folder / f"{name}{rank}.pt"
            process = CONTEXT.Process(target=rank_main, args=(str(result), name, peer, rank, port, values, steps))
            process.start()
            started.append((process, name, rank, result))
    for process, *_ in started:
        process.join(200)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process, *_ in started] == [0] * 4
    return {(name, rank): torch.load(result, weights_only=True) for _, name, rank, result in started}


# Counterparts agree on every shard; the assembled global model is that of unsharded peers up to the order in which FSDP
# adds gradients.
@pytest.mark.slow
def test_two_by_two(make_rendezvous, key_file, tmp_path, monkeypatch):
    import joint_run
    import test_streaming

    values = {
        "rendezvous": make_rendezvous(start_peers=2, beat_timeout_s=4).endpoint,
        "key_file": str(key_file),
        **VALUES,
    }
    found = run(tmp_path, values)
    for rank in range(2):
        facts = [found[name, rank]["facts"] for name in "ab"]
        assert facts[0]["outer_step"] == facts[1]["outer_step"] == 6
        assert facts[0]["hash"] == facts[1]["hash"] and facts[0]["metrics"]["diloco/participants"] == 2
    monkeypatch.setattr(test_streaming, "Blocks", lambda: joint_run.Blocks(width=7))
    expected = oracle(2, 12, H=4, P=2, tau=1, alpha=0, lr=0.7, m=0.9)
    for part in found.values():
        for name, value in part["parameters"].items():
            assert torch.allclose(value, expected[name], rtol=1e-4, atol=1e-5), name
