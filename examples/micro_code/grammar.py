"""Tiny functions with one defect each, drawn from a grammar by seed.

    >>> print(draw_function(seed=0, difficulty=1, split="train").request)
    Start with p, make it at most 7, subtract p, then take the larger of that and q.

A function begins with an argument, changes `x` by two or three steps, and returns it. A step is a `StepKind` with its
constants. The template of a function is its family and the keys of its steps, without constants and names. A template
belongs to "eval" when its CRC-32 is divisible by `EVAL_SHARE`. So no held-out task has a template that training has.

Difficulty is the kind of defect: 1 changes one line (operator, constant or variable), 2 drops one line, 3 drops the
whole body. Every defect makes a shown test fail.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orchestrator.environments import Split, split_one_in

EVAL_SHARE = 6
"""One in about this many templates is held out."""
MIN_DIFFICULTY, MAX_DIFFICULTY = 1, 3
INDENT = "    "
_LARGE = 10_000
_LETTERS = "abcdefg"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKind:
    """One step of a function. In the texts, {k} is a constant, {v} an argument, {p} and {q} are letters."""

    key: str
    request: str
    """The step in words."""
    code: str
    """The line, without indentation."""
    wrong: tuple[str, ...] = ()
    """Lines with a wrong operator."""
    last: bool = False
    """Whether it can only be the last step, because its result has another type."""
    small: bool = False
    """Whether the constant is at most three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionFamily:
    """Functions of one type of argument."""

    key: str
    arguments: tuple[tuple[str, ...], ...]
    """Argument names to draw from."""
    steps: tuple[StepKind, ...]
    draw: Callable[[random.Random], Any]
    """Draws the value of an argument."""


def _kind(key: str, request: str, code: str, *wrong: str, last: bool = False, small: bool = False) -> StepKind:
    return StepKind(key=key, request=request, code=code, wrong=wrong, last=last, small=small)


