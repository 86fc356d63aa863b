"""The fused head against dense float64 formulas: values, gradients, chunks, teachers, adapted and tied layers.

With a GPU (-m gpu) it is tested there, too.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import trainer.head
from composer_prime.channels.sdpo import divergence
from composer_prime.config.channels import SdpoConfig
from composer_prime.errors import ConfigError
from trainer.head import Head, HeadTeacher, head_of, token_statistics

V, H = 19, 5
GPU = pytest.mark.gpu
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
KINDS = {
    "jsd": SdpoConfig(weight=1),
    "forward": SdpoConfig(weight=1, beta=0),
    "reverse": SdpoConfig(weight=1, beta=1),
    "top_k": SdpoConfig(weight=1, kind="top_k", top_k=4),
    "sampled": SdpoConfig(weight=1, kind="sampled", beta=1),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 3 rows, so that chunks have several."""
    for device in ("cpu", "cuda"):
        monkeypatch.setitem(trainer.head.BLOCK_LOGITS, device, 3 * V)


class Case:
    """Random hidden states, output layers and teacher of R rows, the last D of which are taught; float64."""

    def __init__(
        self, rows: int, taught: int, *, seed: int = 0, cap: float | None = None, kind: str = "jsd",
        device: str = "cpu",
    ) -> None:  # fmt: skip
        draw = torch.Generator().manual_seed(seed)
        self.new = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64).to(device)
        self.hidden, self.weight, self.bias = self.new(rows, H), self.new(V, H), self.new(V)
        self.targets = torch.randint(0, V, (rows,), generator=draw).to(device)
        self.temperature = torch.rand(rows, generator=draw, dtype=torch.float64).to(device) + 0.5
        self.taught, self.cap, self.config = taught, cap, KINDS[kind]
        self.states, self.other, self.other_bias = self.new(taught, H), self.new(V, H), self.new(V)
        for tensor in (self.hidden, self.weight, self.bias):
            tensor.requires_grad_()

    def inputs(self) -> tuple[Tensor, ...]:
        return self.hidden, self.weight, self.bias

    def head(self, weight: Tensor, bias: Tensor | None) -> Head:
        return Head(weight_VH=weight, bias_V=bias, scale=0.7, cap=self.cap)

    def fused(self, chunk_rows: int | None, hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        teacher = None
        if self.taught:
            measure = lambda student, other, targets: divergence(student, other, self.config, targets)
            teacher = HeadTeacher(
                hidden_DH=self.states, head=self.head(self.other, self.other_bias), divergence=measure
            )
        out = token_statistics(
            self.head(weight, bias), hidden, self.targets, self.temperature, teacher,
            chunk_rows=chunk_rows,
        )  # fmt: skip
        self.statistics = out
        return (out.logprobs_R, out.entropy_R) + ((out.divergence_D,) if self.taught else ())

    def dense(self, hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        logits = self._capped(0.7 * (hidden @ weight.T + bias)) / self.temperature[:, None]
        logprobs = logits.log_softmax(-1)
        out = (logprobs.gather(1, self.targets[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1))
        if not self.taught:
            return out
        last = slice(len(hidden) - self.taught, None)
        return (*out, divergence(logits[last], self.teacher_logits(), self.config, self.targets[last]))

    def teacher_logits(self) -> Tensor:
        logits = self._capped(0.7 * (self.states @ self.other.T + self.other_bias))
        return logits / self.temperature[-self.taught :, None]

    def _capped(self, logits: Tensor) -> Tensor:
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def worst(case: Case, chunk_rows: int | None) -> float:
    """Largest difference of values and gradients between fused and dense."""
    ours, theirs = case.fused(chunk_rows, *case.inputs()), case.dense(*case.inputs())
    draw = torch.Generator().manual_seed(1)
    coming = [torch.randn(value.shape, generator=draw, dtype=torch.float64).to(value) for value in ours]
    found = torch.autograd.grad(ours, case.inputs(), coming)
    expected = torch.autograd.grad(theirs, case.inputs(), coming)
    pairs = zip(ours + found, theirs + expected, strict=True)
    return max((one - other).abs().max().item() if one.numel() else 0.0 for one, other in pairs)


@pytest.mark.parametrize("chunk_rows", [1, 7, 256, 9, None])
@pytest.mark.parametrize(("taught", "device"), [(0, "cpu"), (4, "cpu"), (9, "cpu"), pytest.param(4, "cuda", marks=GPU)])
def test_gradcheck(chunk_rows, taught, device):
    # float64: every gradient is that of finite differences, for chunks of 1, 7, 256, N rows and kept logits, without
    # and with taught rows (finite differences move the student alone: the teacher's layer is another).
    case = Case(9, taught, device=device)
    assert torch.autograd.gradcheck(lambda *inputs: case.fused(chunk_rows, *inputs), case.inputs())


@pytest.mark.parametrize("chunk_rows", [1, 7, None])
def test_teacher_statistics_are_dense_ones(chunk_rows):
    # The teacher's entropies and its log-probabilities of the targets, at the rows' temperatures.
    case = Case(9, 4, cap=2.0)
    case.fused(chunk_rows, *case.inputs())
    logprobs = case.teacher_logits().log_softmax(-1)
    expected = logprobs.gather(1, case.targets[-4:, None]).squeeze(1)
    assert torch.allclose(case.statistics.teacher_logprobs_D, expected, atol=1e-10)
    assert torch.allclose(case.statistics.teacher_entropy_D, -(logprobs.exp() * logprobs).sum(-1), atol=1e-10)


SHAPES = {
    "share": st.floats(0, 1), "chunk": st.sampled_from([None, 1, 2, 7, 256]), "cap": st.sampled_from([None, 2.0]),
    "kind": st.sampled_from([*KINDS]), "seed": st.integers(0, 99),
}  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(0, 40), **SHAPES)
def test_any_shape_is_the_dense_head(rows, share, chunk, cap, kind, seed):
    # Values and gradients of hidden states, weight and bias equal the dense formulas to 1e-10: any number of rows and
    # taught rows (none too), any chunk, temperatures, scale, soft cap, every kind of divergence.
    assert worst(Case(rows, round(share * rows), seed=seed, cap=cap, kind=kind), chunk) < 1e-10


@DEVICES
@pytest.mark.parametrize("temperature", [None, 0.7])
@pytest.mark.parametrize("wanted", [0, 1])
def test_one_output_alone(wanted, temperature, device):
    # Only log-probabilities or only entropies come back with a gradient, with and without a temperature, no bias,
    # float32 temperatures beside float64 logits: as the dense formulas.
    case = Case(5, 0, device=device)
    heat = None if temperature is None else torch.full((5,), temperature, device=device)
    out = token_statistics(Head(weight_VH=case.weight), case.hidden, case.targets, heat, chunk_rows=2)
    logprobs = (case.hidden @ case.weight.T / (1.0 if heat is None else heat[:, None])).log_softmax(-1)
    dense = (logprobs.gather(1, case.targets[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1))[wanted]
    ours = (out.logprobs_R, out.entropy_R)[wanted]
    assert torch.allclose(ours, dense, atol=1e-12)
    found, expected = (torch.autograd.grad(value.sum(), (case.hidden, case.weight)) for value in (ours, dense))
    assert all(torch.allclose(one, other, atol=1e-12) for one, other in zip(found, expected, strict=True))


@DEVICES
@pytest.mark.parametrize("chunk_rows", [2, None])
def test_masked_logits_do_not_count(chunk_rows, device):
    # A bias of -inf takes tokens out of the vocabulary: values and gradients are those of a head without these tokens,
    # also where a whole piece of a row is masked. NaN logits show in every statistic of their rows, and only there.
    case = Case(4, 0, device=device)
    open_V = torch.tensor([*range(8, 12), 17], device=device)
    bias = torch.full((V,), float("-inf"), device=device, dtype=torch.float64).index_fill(0, open_V, 0.0)
    at = torch.tensor([0, 4, 2, 1], device=device)
    out = token_statistics(Head(weight_VH=case.weight, bias_V=bias), case.hidden, open_V[at], chunk_rows=chunk_rows)
    logprobs = (case.hidden @ case.weight[open_V].T).log_softmax(-1)
    dense = logprobs.gather(1, at[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)
    pairs = zip((out.logprobs_R, out.entropy_R), dense, strict=True)
    assert all(torch.allclose(one, other, atol=1e-12) for one, other in pairs)
    found = torch.autograd.grad((out.logprobs_R + 2 * out.entropy_R).sum(), (case.hidden, case.weight))
    expected = torch.autograd.grad((dense[0] + 2 * dense[1]).sum(), (case.hidden, case.weight))
    assert all(torch.allclose(one, other, atol=1e-12) for one, other in zip(found, expected, strict=True))

    broken = case.hidden.detach().clone()
    broken[1] = float("nan")
    out = token_statistics(Head(weight_VH=case.weight), broken, case.targets, chunk_rows=chunk_rows)
    for values in (out.logprobs_R, out.entropy_R):
        assert values.isnan().tolist() == [False, True, False, False]


def test_empty_results_are_attached_to_the_graph():
    # R = 0: empty results whose backward gives zeros, so a rank without tokens takes part in the collectives.
    case = Case(0, 0)
    logprobs, entropy = case.fused(None, *case.inputs())
    assert logprobs.shape == entropy.shape == (0,)
    hidden, weight, bias = torch.autograd.grad(logprobs.sum(), case.inputs())
    assert hidden.shape == (0, H) and not weight.any() and not bias.any()


@pytest.mark.parametrize("chunk_rows", [3, None])
def test_the_teacher_gets_no_gradient(chunk_rows):
    # Teacher states and teacher layer have no gradient after a backward pass, although they could have one.
    case = Case(8, 5)
    case.states.requires_grad_()
    case.other.requires_grad_()
    case.fused(chunk_rows, *case.inputs())[2].sum().backward()
    assert case.hidden.grad is not None and case.weight.grad is not None
    assert case.states.grad is case.other.grad is None


def test_rows_without_a_teacher_are_not_touched_by_the_divergence():
    # The divergence's gradient lies in the taught rows' hidden states alone.
    case = Case(10, 4)
    (gradient,) = torch.autograd.grad(case.fused(3, *case.inputs())[2].sum(), case.hidden)
    assert not gradient[:6].any() and gradient[6:].any(-1).all()


def test_large_and_shifted_logits_stay_exact():
    # float32 with logits around 1e4: log-probabilities and entropies equal float64's to 1e-3 of their size.
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(6, H, generator=draw), torch.randn(V, H, generator=draw)
    bias = torch.full((V,), 1e4)
    out = token_statistics(Head(weight_VH=weight, bias_V=bias), hidden, torch.arange(6))
    exact = (hidden.double() @ weight.double().T).log_softmax(-1)
    assert (out.logprobs_R - exact.gather(1, torch.arange(6)[:, None]).squeeze(1)).abs().max() < 5e-3
    assert (out.entropy_R + (exact.exp() * exact).sum(-1)).abs().max() < 5e-3


def test_half_precision_operands_have_float32_results():
    # bfloat16 hidden states and weights: statistics are float32 and as exact as their operands; gradients come back in
    # the operands' type, but were summed over chunks in float32.
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, H, generator=draw).bfloat16().requires_grad_()
    weight = torch.randn(V, H, generator=draw).bfloat16().requires_grad_()
    targets = torch.randint(0, V, (64,), generator=draw)
    out = token_statistics(Head(weight_VH=weight), hidden, targets, chunk_rows=1)
    out.logprobs_R.sum().backward()
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    exact = (wide[0] @ wide[1].T).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    exact.sum().backward()
    assert out.logprobs_R.dtype == torch.float32 and (out.logprobs_R - exact).abs().max() < 1e-5
    for tensor, reference in zip((hidden, weight), wide, strict=True):
        assert tensor.grad.dtype == torch.bfloat16
        assert torch.allclose(tensor.grad.double(), reference.grad, rtol=2**-8, atol=1e-6)


SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "values"),
    [("Qwen3", {"tie_word_embeddings": True}), ("Granite", {"logits_scaling": 4.0}), ("Cohere", {"logit_scale": 0.25}),
     ("Gemma2", {"final_logit_softcapping": 3.0}), ("Phi", {})],
)  # fmt: skip
def test_output_layers_of_model_families(family, values):
    # Tied weights, scaling, soft caps and a bias: the log-probabilities are those of the model's own logits.
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SMALL | values)
    lm = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    ids = torch.randint(0, 96, (1, 12))
    with torch.no_grad():
        expected = lm(input_ids=ids).logits[0].log_softmax(-1).gather(1, ids[0, :, None]).squeeze(1)
        hidden = lm.base_model(input_ids=ids).last_hidden_state[0]
        assert (token_statistics(head_of(lm), hidden, ids[0]).logprobs_R - expected).abs().max() < 1e-5


