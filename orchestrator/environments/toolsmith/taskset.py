"""toolsmith's episodes, tools and task set.

An episode, its tools, the user's question and the answer all follow from one seed:

    >>> episode = generate(seed=7, difficulty=2, split="train")
    >>> episode.question
    'Reverse 43, then take the larger of that and 26.'

The same (seed, difficulty, split) gives the same episode on every platform. The two splits share no question.

All values are non-negative integers in decimal. Every operation has several tool names, and one is drawn for each
episode: a memorized name is right only sometimes, so the model must read the list in the prompt. Error texts are short
and do not reveal the repair; hints do that.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf
from pydantic import Field

from orchestrator.environments import Split, split_one_in
from orchestrator.environments.answers import TaskRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What a tool can compute."""

    names: tuple[str, ...]
    """To draw from; the first is the operation's key."""
    description: str
    """In the tool's schema."""
    apply: Callable[..., int]
    """An integer >= 0 for the operands that episodes draw."""
    opening: str
    """The user's words for a first step; {0} and {1} are the operands."""
    following: str
    """The user's words for a later step; the first operand is the last result."""

    @property
    def key(self) -> str:
        return self.names[0]


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        names=("add", "plus", "sum_two", "total", "increase"),
        description="Adds two numbers.",
        apply=lambda a, b: a + b,
        opening="add {0} and {1}",
        following="add {1}",
    ),
    Operation(
        names=("subtract", "minus", "take_away", "difference", "decrease"),
        description="Subtracts the second number from the first.",
        apply=lambda a, b: a - b,
        opening="subtract {1} from {0}",
        following="subtract {1}",
    ),
    Operation(
        names=("multiply", "times", "product", "mul", "scale"),
        description="Multiplies two numbers.",
        apply=lambda a, b: a * b,
        opening="multiply {0} by {1}",
        following="multiply by {1}",
    ),
    Operation(
        names=("maximum", "larger", "biggest", "max_of", "greatest"),
        description="Returns the larger of two numbers.",
        apply=max,
        opening="take the larger of {0} and {1}",
        following="take the larger of that and {1}",
    ),
    Operation(
        names=("join", "concat", "glue", "append", "merge"),
        description="Writes two numbers one after the other.",
        apply=lambda a, b: int(f"{a}{b}"),
        opening="join {0} and {1}",
        following="join {1}",
    ),
    Operation(
        names=("reverse", "flip", "backwards", "mirror", "turn_round"),
        description="Reverses the digits of a number.",
        apply=lambda a: int(str(a)[::-1]),
        opening="reverse {0}",
        following="reverse it",
    ),
)

BY_KEY: dict[str, Operation] = {operation.key: operation for operation in OPERATIONS}

ARGUMENT_NAMES: dict[int, tuple[tuple[str, ...], ...]] = {
    1: (("a",), ("x",), ("value",), ("number",)),
    2: (("a", "b"), ("x", "y"), ("left", "right"), ("first", "second"), ("m", "n")),
}
"""By arity; the first is canonical."""

ARGUMENT_TYPES = ("integer", "string")
"""To draw from: a "string" takes the number in quotes."""

EVAL_SHARE = 8
"""One in this many questions is held out."""
MIN_DIFFICULTY, MAX_DIFFICULTY = 1, 3
TOOLS_BY_DIFFICULTY = {1: 3, 2: 3, 3: 4}
_VALUE_LIMIT = 10_000

INVALID_JSON = "Invalid JSON in tool call"
_TOOL_NOT_FOUND = "Tool not found: "
_MISSING = "Missing argument: "
_UNKNOWN = "Unknown argument: "
_WRONG_TYPE = "Wrong type for argument "
_NOT_A_NUMBER = "Not a number: "
_OUT_OF_RANGE = "Number out of range: "
ERROR_STARTS = (INVALID_JSON, _TOOL_NOT_FOUND, _MISSING, _UNKNOWN, _WRONG_TYPE, _NOT_A_NUMBER, _OUT_OF_RANGE)
"""No result begins like one of them."""

