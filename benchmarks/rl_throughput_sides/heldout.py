"""python -m benchmarks.rl_throughput_sides.heldout PLAN OUT FOLDER ...: mean held-out reward of model folders, as JSON.

It belongs to neither side: transformers' `generate` on left-padded batches, the model folder's own renderer, and the
episodes' own tools. All folders get the same episodes with the same seeds at temperature 1, under the case's limits.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.rl_throughput_sides.plan import Plan, heldout_episodes
from benchmarks.rl_throughput_sides.scoring import answer_is_right, call_is_right, first_call
from orchestrator.chat_renderer import build_renderer
from orchestrator.environments.tool_loop.harness import INVALID_CALL
from orchestrator.environments.toolsmith.taskset import Episode, run_call

BATCH = 64


def play(model: PreTrainedModel, renderer: Any, episodes: list[Episode], plan: Plan) -> list[float]:
    """The reward of one rollout of each episode."""
    prompts = [_opening(renderer, episode) for episode in episodes]
    rewards = [0.0] * len(episodes)
    live = list(range(len(episodes)))
    for _ in range(plan.max_turns):
        if not live:
            break
        completions = sample(model, [prompts[i] for i in live], renderer.get_stop_token_ids(), plan.max_tokens)
        going = []
        for i, ids in zip(live, completions, strict=True):
            reply = renderer.parse_response(ids)
            if plan.case == "single-turn":
                rewards[i] = call_is_right(episodes[i], first_call(renderer._tokenizer.decode(ids)))
                continue
            answers = _answers(episodes[i], reply)
            if not answers or ids[-1] not in renderer.get_stop_token_ids():
                rewards[i] = answer_is_right(episodes[i], reply.content)
                continue
            prompts[i] = renderer.bridge_to_next_turn(prompts[i], ids, answers).token_ids
            if len(prompts[i]) < plan.max_context:
                going.append(i)
        live = going if plan.max_turns > 1 else []
    return rewards


def _opening(renderer: Any, episode: Episode) -> list[int]:
    tools = [tool.schema() for tool in episode.tools]
    messages = [{"role": "user", "content": episode.question}]
    return renderer.render_ids(messages, tools=tools, add_generation_prompt=True)


def _answers(episode: Episode, reply: Any) -> list[dict[str, Any]]:
    """Tool messages for a reply, as the tool loop gives them."""
    texts = [run_call(episode, call.name, json.dumps(call.arguments)) for call in reply.tool_calls]
    texts += [INVALID_CALL] * reply.content.count("<tool_call>")
    return [{"role": "tool", "tool_call_id": f"call_{index}", "content": text} for index, text in enumerate(texts)]


@torch.inference_mode()
def sample(model: PreTrainedModel, prompts: list[list[int]], stops: list[int], max_tokens: int) -> list[list[int]]:
    """One completion of each prompt at temperature 1, its stop token included."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    done = model.generate(ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=True, temperature=1.0,
                          top_k=0, eos_token_id=stops, pad_token_id=0)[:, width:].tolist()  # fmt: skip
    return [_until_stop(tokens, set(stops)) for tokens in done]


def _until_stop(tokens: list[int], stops: set[int]) -> list[int]:
    end = next((index + 1 for index, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[:end]


def reward_of(folder: Path, plan: Plan) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    _, renderer = build_renderer(str(plan.model), None)
    torch.manual_seed(plan.seed)
    episodes = heldout_episodes(plan)
    batches = [episodes[start : start + BATCH] for start in range(0, len(episodes), BATCH)]
    return fmean(reward for batch in batches for reward in play(model, renderer, batch, plan))


def main() -> None:
    plan = Plan.read(Path(sys.argv[1]))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, plan.cores)
    torch.set_num_threads(1)  # a process for each core
    rewards = {folder: reward_of(Path(folder), plan) for folder in sys.argv[3:]}
    Path(sys.argv[2]).write_text(json.dumps(rewards))


if __name__ == "__main__":
    main()
