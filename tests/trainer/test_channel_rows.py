"""All three loss terms from one packed row: index tensors, losses against documents computed alone, wrong input."""

import copy

import msgspec
import numpy as np
import pytest
import torch
import transformers
from hinted_runs import make_hinted, make_pairs, three_channels
from small_runs import VOCABULARY, make_samples, row_of, rows_of
from torch import Tensor

from composer_prime.channels.policy import PolicyConfig, PolicyTerm
from composer_prime.channels.replay_dpo import PairTokens
from composer_prime.channels.sdpo import SdpoConfig, SdpoTokens, divergence
from composer_prime.channels.term import total_loss
from composer_prime.channels.tokens import PolicyTokens
from composer_prime.config.channels import ChannelsConfig
from composer_prime.errors import NonFiniteError, RunMismatchError
from composer_prime.packing.pack import pack, totals
from composer_prime.wire.types import HintedTurn, Sample, StepTotals, flags, floats, ints, pack_floats, pack_ints
from trainer.data import checked_row, unpack
from trainer.head import HeadTeacher
from trainer.model.policy_model import PACKED, AuxiliaryLogprobs, Policy
from trainer.train import loss_of

CPU = torch.device("cpu")
CHANNELS = three_channels(denominator="sequence")
SETTINGS = CHANNELS.terms(64)
ON = {"distil": True, "prefer": True, "share": True}


def small_model() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM._from_config(config, attn_implementation=PACKED).eval()


MODEL = small_model()
OTHER = copy.deepcopy(MODEL)
OTHER.set_attn_implementation("sdpa")


def logits_of(ids: np.ndarray) -> Tensor:
    """Logits [T, V] that predict each token, by transformers' own forward pass; row 0 predicts nothing."""
    scores = OTHER(input_ids=torch.tensor(ids)[None].long(), use_cache=False).logits[0]
    return torch.cat([scores[:1], scores[:-1]])


def picked(logits_TV: Tensor, ids: np.ndarray) -> Tensor:
    return logits_TV.log_softmax(-1).gather(1, torch.tensor(ids)[:, None].long()).squeeze(1)


def oracle(samples, pairs, references: Tensor) -> Tensor:
    """The step's loss from documents that are computed one by one, each token in its place."""
    policy, distil = [], []
    for index, sample in enumerate(samples):
        ids, mask = ints(sample.input_ids), torch.tensor(flags(sample.loss_mask)).bool()
        scores = logits_of(ids) / sample.temperature
        logprobs, old = picked(scores, ids), torch.tensor(floats(sample.logprobs))
        policy.append((logprobs[mask], old[mask], torch.tensor(floats(sample.advantages))[mask], index))
        turns = sample.distillations
        own = mask.clone()
        for turn in turns:
            own[turn.start : turn.end] = True
        for turn in turns:
            span, teacher_ids = slice(turn.start, turn.end), ints(turn.teacher_ids)
            with torch.no_grad():
                hinted = logits_of(teacher_ids)[turn.teacher_start :] / sample.temperature
            value = divergence(scores[span], hinted, CHANNELS.sdpo, torch.tensor(ids[span]).long())
            distil.append((value, logprobs[span].detach(), old[span], turn.weight, own.sum()))
    sides = [picked(logits_of(ints(ids)), ints(ids))[flags(mask) == 1] for pair in pairs
             for ids, mask in zip(pair.documents, pair.masks, strict=True)]  # fmt: skip
    join = lambda parts: torch.cat(parts) if parts else torch.zeros(0)
    numbers = [torch.full((len(part[0]),), index) for index, part in enumerate(distil)]
    inputs = {
        "policy": PolicyTokens(
            logprobs_T=join([part[0] for part in policy]), sampler_logprobs_T=join([part[1] for part in policy]),
            advantages_T=join([part[2] for part in policy]), entropy_T=torch.zeros(sum(len(p[0]) for p in policy)),
            sequence_T=join([torch.full((len(part[0]),), part[3]) for part in policy]).long(), sequences=len(samples),
        ),
        "sdpo": SdpoTokens(
            divergence_D=join([part[0] for part in distil]), logprobs_D=join([part[1] for part in distil]),
            sampler_logprobs_D=join([part[2] for part in distil]),
            weight_D=join([torch.full((len(part[0]),), part[3]) for part in distil]),
            turn_D=join(numbers).long(), kind_D=join(numbers).long(), turns=len(distil), row_tokens=0,
            sample_tokens_D=join([torch.full((len(part[0]),), part[4]) for part in distil]).long(),
            teacher_entropy_D=join([part[1] for part in distil]), teacher_logprobs_D=join([part[1] for part in distil]),
        ),
        "replay_dpo": PairTokens(
            chosen_logprobs_P=torch.stack([side.sum() for side in sides[0::2]]),
            rejected_logprobs_P=torch.stack([side.sum() for side in sides[1::2]]),
            chosen_length_P=torch.tensor([float(len(side)) for side in sides[0::2]]),
            rejected_length_P=torch.tensor([float(len(side)) for side in sides[1::2]]),
            reference_chosen_P=references[0::2], reference_rejected_P=references[1::2],
            epsilon_P=torch.tensor([pair.value for pair in pairs]),
        ),
    }  # fmt: skip
    return total_loss(SETTINGS, inputs, counts(samples, pairs)).total


