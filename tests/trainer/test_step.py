"""One step in this process: gradients against plain autograd, the finite check, empty rows, schedules, Muon, LoRA."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from hinted_runs import make_hinted, make_pairs, three_channels
from small_runs import VOCABULARY, make_config, make_samples, row_of, rows_of
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from composer_prime.channels.policy import PolicyConfig
from composer_prime.config.channels import ChannelsConfig
from composer_prime.config.trainer import ScheduleConfig
from composer_prime.errors import ConfigError, NonFiniteStepError
from composer_prime.packing.pack import pack, totals
from composer_prime.wire.types import ints
from trainer.model.build import build_policy
from trainer.model.policy_model import Policy, SelfTeacher
from trainer.optim import ShardedMuon, build_optimizer, rate
from trainer.train import backward, loss_of, term_norms, train_step

CHANNELS = ChannelsConfig(policy=PolicyConfig(correction="none"))
SETTINGS = CHANNELS.terms(64)


def setup(model_folder, tmp_path, world, **trainer):
    config = make_config(model_folder, tmp_path, trainer=trainer)
    policy = build_policy(config, model_folder, world)
    return policy, build_optimizer(policy, config.trainer.optim)


def whole(policy) -> dict[str, torch.Tensor]:
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return {name: p.full_tensor().clone() for name, p in policy.lm.named_parameters()}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_plain_autograd(model_folder, tmp_path, world, checkpointing):
    # Accumulated over micro-batches, with and without activation checkpointing, tied embeddings included: each gradient
    # equals that of one backward pass through an ordinary transformers model.
    samples = make_samples(1, 10)
    policy, _ = setup(model_folder, tmp_path, world, activation_checkpointing=checkpointing)
    rows = rows_of(samples, world.device, 64)
    assert len(rows) > 2
    for row in rows:
        loss_of(policy, row, totals(samples), SETTINGS)[0].total.backward()

    plain = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="composer_packed")
    (row,) = rows_of(samples, world.device, 4096)
    loss_of(Policy(plain, "composer_packed"), row, totals(samples), SETTINGS)[0].total.backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    got = {name: p.grad.full_tensor() for name, p in policy.lm.named_parameters()}
    assert got.keys() == expected.keys() and "lm_head.weight" not in got
    assert max((got[name] - expected[name]).abs().max().item() for name in got) < 1e-6


def test_a_step_that_is_not_finite_changes_nothing(model_folder, tmp_path, world):
    # NaN in one micro-batch: the error names step, micro-batch and samples; parameters, moments and gradients are as
    # before, and a good step right after works.
    samples = make_samples(1, 6)
    policy, optimizer = setup(model_folder, tmp_path, world)
    rows = rows_of(samples, world.device, 64)
    before = whole(policy)
    rows[1].terms["policy"].arrays["advantages"][0] = math.nan
    with pytest.raises(
        NonFiniteStepError, match=r"NaN .*loss/policy.*micro-batch 1 of rank 0 \(samples .*unch"
    ) as caught:
        train_step(policy, optimizer, rows, totals(samples), SETTINGS, step=7)
    assert caught.value.samples == rows[1].sample_ids
    after = whole(policy)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None for p in policy.parameters())
    good = rows_of(samples, world.device, 64)
    metrics = train_step(policy, optimizer, good, totals(samples), SETTINGS, step=7)
    assert metrics["optim/grad_norm"] > 0 and metrics["tokens/trained"] == totals(samples).tokens
    assert any(not torch.equal(before[name], value) for name, value in whole(policy).items())


def test_logits_that_are_not_finite_are_blamed_on_their_sample(model_folder, tmp_path, world):
    # A token that one sample alone has gets NaN states: the error names that sample of the row and no other;
    # nothing was changed.
    samples = make_samples(1, 6)
    policy, optimizer = setup(model_folder, tmp_path, world)
    homes = {token: {s.sample_id for s in samples if token in ints(s.input_ids)[:4]} for token in range(96)}
    token, (home,) = next((token, found) for token, found in homes.items() if len(found) == 1 and not any(
        token in ints(s.input_ids) for s in samples if s.sample_id not in found))  # fmt: skip
    embedding = policy.lm.get_input_embeddings()
    embedding.register_forward_hook(lambda _, args, out: out.masked_fill((args[0] == token)[..., None], math.nan))
    before = whole(policy)
    rows = rows_of(samples, world.device, 4096)
    with pytest.raises(NonFiniteStepError) as caught:
        train_step(policy, optimizer, rows, totals(samples), SETTINGS, step=7)
    assert f"micro-batch 0 of rank 0 (logits of {home})" in str(caught.value) and caught.value.samples == [home]
    assert all(torch.equal(before[name], value) for name, value in whole(policy).items())


def test_a_loss_of_pairs_alone_is_blamed_on_its_pairs(model_folder, tmp_path, world):
    # A micro-batch without any sample, all logits finite: its pairs are to blame, and no sample of the step.
    samples = make_samples(1, 10)
    policy, optimizer = setup(model_folder, tmp_path, world)
    rows = rows_of(samples, world.device, 64)
    rows[1] = dataclasses.replace(rows[1], sample_ids=[], names=("pair p1-0",) * len(rows[1].names))
    rows[1].terms["policy"].arrays["advantages"][0] = math.nan
    with pytest.raises(NonFiniteStepError, match=r"micro-batch 1 of rank 0 \(all of pair p1-0\)") as caught:
        train_step(policy, optimizer, rows, totals(samples), SETTINGS, step=7)
    assert caught.value.samples == ["pair p1-0"]


def test_a_gradient_that_is_not_finite_is_blamed_on_all_samples(model_folder, tmp_path, world):
    # Every loss is finite and the gradient's norm overflows: no micro-batch is to blame, so all samples are.
    samples = make_samples(1, 6)
    policy, optimizer = setup(model_folder, tmp_path, world)
    rows = rows_of(samples, world.device, 64)
    rows[0].terms["policy"].arrays["advantages"].fill_(3e35)
    with pytest.raises(NonFiniteStepError, match="gradient, although every micro-batch's loss is finite") as caught:
        train_step(policy, optimizer, rows, totals(samples), SETTINGS, step=7)
    assert sorted(caught.value.samples) == sorted(sample.sample_id for sample in samples)


def test_a_gradient_of_rows_alone_is_blamed_on_all_rows(model_folder, tmp_path, world):
    # The step has no sample, as that of SFT alone: a resume would meet the same rows, so they are named.
    samples = make_samples(1, 6)
    policy, optimizer = setup(model_folder, tmp_path, world)
    rows = [dataclasses.replace(row, sample_ids=[], names=("row f:1", "row f:2", *["none"] * (len(row.names) - 2)))
            for row in rows_of(samples, world.device, 4096)]  # fmt: skip
    rows[0].terms["policy"].arrays["advantages"].fill_(3e35)
    with pytest.raises(NonFiniteStepError, match="gradient, although every micro-batch's loss is finite") as caught:
        train_step(policy, optimizer, rows, totals(samples), SETTINGS, step=7)
    assert caught.value.samples == ["row f:1", "row f:2"]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_skipped_step_runs_the_hooks_and_changes_nothing(model_folder, tmp_path, world, kind):
    # The outer loop of a joint run counts steps by a hook of the last part. Gradients are dropped, moments stay.
    samples = make_samples(1, 6)
    policy, optimizer = setup(model_folder, tmp_path, world, optim={"type": kind})
    train_step(policy, optimizer, rows_of(samples, world.device), totals(samples), SETTINGS, step=1)
    counted = []
    optimizer.parts[-1].register_step_post_hook(lambda *_: counted.append(1))
    loss_of(policy, rows_of(samples, world.device)[0], totals(samples), SETTINGS)[0].total.backward()
    before, moments = whole(policy), copy.deepcopy([part.state_dict()["state"] for part in optimizer.parts])
    optimizer.skip()
    assert counted == [1] and all(p.grad is None for p in policy.parameters())
    assert all(torch.equal(before[name], value) for name, value in whole(policy).items())
    assert str(moments) == str([part.state_dict()["state"] for part in optimizer.parts])


def test_models_with_dropout_are_trained_without_it(tmp_path, caplog):
    # A GPT-2 folder that asks for dropout: every such probability is 0 in the trained model, and the log names it.
    from transformers import GPT2Config

    from trainer.model.build import read_model_config

    GPT2Config(resid_pdrop=0.1, embd_pdrop=0.2, attn_pdrop=0.3, n_layer=1).save_pretrained(tmp_path)
    with caplog.at_level("INFO"):
        config = read_model_config(tmp_path)
    assert config.resid_pdrop == config.embd_pdrop == config.attn_pdrop == 0.0
    assert "embd_pdrop is 0.2 and counts as 0" in caplog.text and config.layer_norm_epsilon == 1e-5


def test_micro_batching_does_not_change_the_step(model_folder, tmp_path, world):
    # The same samples in 1 row, in many rows, and with a dummy row: equal metrics and parameters to 1e-6.
    samples, outcomes = make_samples(3, 9), []
    (dummy,) = pack([], run_id="r", step=1, world_size=1, max_tokens=64)[0]
    for budget, extra in ((4096, []), (40, []), (4096, [row_of(dummy, world.device)])):
        policy, optimizer = setup(model_folder, tmp_path, world, optim={"lr": 1e-3})
        rows = rows_of(samples, world.device, budget) + extra
        metrics = train_step(policy, optimizer, rows, totals(samples), SETTINGS, step=1)
        outcomes.append((metrics, whole(policy)))
    for metrics, parameters in outcomes[1:]:
        for name in ("loss/total", "policy/mismatch_kl", "policy/entropy", "optim/grad_norm", "tokens/trained"):
            assert abs(metrics[name] - outcomes[0][0][name]) < 1e-6
        assert max((parameters[n] - outcomes[0][1][n]).abs().max().item() for n in parameters) < 1e-5


def test_the_norm_of_a_term_is_that_of_its_own_gradient(model_folder, tmp_path, world):
    # With each of three terms on: its norm is that of the gradient with all terms less that without it. To measure
    # changes no bit of the step.
    samples, pairs, channels = make_hinted(3, 9), make_pairs(3), three_channels()
    counted, terms, outcomes = totals(samples, pairs), channels.terms(64), []
    for measures in (True, False):
        policy, optimizer = setup(model_folder, tmp_path, world, optim={"lr": 1e-3})
        rows = rows_of(samples, world.device, 200, pairs, distil=True, prefer=True)
        auxiliary = SelfTeacher(policy, channels).prepare(rows)
        if measures:
            given = list(zip(rows, auxiliary, strict=True))
            whole_gradient = gradient(policy, optimizer, given, counted, terms)
            others = {term.name: [each for each in terms if each is not term] for term in terms}
            expected = {
                name: (whole_gradient - gradient(policy, optimizer, given, counted, left)).norm().item()
                for name, left in others.items()
            }
            norms = term_norms(optimizer, terms, partial(backward, policy, rows, counted, 1, auxiliary))
            assert norms == {f"optim/grad_norm/{name}": pytest.approx(expected[name], rel=1e-3) for name in others}
        train_step(policy, optimizer, rows, counted, terms, step=1, auxiliary=auxiliary)
        outcomes.append(whole(policy))
    assert min(expected.values()) > 1e-4
    assert all(torch.equal(outcomes[0][name], value) for name, value in outcomes[1].items())


def gradient(policy, optimizer, given, counted, terms) -> torch.Tensor:
    for row, auxiliary in given:
        loss_of(policy, row, counted, terms, auxiliary=auxiliary)[0].total.backward()
    flat = torch.cat([p.grad.full_tensor().flatten() for p in optimizer.parameters()])
    optimizer.zero_grad()
    return flat


def test_a_step_of_dummies_only_is_harmless(model_folder, tmp_path, world):
    # No trained token anywhere: loss 0, gradient norm 0, no policy metrics, parameters unchanged (no weight decay).
    (dummy,) = pack([], run_id="r", step=1, world_size=1, max_tokens=64)[0]
    policy, optimizer = setup(model_folder, tmp_path, world)
    before = whole(policy)
    metrics = train_step(policy, optimizer, [row_of(dummy, world.device)], totals([]), SETTINGS, step=1)
    assert metrics["loss/total"] == 0 and metrics["optim/grad_norm"] == 0 and "policy/entropy" not in metrics
    assert all(torch.equal(before[name], value) for name, value in whole(policy).items())


def test_learning_rate_schedules():
    # Warm-up reaches the peak at its last step; constant stays; the cosine ends at final_ratio at max_steps.
    constant = ScheduleConfig(warmup_steps=4)
    assert [rate(step, constant, 10) for step in (1, 2, 4, 5, 10)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    cosine = ScheduleConfig(type="cosine", warmup_steps=2, final_ratio=0.1)
    values = [rate(step, cosine, 12) for step in range(1, 13)]
    assert values[1] == 1.0 and math.isclose(values[6], 0.55) and math.isclose(values[-1], 0.1)
    assert all(a >= b for a, b in itertools.pairwise(values[1:]))
    assert rate(1, ScheduleConfig(type="cosine", final_ratio=0.5), 1) == 0.5


def test_clipping_bounds_the_update(model_folder, tmp_path, world):
    # The gradients handed to the optimizer have at most the configured norm; the reported norm is the unclipped one.
    samples = make_samples(1, 6)
    policy, optimizer = setup(model_folder, tmp_path, world, optim={"max_grad_norm": 1e-3})
    for row in rows_of(samples, world.device, 4096):
        loss_of(policy, row, totals(samples), SETTINGS)[0].total.backward()
    norm = optimizer.grad_norm()
    plain = math.sqrt(sum(p.grad.full_tensor().square().sum().item() for p in policy.parameters()))
    assert norm > 1e-3 and math.isclose(norm.item(), plain, rel_tol=1e-5)


def test_sharded_muon_is_torch_s_muon(world):
    # On plain matrices and on shards of a 1-rank mesh, three steps equal torch.optim.Muon's to rounding. A stack of
    # matrices, as fused experts have it, steps as its matrices do alone.
    from torch.distributed.tensor import Shard, distribute_tensor

    draw = torch.Generator().manual_seed(0)
    start = [
        torch.randn(12, 5, generator=draw),
        torch.randn(4, 9, generator=draw),
        torch.randn(3, 6, 4, generator=draw),
    ]
    grads = [[torch.randn(m.shape, generator=draw) for m in start] for _ in range(3)]
    split = lambda tensors: [matrix for m in tensors for matrix in (m.unbind() if m.ndim == 3 else [m])]

    def run(make, optimizer, of=lambda tensors: tensors):
        parameters = [torch.nn.Parameter(make(m.clone())) for m in of(start)]
        muon = optimizer(parameters)
        for step in grads:
            for parameter, gradient in zip(parameters, of(step), strict=True):
                parameter.grad = make(gradient.clone())
            muon.step()
        return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in parameters]

    theirs = run(lambda m: m, lambda p: torch.optim.Muon(p, lr=0.1, momentum=0.9, weight_decay=0.01), split)
    for make in (lambda m: m, lambda m: distribute_tensor(m, world.mesh, [Shard(0)])):
        ours = run(make, lambda p: ShardedMuon(p, lr=0.1, momentum=0.9, weight_decay=0.01))
        assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(split(ours), theirs, strict=True))


def test_muon_takes_block_matrices_and_adamw_the_rest(model_folder, tmp_path, world):
    # Two parts; norms and the (tied) embedding stay with AdamW, every matrix of a block goes to Muon.
    _, optimizer = setup(model_folder, tmp_path, world, optim={"type": "muon"})
    adamw, muon = ([p for group in part.param_groups for p in group["params"]] for part in optimizer.parts)
    assert len(muon) == 2 * 7 and all(p.ndim == 2 for p in muon)
    assert sum(p.ndim == 2 for p in adamw) == 1


def test_muon_takes_fused_experts(tmp_path, world):
    # Qwen3-MoE keeps its experts in tensors of three dimensions: each of its block weights but norms is Muon's.
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(
        Qwen3MoeConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
                       num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=4,
                       num_experts_per_tok=2)
    ).save_pretrained(tmp_path / "moe")  # fmt: skip
    policy, optimizer = setup(tmp_path / "moe", tmp_path, world, optim={"type": "muon"})
    muon = {id(p) for group in optimizer.parts[1].param_groups for p in group["params"]}
    adamw = {name for name, p in policy.lm.named_parameters() if id(p) not in muon}
    assert all("norm" in name or ".layers." not in name for name in adamw)
    assert sum(p.ndim == 3 for p in policy.parameters()) == 4
    samples, before = make_samples(1, 6), whole(policy)
    train_step(policy, optimizer, rows_of(samples, world.device), totals(samples), SETTINGS, step=1)
    after = whole(policy)
    assert all(not torch.equal(before[name], value) for name, value in after.items() if "experts" in name)


def test_lora_trains_adapters_only_and_starts_as_the_base(model_folder, tmp_path, world):
    # Base weights are frozen, adapters train, the first forward equals the base model's.
    samples = make_samples(1, 6)
    policy, optimizer = setup(model_folder, tmp_path, world, lora={"rank": 4, "alpha": 8})
    plain, _ = setup(model_folder, tmp_path, world)
    (row,) = rows_of(samples, world.device, 4096)
    assert torch.allclose(policy(row).logprobs_R, plain(row).logprobs_R, atol=1e-6)
    before = whole(policy)
    for step in (1, 2):
        train_step(policy, optimizer, [row], totals(samples), SETTINGS, step=step)
    changed = {name for name, value in whole(policy).items() if not torch.equal(before[name], value)}
    assert changed and all(".lora_" in name for name in changed)
    with pytest.raises(ConfigError, match=r"trainer.lora.target_modules \['nothing'\]"):
        setup(model_folder, tmp_path, world, lora={"target_modules": ["nothing"]})


def test_temperature_divides_the_logits(model_folder, tmp_path, world):
    # A sample drawn at temperature T is scored under softmax(logits / T): with mu from there, the mismatch is 0.
    policy, _ = setup(model_folder, tmp_path, world)
    samples = make_samples(1, 4, temperature=0.6)
    (row,) = rows_of(samples, world.device, 4096)
    with torch.no_grad():
        scored = policy(row).logprobs_R
    plain = AutoModelForCausalLM.from_pretrained(model_folder)
    ids = row.input_ids[0, : row.trees[0].tokens]
    with torch.no_grad():
        expected = (plain(ids[None]).logits[0, :-1] / 0.6).log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
    own = row.terms["policy"].arrays["sequence"] == 0
    positions = row.source_R[own]
    np.testing.assert_allclose(scored[own], expected[positions], atol=1e-5)


def test_bfloat16_compute_keeps_masters_and_statistics_in_float32(model_folder, tmp_path, world):
    # With bfloat16 compute the masters, gradients, log-probabilities and temperatures stay float32, and the
    # log-probabilities are those of float32 to bfloat16's accuracy.
    import dataclasses

    samples = make_samples(1, 6, temperature=0.7)
    (row,) = rows_of(samples, world.device, 4096)
    config = make_config(model_folder, tmp_path)
    half = build_policy(config, model_folder, dataclasses.replace(world, compute_dtype=torch.bfloat16))
    full = build_policy(config, model_folder, world)
    parts, _ = loss_of(half, row, totals(samples), SETTINGS)
    parts.total.backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in half.parameters())
    one, other = half(row).logprobs_R, full(row).logprobs_R
    assert one.dtype == torch.float32 and row.temperature_R.dtype == torch.float32
    assert 0 < (one - other).abs().max() < 0.05
