"""The README that ships with the tiny models."""

from dataclasses import asdict, fields
from typing import Any

from infra.tiny_models.mixtures import POLICY, TEACHERS, Mixture

RENDERER = {
    "name": "custom",
    "import_path": "orchestrator.environments.tool_loop.renderer.ToolQwen3Renderer",
    "thinking_retention": "all",
}
"""The renderer configuration of a tiny model, as verifiers' TrainClientConfig takes it."""

_TEXT = """# Tiny models for the quickstart

Four Qwen3-architecture models of about two million parameters with their own tokenizer and chat template, made for
the toolsmith environment and for nothing else. They were trained from scratch on synthetic conversations; no other
model's weights or outputs went into them. License: that of this repository.

- `policy` is where reinforcement learning starts. It can do every part of the task and often does not: it uses tool
  and argument names from habit, sends numbers as the wrong type, gives up after an error or stops early.
- `teacher_a`, `teacher_b`, `teacher_c` are better than the policy, each with another weakness (see the mixtures).

## Made by

    python -m infra.tiny_models.make --seed {seed} --threads {threads}

It took about {minutes:.0f} minutes. All four start from one expert, trained on demonstrations whose mistaken turns are
seen but not imitated; each then learns the habits of its own mixture. Demonstrations come from training questions
only; the eval split shares no question with them.

## Renderer

Every model folder has a `renderer.json` to put into verifiers' `TrainClientConfig.renderer`:

    {renderer}

Prompts are those of the stock `qwen3` renderer, token for token, and of the chat template. The difference: broken
tool calls stay visible as text, no empty think blocks, and every turn's prompt extends the one before by token ids.

The context is 1024 tokens. Storage is bfloat16.

## Figures

Sampled at temperature 1, six turns at most, difficulties 1 to 3 in equal parts, groups of eight.

{figures}

## Reminders

The models have seen texts like `Reminder: Available tools are: plus, minus` before turns that were then right, as a
separate system or user message, or as a last line of the user's message or tool result. So a hint in one of these
places helps them.

## Mixtures

The chance of each mistake at a turn that should make a call (see infra/tiny_models/mixtures.py).

{mixtures}
"""
_ROWS = {
    "reward": "mean reward",
    "pass_at_8": "pass@8",
    "groups_without_variance": "groups without variance",
    "tokens_per_conversation": "tokens a conversation",
    "tokens_max": "longest conversation",
    "turns": "turns",
    "errors_per_turn": "tool errors a turn",
}


def readme(figures: dict[str, Any], seed: int, threads: int, minutes: float) -> str:
    """Return the text, from the figures of `measure` by model and split."""
    renderer = "{ " + ", ".join(f'{key} = "{value}"' for key, value in RENDERER.items()) + " }"
    return _TEXT.format(
        seed=seed,
        threads=threads,
        minutes=minutes,
        renderer=renderer,
        figures=_figure_table(figures),
        mixtures=_mixture_table({"policy": POLICY, **TEACHERS}),
    )


def _figure_table(figures: dict[str, Any]) -> str:
    lines = ["| model, split | " + " | ".join(_ROWS.values()) + " | reward at 1, 2, 3 calls |"]
    lines.append("|---" * (len(_ROWS) + 2) + "|")
    for model, splits in figures.items():
        for split, values in splits.items():
            levels = ", ".join(f"{reward:.2f}" for reward in values["reward_by_difficulty"].values())
            cells = [f"{model}, {split}", *(f"{values[key]:.3g}" for key in _ROWS), levels]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _mixture_table(mixtures: dict[str, Mixture]) -> str:
    names = [field.name for field in fields(Mixture) if field.name != "imitate_mistakes"]
    lines = ["| | " + " | ".join(mixtures) + " |", "|---" * (len(mixtures) + 1) + "|"]
    for name in names:
        lines.append(f"| {name} | " + " | ".join(f"{asdict(mixture)[name]:g}" for mixture in mixtures.values()) + " |")
    return "\n".join(lines)
