"""SFT in the trainer: packed rows against each row alone, as a further term, against TRL, and held-out figures."""

from __future__ import annotations

import copy
import math
import warnings

import msgspec
import numpy as np
import pytest
import torch
import transformers
from small_runs import VOCABULARY, make_samples, row_of
from torch import Tensor

from composer_prime.channels.policy import PolicyConfig
from composer_prime.channels.term import Term, channel_metrics
from composer_prime.config.channels import ChannelsConfig
from composer_prime.data.conversation_rows import ConversationRow
from composer_prime.errors import ConfigError, RunMismatchError
from composer_prime.packing.pack import pack, totals
from composer_prime.wire.types import TermUnit, flags, ints, pack_flags, pack_ints
from orchestrator.chat_renderer import ChatTemplateRenderer
from orchestrator.file_rows import RowTokenizer
from tests.chat_models import chat
from trainer.model.policy_model import PACKED, Policy
from trainer.train import loss_of, score_held_out

CPU = torch.device("cpu")


def make_rows(count: int = 7, seed: int = 0) -> list[TermUnit]:
    """Conversations of two turns of random ids, and one of one turn."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        mask = [0] * int(rng.integers(2, 9)) + [1] * int(rng.integers(1, 9))
        mask += [0] * 3 + [1] * 4 if number else []
        ids = rng.integers(0, VOCABULARY, len(mask))
        rows.append(TermUnit(term="sft", name=f"row f:{number}", documents=[pack_ints(ids)], masks=[pack_flags(mask)]))
    return rows


def model(
    dtype: torch.dtype = torch.float64, attention: str = PACKED, vocabulary: int = VOCABULARY
) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    lm = transformers.Qwen3ForCausalLM._from_config(config, attn_implementation=attention)
    return lm.to(dtype).train()


def settings(policy: float = 1.0, sft: float = 1.0) -> list[Term]:
    channels = ChannelsConfig(policy=PolicyConfig(correction="none"), sft={"weight": sft})
    return channels.terms(64)


def ours(lm, rows: list[TermUnit], samples=(), *, budget: int = 64, weight: float = 1.0):
    """Loss, gradients and metric sums of a step, over several packed rows."""
    (batches,) = pack(samples, rows, run_id="r", step=1, world_size=1, max_tokens=budget)
    trained_rows = sum(1 in batch.loss_mask for batch in batches)
    counts = totals(samples, rows, micro_batches=trained_rows)
    policy, total, sums = Policy(lm, PACKED), 0.0, {}
    lm.zero_grad()
    for batch in batches:
        row = row_of(batch, CPU, lm.config.vocab_size, share=True, imitate=weight > 0)
        parts, _ = loss_of(policy, row, counts, settings(sft=weight))
        parts.total.backward()
        total += parts.total.item()
        sums = {name: sums.get(name, 0.0) + value.item() for name, value in parts.sums.items()}
    return total, gradients(lm), sums


def gradients(lm) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in lm.named_parameters() if parameter.grad is not None}


def alone(lm, rows: list[TermUnit]):
    """Loss and gradients of torch's cross entropy on each row by itself, mean over all imitated tokens."""
    lm.zero_grad()
    tokens, loss = sum(row.num_trained for row in rows), 0.0
    for row in rows:
        ids, mask = torch.tensor(ints(row.documents[0])).long(), torch.tensor(flags(row.masks[0])).bool()
        logits = lm(input_ids=ids[None], use_cache=False).logits[0, :-1]
        labels = torch.where(mask, ids, -100)[1:]
        part = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / tokens
        part.backward()
        loss += part.item()
    return loss, gradients(lm)


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_packed_rows_have_the_loss_and_gradients_of_each_row_alone(dtype, precision):
    # Several conversations share a row of 64 tokens, and none sees another: value and every gradient are torch's cross
    # entropy of the rows one by one, with the mean over the imitated tokens of the whole step.
    rows = make_rows()
    (batches,) = pack((), rows, run_id="r", step=1, world_size=1, max_tokens=64)
    assert len(batches) > 1 and max(len(batch.units) for batch in batches) > 1
    loss, grads, sums = ours(model(dtype), rows)
    expected, expected_grads = alone(model(dtype, "sdpa"), rows)
    assert math.isclose(loss, expected, rel_tol=precision)
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name], grad, atol=precision, rtol=0)
    metrics = channel_metrics(settings(), sums)
    assert metrics["sft/tokens"] == sum(row.num_trained for row in rows)
    assert math.isclose(metrics["sft/nll"], expected, rel_tol=1e-5) and metrics["loss/policy"] == 0


