"""The licence of each kind of hint to teach, which it earns in a run, and may lose.

    a hinted turn is drawn again, with its hint and without (orchestrator/hints/redraws.py)
       -> difference of the two rewards -> Licence: bets (composer_prime/stats/sequential.py) -> earned or lost
    StepDone.divergence ----------------> Licence: does the student take it over?              -> ended
    Licence.weight -> HintStage: only a kind with a weight is distilled

A hint is worth distilling where it lifts the reward, and where the lift can be had without the hint: then the
divergence falls, which the trainer measures on fresh tasks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from composer_prime.errors import ConfigError
from composer_prime.monitor.events import event
from composer_prime.run.run_dir import append_line
from composer_prime.stats.sequential import Wager

logger = logging.getLogger(__name__)

_FALSE_LICENCE = 0.05
"""Chance, at most, that a hint without any lift ever gets a first licence; half of that for each further one."""
_LEAST_LIFT = 0.05
"""A hint that lifts the reward by less is not worth its noise."""
_FALSE_LOSS = 0.02
"""One over the pairs, in the mean, after which a hint of the least lift loses its licence by bad luck."""
_TRIAL_STEPS = 10
_WINDOW = 5
"""Steps with a divergence, at the beginning and at the end, whose means are compared."""
_MOST_LEFT = 0.7
"""A licence ends where more than this share of the first divergence is left after the trial, or comes back."""


@dataclass(slots=True)
class _Kind:
    """What is known of one kind of hint."""

    weight: float
    """1 with a licence, 0 without."""
    losses: int = 0
    has_ended: bool = False
    """Its divergence stopped falling: no pair gives it a licence again."""
    pairs: list[float] = field(default_factory=list)
    earns: Wager = field(default_factory=Wager)
    loses: Wager = field(default_factory=lambda: Wager(-_LEAST_LIFT, restarts=True))
    divergences: list[float] = field(default_factory=list)
    """Of the steps that distilled it since it last began to."""

    def add_pair(self, difference: float) -> str | None:
        """Take in a reward with the hint less one without; return why that changes the licence, or None."""
        self.pairs.append(difference)
        if self.has_ended:
            return None
        if self.weight > 0:
            self.loses.add(-difference)
            if self.loses.capital >= 1 / _FALSE_LOSS:
                return self._lose(f"its lift is below {_LEAST_LIFT:g}")
        if self.weight < 1:
            self.earns.add(difference)
            if self.earns.capital >= 2**self.losses / _FALSE_LICENCE:
                self.weight = 1.0
                return f"it lifts the reward by {fmean(self.pairs):+.3f} in {len(self.pairs)} pairs"
        return None

    def add_divergence(self, nats: float) -> str | None:
        """Take in a step's mean divergence; return why the licence ends, or None."""
        if self.weight == 0:
            return None
        self.divergences.append(nats)
        if len(self.divergences) < _TRIAL_STEPS:
            return None
        first, last = fmean(self.divergences[:_WINDOW]), fmean(self.divergences[-_WINDOW:])
        if last <= _MOST_LEFT * first:
            return None
        self.has_ended = True
        return self._lose(
            f"its divergence was {first:.4f} nats a token at first and is {last:.4f} now, where at most {_MOST_LEFT:g} "
            f"of that may be left after {_TRIAL_STEPS} steps: the student takes nothing more over"
        )

    def _lose(self, reason: str) -> str:
        self.weight, self.earns, self.loses = 0.0, Wager(), Wager(-_LEAST_LIFT, restarts=True)
        self.divergences = []
        self.losses += 1
        return reason


