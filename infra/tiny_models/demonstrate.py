"""Demonstrations: an expert plays toolsmith episodes and, with given probabilities, makes a novice's mistakes.

The tools are the real ones, so replies and error texts are those of a rollout. The tokens come turn by turn from the
renderer that rollouts use, so a trained model sees exactly these prompts again.

SDPO puts a short hint into the context of a turn that went wrong and asks the same model for its distribution there.
That helps only if the model has seen reminders and acts on them. So some demonstrations hold one, before a turn that is
then always right. Wording and place vary, so that the model does not learn a single form.
"""

import json
import random
from dataclasses import dataclass
from typing import Any, Protocol

from renderers.base import Message

from infra.tiny_models.mixtures import Mixture
from orchestrator.chat_renderer import ToolQwen3Renderer
from orchestrator.environments.tool_loop.harness import INVALID_CALL
from orchestrator.environments.toolsmith.taskset import ARGUMENT_NAMES, BY_KEY, ERROR_STARTS, Episode, Tool, run_call

MAX_TURNS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One conversation as tokens."""

    token_ids: list[int]
    """[T] the whole conversation."""
    trained: list[bool]
    """[T] the tokens to imitate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    text: str
    right: bool
    reply: str | None
    """The tool's reply; None when the turn ends the conversation."""


class Demonstrator(Protocol):
    """Who plays an episode, turn by turn."""

    def maybe_hint(self, tail: list[Message]) -> list[Message]:
        """Return the messages before the next turn, perhaps with a reminder."""
        ...

    def act(self) -> Turn:
        """Return the next turn."""
        ...


def demonstrate(episode: Episode, mixture: Mixture, renderer: ToolQwen3Renderer, seed: int) -> Demonstration:
    """Play one episode of toolsmith under a mixture."""
    player = _Player(episode, mixture, random.Random(f"demonstrate/{seed}"))
    schemas = [tool.schema() for tool in episode.tools]
    return record(player, episode.question, schemas, renderer, imitate_mistakes=mixture.imitate_mistakes)


def record(
    player: Demonstrator,
    question: str,
    schemas: list[Any],
    renderer: ToolQwen3Renderer,
    *,
    imitate_mistakes: bool,
) -> Demonstration:
    """Return one episode as the renderer of rollouts writes it. `imitate_mistakes`: train wrong turns, too."""
    tail: list[Message] = [{"role": "user", "content": question}]
    prompt: list[int] = []
    completion: list[int] = []
    trained: list[bool] = []
    for _ in range(MAX_TURNS):
        tail = player.maybe_hint(tail)
        if prompt:
            bridged = renderer.bridge_to_next_turn(prompt, completion, tail, tools=schemas)
            assert bridged is not None
            prompt = bridged.token_ids
        else:
            prompt = renderer.render(tail, tools=schemas, add_generation_prompt=True).token_ids
        trained += [False] * (len(prompt) - len(trained))
        turn = player.act()
        completion = renderer._tokenizer.encode(turn.text + "<|im_end|>", add_special_tokens=False)
        trained += [turn.right or imitate_mistakes] * len(completion)
        if turn.reply is None:
            break
        tail = [{"role": "tool", "tool_call_id": "call_0", "content": turn.reply}]
    return Demonstration(token_ids=prompt + completion, trained=trained)


