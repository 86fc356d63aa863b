"""The optimizer against AdamW and clipping as their papers state them, in float64."""

import math
from collections import Counter

import pytest
import torch
from small_runs import make_config, make_samples, rows_of
from test_step import SETTINGS, setup, whole
from torch.autograd import graph
from torch.distributed.tensor import distribute_tensor

from composer_prime.errors import ConfigError
from composer_prime.packing.pack import totals
from trainer.model.build import blocks, build_policy, compile_blocks
from trainer.optim import build_optimizer
from trainer.train import train_step

LR, DECAY, EPS, BETA1, BETA2, MAX_NORM = 1e-2, 0.1, 1e-8, 0.9, 0.95, 0.7
RATIOS = (0.5, 1.0, 0.25)


def gradients(policy, step: int) -> dict[str, torch.Tensor]:
    """Gradients of step `step`, tiny ones and zeros among them; their norm is above MAX_NORM in step 0 alone."""
    draw = torch.Generator().manual_seed(step)
    scale = 1e-2 if step == 0 else 1e-5
    return {name: torch.randn(p.shape, generator=draw) * scale for name, p in policy.lm.named_parameters()}


def adamw(start: torch.Tensor, steps: list[torch.Tensor], decay: float) -> torch.Tensor:
    """Decoupled weight decay, arXiv 1711.05101 algorithm 2, over clipped gradients."""
    value, first, second = start.double(), 0.0, 0.0
    for count, (gradient, ratio) in enumerate(zip(steps, RATIOS, strict=True), start=1):
        first = BETA1 * first + (1 - BETA1) * gradient
        second = BETA2 * second + (1 - BETA2) * gradient.square()
        unbiased, scale = first / (1 - BETA1**count), (second / (1 - BETA2**count)).sqrt()
        value = value - LR * ratio * (decay * value + unbiased / (scale + EPS))
    return value


def muon(start: torch.Tensor, steps: list[torch.Tensor], heads: int) -> torch.Tensor:
    """torch.optim.Muon of each head's rows."""
    parts = [torch.nn.Parameter(rows.clone()) for rows in start.chunk(heads)]
    reference = torch.optim.Muon(parts, momentum=0.95, weight_decay=DECAY)
    for gradient, ratio in zip(steps, RATIOS, strict=True):
        reference.param_groups[0]["lr"] = 2e-4 * ratio
        for part, rows in zip(parts, gradient.float().chunk(heads), strict=True):
            part.grad = rows
        reference.step()
    return torch.cat(parts).detach()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_steps_are_adamw_s_with_clipping(model_folder, tmp_path, world, kind):
    # Three steps with rates of their own, the first of them clipped: every parameter of AdamW equals the paper's. Only
    # matrices decay; norms keep their scale. Under Muon the same holds for what is no matrix of a block; queries, keys
    # and values are torch.optim.Muon's a head, other matrices whole.
    optim = {"type": kind, "lr": LR, "weight_decay": DECAY, "max_grad_norm": MAX_NORM}
    policy, optimizer = setup(model_folder, tmp_path, world, optim=optim)
    start, clipped = whole(policy), []
    for step, ratio in enumerate(RATIOS):
        drawn = gradients(policy, step)
        for name, p in policy.lm.named_parameters():
            p.grad = distribute_tensor(drawn[name], p.device_mesh, p.placements)
        norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in drawn.values()))
        assert (norm > 2 * MAX_NORM) == (step == 0)
        factor = min(1.0, MAX_NORM / norm)
        clipped.append({name: gradient.double() * factor for name, gradient in drawn.items()})
        optimizer.scale_rates(ratio)
        assert optimizer.step(optimizer.grad_norm()) == pytest.approx(LR * ratio)
    checked = set()
    for name, value in whole(policy).items():
        steps = [each[name] for each in clipped]
        if kind == "muon" and ".layers." in name and start[name].ndim == 2:
            expected = muon(start[name], steps, {"q_proj": 4, "k_proj": 2, "v_proj": 2}.get(name.split(".")[-2], 1))
        else:
            expected = adamw(start[name], steps, DECAY if start[name].ndim >= 2 else 0.0)
        assert (value.double() - expected).abs().max() < 2e-6, name
        checked.add(start[name].ndim)
    assert checked == {1, 2}