def test_as_a_further_term_the_gradient_is_the_weighted_sum():
    # policy + 0.1 sft in one step, samples and conversations in common rows.
    samples, rows, lm = make_samples(1, 8), make_rows(), model()
    mixed_loss, mixed, _ = ours(lm, rows, samples, weight=0.1)
    policy_loss, policy, _ = ours(lm, [], samples, weight=0.0)
    sft_loss, sft, _ = ours(lm, rows)
    assert math.isclose(mixed_loss, policy_loss + 0.1 * sft_loss, rel_tol=1e-6)  # advantages are float32
    for name, grad in mixed.items():
        torch.testing.assert_close(grad, policy[name] + 0.1 * sft[name], atol=1e-8, rtol=0)


TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{% else %}{{ message.content }}<|im_end|>"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.slow
def test_trl_has_the_same_loss_and_gradients(tmp_path):
    # TRL's SFTTrainer with assistant_only_loss on the same conversations, from messages on, in float32: its padded
    # batch and our packed rows agree to rounding.
    import datasets

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl import SFTConfig, SFTTrainer

    tokenizer = copy.copy(chat("smollm2")[1])
    tokenizer.chat_template = TEMPLATE
    says = lambda number, turn: [("user", f"What is {number} + {turn}?"), ("assistant", f"{number + turn}.")]
    talks = [
        [{"role": role, "content": text} for turn in range(1 + number % 3) for role, text in says(number, turn)]
        for number in range(6)
    ]
    rows = [ConversationRow(name=f"f:{number}", messages=talk, tools=None) for number, talk in enumerate(talks)]
    maker = RowTokenizer(ChatTemplateRenderer(tokenizer), max_context=512)
    loss, grads, _ = ours(
        model(torch.float32, vocabulary=len(tokenizer)), list(map(maker.demonstration, rows)), budget=128
    )

    lm = model(torch.float32, "sdpa", vocabulary=len(tokenizer))
    arguments = SFTConfig(
        output_dir=str(tmp_path), assistant_only_loss=True, per_device_train_batch_size=len(talks), max_length=None,
        use_cpu=True, report_to=[], gradient_checkpointing=False, bf16=False, disable_tqdm=True,
    )  # fmt: skip
    data = datasets.Dataset.from_list([{"messages": talk} for talk in talks])
    trainer = SFTTrainer(lm, args=arguments, train_dataset=data, processing_class=tokenizer)
    (batch,) = trainer.get_train_dataloader()
    lm.zero_grad()
    theirs = trainer.compute_loss(lm, dict(batch))
    theirs.backward()
    assert math.isclose(loss, theirs.item(), rel_tol=1e-6)
    for name, grad in gradients(lm).items():
        torch.testing.assert_close(grads[name], grad, atol=2e-6, rtol=0)


def test_held_out_figures_are_those_of_plain_logits(world):
    # Loss and the share of tokens that are the likeliest, over all rows.
    rows, lm = make_rows(), model(torch.float32)
    plain, hits, tokens = model(torch.float32, "sdpa").eval(), 0, 0
    for row in rows:
        ids, mask = torch.tensor(ints(row.documents[0])).long(), torch.tensor(flags(row.masks[0])).bool()[1:]
        best = plain(input_ids=ids[None], use_cache=False).logits[0, :-1].argmax(-1)
        hits, tokens = hits + int((best == ids[1:])[mask].sum()), tokens + int(mask.sum())
    (batches,) = pack((), rows, run_id="r", step=1, world_size=1, max_tokens=64)
    packed = [row_of(batch, CPU, share=True, imitate=True) for batch in batches]
    figures = score_held_out(Policy(lm, PACKED), packed)
    assert figures["eval/demonstrations/tokens"] == tokens
    assert math.isclose(figures["eval/demonstrations/token_accuracy"], hits / tokens)
    assert math.isclose(figures["eval/demonstrations/loss"], alone(plain, rows)[0], rel_tol=1e-5)


def test_a_row_without_a_token_to_imitate_is_refused():
    (row,) = make_rows(1)
    empty = msgspec.structs.replace(row, masks=[bytes(len(row.masks[0]))])
    with pytest.raises(RunMismatchError, match="row f:0"):
        pack((), [empty], run_id="r", step=1, world_size=1, max_tokens=64)
    with pytest.raises(ConfigError, match=r"row f:0 .*trainer\.micro_batch_tokens"):
        pack((), [row], run_id="r", step=1, world_size=1, max_tokens=4)


def test_non_finite_logits_blame_the_row():
    lm, rows = model(), make_rows(2)
    (batch,) = pack((), rows, run_id="r", step=1, world_size=1, max_tokens=64)[0]
    row = row_of(batch, CPU, share=True, imitate=True)
    assert set(row.names) == {"row f:0", "row f:1"}
    with torch.no_grad():
        lm.model.embed_tokens.weight[int(ints(rows[0].documents[0])[0])] = math.nan
    _, bad = loss_of(Policy(lm, PACKED), row, totals((), rows), settings())
    assert bad[row.names.index("row f:0")] > 0
