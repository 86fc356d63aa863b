"""Ranks in other layouts: replicas, context groups and experts' owners train as one rank does."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hinted_runs import make_hinted, make_pairs, three_channels
from rank_process import start_ranks
from small_runs import VOCABULARY, make_samples
from step_peer import StepPeer
from test_ranks import difference, lines
from test_sft_rows import make_rows
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from composer_prime.address import free_port
from composer_prime.config import load
from composer_prime.config.channels import ChannelsConfig
from composer_prime.errors import ConfigError
from composer_prime.packing.pack import pack, totals
from composer_prime.run.ledger import check_ledger
from composer_prime.run.run_dir import RunDir
from composer_prime.wire.types import Sample, flags, floats, ints, pack_flags, pack_floats, pack_ints
from trainer import world as worlds
from trainer.data import checked_row, unpack
from trainer.model.build import build_policy, shard_policy
from trainer.model.policy_model import SelfTeacher
from trainer.optim import build_optimizer
from trainer.train import backward, train_step
from trainer.weights.publish import whole_tensors

STEPS, TOLERANCE, PROMPT = 5, 1e-5, 25
CHANNELS = ChannelsConfig.model_validate(
    three_channels("ema", kl={"weight": 0.1, "estimator": "k2"}).model_dump() | {"sft": {"weight": 0.5}}
)


def trains(folder: str) -> None:
    """Train on the same batches in each layout of layouts.json; rank 0 saves gradients, metrics and parameters."""
    base = load.read_config(RunDir(Path(folder)).config)
    for name, (port, settings) in json.loads((Path(folder) / "layouts.json").read_text()).items():
        os.environ["MASTER_PORT"] = str(port)  # a rank must not find the store of the layout before
        values = base.trainer.model_dump() | settings
        config = base.model_copy(update={"trainer": type(base.trainer).model_validate(values)})
        world = worlds.join(config.trainer)
        policy = build_policy(config, Path(config.model.path), world)
        results = steps_of(policy, config, world)
        if world.first:
            torch.save(results, Path(folder) / f"{name}.pt")
        worlds.leave()


def after_prompt(sample: Sample, step: int) -> Sample:
    """`sample` behind a prompt that all samples of the step share, so rows hold trees."""
    prompt = np.random.default_rng(step).integers(0, VOCABULARY, PROMPT)
    longer = {
        name: pack(np.r_[np.zeros(PROMPT), unpacked(getattr(sample, name))])
        for name, pack, unpacked in (("loss_mask", pack_flags, flags), ("logprobs", pack_floats, floats),
                                     ("advantages", pack_floats, floats))
    }  # fmt: skip
    turns = [
        msgspec.structs.replace(
            turn, start=turn.start + PROMPT, end=turn.end + PROMPT, teacher_start=turn.teacher_start + PROMPT,
            teacher_ids=pack_ints(np.r_[prompt, ints(turn.teacher_ids)]),
        )
        for turn in sample.distillations
    ]  # fmt: skip
    ids = pack_ints(np.r_[prompt, ints(sample.input_ids)])
    return msgspec.structs.replace(sample, input_ids=ids, distillations=turns, **longer)


def steps_of(policy, config, world) -> dict[str, dict]:
    optimizer, teacher = build_optimizer(policy, config.trainer.optim), SelfTeacher(policy, CHANNELS)
    terms, sharers, results = CHANNELS.terms(64), config.trainer.context_parallel, {}
    for step in range(1, STEPS + 1):
        samples = [after_prompt(sample, step) for sample in make_hinted(step, 7)]
        units = [*make_pairs(step, 2), *make_rows(2, step)]
        batches = pack(samples, units, run_id="r", step=step, world_size=world.size // sharers, max_tokens=160)
        rows = [
            unpack(checked_row(batch, policy.vocabulary), terms, world.device, share=True, context=world.context)
            for batch in batches[world.rank // sharers]
        ]
        assert world.size > 1 or any(tree.branches for row in rows for tree in row.trees)
        auxiliary, counts = teacher.prepare(rows), totals(samples, units)
        if step == 1:
            backward(policy, rows, counts, step, auxiliary, terms)
            results["gradients"] = {name: p.grad.full_tensor() for name, p in policy.named_parameters()}
            optimizer.zero_grad()
        results[f"metrics {step}"] = train_step(policy, optimizer, rows, counts, terms, step=step, auxiliary=auxiliary)
        teacher.follow()
    results["parameters"] = {name: whole.clone() for name, whole, _ in whole_tensors(policy, world, torch.float32)}
    return results


def outcomes(run, layouts: dict[str, dict], ranks: int) -> dict[str, dict]:
    with_ports = {name: (free_port(), {"ranks": ranks} | settings) for name, settings in layouts.items()}
    (run.dir.root / "layouts.json").write_text(json.dumps(with_ports))
    started = start_ranks([run.dir.root] * ranks, work=trains)
    assert [rank.wait(400) for rank in started] == [0] * ranks, "".join(rank.output for rank in started)
    return {name: torch.load(run.dir.root / f"{name}.pt") for name in layouts}


def assert_as_one_rank(run, *of_ranks: tuple[int, dict[str, dict]]) -> dict[str, dict]:
    """All gradients of the first step, metrics of each and final parameters equal those of one rank, the result.

    `of_ranks`: a number of ranks, and the layouts to try on it."""
    (one,) = outcomes(run, {"one": {}}, 1).values()
    for ranks, layouts in of_ranks:
        for name, found in outcomes(run, layouts, ranks).items():
            for part, values in one.items():
                assert found[part].keys() == values.keys()
                for key in (key for key in values if not key.startswith("time/")):
                    gap = torch.as_tensor(found[part][key]) - torch.as_tensor(values[key])
                    assert gap.abs().max() <= TOLERANCE, (name, part, key, gap)
    return one


@pytest.mark.slow
@pytest.mark.process
def test_replicas_are_one_rank(make_run):
    # Four ranks as two replicas of two and as four copies: every loss term, gradients, their norm and clipping, and
    # parameters after five steps; with Muon too.
    run = make_run(trainer={"optim": {"lr": 1e-3, "weight_decay": 0.01, "max_grad_norm": 0.05}})
    assert_as_one_rank(run, (4, {"replicas": {"replicas": 2}, "copies": {"replicas": 4}}))
    muon = make_run("muon", trainer={"optim": {"type": "muon"}, "activation_checkpointing": True})
    assert_as_one_rank(muon, (4, {"replicas": {"replicas": 2}}))


@pytest.mark.slow
@pytest.mark.process
def test_ranks_that_share_rows_are_one_rank(make_run, tmp_path):
    # Twelve heads and three key-value heads over two and four ranks, alone and beside data parallelism: whole rows,
    # even odd ones, trees and windows, every loss term, metrics counted once.
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=12,
        num_key_value_heads=3, head_dim=8, use_sliding_window=True, sliding_window=16, max_window_layers=1,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "windows")
    run = make_run(model={"path": str(tmp_path / "windows")}, trainer={"optim": {"lr": 1e-3}})
    pair = {"cp2": {"context_parallel": 2, "activation_checkpointing": True}}
    assert_as_one_rank(run, (2, pair), (4, {"cp4": {"context_parallel": 4}, "dp2-cp2": {"context_parallel": 2}}))


@pytest.fixture
def experts(tmp_path, model_folder) -> dict[str, str]:
    """The section [model] for eight experts a layer; those from the fifth on never get a token in layer 1."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=32, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(0)
    lm = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        lm.model.embed_tokens.weight[:, 0] = 0.2
        lm.model.layers[1].mlp.gate.weight[:, 0] = torch.tensor([1.0] * 4 + [-1.0] * 4)
    folder = shutil.copytree(model_folder, tmp_path / "experts")
    lm.save_pretrained(folder)
    return {"path": str(folder)}


