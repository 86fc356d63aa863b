"""The trainer's CUDA path without a GPU: fake tensors carry device, type and shape through the real code."""

import pytest
import torch
import transformers
from hinted_runs import make_hinted, make_pairs, three_channels
from small_runs import VOCABULARY, rows_of
from torch._subclasses.fake_tensor import FakeTensorMode

from composer_prime.channels.sdpo import divergence
from composer_prime.packing.pack import totals
from trainer.head import HeadTeacher
from trainer.model.policy_model import PACKED, AuxiliaryLogprobs, Policy
from trainer.train import loss_of

CUDA = torch.device("cuda", 0)
CHANNELS = three_channels()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_step_in_bfloat16_on_cuda_mixes_no_devices_or_types(temperature):
    # Rows, forward pass, head and the three loss terms of a bfloat16 model on a GPU: every operation's operands lie
    # together and fit (an operation on a CPU and a CUDA tensor raises), and loss and figures come out on the GPU. What
    # a real kernel computes, and the backward pass, are the GPU tests' business.
    samples, pairs = make_hinted(3, 9, temperature=temperature), make_pairs(3)
    with FakeTensorMode(allow_non_fake_inputs=False):
        policy = bfloat16_policy()
        (row,) = rows_of(samples, CUDA, 4096, pairs, distil=True, prefer=True, share=True)
        arrays = [array for term in row.terms.values() for array in term.arrays.values()]
        assert len(arrays) > 1 and {each.device for each in (row.input_ids, row.source_R, *arrays)} == {CUDA}
        states = policy.states(row.taught[0]).detach()
        measure = lambda student, teacher, targets: divergence(student, teacher, CHANNELS.sdpo, targets)
        teacher = HeadTeacher(hidden_DH=states, head=policy.head(), divergence=measure)
        auxiliary = AuxiliaryLogprobs(
            teacher=teacher, references={"replay_dpo": torch.zeros(2 * len(pairs), device=CUDA)}
        )
        settings = CHANNELS.terms(64)
        parts, broken = loss_of(policy, row, totals(samples, pairs), settings, auxiliary=auxiliary)
        assert {parts.total.device, broken.device, *(value.device for value in parts.sums.values())} == {CUDA}
        assert parts.total.requires_grad and parts.total.dtype == torch.float32


def bfloat16_policy() -> Policy:
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    with CUDA:
        lm = transformers.Qwen3ForCausalLM._from_config(config, attn_implementation=PACKED, dtype=torch.bfloat16)
    return Policy(lm, PACKED)
