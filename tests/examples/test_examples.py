"""The files of examples/ do what they say."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from composer_prime.channels.policy import PolicyConfig, load_policy_loss, policy_loss
from composer_prime.channels.term import channel_metrics, total_loss
from composer_prime.channels.tokens import PolicyTokens
from composer_prime.config.channels import ChannelsConfig
from composer_prime.errors import ConfigError
from composer_prime.wire.types import StepTotals

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def examples(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)


# Compiler output becomes an error turn with a hint that names what is wrong; output without an error does not.
def test_own_hint(examples):
    import own_hint

    templates = own_hint.Templates.load(own_hint.TABLES)
    hints = [own_hint.hint_for(answer, templates) for answer in own_hint.ANSWERS]
    assert [hint and hint[0] for hint in hints] == ["undefined_name", "compiler_error", "undefined_name", None]
    assert "total is not defined" in hints[0][1] and "src/lib.rs:3: expected `;`, found `}`" in hints[1][1]


def policy_tokens(logprobs_T: torch.Tensor, gap: float) -> PolicyTokens:
    return PolicyTokens(
        logprobs_T=logprobs_T,
        sampler_logprobs_T=logprobs_T.detach() + gap,
        advantages_T=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        entropy_T=torch.zeros(4),
        sequence_T=torch.tensor([0, 0, 1, 1]),
        sequences=2,
    )


# On-policy and with negative rollouts in full, the own objective has dr_grpo's gradient; off-policy it unlearns less.
def test_own_loss(examples):
    from own_loss import tapered_loss

    logprobs_T = torch.tensor([-0.5, -1.0, -2.0, -0.1], requires_grad=True)
    totals = StepTotals(samples=2, tokens=4)
    config = PolicyConfig(objective="dr_grpo", correction="none")
    expected = policy_loss(policy_tokens(logprobs_T, 0.0), totals, config, 8)[0]
    loss = tapered_loss(policy_tokens(logprobs_T, 0.0), totals, config, 8, negative_share=1.0)[0]
    gradients = [torch.autograd.grad(value, logprobs_T)[0] for value in (loss, expected)]
    assert torch.allclose(*gradients)
    off_policy, sums = tapered_loss(policy_tokens(logprobs_T, 0.7), totals, config, 8, negative_share=1.0)
    gradient = torch.autograd.grad(off_policy, logprobs_T)[0]
    assert torch.equal(gradient[:2], gradients[0][:2]) and (gradient[2:] < gradients[0][2:]).all()
    assert sums["tapered"] == 2


# The import path puts the own objective into the total loss, with metrics of its own; a wrong one says what is wrong.
def test_own_loss_by_its_import_path(examples):
    from own_loss import tapered_loss

    logprobs_T, totals = torch.tensor([-0.5, -1.0, -2.0, -0.1], requires_grad=True), StepTotals(samples=2, tokens=4)
    channels = ChannelsConfig(policy={"loss": {"name": "own_loss:tapered_loss", "settings": {"negative_share": 0.25}}})
    tokens, terms = policy_tokens(logprobs_T, 0.7), channels.terms(8)
    parts = total_loss(terms, {"policy": tokens}, totals)
    assert torch.equal(parts.total, tapered_loss(tokens, totals, channels.policy, 8, negative_share=0.25)[0])
    metrics = channel_metrics(terms, {name: value.item() for name, value in parts.sums.items()})
    assert metrics["policy/tapered"] == 0.5 and metrics["loss/policy"] == pytest.approx(parts.total.item())
    assert {"policy/mismatch_kl", "policy/ess", "policy/entropy"} <= metrics.keys()
    assert load_policy_loss(PolicyConfig(objective="grpo")) is policy_loss
    for path in ("no_such_module:loss", "own_loss:nothing", "own_loss:on_a_batch"):
        with pytest.raises(ConfigError, match=rf"channels\.policy\.loss .*{path}"):
            load_policy_loss(PolicyConfig(loss=path))
    with pytest.raises(ConfigError, match=r"channels\.policy\.loss .*no_such"):
        load_policy_loss(PolicyConfig(loss={"name": "own_loss:tapered_loss", "settings": {"no_such": 1}}))
    with pytest.raises(ValidationError, match=r"own_loss\.tapered_loss"):
        PolicyConfig(loss="own_loss.tapered_loss")


# On padded rows it counts the sampled ids only: good ones in full, bad ones by their share.
def test_own_loss_on_a_batch(examples):
    import own_loss

    logprobs_BT = torch.tensor([[-1.0, -2.0, -4.0], [-8.0, -16.0, -32.0]], requires_grad=True)
    mask_BT = torch.tensor([[False, True, True], [False, False, True]])
    loss = own_loss.on_a_batch(logprobs_BT, mask_BT, torch.tensor([1.0, -1.0]))
    assert loss.item() == pytest.approx((6 - 32 * own_loss.NEGATIVE_SHARE) / own_loss.grpo_in_one_file.MAX_CONTEXT)
    gradient = torch.autograd.grad(loss, logprobs_BT)[0]
    assert torch.equal(gradient != 0, mask_BT)


# Padding and company in a batch change no log-probability; the loss counts exactly the sampled ids.
def test_grpo_in_one_file_masks(examples):
    import grpo_in_one_file as grpo

    tokenizer = grpo.AutoTokenizer.from_pretrained(grpo.MODEL, padding_side="left")
    model = grpo.AutoModelForCausalLM.from_pretrained(grpo.MODEL, dtype=torch.float32)
    draw = random.Random(0)
    rollouts = []
    for length in (5, 9):
        episode = grpo.generate(seed=draw.getrandbits(53), difficulty=length // 4, split="train")
        rollouts.append(grpo.open_rollout(tokenizer, episode))
        grpo.append(rollouts[-1], list(range(10, 10 + length)), sampled=True)
    with torch.no_grad():
        logprobs_BT, mask_BT = grpo.sampled_logprobs(model, tokenizer, rollouts)
        for row, rollout in enumerate(rollouts):
            alone_BT, alone_mask_BT = grpo.sampled_logprobs(model, tokenizer, [rollout])
            assert torch.allclose(logprobs_BT[row][mask_BT[row]], alone_BT[alone_mask_BT], atol=1e-4)
    assert mask_BT.sum(1).tolist() == [5, 9]
    assert grpo.dr_grpo_loss(torch.ones_like(logprobs_BT), mask_BT, torch.tensor([1.0, -1.0])) == 4 / grpo.MAX_CONTEXT


# A turn's call gets the tool's reply or an error text; a turn without a call ends the rollout.
def test_grpo_in_one_file_tools(examples):
    import grpo_in_one_file as grpo

    episode = grpo.generate(seed=7, difficulty=1, split="train")
    step = episode.steps[0]
    tool = episode.tool_for(step.operation)
    call = json.dumps({"name": tool.name, "arguments": tool.encode(step.operands)})
    assert grpo.answer_tool_call(episode, f"<tool_call>\n{call}\n</tool_call>") == episode.answer
    assert grpo.answer_tool_call(episode, "<tool_call>\n{nonsense") == grpo.INVALID_JSON
    assert grpo.answer_tool_call(episode, episode.answer) is None


# The whole loop runs, with dr_grpo's loss and with the own one, and returns the rewards of each step.
@pytest.mark.slow
def test_grpo_in_one_file_runs(examples, capsys):
    import grpo_in_one_file as grpo
    from own_loss import on_a_batch

    few = ["--steps", "1", "--groups", "1", "--group-size", "4"]
    for loss in (grpo.dr_grpo_loss, on_a_batch):
        rewards = grpo.main(few, loss=loss)
        assert len(rewards) == 1 and 0 <= rewards[0] <= 1
    assert capsys.readouterr().out.count("step 1/1  reward") == 2


# The task set has a tool that answers, an error that hints can repair, and the right answer beside each question.
def test_own_environment():
    from examples.own_environment import SumsConfig, SumsTaskset

    task = next(iter(SumsTaskset(SumsConfig(id="examples.own_environment")).load()))
    executor = task.data.tool_executor()
    left, right = (int(word) for word in re.findall(r"\d+", task.data.prompt))
    assert asyncio.run(executor.call("plus", json.dumps({"left": left, "right": right}))) == task.data.answer
    wrong = [("plus", "{"), ("plus", "[]"), ("plus", json.dumps({"left": "1", "right": 2})), ("add", "{}")]
    assert all(task.data.is_tool_error(asyncio.run(executor.call(*call))) for call in wrong)


# The command of the page trains a step on it.
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_own_environment_trains(tmp_path):
    settings = ["--run.output_dir", str(tmp_path), "--run.max_steps", "1", "--orchestrator.eval.tasks", "4"]
    command = [sys.executable, "-m", "trainer.main", "@", str(EXAMPLES / "own_environment/own.toml"), *settings]
    finished = subprocess.run(command, cwd=EXAMPLES.parent, capture_output=True, text=True, timeout=540)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "own/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["role"] == "trainer" and "loss/total" in line] == [1]
