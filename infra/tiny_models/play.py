"""Play toolsmith episodes with a model, many at once and without the network, and measure how good it is."""

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import torch
from transformers import DynamicCache, Qwen3ForCausalLM

from infra.tiny_models.demonstrate import MAX_TURNS
from orchestrator.chat_renderer import ToolQwen3Renderer
from orchestrator.environments.tool_loop.harness import INVALID_CALL
from orchestrator.environments.toolsmith.taskset import Episode, generate, is_error, run_call

MAX_NEW_TOKENS = 48
GROUP = 8
"""Rollouts of one episode in `measure`."""


@dataclass(slots=True, kw_only=True)
class Rollout:
    """One conversation and how it went."""

    episode: Episode
    prompt: list[int]
    """Token ids of the next turn's prompt; at the end, of the whole conversation."""
    first_prompt_length: int
    sampled: list[bool] = field(default_factory=list)
    """[T] which tokens of the conversation the model wrote."""
    turns: int = 0
    errors: list[str] = field(default_factory=list)
    """Tool errors met."""
    done: bool = False
    reward: float = 0.0


def draw_episodes(count: int, *, seed: int, split: str = "train") -> list[Episode]:
    """Return episodes of difficulty one to three in equal parts."""
    rng = random.Random(f"play/{seed}")
    return [
        generate(seed=rng.getrandbits(53), difficulty=1 + i % 3, split="eval" if split == "eval" else "train")
        for i in range(count)
    ]


@torch.inference_mode()
def play(
    model: Qwen3ForCausalLM, renderer: ToolQwen3Renderer, episodes: list[Episode], *, temperature: float, seed: int
) -> list[Rollout]:
    """Play one rollout per episode (repeat an episode for a group). Temperature 0 is greedy."""
    generator = torch.Generator().manual_seed(seed)
    rollouts = [_begin(episode, renderer) for episode in episodes]
    for _ in range(MAX_TURNS):
        live = [rollout for rollout in rollouts if not rollout.done]
        if not live:
            break
        completions = complete(model, renderer, [rollout.prompt for rollout in live], temperature, generator)
        for rollout, completion in zip(live, completions, strict=True):
            _advance(rollout, completion, renderer)
    return rollouts


def _begin(episode: Episode, renderer: ToolQwen3Renderer) -> Rollout:
    schemas: list[Any] = [tool.schema() for tool in episode.tools]
    prompt = renderer.render(
        [{"role": "user", "content": episode.question}], tools=schemas, add_generation_prompt=True
    ).token_ids
    return Rollout(episode=episode, prompt=prompt, first_prompt_length=len(prompt), sampled=[False] * len(prompt))


def _advance(rollout: Rollout, completion: list[int], renderer: ToolQwen3Renderer) -> None:
    rollout.turns += 1
    rollout.sampled += [True] * len(completion)
    parsed = renderer.parse_response(completion)
    replies = [run_call(rollout.episode, call.name or "", _as_text(call.arguments)) for call in parsed.tool_calls]
    if "<tool_call>" in parsed.content:
        replies.append(INVALID_CALL)
    rollout.errors += [reply for reply in replies if is_error(reply)]
    cut = len(completion) == MAX_NEW_TOKENS
    if not replies or cut:
        rollout.done = True
        rollout.prompt = rollout.prompt + completion
        rollout.reward = float(parsed.content.strip() == rollout.episode.answer)
        return
    tail: list[Any] = [{"role": "tool", "tool_call_id": "call_0", "content": reply} for reply in replies]
    bridged = renderer.bridge_to_next_turn(rollout.prompt, completion, tail)
    assert bridged is not None
    rollout.prompt = bridged.token_ids
    rollout.sampled += [False] * (len(rollout.prompt) - len(rollout.sampled))


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {})


def complete(
    model: Qwen3ForCausalLM,
    renderer: ToolQwen3Renderer,
    prompts: list[list[int]],
    temperature: float,
    generator: torch.Generator,
) -> list[list[int]]:
    """Sample one turn for every prompt, left-padded, until all have stopped."""
    stops = set(renderer.get_stop_token_ids())
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    completions: list[list[int]] = [[] for _ in prompts]
    open_rows = set(range(len(prompts)))
    cache = DynamicCache(config=model.config)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for _ in range(MAX_NEW_TOKENS):
        output = model(
            ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        drawn = _draw_tokens(output.logits[:, -1].float(), temperature, generator)
        for row in list(open_rows):
            completions[row].append(int(drawn[row]))
            if completions[row][-1] in stops:
                open_rows.discard(row)
        if not open_rows:
            break
        ids, positions = drawn[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones(len(prompts), 1, dtype=torch.long)], 1)
    return completions


def _draw_tokens(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    if temperature == 0.0:
        return logits.argmax(-1)
    return torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)[:, 0]


def measure(
    model: Qwen3ForCausalLM, renderer: ToolQwen3Renderer, *, groups: int, seed: int = 0, split: str = "train"
) -> dict[str, Any]:
    """Return figures of `groups` groups of eight rollouts at temperature 1, a third of each difficulty."""
    episodes = draw_episodes(groups, seed=seed, split=split)
    rollouts: list[Rollout] = []
    for start in range(0, groups, GROUP):
        batch = [episode for episode in episodes[start : start + GROUP] for _ in range(GROUP)]
        rollouts += play(model, renderer, batch, temperature=1.0, seed=seed + start)
    rewards = [[rollout.reward for rollout in rollouts[i : i + GROUP]] for i in range(0, len(rollouts), GROUP)]
    errors = Counter(error.split(":")[0].split(" argument ")[0] for rollout in rollouts for error in rollout.errors)
    levels = sorted({episode.difficulty for episode in episodes})
    by_level = {
        level: mean(rollout.reward for rollout in rollouts if rollout.episode.difficulty == level) for level in levels
    }
    return {
        "rollouts": len(rollouts),
        "reward": mean(map(mean, rewards)),
        "reward_by_difficulty": by_level,
        "pass_at_8": mean(max(group) for group in rewards),
        "groups_without_variance": mean(max(group) == min(group) for group in rewards),
        "tokens_per_conversation": mean(len(rollout.prompt) for rollout in rollouts),
        "tokens_max": max(len(rollout.prompt) for rollout in rollouts),
        "turns": mean(rollout.turns for rollout in rollouts),
        "errors_per_turn": sum(errors.values()) / sum(rollout.turns for rollout in rollouts),
        "errors": dict(errors.most_common()),
    }