def counts(samples, pairs) -> StepTotals:
    return totals(samples, pairs)


REFERENCES = torch.linspace(-40, -20, 6)


def auxiliary_of(policy: Policy, row, pairs) -> AuxiliaryLogprobs:
    """Live teacher, and made-up reference values for the row's pairs."""
    order = {pair.name: index for index, pair in enumerate(pairs)}
    names = [name for name in row.names if name in order]
    sides = [REFERENCES[2 * order[name] + place % 2] for place, name in enumerate(names)]
    teacher = None
    if row.taught:
        with torch.no_grad():
            states = [policy.states(reading) for reading in row.taught]
        measure = lambda student, teacher, targets: divergence(student, teacher, CHANNELS.sdpo, targets)
        teacher = HeadTeacher(hidden_DH=torch.cat(states), head=policy.head(), divergence=measure)
    return AuxiliaryLogprobs(
        teacher=teacher, references={"replay_dpo": torch.stack(sides) if sides else torch.zeros(0)}
    )


def packed_loss(samples, pairs, budget: int, **options) -> Tensor:
    policy = Policy(MODEL, PACKED)
    parts = []
    for row in rows_of(samples, CPU, budget, pairs, **ON | options):
        parts.append(
            loss_of(policy, row, counts(samples, pairs), SETTINGS, auxiliary=auxiliary_of(policy, row, pairs))[0].total
        )
    return torch.stack(parts).sum()


def gradients(lm, loss: Tensor) -> dict[str, Tensor]:
    lm.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in lm.named_parameters()}