NUMBER = FunctionFamily(
    key="number",
    arguments=(("a", "b"), ("m", "n"), ("p", "q")),
    steps=(
        _kind("add", "add {v}", "x = x + {v}", "x = x - {v}", "x = x * {v}"),
        _kind("subtract", "subtract {v}", "x = x - {v}", "x = x + {v}", "x = x * {v}"),
        _kind("multiply", "multiply by {v}", "x = x * {v}", "x = x + {v}", "x = x - {v}"),
        _kind("add_constant", "add {k}", "x = x + {k}", "x = x - {k}", "x = x * {k}"),
        _kind("subtract_constant", "subtract {k}", "x = x - {k}", "x = x + {k}", "x = x * {k}"),
        _kind("multiply_constant", "multiply by {k}", "x = x * {k}", "x = x + {k}", "x = x - {k}"),
        _kind("larger", "take the larger of that and {v}", "x = max(x, {v})", "x = min(x, {v})"),
        _kind("smaller", "take the smaller of that and {v}", "x = min(x, {v})", "x = max(x, {v})"),
        _kind("at_least", "make it at least {k}", "x = max(x, {k})", "x = min(x, {k})"),
        _kind("at_most", "make it at most {k}", "x = min(x, {k})", "x = max(x, {k})"),
        _kind("remainder", "take the remainder by {k}", "x = x % {k}", "x = x // {k}"),
        _kind("divide", "divide by {k} and round down", "x = x // {k}", "x = x % {k}"),
        _kind("above", "tell if it is above {k}", "x = x > {k}", "x = x < {k}", "x = x >= {k}", last=True),
        _kind("below", "tell if it is below {k}", "x = x < {k}", "x = x > {k}", "x = x <= {k}", last=True),
    ),
    draw=lambda rng: rng.randint(0, 20),
)
LIST = FunctionFamily(
    key="list",
    arguments=(("items",), ("values",), ("row",)),
    steps=(
        _kind("keep_above", "keep what is above {k}", "x = [i for i in x if i > {k}]", "x = [i for i in x if i < {k}]"),
        _kind("keep_below", "keep what is below {k}", "x = [i for i in x if i < {k}]", "x = [i for i in x if i > {k}]"),
        _kind("add_each", "add {k} to each", "x = [i + {k} for i in x]", "x = [i * {k} for i in x]"),
        _kind("multiply_each", "multiply each by {k}", "x = [i * {k} for i in x]", "x = [i + {k} for i in x]"),
        _kind("drop", "drop the first {k}", "x = x[{k}:]", "x = x[:{k}]", small=True),
        _kind("keep", "keep the first {k}", "x = x[:{k}]", "x = x[{k}:]", small=True),
        _kind("sort", "sort it", "x = sorted(x)", "x = x[::-1]"),
        _kind("reverse", "reverse it", "x = x[::-1]", "x = sorted(x)"),
        _kind("append", "append {k}", "x = x + [{k}]", "x = [{k}] + x"),
        _kind("prepend", "put {k} in front", "x = [{k}] + x", "x = x + [{k}]"),
        _kind("sum", "sum it", "x = sum(x)", "x = len(x)", last=True),
        _kind("count", "count it", "x = len(x)", "x = sum(x)", last=True),
    ),
    draw=lambda rng: [rng.randint(0, 9) for _ in range(rng.randint(3, 5))],
)
TEXT = FunctionFamily(
    key="text",
    arguments=(("text",), ("word",), ("name",)),
    steps=(
        _kind("upper", "make it upper case", "x = x.upper()", "x = x.lower()"),
        _kind("lower", "make it lower case", "x = x.lower()", "x = x.upper()"),
        _kind("backwards", "write it backwards", "x = x[::-1]", "x = x[1:]"),
        _kind("repeat", "repeat it {k} times", "x = x * {k}", "x = x + {k}", small=True),
        _kind("cut", "drop the first {k} letters", "x = x[{k}:]", "x = x[:{k}]", small=True),
        _kind("head", "keep the first {k} letters", "x = x[:{k}]", "x = x[{k}:]", small=True),
        _kind("front", "put '{p}' in front", "x = '{p}' + x", "x = x + '{p}'"),
        _kind("end", "put '{p}' at the end", "x = x + '{p}'", "x = '{p}' + x"),
        _kind("replace", "replace '{p}' by '{q}'", "x = x.replace('{p}', '{q}')", "x = x.replace('{q}', '{p}')"),
        _kind("letters", "count the letters", "x = len(x)", last=True),
        _kind("occurrences", "count '{p}' in it", "x = x.count('{p}')", "x = x.index('{p}')", last=True),
    ),
    draw=lambda rng: "".join(rng.choice(_LETTERS + _LETTERS.upper()) for _ in range(rng.randint(3, 6))),
)
FAMILIES = (NUMBER, LIST, TEXT)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionStep:
    """One step with its constants."""

    kind: StepKind
    values: dict[str, str]
    """What stands for {k}, {v}, {p} and {q}."""

    @property
    def line(self) -> str:
        return INDENT + self.kind.code.format(**self.values)

    def wrong_lines(self, arguments: tuple[str, ...]) -> list[str]:
        """Return lines with a wrong operator, constant or variable."""
        others = [wrong.format(**self.values) for wrong in self.kind.wrong]
        for key, value in self.values.items():
            for instead in _other_values(key, value, arguments):
                others.append(self.kind.code.format(**self.values | {key: instead}))
        right = self.kind.code.format(**self.values)
        return [INDENT + line for line in dict.fromkeys(others) if line != right]


@dataclass(frozen=True, slots=True, kw_only=True)
class DefectiveFunction:
    """One task: a function, its defect and its tests."""

    family: str
    template: str
    """FunctionFamily and step keys. Train and eval share none."""
    request: str
    """What the function must do, in words."""
    lines: tuple[str, ...]
    """The right source."""
    start: tuple[str, ...]
    """The source with its defect."""
    defect_line: int
    """Number of the first wrong line of `start`, from 1."""
    repair: str
    """The text that must stand there instead; several lines where the body was dropped."""
    near_misses: tuple[str, ...]
    """Wrong texts for that line which look like the right one."""
    tests: tuple[tuple[str, str], ...]
    """Shown tests: a call and the text of its value."""
    hidden: tuple[tuple[str, str], ...]
    """Further calls that grading makes, and the texts of their values."""


def draw_function(*, seed: int, difficulty: int, split: Split) -> DefectiveFunction:
    """Return the function of a seed. Raises ValueError where difficulty is not in 1..3 or the split is unknown."""
    if not MIN_DIFFICULTY <= difficulty <= MAX_DIFFICULTY:
        raise ValueError(f"micro_code: difficulty is {difficulty}; choose {MIN_DIFFICULTY} to {MAX_DIFFICULTY}")
    if split not in ("train", "eval"):
        raise ValueError(f"micro_code: split is {split!r}; choose 'train' or 'eval'")
    rng = random.Random(f"micro_code/{split}/{difficulty}/{seed}")
    while True:
        family = rng.choice(FAMILIES)
        kinds = rng.sample(family.steps, 3 if difficulty == MIN_DIFFICULTY else 2)
        template = " ".join([family.key, *(kind.key for kind in kinds)])
        if split_one_in(EVAL_SHARE, template) != split or any(kind.last for kind in kinds[:-1]):
            continue
        function = _draw(rng, family, kinds, template, difficulty)
        if function is not None:
            return function


