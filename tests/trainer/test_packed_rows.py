"""A packed row gives each document the log-probabilities that it has alone, for several architectures."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import make_samples, row_of, rows_of

from composer_prime.errors import ConfigError, NonFiniteError, RunMismatchError
from composer_prime.packing.pack import Row, pack, prefix_layout
from composer_prime.wire.types import flags, ints, pack_flags, pack_floats, pack_ints
from trainer.data import _teacher_passes
from trainer.model.build import check_packing
from trainer.model.policy_model import PACKED, Policy, attention_name

CPU = torch.device("cpu")
SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 256}  # fmt: skip


def build(family: str, attention: str = PACKED, **values) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    made = getattr(transformers, f"{family}ForCausalLM")
    return made._from_config(made.config_class(**SMALL | values), attn_implementation=attention).eval()


def alone(lm, sample, temperature: float) -> torch.Tensor:
    """log-probabilities of a sample's trained tokens by transformers' own forward pass."""
    ids = torch.tensor(ints(sample.input_ids))
    scores = lm(input_ids=ids[None].long(), use_cache=False).logits[0, :-1].float() / temperature
    logprobs = scores.log_softmax(-1).gather(1, ids[1:, None].long()).squeeze(1)
    return logprobs[torch.tensor(flags(sample.loss_mask)[1:]).bool()]


@torch.no_grad()
def difference(lm, samples, budget: int) -> float:
    policy, by_id, worst = Policy(lm, lm.config._attn_implementation), {s.sample_id: s for s in samples}, 0.0
    packed = {}
    for row in rows_of(samples, CPU, budget):
        logprobs_T = policy(row).logprobs_R
        for index, sample_id in enumerate(row.sample_ids):
            packed[sample_id] = logprobs_T[row.terms["policy"].arrays["sequence"] == index]
    lm.set_attn_implementation("sdpa" if lm.config._attn_implementation == PACKED else "eager")
    for sample_id, logprobs_T in packed.items():
        worst = max(worst, (logprobs_T - alone(lm, by_id[sample_id], by_id[sample_id].temperature)).abs().max().item())
    return worst


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("budget", [64, 4096])
def test_packed_equals_alone(temperature, budget):
    # Log-probabilities of trained tokens in packed rows equal those of each sample alone to 1e-5, at any temperature.
    assert difference(build("Qwen3", head_dim=8), make_samples(1, 16, temperature=temperature), budget) < 1e-5


@pytest.mark.parametrize(
    ("family", "values", "attention"),
    [
        ("Llama", {}, PACKED),
        ("Mistral", {"sliding_window": 5}, PACKED),
        ("Granite", {"logits_scaling": 4.0}, PACKED),
        ("Cohere", {"logit_scale": 0.25}, PACKED),
        ("Qwen3Moe", {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}, PACKED),
        ("Gemma2", {"head_dim": 8, "sliding_window": 5}, "eager"),
        ("GptOss", {"head_dim": 8, "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2}, "eager"),
    ],
)
def test_other_families(family, values, attention):
    # Sliding windows, logit scaling, soft caps and experts: packed equals alone to 1e-5 there too.
    assert difference(build(family, attention, **values), make_samples(2, 8), 4096) < 1e-5


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(1, 1000), order=st.permutations(range(6)))
def test_the_order_of_documents_changes_nothing(seed, order):
    # Permuting the documents of a row permutes their log-probabilities and nothing else.
    samples = make_samples(seed, 6)
    policy = Policy(QWEN, PACKED)
    with torch.no_grad():
        (row,) = rows_of(samples, CPU)
        by_id = {
            name: policy(row).logprobs_R[row.terms["policy"].arrays["sequence"] == i]
            for i, name in enumerate(row.sample_ids)
        }
        renamed = [_renamed(samples[index], f"{position:02d}") for position, index in enumerate(order)]
        (other,) = rows_of(renamed, CPU)
        logprobs_T = policy(other).logprobs_R
    for index, name in enumerate(other.sample_ids):
        expected = by_id[samples[order[int(name)]].sample_id]
        assert (logprobs_T[other.terms["policy"].arrays["sequence"] == index] - expected).abs().max() < 1e-5


def _renamed(sample, name: str):
    return msgspec.structs.replace(sample, sample_id=name)


QWEN = build("Qwen3", head_dim=8)


def siblings(seed: int, prompt: int, count: int = 6):
    """Samples of one group over a common prompt, every third with a common first turn too; masks differ."""
    rng = np.random.default_rng(seed)
    head, turn = rng.integers(0, 96, prompt), rng.integers(0, 96, 25)
    made = []
    for index in range(count):
        own = rng.integers(0, 96, int(rng.integers(1, 15)))
        own = np.r_[turn, own] if index % 3 == 0 else own
        mask = np.r_[np.zeros(prompt), np.ones(len(own))]
        mask[prompt - 3 : prompt] = index % 2
        made.append(
            msgspec.structs.replace(
                make_samples(seed, 1)[0],
                sample_id=f"s-{index}/0",
                input_ids=pack_ints(np.r_[head, own]),
                loss_mask=pack_flags(mask),
                logprobs=pack_floats(mask * -4.0),
                advantages=pack_floats(mask * rng.normal()),
            )
        )
    return made


@pytest.mark.parametrize("family", [("Qwen3", {"head_dim": 8}), ("Mistral", {"sliding_window": 7})])
def test_shared_prefixes_change_neither_logprobs_nor_gradients(family):
    # Computing the common prompt of siblings once gives each sample's own log-probabilities and the same gradients.
    lm, samples = build(family[0], **family[1]), [*siblings(1, 30), *make_samples(5, 3), *siblings(2, 20, 3)]
    samples = [_renamed(sample, f"{index:02d}") for index, sample in enumerate(samples)]
    ((batch,),) = pack(samples, run_id="r", step=1, world_size=1, max_tokens=4096)
    policy, results = Policy(lm, PACKED), []
    for share in (False, True):
        row = row_of(batch, CPU, share=share)
        logprobs_T = policy(row).logprobs_R
        lm.zero_grad()
        (logprobs_T * row.terms["policy"].arrays["advantages"]).sum().backward()
        results.append((logprobs_T.detach(), {name: p.grad.clone() for name, p in lm.named_parameters()}, row))
    (one, grads, row), (other, shared_grads, shared_row) = results
    assert shared_row.input_ids.numel() < 0.7 * row.input_ids.numel() and shared_row.packed_tokens == row.packed_tokens
    assert (one - other).abs().max() < 1e-5
    assert max((grads[name] - shared_grads[name]).abs().max().item() for name in grads) < 1e-4


@pytest.mark.parametrize(
    ("family", "values", "kind"),
    [
        ("Jamba", {"mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1}, "linear_attention"),
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "conv"),
        ("MiniMax", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}, "linear_attention"),
    ],
)
def test_layers_with_a_running_state_are_refused_with_what_they_need(family, values, kind):
    # Their layers carry a state from one document of a row into the next, and cannot be told where these end.
    lm = build(family, **values, initializer_range=0.2)
    with pytest.raises(ConfigError, match=rf"{family}ForCausalLM: .*{kind} layers.*restart at the borders"):
        check_packing(lm)


def test_check_packing_passes_good_models_and_names_leaking_ones():
    # An architecture whose packed log-probabilities differ is refused with its name before training.
    assert check_packing(build("Qwen3", head_dim=8)) < 1e-5
    leaking = build("Qwen3", head_dim=8)
    leaking.get_output_embeddings().register_forward_hook(lambda module, args, out: out + 0.1 * out.cumsum(-2))
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM: .* differ by .* cannot be trained on packed rows"):
        check_packing(leaking)


def test_attention_that_cannot_be_packed_is_a_configuration_error():
    # Soft caps under sdpa and flash attention without CUDA: an error that names model.attention.
    with pytest.raises(ConfigError, match=r"set model\.attention = 'eager'"):
        difference(build("Gemma2", PACKED, head_dim=8), make_samples(2, 2), 4096)
    with pytest.raises(ConfigError, match=r"model\.attention is 'flash_attention_2'"):
        attention_name("flash_attention_2", "cpu", torch.bfloat16)


def test_auto_takes_flash_attention_in_half_precision_only(monkeypatch):
    # On CUDA with the package installed: in float32 its kernels raise at the first step.
    monkeypatch.setattr("trainer.model.policy_model.is_flash_attn_2_available", lambda: True)
    chosen = {dtype: attention_name("auto", "cuda", dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)}
    assert list(chosen.values()) == ["flash_attention_2", "flash_attention_2", PACKED]
    assert attention_name("auto", "cpu", torch.bfloat16) == PACKED


def passes_by_layout(documents: list[np.ndarray], *, share: bool, max_tokens: int | None) -> list[range]:
    """The rule as it reads: lay out each longer pass, and look whether it fits."""
    passes: list[range] = []
    for index in range(len(documents)):
        longer = range(passes[-1].start, index + 1) if passes else range(0)
        kept = prefix_layout(documents[longer.start : longer.stop], share=share).kept if passes else []
        if passes and (max_tokens is None or len(kept) <= max_tokens):
            passes[-1] = longer
        else:
            passes.append(range(index, index + 1))
    return passes


@st.composite
def branching(draw) -> list[np.ndarray]:
    """Documents, most of which begin as an earlier one does."""
    documents: list[list[int]] = []
    for _ in range(draw(st.integers(1, 12))):
        start = draw(st.sampled_from(documents)) if documents else []
        own = draw(st.lists(st.integers(0, 2), min_size=1, max_size=30))
        documents.append(start[: draw(st.integers(0, len(start)))] + own)
    return [np.array(document, dtype=np.int32) for document in documents]


@settings(max_examples=50, deadline=None)
@given(branching(), st.booleans(), st.one_of(st.none(), st.integers(20, 200)))
def test_teacher_passes_are_those_of_whole_layouts(documents, share, max_tokens):
    # Tokens are compared once a row; the passes are those of a layout for each longer pass.
    ((batch,),) = pack(make_samples(1, 1), run_id="r", step=1, world_size=1, max_tokens=256)
    row, ends = Row.of(batch), np.cumsum([*map(len, documents)])
    row = replace(row, ids_N=np.concatenate([row.ids_N, *documents]), starts=np.r_[row.starts, row.starts[-1] + ends])
    passes = _teacher_passes(row, share=share, max_tokens=max_tokens)
    found = [range(each.start - row.first_teacher, each.stop - row.first_teacher) for each in passes]
    assert found == passes_by_layout(documents, share=share, max_tokens=max_tokens)


def test_bad_rows_are_refused_by_sample():
    # Ids outside the vocabulary, NaN advantages of trained tokens, arrays of other lengths: named, before any compute.
    ((batch,),) = pack(make_samples(1, 3), run_id="r", step=1, world_size=1, max_tokens=256)
    change = lambda **values: row_of(msgspec.structs.replace(batch, **values), CPU)
    with pytest.raises(RunMismatchError, match=r"token ids \d+..\d+, the model's vocabulary is 0..9"):
        row_of(batch, CPU, 10)
    broken = [float("nan")] * sum(batch.lengths)
    with pytest.raises(NonFiniteError, match=r"advantages of sample s1-\d/0 hold NaN"):
        change(advantages=pack_floats(broken))
    with pytest.raises(RunMismatchError, match="logprobs has 1 entries"):
        change(logprobs=pack_floats([0.0]))
    with pytest.raises(RunMismatchError, match="do not add up"):
        change(lengths=batch.lengths[:-1])
    with pytest.raises(RunMismatchError, match="one positive number"):
        change(temperatures=[0.0] * len(batch.lengths))
    with pytest.raises(RunMismatchError, match="first token is marked as trained in s1-"):
        change(loss_mask=b"\1" * sum(batch.lengths))