@pytest.mark.slow
@pytest.mark.process
def test_ranks_that_share_experts_are_one_rank(make_run, experts):
    # Experts over two ranks, over two of four with each cut in two, and over four that share rows in twos; also where
    # some ranks' experts get no token.
    run = make_run(model=experts, trainer={"optim": {"lr": 1e-3, "max_grad_norm": 0.05}})
    pair = {"ep2": {"expert_parallel": 2, "activation_checkpointing": True}}
    layouts = {"efsdp2-ep2": {"expert_parallel": 2}, "cp2-ep4": {"expert_parallel": 4, "context_parallel": 2}}
    one = assert_as_one_rank(run, (2, pair), (4, layouts))
    idle = one["gradients"]["lm.model.layers.1.mlp.experts.gate_up_proj"].flatten(1).norm(dim=1)
    assert idle[4:].max() == 0 < idle[:4].max()


RESUMED = {
    "dense": [{"ranks": 4, "replicas": 2, "context_parallel": 2}, {"ranks": 2, "replicas": 2}, {"ranks": 1}],
    "experts": [{"ranks": 2, "expert_parallel": 2}, {"ranks": 1}],
    "grown": [{"ranks": 1}, {"ranks": 4, "replicas": 2}],
}


@pytest.mark.process
@pytest.mark.parametrize("kind", RESUMED)
def test_a_resume_may_change_the_layout(make_run, experts, kind):
    # A step in each layout: losses, counts, ledger and end are those of one rank throughout. Only the first rank of a
    # context group asks for batches.
    layouts, model = RESUMED[kind], {"model": experts} if kind == "experts" else {}
    last = len(layouts)
    whole, run = (make_run(name, run={"max_steps": last}, **model) for name in ("whole", "run"))
    with StepPeer(whole.dir, make_samples, max_steps=last):
        codes, outputs = whole.train()
    assert codes == [0], outputs
    for steps, settings in enumerate(layouts, 1):
        values = {"run": {"max_steps": steps, "resume": steps > 1}, "trainer": settings}
        updated = {name: getattr(run.config, name).model_copy(update=update) for name, update in values.items()}
        resumed = run.write(run.config.model_copy(update=updated))
        with StepPeer(run.dir, make_samples, max_steps=steps) as peer:
            codes, outputs = resumed.train(settings["ranks"])
        assert codes == [0] * settings["ranks"], "\n".join(outputs)
        asked = {(request.rank, request.world_size) for request in peer.requests}
        count = settings["ranks"] // settings.get("context_parallel", 1)
        assert asked == {(rank, count) for rank in range(count)}
    counted = ("tokens/total", "tokens/trained")
    for one, other in zip(lines(whole), lines(run), strict=True):
        assert abs(one["loss/total"] - other["loss/total"]) < TOLERANCE
        assert [one[name] for name in counted] == [other[name] for name in counted]
    assert check_ledger(run.dir.ledger) == [] and difference(whole, run) < TOLERANCE


