"""Play micro_code with a model, many episodes at once, with its code in a sandbox; and measure how good it is."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from composer_prime.config.sandbox import RuntimeConfig
from examples.micro_code.episode import (
    ToolAction,
    apply,
    cheats,
    check_call,
    is_error,
    question,
    reply_to,
    schemas,
    start_files,
)
from examples.micro_code.execution import CodeRunner, Job
from examples.micro_code.grammar import DefectiveFunction, Split, draw_function
from examples.micro_code.taskset import solved
from infra.tiny_models.demonstrate import MAX_TURNS
from infra.tiny_models.pairs import message_of
from infra.tiny_models.play import GROUP, complete
from orchestrator.chat_renderer import ToolQwen3Renderer
from orchestrator.environments.tool_loop.harness import INVALID_CALL

_TOOLS: list[Any] = schemas()


@dataclass(slots=True, kw_only=True)
class CodingEpisode:
    """One episode under way."""

    number: int
    function: DefectiveFunction
    files: dict[str, str]
    messages: list[dict[str, Any]]
    prompt: list[int]
    """Token ids of the next turn's prompt; at the end, of the whole conversation."""
    turn: int = 0
    actions: list[ToolAction] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def draw_functions(count: int, *, seed: int, split: Split = "train") -> list[DefectiveFunction]:
    """Return functions of difficulty one to three in equal parts."""
    rng = random.Random(f"play/{seed}")
    return [draw_function(seed=rng.getrandbits(53), difficulty=1 + i % 3, split=split) for i in range(count)]


def begin(number: int, function: DefectiveFunction, renderer: ToolQwen3Renderer) -> CodingEpisode:
    messages: list[Any] = [{"role": "user", "content": question(function, lure=True)}]
    prompt = renderer.render(messages, tools=_TOOLS, add_generation_prompt=True).token_ids
    files = start_files(function, lure=True)
    return CodingEpisode(number=number, function=function, files=files, messages=messages, prompt=prompt)


async def advance(
    episode: CodingEpisode, completion: list[int], renderer: ToolQwen3Renderer, runner: CodeRunner
) -> bool:
    """Add the policy's turn and the tools' replies. Return False when the episode is over."""
    message = message_of(renderer, completion)
    cut = completion[-1] not in renderer.get_stop_token_ids()
    replies = [] if cut else [await _reply(episode, call["function"], runner) for call in message.get("tool_calls", [])]
    if not cut and "<tool_call>" in message["content"]:
        replies.append(INVALID_CALL)
    episode.turn += 1
    episode.errors += [reply for reply in replies if is_error(reply)]
    if not replies or episode.turn == MAX_TURNS:
        episode.prompt = episode.prompt + completion
        return False
    tail: list[Any] = [{"role": "tool", "tool_call_id": f"call_{n}", "content": text} for n, text in enumerate(replies)]
    bridged = renderer.bridge_to_next_turn(episode.prompt, completion, tail, tools=_TOOLS)
    assert bridged is not None
    episode.prompt = bridged.token_ids
    episode.messages = [*episode.messages, message, *tail]
    return True


async def _reply(episode: CodingEpisode, function: dict[str, str], runner: CodeRunner) -> str:
    action = check_call(episode.files, function["name"], function["arguments"])
    if isinstance(action, str):
        return action
    episode.actions.append(action)
    episode.files = apply(episode.files, action)
    result = None if action.name == "read" else await runner.run(Job(files=episode.files))
    return reply_to(episode.files, action, result)


@torch.inference_mode()
async def play(
    model: Qwen3ForCausalLM, renderer: ToolQwen3Renderer, functions: list[DefectiveFunction], runner: CodeRunner,
    *, seed: int,
) -> list[CodingEpisode]:  # fmt: skip
    """Play one episode per function (repeat a function for a group) at temperature 1."""
    generator = torch.Generator().manual_seed(seed)
    episodes = [begin(number, function, renderer) for number, function in enumerate(functions)]
    live = episodes
    while live:
        completions = complete(model, renderer, [episode.prompt for episode in live], 1.0, generator)
        goes_on = await asyncio.gather(
            *(advance(episode, each, renderer, runner) for episode, each in zip(live, completions, strict=True))
        )
        live = [episode for episode, more in zip(live, goes_on, strict=True) if more]
    return episodes


def measure(
    model: Qwen3ForCausalLM, renderer: ToolQwen3Renderer, runtime: RuntimeConfig, *, groups: int, split: Split
) -> dict[str, Any]:
    """Return figures of `groups` groups of eight episodes at temperature 1, a third of each difficulty."""
    return asyncio.run(_measure(model, renderer, runtime, groups, split))


async def _measure(
    model: Qwen3ForCausalLM, renderer: ToolQwen3Renderer, runtime: RuntimeConfig, groups: int, split: Split
) -> dict[str, Any]:
    runner = CodeRunner(runtime)
    functions = draw_functions(groups, seed=0, split=split)
    episodes: list[CodingEpisode] = []
    rewards: list[bool] = []
    try:
        for start in range(0, groups, GROUP):
            batch = [function for function in functions[start : start + GROUP] for _ in range(GROUP)]
            played = await play(model, renderer, batch, runner, seed=start)
            rewards += await asyncio.gather(*(solved(each.function, each.files, runner) for each in played))
            episodes += played
    finally:
        await runner.close()
    by_group = [rewards[start : start + GROUP] for start in range(0, len(rewards), GROUP)]
    turns = sum(episode.turn for episode in episodes)
    kinds = Counter(kind for episode in episodes for kind in cheats(episode.actions))
    levels = [mean(map(mean, by_group[level::3])) for level in range(3)]
    return {
        "episodes": len(episodes),
        "solved": round(mean(rewards), 3),
        "solved_by_difficulty": [round(level, 3) for level in levels],
        "solved_in_8": round(mean(any(group) for group in by_group), 3),
        "groups_without_variance": round(mean(len(set(group)) == 1 for group in by_group), 3),
        "tokens": round(mean(len(episode.prompt) for episode in episodes), 1),
        "tokens_max": max(len(episode.prompt) for episode in episodes),
        "turns": round(turns / len(episodes), 2),
        "errors_a_turn": round(sum(len(episode.errors) for episode in episodes) / turns, 3),
        "cheats": {kind: round(count / len(episodes), 3) for kind, count in sorted(kinds.items())},
        "errors": dict(Counter(json.dumps(e)[1:16] for episode in episodes for e in episode.errors).most_common(6)),
    }
