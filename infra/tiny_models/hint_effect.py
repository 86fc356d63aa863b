"""python -m infra.tiny_models.hint_effect: what a hint changes at the turns that went wrong.

The policy plays toolsmith. At every turn that a tool answers with an error, the same model writes the turn again: from
the same context, and from the context with a hint at each possible place. Prints how the second attempts ended: a call
that works (ok), another error, or an answer instead of a call.
"""

import argparse
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from renderers.configs import Qwen3RendererConfig
from transformers import AutoTokenizer, Qwen3ForCausalLM

from infra.tiny_models.make import ASSETS
from infra.tiny_models.pairs import Conversation, advance, begin, message_of, replies_to
from infra.tiny_models.play import complete, draw_episodes
from orchestrator.environments.tool_loop.renderer import ToolQwen3Renderer
from orchestrator.environments.toolsmith.episode import is_error
from orchestrator.hints.generate import ErrorTurn, Templates
from orchestrator.hints.placement import HintPlacer

PLACEMENTS = ("message_end", "user", "system")
TEMPLATES = Templates.load()


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongTurn:
    """A turn that a tool answered with an error."""

    conversation: Conversation
    prompt: list[int]
    kind: str
    hint: str

    @property
    def role_before(self) -> str:
        return self.conversation.messages[-1]["role"]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m infra.tiny_models.hint_effect", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--model", type=Path, default=ASSETS / "policy", help="folder of the model that plays")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--seed", type=int, default=11)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    renderer = ToolQwen3Renderer(tokenizer, Qwen3RendererConfig(thinking_retention="all"))
    model = Qwen3ForCausalLM.from_pretrained(options.model).float().eval()
    placers = {place: HintPlacer(renderer, tokenizer, place) for place in PLACEMENTS}
    ends: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    generator = torch.Generator().manual_seed(options.seed)
    live = [begin(n, episode, renderer) for n, episode in enumerate(draw_episodes(options.episodes, seed=options.seed))]
    while live:
        completions = complete(model, renderer, [each.prompt for each in live], 1.0, generator)
        wrong = [turn for pair in zip(live, completions, strict=True) if (turn := _wrong_turn(*pair, renderer))]
        for arm in ("none", *PLACEMENTS) if wrong else ():
            prompts = [turn.prompt if arm == "none" else _hinted(placers[arm], turn) for turn in wrong]
            again = complete(model, renderer, prompts, 1.0, generator)
            for turn, completion in zip(wrong, again, strict=True):
                end = _end(turn.conversation, completion, renderer)
                ends[arm, "all"][end] += 1
                ends[arm, turn.kind][end] += 1
        live = [each for each, completion in zip(live, completions, strict=True) if advance(each, completion, renderer)]
    print(_table(ends))


def _wrong_turn(conversation: Conversation, completion: list[int], renderer: ToolQwen3Renderer) -> WrongTurn | None:
    """Return the turn with its hint, None when it went right or no template has a hint."""
    message = message_of(renderer, completion)
    error = next((reply for reply in replies_to(conversation, message) if is_error(reply)), None)
    if error is None:
        return None
    called = message["tool_calls"][0]["function"]["name"] if message.get("tool_calls") else None
    kind = TEMPLATES.kind_of(error)
    hint = TEMPLATES.fill(ErrorTurn(message=0, turn=0, kind=kind, text=error, tool=called, tools=conversation.tools))
    if hint is None:
        return None
    return WrongTurn(conversation=conversation, prompt=list(conversation.prompt), kind=kind, hint=hint)


def _hinted(placer: HintPlacer, turn: WrongTurn) -> list[int]:
    hinted = placer.hinted(np.array(turn.prompt, np.int32), turn.role_before, turn.hint)
    assert hinted is not None
    return hinted.tolist()


def _end(conversation: Conversation, completion: list[int], renderer: ToolQwen3Renderer) -> str:
    replies = replies_to(conversation, message_of(renderer, completion))
    if not replies:
        return "answer"
    return "error" if any(map(is_error, replies)) else "ok"


def _table(ends: dict[tuple[str, str], Counter[str]]) -> str:
    kinds = sorted({kind for _, kind in ends}, key=lambda kind: (kind != "all", kind))
    lines = ["| error | turns | " + " | ".join(("no hint", *PLACEMENTS)) + " |", "|---" * 6 + "|"]
    for kind in kinds:
        cells = []
        for arm in ("none", *PLACEMENTS):
            counts = ends[arm, kind]
            total = sum(counts.values())
            cells.append(" / ".join(f"{counts[end] / total:.2f}" for end in ("ok", "error", "answer")))
        lines.append(f"| {kind} | {sum(ends['none', kind].values())} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