class Licence:
    """The licences of a run, by kind of error, from the measurements in a file, which is read and added to.

    A line is {"model"}, the first one, {"step", "kind", "with", "without"}, {"step", "divergence"}, or {"resume"}: the
    step whose later measurements no longer count.
    """

    def __init__(
        self, path: Path, model: str, step: int = 0, *, trust: bool = False, earlier: Path | None = None
    ) -> None:
        """`trust`: whether a kind of which nothing is shown yet teaches. `earlier`: the pairs of a probe of `model`.

        `step`: the last trained one. Raises ConfigError as `read_pairs` does.
        """
        self._path = path
        self._start = float(trust)
        self._earlier = read_pairs(earlier, model) if earlier is not None else []
        self._is_out_of_range = False
        self._kinds: defaultdict[str, _Kind]
        if not path.exists():
            self._write({"model": model})
        self.resume(step)

    def resume(self, step: int) -> None:
        """Stand after `step`: what was measured later the run measures again."""
        self._step = step
        self._write({"resume": step})
        self._kinds = defaultdict(lambda: _Kind(self._start))
        for kind, difference in self._earlier:
            self._kinds[kind].add_pair(difference)
        lines: list[dict[str, Any]] = []
        for line in _decoded(self._path) if self._path.exists() else ():
            if "resume" in line:
                lines = [each for each in lines if each["step"] <= line["resume"]]
            elif "step" in line:
                lines.append(line)
        for line in lines:
            for kind, nats in line.get("divergence", {}).items():
                self._kinds[kind].add_divergence(nats)
            if "kind" in line:
                self._kinds[line["kind"]].add_pair(line["with"] - line["without"])

    def weight(self, kind: str) -> float:
        """Return the factor on the weight of a kind. Any thread may ask."""
        known = self._kinds.get(kind)
        return self._start if known is None else known.weight

    def has_ended(self, kind: str) -> bool:
        """Tell whether no pair can help a kind any more."""
        return self._kinds[kind].has_ended

    def note_pair(self, kind: str, rewards: tuple[float, float]) -> None:
        """Take in the rewards of two redraws of a turn, with the hint and without, that differ by 1 at most."""
        difference = rewards[0] - rewards[1]
        if abs(difference) > 1:
            if not self._is_out_of_range:
                logger.warning(
                    "redraws got the rewards %g and %g: a licence counts only those between 0 and 1", *rewards
                )
            self._is_out_of_range = True
            return
        self._write({"step": self._step, "kind": kind, "with": rewards[0], "without": rewards[1]})
        self._tell(kind, self._kinds[kind].add_pair(difference))

    def note_step(self, step: int, divergence: Mapping[str, float]) -> None:
        """Take in the mean divergence of a token by kind, in nats, of a step that is trained."""
        self._step = step
        finite = {kind: nats for kind, nats in divergence.items() if math.isfinite(nats)}
        if not finite:
            return
        self._write({"step": step, "divergence": finite})
        for kind, nats in finite.items():
            self._tell(kind, self._kinds[kind].add_divergence(nats))

    def _write(self, line: dict[str, Any]) -> None:
        try:
            append_line(self._path, json.dumps(line).encode())
        except OSError as error:
            logger.warning("%s gets no line, which a resume will miss: %s", self._path, error)

    def _tell(self, kind: str, reason: str | None) -> None:
        if reason is not None:
            verb = "has a licence to teach" if self._kinds[kind].weight else "lost its licence to teach"
            logger.info("hints for %s: the kind %s: %s", kind, verb, reason, extra=event("hints"))

    def metrics(self) -> dict[str, float]:
        """Return the number of pairs, and by kind the mean lift and the weight."""
        figures = {"hints/pairs": float(sum(len(known.pairs) for known in self._kinds.values()))}
        for kind, known in sorted(self._kinds.items()):
            figures[f"hints/weight/{kind}"] = known.weight
            if known.pairs:
                figures[f"hints/lift/{kind}"] = fmean(known.pairs)
        return figures


def read_pairs(path: Path, model: str) -> list[tuple[str, float]]:
    """Return a probe's pairs: kind, and reward with the hint less without.

    Raises ConfigError for those of another model, and for a file without pairs, of other rewards, or not readable.
    """
    setting = "orchestrator.hints.licence.file"
    try:
        first, *lines = _decoded(path.expanduser())
        said = first["model"]
        pairs = [(line["kind"], line["with"] - line["without"]) for line in lines]
        if not pairs or not all(abs(difference) <= 1 for _, difference in pairs):
            raise ValueError(f"it has {len(pairs)} redraws, and needs some, whose rewards differ by 1 at most")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{setting} is {path}, which is no file of `composer hints probe --save`: {error!r}"
        ) from None
    if Path(str(said)).expanduser().resolve() != Path(model).expanduser().resolve():
        raise ConfigError(
            f"{setting} is {path}, which holds redraws of {said}, but model.path is {model}: a hint must lift the "
            "model that it teaches; probe this model"
        )
    return pairs


def write_pairs(path: Path, model: str, pairs: Iterable[tuple[str, float, float]]) -> None:
    """Write the pairs of a probe: kind, reward with the hint, and without."""
    append_line(path, json.dumps({"model": model}).encode())
    for kind, hinted, free in pairs:
        line = {"step": 0, "kind": kind, "with": hinted, "without": free}
        append_line(path, json.dumps(line).encode())


def _decoded(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file but those that a crash cut short."""
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)
