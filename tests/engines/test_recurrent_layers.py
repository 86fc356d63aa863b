"""The local engine over models whose layers carry a state: linear attention and Mamba beside attention."""

from __future__ import annotations

import asyncio

import pytest
import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from tests.engines.models import SHAPE, make_model
from tests.engines.reference import sampling
from tests.engines.test_local_engine import start

LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
           "shared_expert_intermediate_size": 32}  # fmt: skip
FAMILIES = {
    "Qwen3Next": LINEAR | EXPERTS | {"head_dim": 16},
    "Qwen3_5": LINEAR | {"head_dim": 16},
    "FalconH1": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_ssm": 64,
                 "head_dim": 8},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
async def test_states_are_those_of_the_tokens(family, tmp_path):
    # Batches, prompts in pieces, siblings, swaps, and turns of a conversation that go on, branch off or repeat: each
    # logprob is that of transformers. Only a conversation that goes on, or a copy of it, reuses a state.
    torch.manual_seed(0)
    made = getattr(transformers, f"{family}ForCausalLM")
    values = {**SHAPE, "hidden_size": 64, "num_hidden_layers": 4} | FAMILIES[family]
    made(made.config_class(**values)).save_pretrained(tmp_path)
    for path in make_model(tmp_path / "tokenizer", tied=True).glob("token*.json"):
        path.rename(tmp_path / path.name)
    subject = await start(tmp_path, prefill_tokens=32, max_batch=6)
    wanted = [(subject.prompt(k, 1 + 21 * k), sampling(8, seed=k)) for k in range(4)]
    wanted += [(subject.prompt(0, 60), sampling(8 + k, seed=k)) for k in range(4)]
    for version in (0, 1):
        tasks = [asyncio.ensure_future(subject.generate(*pair)) for pair in wanted]
        while version and not any(task.done() for task in tasks):
            await asyncio.sleep(0)
        if version:
            stored = revert_weight_conversion(subject.reference.model, subject.reference.weights(1))
            await subject.engine.load_weights(1, stored)
        for (prompt, options), done in zip(wanted, await asyncio.gather(*tasks), strict=True):
            subject.verify(prompt, options, done)
    prompt, options = subject.prompt(23, 80), sampling(8)
    first = await subject.generate(prompt, options, "talk")
    longer = prompt + first.ids.tolist() + subject.prompt(24, 10)
    turns = [("copy", [*longer, 7], len(longer) - 11), ("talk", longer, len(longer) - 11), ("talk", longer, 0),
             ("talk", prompt[:70] + subject.prompt(25, 20), 0)]  # fmt: skip
    for session, tokens, cached in turns:
        done = await subject.generate(tokens, options, session)
        subject.verify(tokens, options, done)
        assert done.prompt_cached == cached
        scores = torch.tensor(await subject.engine.score(tokens))
        assert (scores - subject.reference.score(tokens, 1)).abs().max() < 1e-4
    await subject.engine.close()
