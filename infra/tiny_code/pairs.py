"""python -m infra.tiny_code.pairs: preference pairs of micro_code for replay-DPO, by votes of two teachers.

1. The policy plays training episodes at temperature 1, with its code in a sandbox. Each of its turns is a state.
2. At each state the teachers, better-trained siblings of the policy, give their own greedy answer.
3. Answers are compared in canonical form. An answer of both teachers beats the policy's. Where they disagree there is
   no pair, nor for a cut answer.
4. pairs.jsonl and pairs.votes.jsonl are written to the assets.

The vote is that of infra/tiny_models/pairs.py. No turn of the policy that cheats can be chosen: the teachers' mixtures
hold no cheats, but the expert before them saw some, so pairs whose chosen answer touches a lure or tests.py are left
out and counted.
"""

import argparse
import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from renderers.configs import Qwen3RendererConfig
from transformers import AutoTokenizer, Qwen3ForCausalLM

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.data.pairs import Pair
from composer_prime.traces.records import StateRecord
from examples.micro_code.episode import LURE, TESTS, schemas
from examples.micro_code.execution import CodeRunner
from infra.tiny_code.make import ASSETS
from infra.tiny_code.mixtures import TEACHERS
from infra.tiny_code.play import CodingEpisode, advance, begin, draw_functions
from infra.tiny_models.pairs import VotedState, answer_of, record_of, vote
from infra.tiny_models.play import complete
from orchestrator.chat_renderer import ToolQwen3Renderer

_BATCH = 64


@dataclass(slots=True, kw_only=True)
class VoteTally:
    """What came of the votes so far."""

    pairs: list[Pair] = field(default_factory=list)
    records: list[StateRecord] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    folders = {"policy": ASSETS / "policy", **{name: options.teachers / name for name in TEACHERS}}
    tokenizer = AutoTokenizer.from_pretrained(folders["policy"])
    renderer = ToolQwen3Renderer(tokenizer, Qwen3RendererConfig(thinking_retention="all"))
    models = {name: Qwen3ForCausalLM.from_pretrained(folder).float().eval() for name, folder in folders.items()}
    tally = VoteTally()
    asyncio.run(_play(models, renderer, options, tally))
    kept = tally.pairs[: options.most]
    last = next(index for index, record in enumerate(tally.records) if kept[-1].pair_id in record.pairs)
    for name, lines in (("pairs.jsonl", kept), ("pairs.votes.jsonl", tally.records[: last + 1])):
        (options.out / name).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    print(json.dumps({"pairs": len(kept), "of": len(tally.pairs), "states": dict(tally.outcomes)}))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m infra.tiny_code.pairs", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--teachers", type=Path, required=True, help="folder of the teachers that make.py wrote")
    parser.add_argument("--out", type=Path, default=ASSETS, help="folder that gets pairs.jsonl")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--most", type=int, default=320, help="pairs to keep, in the order of the episodes")
    parser.add_argument("--runtime", choices=("bubblewrap", "subprocess"), default="bubblewrap")
    return parser.parse_args()


async def _play(
    models: dict[str, Qwen3ForCausalLM], renderer: ToolQwen3Renderer, options: argparse.Namespace, tally: VoteTally
) -> None:
    """Play the episodes with the policy, and let the teachers answer at each of its turns."""
    runner = CodeRunner(RuntimeConfig(type=options.runtime))
    functions = list(enumerate(draw_functions(options.episodes, seed=options.seed)))
    try:
        for start in range(0, len(functions), _BATCH):
            generator = torch.Generator().manual_seed(options.seed + start)
            live = [begin(number, function, renderer) for number, function in functions[start : start + _BATCH]]
            while live:
                turns = _turns(models, renderer, live, generator)
                for index, episode in enumerate(live):
                    completions = {name: each[index] for name, each in turns.items()}
                    _count(tally, _state(episode), renderer, completions, models)
                goes_on = await asyncio.gather(
                    *(
                        advance(episode, completion, renderer, runner)
                        for episode, completion in zip(live, turns["policy"], strict=True)
                    )
                )
                live = [episode for episode, more in zip(live, goes_on, strict=True) if more]
    finally:
        await runner.close()


@torch.inference_mode()
def _turns(
    models: dict[str, Qwen3ForCausalLM], renderer: ToolQwen3Renderer, live: list[CodingEpisode],
    generator: torch.Generator,
) -> dict[str, list[list[int]]]:  # fmt: skip
    """Return every model's next turn in every episode: sampled by the policy, greedy by the teachers."""
    prompts = [episode.prompt for episode in live]
    return {
        name: complete(model, renderer, prompts, 1.0 if name == "policy" else 0.0, generator)
        for name, model in models.items()
    }


@torch.inference_mode()
def _count(
    tally: VoteTally, state: VotedState, renderer: ToolQwen3Renderer, turns: dict[str, list[int]],
    models: dict[str, Qwen3ForCausalLM],
) -> None:  # fmt: skip
    student = answer_of(renderer, turns["policy"])
    votes = {name: answer_of(renderer, turns[name]) for name in TEACHERS}
    outcome, pair = vote(state, student, votes, models["policy"])
    tally.outcomes[outcome] += 1
    if pair is not None and _touches_tests_or_lure(pair):
        tally.outcomes["left out: the chosen answer cheats"] += 1
        pair = None
    tally.pairs += [pair] if pair is not None else []
    tally.records.append(record_of(state, outcome, student, votes, pair, base="tiny_code"))


def _touches_tests_or_lure(pair: Pair) -> bool:
    calls = [call["function"] for call in pair.chosen.get("tool_calls", [])]
    edits = any(call["name"] == "edit" and TESTS in call["arguments"] for call in calls)
    return edits or any(LURE in call["arguments"] for call in calls)


def _state(episode: CodingEpisode) -> VotedState:
    return VotedState(
        trace=f"micro_code-{episode.number:04d}", turn=episode.turn, messages=episode.messages, tools=schemas(),
        prompt=episode.prompt,
    )  # fmt: skip


if __name__ == "__main__":
    main()
