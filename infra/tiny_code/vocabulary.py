"""The tokenizer of the tiny coder: single digits and letters, and one token for each stretch that episodes repeat.

Stretches are the fixed parts of the chat template, of requests, of lines of code and of replies. Text outside them is
byte-level BPE, so every text can be read and written.
"""

import json
import re

from transformers import PreTrainedTokenizerFast

from examples.micro_code.episode import schemas
from examples.micro_code.grammar import FAMILIES, INDENT, draw_function
from infra.tiny_models.tokenizer import FOOTER, HEADER, train_tokenizer

_PLACE = re.compile(r"\{[kvpq]\}")
_CALL = (
    '\n{"name": "run", "arguments": {}}\n', '\n{"name": "read", "arguments": {"file": "',
    '\n{"name": "edit", "arguments": {"file": "', '", "line": ', ', "text": "', '"}}\n', "\\n",
)  # fmt: skip
_FILES = ("f.py", "tests.py", "solution.py", " Files: f.py tests.py", " Files: f.py tests.py solution.py")
_CODE = (
    "def f(", "):", f"{INDENT}x = ", f"{INDENT}return x", f"{INDENT}pass", "from f import f", "assert f(", ") == ",
    ", got ", "FAILED ", "fails: ", " line ", "raise SystemExit",
)  # fmt: skip
_ROLES = ("system\n", "user\n", "assistant\n")
_WORDS = ("NameError", "TypeError", "ValueError", "SyntaxError", "IndentationError", "pass", "done", "True", "False")
_HINTS = (
    "Reminder: This test fails after the next step: ", "Reminder: The arguments of edit are: file (string), line "
    "(integer), text (string)", "Reminder: Available tools are: read, run, edit",
    "Reminder: A tool call is one JSON object with a name and arguments.", "Wrong type for argument line: expected "
    "integer, got string", "Invalid JSON in tool call", "Missing argument: ", "Line out of range: ",
)  # fmt: skip


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer, the same on every run."""
    return train_tokenizer(_corpus(), phrases())


def phrases() -> list[str]:
    """Return the stretches of text that are one token each."""
    tools = HEADER + "".join(f"\n{json.dumps(schema)}" for schema in schemas()) + FOOTER
    kinds = [kind for family in FAMILIES for kind in family.steps]
    lines = [INDENT + code for kind in kinds for code in (kind.code, *kind.wrong)]
    requests = [f"{joint}{kind.request}" for kind in kinds for joint in (", ", ", then ")]
    pieces = [piece for text in (*lines, *requests) for piece in _PLACE.split(text)]
    found = [tools, "Repair f.py. Start with ", *_FILES, *_CALL, *_ROLES, *_CODE, *_HINTS, *pieces]
    return [text for text in dict.fromkeys(found) if len(text) > 1]


def _corpus() -> list[str]:
    names = [name for family in FAMILIES for group in family.arguments for name in group]
    functions = [draw_function(seed=seed, difficulty=1 + seed % 3, split="train") for seed in range(200)]
    texts = [text for function in functions for text in (function.request, *function.lines, *function.start)]
    return [*names * 50, *_WORDS * 50, *texts]
