"""How good a tiny model is: mean reward, pass@k and how much a group of rollouts varies."""

from collections import Counter
from statistics import mean
from typing import Any

from transformers import Qwen3ForCausalLM

from infra.tiny_models.play import Rollout, draw_episodes, play
from orchestrator.environments.tool_loop.renderer import ToolQwen3Renderer

GROUP = 8


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