@pytest.mark.parametrize("budget", [200, 4096])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_loss_and_gradients_are_those_of_documents_alone(budget, temperature):
    # Three loss terms over packed rows (one, or many), with a live teacher: loss and every parameter's gradient equal
    # those of documents that went through transformers one by one.
    samples, pairs = make_hinted(3, 9, temperature=temperature), make_pairs(3)
    ours = packed_loss(samples, pairs, budget, max_tokens=budget // 4)
    theirs = oracle(samples, pairs, REFERENCES)
    assert abs(ours.item() - theirs.item()) < 2e-6 * max(1, abs(theirs.item()))
    found, expected = gradients(MODEL, ours), gradients(OTHER, theirs)
    assert max((found[name] - expected[name]).abs().max().item() for name in found) < 2e-6


def test_turns_that_the_policy_loss_does_not_train_are_weighted_alike():
    # A sample with mask and advantages 0 keeps its importance weights min(pi / mu, c): loss and gradients are those of
    # documents alone, and differ from counting pi / mu = 1.
    samples = [
        msgspec.structs.replace(
            sample, loss_mask=bytes(sample.num_tokens), advantages=pack_floats(np.zeros(sample.num_tokens))
        ) if sample.distillations else sample
        for sample in make_hinted(3, 9)
    ]  # fmt: skip
    pairs = make_pairs(3)
    ours, theirs = packed_loss(samples, pairs, 4096), oracle(samples, pairs, REFERENCES)
    assert abs(ours.item() - theirs.item()) < 2e-6 * max(1, abs(theirs.item()))
    unweighed = [msgspec.structs.replace(s, logprobs=bytes(len(s.logprobs))) if s.distillations else s for s in samples]
    assert abs(packed_loss(unweighed, pairs, 4096).item() - ours.item()) > 1e-4
    broken = [msgspec.structs.replace(s, logprobs=pack_floats(np.full(s.num_tokens, np.nan))) if s.distillations else s
              for s in samples]  # fmt: skip
    with pytest.raises(NonFiniteError, match=r"logprobs of sample s3-\d/0"):
        packed_loss(broken, pairs, 4096)


def test_simpo_trains_without_a_reference():
    # Nothing was read under other weights; the row's loss and metrics are there all the same.
    pairs = make_pairs(3)
    (row,) = rows_of(make_samples(3, 4), CPU, 4096, pairs, prefer=True, share=True)
    channels = ChannelsConfig.model_validate(
        {"policy": {"correction": "none"}, "replay_dpo": {"weight": 1.0, "loss": "simpo"}}
    )
    settings = channels.terms(64)
    parts, _ = loss_of(
        Policy(MODEL, PACKED), row, counts(make_samples(3, 4), pairs), settings, auxiliary=AuxiliaryLogprobs()
    )
    assert parts.total.isfinite() and parts.sums["dpo/pairs"] == 3 and "dpo/displacement" not in parts.sums


def test_a_token_of_two_terms_is_one_row_of_the_head():
    # Policy tokens in hinted turns are computed once; each term's indices point at its own tokens.
    samples, pairs = make_hinted(2, 8), make_pairs(2)
    ((batch,),) = pack(samples, pairs, run_id="r", step=1, world_size=1, max_tokens=4096)
    row, ids = row_of(batch, CPU, **ON), ints(batch.input_ids)
    policy, sdpo, dpo = (row.terms[name] for name in ("policy", "sdpo", "replay_dpo"))
    trained, answers = int(flags(batch.loss_mask).sum()), len(dpo.head_rows)
    hinted = sum(turn.count for turn in batch.turns)
    assert len(row.targets_R) == trained + answers and len(policy.head_rows) == trained
    assert len(sdpo.head_rows) == len(row.taught[0].source_R) == hinted
    assert np.array_equal(row.targets_R[policy.head_rows], ids[np.flatnonzero(flags(batch.loss_mask))])
    spans = [ids[turn.student : turn.student + turn.count] for turn in batch.turns]
    assert np.array_equal(row.targets_R[-hinted:], np.concatenate(spans))
    sides = [ids[start:end] for unit in batch.units for ((start, end),) in unit.spans]
    assert np.array_equal(row.targets_R[dpo.head_rows], np.concatenate(sides))
    assert dpo.arrays["length"].tolist() == [len(side) for side in sides]
    assert [len(ids) - start for ids, start in row.scored] == list(map(len, sides))


def test_terms_that_are_off_leave_no_trace():
    # With SDPO and replay-DPO off, a row with their documents gives the policy loss and its gradients to the last bit.
    hinted, pairs, bare = make_hinted(4, 6), make_pairs(4), make_samples(4, 6)
    settings = ChannelsConfig(policy=CHANNELS.policy).terms(64)
    outcomes = []
    for samples, extra in ((hinted, pairs), (bare, ())):
        (row,) = rows_of(samples, CPU, 4096, extra, share=True)
        loss = loss_of(Policy(MODEL, PACKED), row, totals(bare), settings)[0].total
        outcomes.append((loss.detach(), gradients(MODEL, loss)))
    (one, grads), (other, expected) = outcomes
    assert torch.equal(one, other) and all(torch.equal(grads[name], expected[name]) for name in grads)


def test_what_the_packer_does_not_know_is_refused():
    # Lengths that do not fit, and ids outside the model's vocabulary, also those of teacher documents.
    ((batch,),) = pack(make_hinted(2, 8), run_id="r", step=1, world_size=1, max_tokens=4096)
    turn = batch.turns[0]
    beyond = msgspec.structs.replace(turn, tail=pack_ints(np.r_[VOCABULARY, ints(turn.tail)]))
    for changes in ({"turns": [beyond]}, {"lengths": batch.lengths[1:]}, {"logprobs": batch.logprobs[4:]}):
        with pytest.raises(RunMismatchError):
            row_of(msgspec.structs.replace(batch, **changes), CPU, **ON)


def long_sample(tokens: int, turns: int, reply: int) -> Sample:
    """A rollout of `tokens` with a hinted reply at the end of each of `turns` equal stretches."""
    rng, stretch = np.random.default_rng(0), tokens // turns
    ids, distillations = rng.integers(0, VOCABULARY, tokens), []
    for turn in range(turns):
        end = (turn + 1) * stretch
        start = end - reply
        teacher = np.r_[ids[: start - 2], rng.integers(0, VOCABULARY, 100), ids[start - 2 : end]]
        distillations.append(
            HintedTurn(start=start, end=end, teacher_ids=pack_ints(teacher), teacher_start=start + 100, turn=turn,
                       error="test")
        )  # fmt: skip
    return msgspec.structs.replace(
        make_hinted(1, 1)[0], input_ids=pack_ints(ids), loss_mask=b"\0" + b"\1" * (tokens - 1),
        logprobs=bytes(4 * tokens), advantages=bytes(4 * tokens), distillations=distillations,
    )  # fmt: skip


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("tokens", [16_000, 30_000])
def test_long_samples_keep_all_their_hinted_turns(tokens, share):
    # 20 hinted turns of 16,000 and of 30,000 tokens in rows of 32,768: the row holds one sample and no context twice,
    # every turn is read, and no forward pass computes more tokens than a row may have.
    limit, hinted = 32_768, long_sample(tokens, 20, 200)
    ((batch,),) = pack([hinted], run_id="r", step=1, world_size=1, max_tokens=limit)
    assert batch.lengths == [tokens] and batch.sample_ids == [hinted.sample_id]
    counts = totals([hinted])
    assert (counts.samples, counts.distilled_turns, counts.distilled_tokens) == (1, 20, 20 * 200)
    assert sum(len(turn.tail) // 4 for turn in batch.turns) == 20 * (100 + 2 + 200)
    documents = checked_row(batch, VOCABULARY)
    row = unpack(
        documents,
        [SdpoConfig().term(PolicyTerm(PolicyConfig(), 64))],
        torch.device("cpu"),
        share=share,
        max_tokens=limit,
    )
    assert max(reading.input_ids.numel() for reading in (row, *row.taught)) <= limit
    tokens_read = sum(len(reading.source_R) for reading in row.taught)
    assert tokens_read == len(row.terms["sdpo"].arrays["turn"]) == 20 * 200
    if share:
        assert len(row.taught) <= 2
