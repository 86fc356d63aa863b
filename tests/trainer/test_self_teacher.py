"""Other weights in the policy's place: exchanges, averages, the three teachers, cached reference log-probabilities."""

import pytest
import torch
from hinted_runs import make_hinted, make_pairs, three_channels
from small_runs import make_config, rows_of
from transformers import AutoModelForCausalLM

from composer_prime.errors import NonFiniteError
from composer_prime.packing.pack import totals
from composer_prime.wire.types import flags, ints
from trainer.model.build import build_policy
from trainer.model.policy_model import ReferenceLogprobs, SelfTeacher, WeightSnapshot
from trainer.optim import build_optimizer
from trainer.train import train_step
from trainer.weights.publish import whole_tensors


def setup(model_folder, tmp_path, world, **trainer):
    config = make_config(model_folder, tmp_path, trainer=trainer)
    policy = build_policy(config, model_folder, world)
    return policy, build_optimizer(policy, config.trainer.optim)


def copy_of(policy, world) -> AutoModelForCausalLM:
    """A plain transformers model with the policy's weights."""
    lm = AutoModelForCausalLM.from_config(policy.lm.config, attn_implementation="sdpa")
    wholes = whole_tensors(policy, world, torch.float32)
    lm.load_state_dict({name: value.clone() for name, value, _ in wholes}, strict=False)
    lm.tie_weights()
    return lm.eval()


def turn_logits(lm, samples) -> torch.Tensor:
    """[D, V]: hinted logits of every token of a hinted turn, sample by sample."""
    parts = []
    for sample in samples:
        for turn in sample.distillations:
            scores = lm(input_ids=torch.tensor(ints(turn.teacher_ids))[None].long(), use_cache=False).logits[0]
            parts.append(scores[turn.teacher_start - 1 : -1])
    return torch.cat(parts)


def answer_sums(lm, pairs) -> list[float]:
    sums = []
    for pair in pairs:
        for raw, mask in zip(pair.documents, pair.masks, strict=True):
            ids = torch.tensor(ints(raw)).long()
            logprobs = lm(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            sums.append(logprobs.gather(1, ids[1:, None]).squeeze(1)[flags(mask)[1:] == 1].sum().item())
    return sums


def taught(model_folder, tmp_path, world, kind: str, **trainer):
    """Three steps with a teacher of `kind`; the teacher's logits at the last step, and those of plain copies."""
    channels, samples, pairs = three_channels(kind), make_hinted(1, 8), make_pairs(1)
    policy, optimizer = setup(model_folder, tmp_path, world, **trainer)
    teacher = SelfTeacher(policy, channels)
    (row,) = rows_of(samples, world.device, 4096, pairs, distil=True, prefer=True, share=True)
    copies = [copy_of(policy, world)]
    for step in (1, 2, 3):
        auxiliary = teacher.prepare([row])
        counts = totals(samples, pairs)
        if step < 3:
            train_step(policy, optimizer, [row], counts, channels.terms(64),
                       step=step, auxiliary=auxiliary)  # fmt: skip
            teacher.follow()
            copies.append(copy_of(policy, world))
    (of_row,) = auxiliary
    found = of_row.teacher.hidden_DH @ of_row.teacher.head.weight_VH.T
    order = [next(s for s in samples if s.sample_id == name) for name in row.sample_ids]
    return found, order, copies, policy, of_row


def averaged(copies, rate: float):
    """The moving average of the copies, which starts at the first."""
    lm = copies[0]
    with torch.no_grad():
        for newer in copies[1:]:
            for old, new in zip(lm.parameters(), newer.parameters(), strict=True):
                old.lerp_(new, rate)
    return lm


EXPECTED = {
    "live": lambda order, copies: turn_logits(copies[2], order),
    "frozen": lambda order, copies: turn_logits(copies[0], order),
    "ema": lambda order, copies: turn_logits(averaged(copies, 0.3), order),
}


@pytest.mark.parametrize("kind", EXPECTED)
@torch.no_grad()
def test_teachers_are_what_they_are_called(model_folder, tmp_path, world, kind):
    # After two steps, the teacher's logits equal those of plain copies of the start, of the present, or of
    # the moving average; the policy's own parameters are untouched by the reading, to the last bit.
    with torch.enable_grad():
        found, order, copies, policy, _ = taught(model_folder, tmp_path, world, kind, optim={"lr": 1e-2})
    present = copy_of(policy, world)
    assert all(torch.equal(a, b) for a, b in zip(present.parameters(), copies[2].parameters(), strict=True))
    assert (found - EXPECTED[kind](order, copies)).abs().max() < 1e-4
    if kind != "live":
        assert (found - turn_logits(present, order)).abs().max() > 1e-2


@torch.no_grad()
def test_with_adapters_the_frozen_teacher_is_the_base(model_folder, tmp_path, world):
    # Low-rank adapters: no second set of weights is held; the frozen teacher is the start model, whatever was trained.
    with torch.enable_grad():
        found, order, copies, policy, of_row = taught(
            model_folder, tmp_path, world, "frozen", optim={"lr": 1e-2}, lora={"rank": 4}
        )
    base = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="sdpa")
    assert (found - turn_logits(base, order)).abs().max() < 1e-4
    moved = [torch.equal(a, b) for a, b in zip(copies[2].parameters(), base.parameters(), strict=True)]
    assert not all(moved)
    expected = answer_sums(base, make_pairs(1))
    assert sorted(of_row.references["replay_dpo"].tolist()) == pytest.approx(sorted(expected), abs=1e-4)
    assert all(parameter.requires_grad == ("lora_" in name) for name, parameter in policy.named_parameters())


