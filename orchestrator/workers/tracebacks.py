"""The place where an environment's code raised, read from the text of a traceback.

verifiers reports an error as text: that of the environment's code, then that of the boundary which caught it.
"""

from __future__ import annotations

import inspect
import re
import sysconfig
import traceback
from pathlib import Path
from typing import Any

import msgspec

from composer_prime.errors import ConfigError
from orchestrator.workers.protocol import RolloutFailure

_FRAME = re.compile(r'^[ |]*File "([^"<]+)", line (\d+), in (\S+)', re.MULTILINE)
_CHAINED = re.compile(
    r"\n(?:The above exception was the direct cause|During handling of the above exception, another exception).*\n"
)
_RECORDED = re.compile(r"in record_(reward|metric)s?$")
"""Where verifiers turns a result into a float."""
_STDLIB = sysconfig.get_paths()["stdlib"]
_DETAIL_CHARS = 2000
_DUMPED = re.compile(r'^  File "([^"<]+)", line (\d+) in (\S+)', re.MULTILINE)
"""A frame as faulthandler writes it, the innermost first."""
_MAIN_THREAD = re.compile(r'workers/worker\.py", line \d+ in main$', re.MULTILINE)
_MACHINERY = (Path(__file__).parent, Path(__file__).parents[1] / "environments" / "tool_loop")
"""Folders of ours that call the environment's code."""


def describe_exception(error: BaseException) -> str:
    """Return `LookupError: no word list (envs/words.py:12, in load)`."""
    _, where = read_traceback("".join(traceback.format_exception(error)))
    return f"{type(error).__name__}: {error}{f' ({where})' if where else ''}"


def read_traceback(text: str) -> tuple[str, str | None]:
    """Return the end of the traceback of the code that raised, and its `file:line, in function`; None without a frame.

    The frame is the last one of the user's own files, else of an installed package other than verifiers, else the last
    one of the first cause.
    """
    parts = _CHAINED.split(text)
    for rank in (0, 1):
        for number in reversed(range(len(parts))):
            frames = [frame for frame in _FRAME.findall(parts[number]) if _distance(frame[0]) <= rank]
            if frames:
                return parts[number].strip()[-_DETAIL_CHARS:], _frame_text(*frames[-1])
    frames = _FRAME.findall(parts[0])
    return parts[0].strip()[-_DETAIL_CHARS:], _frame_text(*frames[-1]) if frames else None


def blocked_at(dump: str) -> str | None:
    """Return `file:line, in function` of the code at which a worker's main thread stood in a dump of faulthandler.

    The frame is the innermost one of the user's own files, else of an installed package, else of any.
    """
    threads = [block for block in dump.split("\n\n") if _MAIN_THREAD.search(block)]
    frames = _DUMPED.findall(threads[-1]) if threads else []
    for rank in (0, 1, 2):
        for frame in frames:
            ours = any(Path(frame[0]).is_relative_to(folder) for folder in _MACHINERY)
            if (2 if ours else _distance(frame[0])) <= rank:
                return _frame_text(*frame)
    return None


def refuse_plain_rewards(task: Any) -> None:
    """Raise ConfigError for a reward or metric of a verifiers Task that returns a number but is not a coroutine.

    verifiers awaits each, so every rollout would fail with an error of asyncio.
    """
    for kind in ("reward", "metric"):
        for function in task.hooks(kind):
            returned = inspect.signature(function).return_annotation
            is_number = getattr(returned, "__name__", returned) in ("float", "int", "bool")
            plain = inspect.unwrap(function)
            if is_number and not any(map(inspect.iscoroutinefunction, (function, plain))):
                code = plain.__code__
                place = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
                raise ConfigError(f"{kind} `{function.__name__}` ({place}) must be `async def` and return a number")


def with_function(failure: RolloutFailure | None, task: Any, trace: Any) -> RolloutFailure | None:
    """Name the reward or metric of a verifiers Task whose result is not a number.

    verifiers' traceback ends where the result is recorded, after the function has returned.
    """
    match = _RECORDED.search(failure.where or "") if failure is not None else None
    if failure is None or match is None or trace is None:
        return failure
    kind = match[1]
    values = trace.rewards if kind == "reward" else trace.metrics
    names = [hook.__name__ for hook in task.hooks(kind) if values.get(hook.__name__) is None]
    message = f"{kind} {' or '.join(names)} returned no number ({failure.message})"
    return msgspec.structs.replace(failure, message=message, retryable=False)


def _distance(file: str) -> int:
    """Return 0 for a file of the user, 1 for an installed package, 2 for Python and for verifiers itself."""
    path = Path(file)
    if "site-packages" in path.parts or "dist-packages" in path.parts:
        return 2 if "verifiers" in path.parts else 1
    return 2 if path.is_relative_to(_STDLIB) else 0


def _frame_text(file: str, line: str, function: str) -> str:
    path = Path(file)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{line}, in {function}"
