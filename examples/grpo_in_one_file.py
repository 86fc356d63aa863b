"""GRPO on tool calls, top to bottom in one file: python examples/grpo_in_one_file.py [--steps 30]

Trains the embedded tiny model (1.9 million parameters) on toolsmith tasks, on a CPU. No processes, no gateway, no
packing: read this first, then docs/architecture.md for what the real trainer adds.

Departures from the run of configs/a1.toml:
1. Synchronous and on-policy. One optimizer step a batch, so the PPO ratio is 1 and no clip or correction is needed.
2. transformers' generate() samples one turn for all unfinished rollouts at a time.
3. Rows are padded, and siblings compute their common prompt again.
4. Plain dr_grpo (Dr. GRPO, arXiv 2503.20783): advantage = reward - group mean, a constant length divisor.

Suffixes: _B rollouts in the batch, _T positions of a padded row.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from orchestrator.environments.toolsmith.taskset import INVALID_JSON, Episode, generate, run_call

MODEL = Path(__file__).parents[1] / "composer_prime/assets/tiny/policy"
MAX_TURNS, MAX_NEW_TOKENS, MAX_CONTEXT = 6, 64, 384
TOOL_REPLY = "\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


@dataclass(kw_only=True)
class Rollout:
    """One attempt at a task, as token ids. Sampled ids are kept as they are: text is never tokenized again."""

    episode: Episode
    ids: list[int]
    sampled: list[bool] = field(default_factory=list)
    """True for each id that the model sampled; only these are trained."""
    reply: str = ""
    done: bool = False


def open_rollout(tokenizer, episode: Episode) -> Rollout:
    """A rollout that holds the rendered prompt."""
    tools = [tool.schema() for tool in episode.tools]
    question = [{"role": "user", "content": episode.question}]
    ids = tokenizer.apply_chat_template(question, tools=tools, add_generation_prompt=True)["input_ids"]
    return Rollout(episode=episode, ids=ids, sampled=[False] * len(ids))


def answer_tool_call(episode: Episode, text: str) -> str | None:
    """The tool's reply to a turn, which may be an error text; None when the turn calls no tool."""
    call = re.search(r"<tool_call>(.*?)(?:</tool_call>|$)", text, re.DOTALL)
    if call is None:
        return None
    try:
        request = json.loads(call[1])
        return run_call(episode, request["name"], json.dumps(request["arguments"]))
    except (ValueError, KeyError, TypeError):
        return INVALID_JSON


@torch.no_grad()
def play(model, tokenizer, rollouts: list[Rollout]) -> None:
    """Play all rollouts to their end, one turn of every unfinished rollout at a time."""
    model.eval()
    for _ in range(MAX_TURNS):
        active = [rollout for rollout in rollouts if not rollout.done]
        if not active:
            break
        prompts = tokenizer.pad({"input_ids": [rollout.ids for rollout in active]}, return_tensors="pt")
        width = prompts["input_ids"].shape[1]
        output = model.generate(**prompts, do_sample=True, top_k=0, max_new_tokens=MAX_NEW_TOKENS)
        for rollout, row in zip(active, output[:, width:].tolist(), strict=True):
            end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
            append(rollout, row[:end], sampled=True)
            rollout.reply = tokenizer.decode(row[:end], skip_special_tokens=True).strip()
            reply = answer_tool_call(rollout.episode, rollout.reply)
            if reply is None or row[end - 1] != tokenizer.eos_token_id:
                rollout.done = True
                continue
            append(rollout, tokenizer.encode(TOOL_REPLY.format(reply), add_special_tokens=False), sampled=False)
            rollout.done = len(rollout.ids) + MAX_NEW_TOKENS > MAX_CONTEXT


def append(rollout: Rollout, ids: list[int], *, sampled: bool) -> None:
    rollout.ids += ids
    rollout.sampled += [sampled] * len(ids)


def sampled_logprobs(model, tokenizer, rollouts: list[Rollout]) -> tuple[torch.Tensor, torch.Tensor]:
    """log pi of each id, and True where the model sampled it; both [B, T - 1], for the first id has no prediction."""
    batch = tokenizer.pad({"input_ids": [rollout.ids for rollout in rollouts]}, return_tensors="pt")
    ids_BT, width = batch["input_ids"], batch["input_ids"].shape[1]
    mask_BT = torch.tensor([[False] * (width - len(rollout.ids)) + rollout.sampled for rollout in rollouts])
    position_BT = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    logits_BTV = model(**batch, position_ids=position_BT).logits[:, :-1].float()
    return logits_BTV.log_softmax(-1).gather(-1, ids_BT[:, 1:, None]).squeeze(-1), mask_BT[:, 1:]


def dr_grpo_loss(logprobs_BT: torch.Tensor, mask_BT: torch.Tensor, advantages_B: torch.Tensor) -> torch.Tensor:
    """-1 / MAX_CONTEXT * sum over rollouts i and sampled tokens t of A_i log pi(t); the caller divides by B."""
    return -(advantages_B[:, None] * logprobs_BT * mask_BT).sum() / MAX_CONTEXT


def main(arguments: list[str] | None = None, loss=dr_grpo_loss) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--groups", type=int, default=8, help="tasks a step")
    parser.add_argument("--group-size", type=int, default=8, help="rollouts a task")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    draw = random.Random(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0)
    rewards = []
    for step in range(1, options.steps + 1):
        episodes = [
            generate(seed=draw.getrandbits(53), difficulty=draw.randint(1, 3), split="train")
            for _ in range(options.groups)
        ]
        rollouts = [open_rollout(tokenizer, episode) for episode in episodes for _ in range(options.group_size)]
        play(model, tokenizer, rollouts)
        reward_B = torch.tensor([float(rollout.reply == rollout.episode.answer) for rollout in rollouts])
        groups = reward_B.view(options.groups, options.group_size)
        advantages_B = (groups - groups.mean(1, keepdim=True)).flatten()
        model.train()
        for start in range(0, len(rollouts), options.group_size):  # a group is a micro-batch: its rows are alike
            chosen = slice(start, start + options.group_size)
            if advantages_B[chosen].any():  # a group whose rewards are all equal teaches nothing
                logprobs_BT, mask_BT = sampled_logprobs(model, tokenizer, rollouts[chosen])
                (loss(logprobs_BT, mask_BT, advantages_B[chosen]) / len(rollouts)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rewards.append(reward_B.mean().item())
        print(f"step {step}/{options.steps}  reward {rewards[-1]:.3f}", flush=True)
    return rewards


if __name__ == "__main__":
    main()