def test_an_adapted_output_layer_trains_its_adapters():
    # Low-rank adapters on the output layer: values and adapter gradients equal those of peft's own forward pass; with
    # the adapters scaled to nothing the layer is the base.
    from composer_prime.config.trainer import LoraConfig
    from trainer.model.adapters import inject_adapters
    from trainer.model.policy_model import adapters_off

    torch.manual_seed(0)
    lm = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL, tie_word_embeddings=False))
    inject_adapters(lm, LoraConfig(rank=2, alpha=4, target_modules=["lm_head"]))
    layer = lm.get_output_embeddings()
    layer.lora_B["default"].weight.data.normal_()
    hidden, targets = torch.randn(7, 32), torch.randint(0, 96, (7,))
    adapters = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    expected = layer(hidden).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    ours = token_statistics(head_of(lm), hidden, targets, chunk_rows=3).logprobs_R
    assert torch.allclose(ours, expected, atol=1e-5)
    for one, other in zip(
        torch.autograd.grad(ours.sum(), adapters), torch.autograd.grad(expected.sum(), adapters), strict=True
    ):
        assert torch.allclose(one, other, atol=1e-5)
    with adapters_off(lm):
        assert torch.equal(head_of(lm).weight_VH, layer.base_layer.weight)
    assert not torch.equal(head_of(lm).weight_VH, layer.base_layer.weight)


def test_an_output_layer_that_is_not_linear_is_refused():
    # A model that ends otherwise: the error names its class and what to do.
    lm = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL))
    lm.lm_head = torch.nn.Sequential(torch.nn.Linear(32, 96))
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM ends in a Sequential, .* linear output layer"):
        head_of(lm)


@GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_head_is_that_of_the_cpu(dtype):
    # The same rows on CUDA and on the CPU give the same statistics and gradients, to the type's rounding.
    results = []
    for device in ("cpu", "cuda"):
        draw = torch.Generator().manual_seed(0)
        hidden = torch.randn(50, 64, generator=draw).to(device, dtype).requires_grad_()
        weight = torch.randn(1000, 64, generator=draw).to(device, dtype).requires_grad_()
        targets = torch.randint(0, 1000, (50,), generator=draw).to(device)
        out = token_statistics(Head(weight_VH=weight, scale=0.1), hidden, targets, chunk_rows=16)
        out.logprobs_R.sum().backward()
        results.append([t.detach().float().cpu() for t in (out.logprobs_R, out.entropy_R, hidden.grad, weight.grad)])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=0.02, atol=0.02)