_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_DIGITS_LIMIT = 12
_ECHO_LIMIT = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool as an episode offers it."""

    operation: str
    name: str
    """Drawn; the model must use it."""
    arguments: tuple[str, ...]
    """Names, in the operation's order."""
    argument_type: str
    """Of every argument: "integer" or "string"."""

    def schema(self) -> dict[str, Any]:
        """Return the tool as an OpenAI function definition."""
        parameters = {
            "type": "object",
            "properties": {name: {"type": self.argument_type} for name in self.arguments},
            "required": list(self.arguments),
        }
        description = BY_KEY[self.operation].description
        function = {"name": self.name, "description": description, "parameters": parameters}
        return {"type": "function", "function": function}

    def encode(self, operands: tuple[int, ...]) -> dict[str, int | str]:
        """Return the arguments of a correct call."""
        values = operands if self.argument_type == "integer" else tuple(str(value) for value in operands)
        return dict(zip(self.arguments, values, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeStep:
    """A call that the answer needs."""

    operation: str
    """Key of the `Operation`."""
    operands: tuple[int, ...]
    """In call order. After the first step, operand 0 is the previous result."""
    result: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    seed: int
    difficulty: int
    """Calls that the answer needs, 1 to 3."""
    split: Split
    tools: tuple[Tool, ...]
    """In prompt order; more than the steps need."""
    steps: tuple[EpisodeStep, ...]
    question: str
    answer: str
    """Exact text."""

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema() for tool in self.tools]

    async def call(self, name: str, arguments_json: str) -> str:
        """Make the episode an executor of `tool_loop`."""
        return run_call(self, name, arguments_json)

    def tool_for(self, operation: str) -> Tool:
        """Return the tool of an operation. Raises KeyError where this episode has none."""
        return {tool.operation: tool for tool in self.tools}[operation]


def generate(*, seed: int, difficulty: int, split: Split) -> Episode:
    """Return the episode of a seed."""
    num_tools = TOOLS_BY_DIFFICULTY[difficulty]
    rng = random.Random(f"toolsmith/{split}/{difficulty}/{seed}")
    while True:
        steps = _draw_steps(rng, difficulty)
        question = _ask(steps)
        if split_one_in(EVAL_SHARE, question) == split:
            break
    tools = _draw_tools(rng, steps, num_tools)
    answer = str(steps[-1].result)
    return Episode(
        seed=seed, difficulty=difficulty, split=split, tools=tools, steps=steps, question=question, answer=answer
    )


def _draw_steps(rng: random.Random, count: int) -> tuple[EpisodeStep, ...]:
    operations = rng.sample(OPERATIONS, count)
    steps: list[EpisodeStep] = []
    for operation in operations:
        operands = _draw_operands(rng, operation, steps[-1].result if steps else None)
        steps.append(EpisodeStep(operation=operation.key, operands=operands, result=operation.apply(*operands)))
    return _draw_steps(rng, count) if max(step.result for step in steps) >= _VALUE_LIMIT else tuple(steps)


def _draw_operands(rng: random.Random, operation: Operation, previous: int | None) -> tuple[int, ...]:
    first = rng.randint(11, 99) if previous is None else previous
    if "{1}" not in operation.opening:
        return (first,)
    if operation.key == "subtract":
        return first, rng.randint(0, min(first, 99))
    small = operation.key in ("multiply", "join")
    return first, rng.randint(2, 9) if small else rng.randint(2, 99)


def _draw_tools(rng: random.Random, steps: tuple[EpisodeStep, ...], count: int) -> tuple[Tool, ...]:
    needed = [step.operation for step in steps]
    spare = [operation.key for operation in OPERATIONS if operation.key not in needed]
    keys = needed + rng.sample(spare, count - len(needed))
    rng.shuffle(keys)
    return tuple(_draw_tool(rng, BY_KEY[key]) for key in keys)


def _draw_tool(rng: random.Random, operation: Operation) -> Tool:
    return Tool(
        operation=operation.key,
        name=rng.choice(operation.names),
        arguments=rng.choice(ARGUMENT_NAMES[2 if "{1}" in operation.opening else 1]),
        argument_type=rng.choice(ARGUMENT_TYPES),
    )


def _ask(steps: tuple[EpisodeStep, ...]) -> str:
    phrases = [BY_KEY[steps[0].operation].opening.format(*steps[0].operands)]
    phrases += [BY_KEY[step.operation].following.format(*step.operands) for step in steps[1:]]
    sentence = ", then ".join(phrases) + "."
    return sentence[0].upper() + sentence[1:]


# -- tool calls ----------------------------------------------------------------------------------------------------


def is_error(text: str) -> bool:
    return text.startswith(ERROR_STARTS)


def run_call(episode: Episode, name: str, arguments_json: str) -> str:
    """Return the result in decimal, or an error text."""
    tool = next((tool for tool in episode.tools if tool.name == name), None)
    if tool is None:
        return _TOOL_NOT_FOUND + _echo(name)
    try:
        arguments = json.loads(arguments_json)
    except (ValueError, RecursionError):
        return INVALID_JSON
    if not isinstance(arguments, dict):
        return INVALID_JSON
    error = _argument_error(tool, arguments)
    if error is not None:
        return error
    result = BY_KEY[tool.operation].apply(*(int(arguments[argument]) for argument in tool.arguments))
    return str(result)


def _argument_error(tool: Tool, arguments: dict[str, Any]) -> str | None:
    for name in arguments:
        if name not in tool.arguments:
            return _UNKNOWN + _echo(name)
    for name in tool.arguments:
        if name not in arguments:
            return _MISSING + name
        value = arguments[name]
        json_type = _JSON_TYPES.get(type(value), "null")
        if json_type != tool.argument_type:
            return f"{_WRONG_TYPE}{name}: expected {tool.argument_type}, got {json_type}"
        digits = str(value)[: _DIGITS_LIMIT + 1]
        if not (digits.isascii() and digits.isdigit()):
            return _NOT_A_NUMBER + _echo(digits)
        if len(digits) > _DIGITS_LIMIT:
            return _OUT_OF_RANGE + digits
    return None


def _echo(text: str) -> str:
    return text if len(text) <= _ECHO_LIMIT else text[:_ECHO_LIMIT] + "..."


# -- the task set of verifiers -------------------------------------------------------------------------------------


class ToolsmithData(TaskRow):
    """The whole episode follows from three of its fields."""

    seed: int
    difficulty: int
    split: Split
    answer: str

    def tool_executor(self) -> Episode:
        return generate(seed=self.seed, difficulty=self.difficulty, split=self.split)


class ToolsmithTask(vf.Task[ToolsmithData]):
    """1.0 where the last reply is exactly the answer, else 0.0."""

    @property
    def key(self) -> str:
        return f"toolsmith/{self.data.split}/{self.data.difficulty}/{self.data.seed}"

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def tool_errors(self, trace: vf.Trace) -> float:
        return float(sum(is_error(str(message.content)) for message in trace.tool_messages))


class ToolsmithConfig(vf.TasksetConfig):
    """Which episodes load."""

    split: Split = "train"
    """Training questions or held-out ones. The two share none."""
    num_tasks: int = Field(1024, ge=1)
    """Number of tasks."""
    min_difficulty: int = Field(MIN_DIFFICULTY, ge=MIN_DIFFICULTY, le=MAX_DIFFICULTY)
    """Fewest calls a task may need."""
    max_difficulty: int = Field(MAX_DIFFICULTY, ge=MIN_DIFFICULTY, le=MAX_DIFFICULTY)
    """Most calls a task may need."""
    seed: int = 0
    """Draws another set of episodes."""


class ToolsmithTaskset(vf.Taskset[ToolsmithTask, ToolsmithConfig]):
    """Task i of a configuration is always the same episode."""

    def load(self) -> Iterator[ToolsmithTask]:
        config = self.config
        for index in range(config.num_tasks):
            rng = random.Random(f"toolsmith/{config.seed}/{index}")
            difficulty = rng.randint(config.min_difficulty, config.max_difficulty)
            seed = rng.getrandbits(53)
            episode = generate(seed=seed, difficulty=difficulty, split=config.split)
            data = ToolsmithData(
                name=f"toolsmith-{config.split}-{index}",
                prompt=episode.question,
                seed=seed,
                difficulty=difficulty,
                split=config.split,
                answer=episode.answer,
            )
            yield ToolsmithTask(data, config.task)
