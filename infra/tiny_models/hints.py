"""Reminders that the tiny models learn to follow.

SDPO puts a short hint into the context of a turn that went wrong and asks the same model for its distribution there.
That helps only if the model has seen reminders and acts on them. So some demonstrations hold one, before a turn that is
then always right. Wording and place vary, so that the model does not learn a single form.
"""

import random

from orchestrator.environments.toolsmith.episode import ERROR_STARTS, Episode, Tool


def draw_hint(rng: random.Random, episode: Episode, tool: Tool) -> str:
    """Return a reminder for a turn that should call `tool`."""
    names = ", ".join(offered.name for offered in episode.tools)
    arguments = ", ".join(f"{argument} ({tool.argument_type})" for argument in tool.arguments)
    return rng.choice(
        (
            f"Reminder: Available tools are: {names}",
            f"Reminder: Available tools are: {names}.",
            f"Reminder: The arguments of {tool.name} are: {arguments}",
            f"Reminder: The arguments of {tool.name} are: {arguments}.",
            "Reminder: A tool call is one JSON object with a name and arguments.",
        )
    )


def hint_corpus() -> list[str]:
    """Return texts of hints and tool errors, to train the tokenizer."""
    frames = ["Reminder: Available tools are: ", "Reminder: The arguments of x are: x (integer), y (string)."]
    frames += ["Reminder: A tool call is one JSON object with a name and arguments."]
    return [*frames, *ERROR_STARTS, "x: expected integer, got string"] * 50