def test_an_exchange_is_undone_to_the_last_bit(model_folder, tmp_path, world):
    # Inside the block the policy computes with the snapshot. Afterwards, also after an error, both have their own
    # values again. Whole parameters that a forward pass left behind do not blur the two.
    policy, _ = setup(model_folder, tmp_path, world)
    (row,) = rows_of(make_hinted(1, 4), world.device)
    snapshot = WeightSnapshot(policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5)
        before = policy(row).logprobs_R
        start = build_policy(make_config(model_folder, tmp_path), model_folder, world)(row).logprobs_R
        with pytest.raises(KeyError), snapshot.swapped_in():
            assert torch.equal(policy(row).logprobs_R, start)
            raise KeyError
        assert torch.equal(policy(row).logprobs_R, before) and not torch.equal(before, start)
        with snapshot.swapped_in():
            assert torch.equal(policy(row).logprobs_R, start)


def test_kl_reference_logprobs(model_folder, tmp_path, world):
    # With a KL penalty the auxiliary log-probabilities are those of the policy loss's tokens under the start weights,
    # and the step reports the distance to them.
    channels = three_channels("live", kl={"weight": 0.1, "estimator": "k3"})
    settings = channels.terms(64)
    samples, pairs = make_hinted(1, 8), make_pairs(1)
    policy, optimizer = setup(model_folder, tmp_path, world, optim={"lr": 1e-2})
    teacher = SelfTeacher(policy, channels)
    (row,) = rows_of(samples, world.device, 4096, pairs, distil=True, prefer=True)
    distances = []
    for step in (1, 2):
        auxiliary = teacher.prepare([row])
        start = auxiliary[0].references["policy"]
        assert start.shape == row.terms["policy"].arrays["advantages"].shape and not start.requires_grad
        counts = totals(samples, pairs)
        metrics = train_step(policy, optimizer, [row], counts, settings, step=step, auxiliary=auxiliary)
        teacher.follow()
        distances.append(metrics["policy/reference_kl"])
    assert abs(distances[0]) < 1e-6 < distances[1]


def test_reference_logprobs_are_computed_once(model_folder, tmp_path, world):
    # Values equal transformers' own, and are not missing any more.
    policy, _ = setup(model_folder, tmp_path, world)
    pairs = make_pairs(1)
    (row,) = rows_of([], world.device, 4096, pairs, prefer=True)
    cache = ReferenceLogprobs()
    assert cache.missing([row.scored]) == [True]
    with torch.no_grad():
        cache.compute(policy, [row.scored])
        expected = answer_sums(AutoModelForCausalLM.from_pretrained(model_folder), pairs)
    assert sorted(cache.of(row.scored).tolist()) == pytest.approx(sorted(expected), abs=1e-4)
    assert cache.missing([row.scored]) == [False]


def test_a_reference_that_is_not_finite_is_refused(model_folder, tmp_path, world):
    # A base model that gives NaN: nothing is cached, nothing is trained.
    policy, _ = setup(model_folder, tmp_path, world)
    (row,) = rows_of([], world.device, 4096, make_pairs(1), prefer=True)
    cache = ReferenceLogprobs()
    with torch.no_grad(), pytest.raises(NonFiniteError):
        for parameter in policy.parameters():
            parameter.fill_(float("nan"))
        cache.compute(policy, [row.scored])
    assert cache.missing([row.scored]) == [True]