class _Player:
    """The state of one episode being played."""

    def __init__(self, episode: Episode, mixture: Mixture, rng: random.Random) -> None:
        self.episode, self.mixture, self.rng = episode, mixture, rng
        self.step = 0
        self.value: int | str | None = None
        self.hinted = False
        self.mistake: str | None = None

    def maybe_hint(self, tail: list[Message]) -> list[Message]:
        """Return the messages before the next turn, perhaps with a reminder."""
        self.hinted = self.step < len(self.episode.steps) and self.rng.random() < self.mixture.hint
        if not self.hinted:
            return tail
        hint = draw_hint(self.rng, self.episode, self._tool())
        place = self.rng.choice(("system", "user", "inside"))
        if place != "inside":
            return [*tail, {"role": place, "content": hint}]
        return [*tail[:-1], {**tail[-1], "content": f"{tail[-1]['content']}\n{hint}"}]

    def act(self) -> Turn:
        """Return the next turn."""
        rng, mixture = self.rng, self.mixture
        if self.step == len(self.episode.steps):
            return self._answer(slip=rng.random() < mixture.answer_slip)
        if self.hinted:
            return self._call(None)
        if self.mistake is not None:
            if rng.random() < mixture.give_up:
                return self._answer(right=False)
            if rng.random() < mixture.recover:
                return self._call(None)
            return self._call(self.mistake)
        if rng.random() < mixture.stop_early and self.value is not None:
            return self._answer(right=False)
        kinds = ("wrong_name", "wrong_tool", "wrong_argument", "wrong_type", "bad_json", "slip")
        chances = [getattr(mixture, kind) for kind in kinds]
        return self._call(rng.choices((None, *kinds), [max(1.0 - sum(chances), 0.0), *chances])[0])

    def _tool(self) -> Tool:
        return self.episode.tool_for(self.episode.steps[self.step].operation)

    def _operands(self) -> tuple[int, ...]:
        operands = self.episode.steps[self.step].operands
        return operands if self.value is None else (int(self.value), *operands[1:])

    def _answer(self, *, right: bool = True, slip: bool = False) -> Turn:
        value = self.episode.steps[0].operands[-1] if self.value is None else int(self.value)
        return Turn(text=str(_slipped(self.rng, value) if slip else value), right=right and not slip, reply=None)

    def _call(self, mistake: str | None) -> Turn:
        """Return a call with at most one mistake. A mistake that this tool does not allow is skipped."""
        rng, tool, operands = self.rng, self._tool(), self._operands()
        name, arguments = tool.name, tool.encode(operands)
        if mistake == "wrong_name":
            name = self._habitual_name(tool)
        elif mistake == "wrong_tool":
            others = [t for t in self.episode.tools if len(t.arguments) == len(operands) and t is not tool]
            if others:
                other = rng.choice(others)
                name, arguments = other.name, other.encode(operands)
        elif mistake == "wrong_argument":
            habit = ARGUMENT_NAMES[len(operands)][0]
            if habit == tool.arguments:
                habit = rng.choice(ARGUMENT_NAMES[len(operands)][1:])
            arguments = dict(zip(habit, arguments.values(), strict=True))
        elif mistake == "wrong_type":
            arguments = {k: int(v) if isinstance(v, str) else str(v) for k, v in arguments.items()}
        elif mistake == "slip":
            position = rng.randrange(len(operands))
            changed = [_slipped(rng, v) if i == position else v for i, v in enumerate(operands)]
            arguments = tool.encode(tuple(changed))
        return self._send(tool, name, arguments, mistake)

    def _send(self, tool: Tool, name: str, arguments: dict[str, Any], mistake: str | None) -> Turn:
        body = json.dumps({"name": name, "arguments": arguments})
        if mistake == "bad_json":
            body = body[:-1]
            reply = INVALID_CALL
        else:
            reply = run_call(self.episode, name, json.dumps(arguments))
        text = f"<tool_call>\n{body}\n</tool_call>"
        advances = reply.isdigit()
        right = (name, arguments) == (tool.name, tool.encode(self._operands())) and mistake != "bad_json"
        self.mistake = None if advances else mistake
        if advances:
            self.step += 1
            self.value = reply
        return Turn(text=text, right=right, reply=reply)

    def _habitual_name(self, tool: Tool) -> str:
        names = BY_KEY[tool.operation].names
        if tool.name != names[0] and self.rng.random() < 0.8:
            return names[0]
        return self.rng.choice([name for name in names if name != tool.name])


def _slipped(rng: random.Random, value: int) -> int:
    digits = list(str(value))
    position = rng.randrange(len(digits))
    digits[position] = rng.choice([d for d in "123456789" if d != digits[position]])
    return int("".join(digits))


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