def _draw(
    rng: random.Random, family: FunctionFamily, kinds: list[StepKind], template: str, difficulty: int
) -> DefectiveFunction | None:
    """Return a function of these steps; None where the draw makes no good task."""
    arguments = rng.choice(family.arguments)
    steps = [FunctionStep(kind=kind, values=_draw_values(rng, kind, arguments)) for kind in kinds]
    body = [f"{INDENT}x = {arguments[0]}", *(step.line for step in steps)]
    head, tail = f"def f({', '.join(arguments)}):", f"{INDENT}return x"
    lines = (head, *body, tail)
    start, defect_line, repair = _spoil(rng, lines, steps, arguments, difficulty)
    calls = _draw_calls(rng, family, len(arguments), "\n".join(lines), "\n".join(start))
    if calls is None:
        return None
    step = steps[defect_line - 3] if difficulty < MAX_DIFFICULTY else rng.choice(steps)
    words = [f"start with {arguments[0]}", *(step.kind.request.format(**step.values) for step in steps)]
    request = ", ".join(words[:-1]) + f", then {words[-1]}."
    return DefectiveFunction(
        family=family.key,
        template=template,
        request=request[0].upper() + request[1:],
        lines=lines,
        start=start,
        defect_line=defect_line,
        repair=repair,
        near_misses=tuple(repair.replace(step.line, wrong) for wrong in step.wrong_lines(arguments)),
        tests=tuple(calls[:2]),
        hidden=tuple(calls[2:]),
    )


def _spoil(
    rng: random.Random, lines: tuple[str, ...], steps: list[FunctionStep], arguments: tuple[str, ...], difficulty: int
) -> tuple[tuple[str, ...], int, str]:
    """Return the spoiled source, the number of the spoiled line and its repair."""
    if difficulty == MAX_DIFFICULTY:
        return (lines[0], f"{INDENT}pass", lines[-1]), 2, "\n".join(lines[1:-1])
    position = rng.randrange(len(steps))
    number = position + 3
    wrong = f"{INDENT}pass"
    if difficulty == MIN_DIFFICULTY:
        wrong = rng.choice(steps[position].wrong_lines(arguments) or [wrong])
    return (*lines[: number - 1], wrong, *lines[number:]), number, lines[number - 1]


def _draw_values(rng: random.Random, kind: StepKind, arguments: tuple[str, ...]) -> dict[str, str]:
    values: dict[str, str] = {}
    if "{k}" in kind.code:
        values["k"] = str(rng.randint(2, 3) if kind.small else rng.randint(2, 9))
    if "{v}" in kind.code:
        values["v"] = rng.choice(arguments)
    for key, letter in zip("pq", rng.sample(_LETTERS, 2), strict=True):
        if f"{{{key}}}" in kind.code:
            values[key] = letter
    return values


def _other_values(key: str, value: str, arguments: tuple[str, ...]) -> list[str]:
    if key == "k":
        return [str(int(value) - 1), str(int(value) + 1)]
    if key == "v":
        return [name for name in arguments if name != value]
    return [letter for letter in _LETTERS if abs(ord(letter) - ord(value)) == 1]


def _draw_calls(
    rng: random.Random, family: FunctionFamily, arity: int, right_source: str, wrong_source: str
) -> list[tuple[str, str]] | None:
    """Return six calls with their values. The first two tell the sources apart. None where few draws do."""
    right, wrong = _function(right_source), _function(wrong_source)
    telling: dict[str, str] = {}
    others: dict[str, str] = {}
    for _ in range(24):
        values = tuple(family.draw(rng) for _ in range(arity))
        call = f"f({', '.join(map(repr, values))})"
        result = _value_text(right, values)
        if len(result) > 40 or (family is NUMBER and result.lstrip("-").isdigit() and abs(int(result)) > _LARGE):
            continue
        tells = len(telling) < 2 and result != _value_text(wrong, values)
        (telling if tells else others)[call] = result
        calls = [*telling.items(), *others.items()][:6]
        if len(telling) == 2 and len(calls) == 6:
            return calls if len({value for _, value in calls}) > 1 else None
    return None


def _function(source: str) -> Callable[..., Any]:
    """Run text of this module's own grammar, nothing that a model wrote."""
    names: dict[str, Any] = {}
    exec(source, names)
    return names["f"]


def _value_text(function: Callable[..., Any], values: tuple[Any, ...]) -> str:
    """Return the text of the call's value, or the name of its exception."""
    try:
        return repr(function(*values))
    except Exception as error:
        return type(error).__name__
