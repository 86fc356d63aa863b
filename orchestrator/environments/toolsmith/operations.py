"""The operations behind toolsmith's tools, and the words they go by.

All values are non-negative integers written in decimal. Every operation has several tool names; one of them is drawn
for each episode, so a name learnt by heart is right only some of the time and the list in the prompt must be read.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One thing a tool can do."""

    key: str
    """Identity of the operation; never shown."""
    names: tuple[str, ...]
    """Tool names to draw from; the first is the canonical one."""
    description: str
    """The description in the tool's schema."""
    arity: int
    """Number of arguments, 1 or 2."""
    apply: Callable[..., int]
    """The result, an integer >= 0 for the operands that episodes draw."""
    opening: str
    """How a user asks for it as the first step; {0} and {1} are the operands in call order."""
    following: str
    """How a user asks for it as a later step; {1} is the second operand, the first is the last result."""


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        key="add",
        names=("add", "plus", "sum_two", "total", "increase"),
        description="Adds two numbers.",
        arity=2,
        apply=lambda a, b: a + b,
        opening="add {0} and {1}",
        following="add {1}",
    ),
    Operation(
        key="subtract",
        names=("subtract", "minus", "take_away", "difference", "decrease"),
        description="Subtracts the second number from the first.",
        arity=2,
        apply=lambda a, b: a - b,
        opening="subtract {1} from {0}",
        following="subtract {1}",
    ),
    Operation(
        key="multiply",
        names=("multiply", "times", "product", "mul", "scale"),
        description="Multiplies two numbers.",
        arity=2,
        apply=lambda a, b: a * b,
        opening="multiply {0} by {1}",
        following="multiply by {1}",
    ),
    Operation(
        key="maximum",
        names=("maximum", "larger", "biggest", "max_of", "greatest"),
        description="Returns the larger of two numbers.",
        arity=2,
        apply=max,
        opening="take the larger of {0} and {1}",
        following="take the larger of that and {1}",
    ),
    Operation(
        key="join",
        names=("join", "concat", "glue", "append", "merge"),
        description="Writes two numbers one after the other.",
        arity=2,
        apply=lambda a, b: int(f"{a}{b}"),
        opening="join {0} and {1}",
        following="join {1}",
    ),
    Operation(
        key="reverse",
        names=("reverse", "flip", "backwards", "mirror", "turn_round"),
        description="Reverses the digits of a number.",
        arity=1,
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
"""Argument names by arity; the first entry is the canonical one."""

ARGUMENT_TYPES = ("integer", "string")
"""JSON types to draw from. A "string" argument takes the number in quotes."""
