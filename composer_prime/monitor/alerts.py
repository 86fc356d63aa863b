"""What in a step's figures should worry its user, each with the setting to turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import takewhile
from math import inf
from statistics import median

from composer_prime.config.trainer import OptimConfig
from composer_prime.monitor.metrics_file import Line, numeric_field

FEW_STEPS = 10
"""Steps in a row without reward that are said; the fewest with a usual value."""
_REMEMBERED = 100
"""Steps of which a usual value is the median."""
_TIMES_USUAL = 10.0
_BOUNDS = {
    "optim/lr": (0.0, 5e-3, "usual are 1e-7 to 1e-3; lower trainer.optim.lr"),
    "policy/entropy": (1e-3, inf, "rollouts are all alike; raise orchestrator.sampling.temperature"),
    "rollout/truncated_share": (0.0, 0.8, "raise orchestrator.sampling.max_tokens or model.max_context"),
}
"""Figure -> least and most that is no news, and the remedy."""
_STEADY = {
    "optim/grad_norm": (0.0, "lower trainer.optim.lr or trainer.optim.max_grad_norm"),
    "policy/mismatch_kl": (0.01, "lower trainer.optim.lr or orchestrator.max_staleness"),
}
"""Figure that stays near its median -> where a jump becomes news, and the remedy."""


def alerts(lines: Mapping[int, Line], step: int, optim: OptimConfig) -> Iterator[tuple[str, str]]:
    """Yield a name and a sentence for each thing that is wrong with `step`."""
    for name, (least, most, remedy) in _BOUNDS.items():
        value = None if optim.type.is_own and name == "optim/lr" else numeric_field(lines[step], name)
        if value is not None and not least <= value <= most:
            yield name, f"{name} is {value:.3g}: {remedy}"
    before = [lines[each] for each in range(step - _REMEMBERED, step) if each in lines]
    yield from _jumps(lines[step], before)
    silent = list(takewhile(_is_silent, (lines[each] for each in range(step, -1, -1) if each in lines)))
    if len(silent) >= FEW_STEPS:
        remedy = "lower trainer.optim.lr if there was reward before, else change the tasks of [[orchestrator.source]]"
        yield "reward/mean", f"every reward has been 0 since step {silent[-1]['step']}: {remedy}"


def _is_silent(line: Line) -> bool:
    return numeric_field(line, "reward/mean") == 0 and not numeric_field(line, "reward/std")


def _jumps(line: Line, before: list[Line]) -> Iterator[tuple[str, str]]:
    for name, (least, remedy) in _STEADY.items():
        usual = [value for each in before if (value := numeric_field(each, name))]
        value = numeric_field(line, name) or 0.0
        if len(usual) >= FEW_STEPS and value > max(_TIMES_USUAL * median(usual), least):
            yield name, f"{name} is {value:.3g}, usually {median(usual):.3g}: {remedy}"