def test_an_optimizer_of_the_user_s_is_built_with_its_settings(model_folder, tmp_path, world):
    # Named by its import path: it gets all trainable parameters, the rate and its own settings; a wrong one is refused.
    own = {"type": {"name": "torch.optim:SGD", "settings": {"momentum": 0.8}}, "lr": 0.1}
    policy, optimizer = setup(model_folder, tmp_path, world, optim=own)
    (sgd,) = optimizer.parts
    assert isinstance(sgd, torch.optim.SGD) and {group["momentum"] for group in sgd.param_groups} == {0.8}
    assert len(list(optimizer.parameters())) == len(list(policy.parameters()))
    with pytest.raises(ConfigError, match=r"trainer\.optim\.type"):
        setup(model_folder, tmp_path, world, optim={"type": own["type"] | {"settings": {"no_such": 1}}})


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_offloading_changes_no_bit(model_folder, tmp_path, world, monkeypatch, kind):
    # Three steps with activations and moments on the host and without are the same. Each row's input of a block is
    # saved once, and read again from its copy; a block's moments have an optimizer of their own.
    saved, read, ends, steps = [], [], [], [make_samples(step, 6) for step in (1, 2, 3)]

    class Saving(graph.save_on_cpu):
        def __init__(self, **options):
            super().__init__(**options)
            self.pack_hook = lambda tensor, pack=self.pack_hook: saved.append(tensor) or pack(tensor)

    monkeypatch.setattr(graph, "save_on_cpu", Saving)
    for offload in ([], ["activations", "moments"]):
        trainer = {"activation_checkpointing": True, "optim": {"type": kind, "lr": LR}, "offload": offload}
        config = make_config(model_folder, tmp_path, trainer=trainer)
        policy = build_policy(config, model_folder, world)
        optimizer = build_optimizer(policy, config.trainer.optim, offloads="moments" in offload)
        read.clear()
        for block in blocks(policy.lm):
            block.register_forward_pre_hook(lambda _, given: read.append(given[0]))
        for samples in steps:
            rows = rows_of(samples, world.device)
            train_step(policy, optimizer, rows, totals(samples), SETTINGS, step=1)
        ends.append(whole(policy))
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    places = Counter(tensor.data_ptr() for tensor in saved)
    assert [places[tensor.data_ptr()] for tensor in read] == [1, 1, 0, 0] * (len(read) // 4) and read
    assert len(optimizer.parts) == (1 + 2) + (2 if kind == "muon" else 0)


@pytest.mark.slow
def test_compiled_blocks_take_the_same_steps(model_folder, tmp_path, world):
    # With recomputation, on rows of changing lengths and numbers of documents: losses to 1e-5, and no graph is compiled
    # after the first step. A backend that torch does not have is refused.
    losses = {}
    for backend in (None, "aot_eager"):
        torch._dynamo.reset()
        settings = {"compile": backend, "activation_checkpointing": True}
        policy, optimizer = setup(model_folder, tmp_path, world, **settings)
        graphs = []
        for step in (1, 2, 3):
            samples = make_samples(step, 4 + step)
            rows = rows_of(samples, world.device, 64 * step)
            metrics = train_step(policy, optimizer, rows, totals(samples), SETTINGS, step=step)
            losses.setdefault(backend, []).append(metrics["loss/total"])
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert len(set(graphs)) == 1 and (graphs[0] > 0) == (backend is not None), graphs
    assert losses["aot_eager"] == pytest.approx(losses[None], abs=1e-5)
    with pytest.raises(ConfigError, match="no_such"):
        compile_blocks(policy, "no_such")