@pytest.mark.process
def test_a_stop_of_a_rank_that_asks_for_no_batch_stops_all(make_run):
    # The second rank of a context group hears a signal while the first waits for a batch: both leave with a checkpoint.
    run = make_run(trainer={"ranks": 2, "context_parallel": 2})
    with StepPeer(run.dir, make_samples, max_steps=3) as peer:
        peer.quiet_from = 2
        ranks = run.start(2)
        ranks[0].wait_for("step 1:")
        os.kill(ranks[1].pid, signal.SIGTERM)
        assert [rank.wait(100) for rank in ranks] == [128 + signal.SIGTERM] * 2, ranks[0].output
    assert run.dir.complete_checkpoints() == [1]


def test_ranks_that_settings_do_not_divide_are_refused_by_each_rank(make_run, world, experts, model_folder):
    # Under torchrun the number of ranks is known last, and the model's shapes where it lies.
    trainer = {"address": "tcp://elsewhere:1"}
    with pytest.raises(ConfigError, match=r"trainer\.replicas is 2, .* the 1 ranks"):
        worlds.join(make_run(trainer=trainer | {"replicas": 2}).config.trainer)
    config = make_run(model=experts, trainer=trainer | {"context_parallel": 3}).config
    with pytest.raises(ConfigError, match=r"context_parallel is 3, .*num_attention_heads = 4"):
        build_policy(config, Path(config.model.path), world)
    with pytest.raises(ConfigError, match=r"no plan for the experts of a Qwen3ForCausalLM"):
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("efsdp", "ep"))
        shard_policy(build_policy(make_run().config, model_folder, world), dataclasses.replace(world, experts=mesh))
