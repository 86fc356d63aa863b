"""How fast a node is, by the gateway's own clock and counts. Nothing that a node claims about itself enters.

An answer of T tokens after C prompt tokens that were not cached, on a node with R requests, takes about

    prompt_s x C + max(fastest_s, token_s x R) x T    seconds

`prompt_s` and `token_s` are fitted to the node's answers by least squares, older answers counting less. `fastest_s`
bounds what a single request can have: a GPU with one request is not faster than with eight.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

_LEAST_ANSWERS = 3
"""Answers from which a node counts as measured."""
_FORGET = 0.95
"""Weight of the past at each answer: about twenty answers count."""
_PREFILL_GAIN = 20.0
"""Prompt tokens a second over sampled tokens a second, until the answers tell them apart."""
_PRIOR = 0.2
"""How much of an answer that ratio counts as, in the fit."""
_LEAST_SAMPLING = 0.25
"""Share of an answer's time that its tokens took at least, however long its prompt."""
_GAIN_RANGE = (0.5, 400.0)
_MOST_ABOVE_MEDIAN = 16.0
"""No node counts as faster than this many times the fleet's median, whatever its answers look like."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds a token; see the module's formula."""

    prompt_s: float
    token_s: float
    fastest_s: float = 0.0

    def seconds(self, cold: float, sampled: float, load: int) -> float:
        """Return how long an answer takes."""
        return self.prompt_s * cold + max(self.fastest_s, self.token_s * load) * sampled


class NodeSpeed:
    """Running sums over one node's answers, for the least-squares fit."""

    def __init__(self) -> None:
        self.answers = 0
        self.tokens = 0
        """Delivered in answers and parts of answers."""
        self.pace: Pace | None = None
        """None while it is not measured."""
        self.streams = False
        """Whether its node has ever delivered a part of an answer."""
        self.is_hopeful = True
        """Whether its node counts as fast while it is idle and not measured, to be tried at all."""
        self._cc = self._cw = self._ww = self._ce = self._we = 0.0
        self._weight = 0.0

    def note_tokens(self, count: int) -> bool:
        """Count delivered tokens. Return whether the pace is not measured yet."""
        self.tokens += count
        return self.pace is None

    def note(self, elapsed_s: float, *, cold: int, sampled: int, load: float) -> None:
        """Take in an answer: its time, and tokens computed and sampled. `load`: mean requests that the node held."""
        work = sampled * load
        self.answers += 1
        sums = (self._cc, self._cw, self._ww, self._ce, self._we)
        terms = (cold * cold, cold * work, work * work, cold * elapsed_s, work * elapsed_s)
        self._cc, self._cw, self._ww, self._ce, self._we = (
            _FORGET * old + new for old, new in zip(sums, terms, strict=True)
        )
        self._weight = _FORGET * self._weight + 1.0
        if self.answers >= _LEAST_ANSWERS:
            self.pace = self._fit(elapsed_s, cold, sampled)

    def _fit(self, elapsed_s: float, cold: int, sampled: int) -> Pace:
        """Solve for both rates, drawn a little towards the usual ratio of the two."""
        gain = 1.0 / _PREFILL_GAIN
        token = (self._we + gain * self._ce) / (self._ww + 2 * gain * self._cw + gain * gain * self._cc)
        prompt = gain * token
        rest_c = self._ce - prompt * self._cc - token * self._cw
        rest_w = self._we - prompt * self._cw - token * self._ww
        draw = 1 + _PRIOR / self._weight
        cc, ww = self._cc * draw + 1e-9, self._ww * draw
        determinant = cc * ww - self._cw * self._cw
        token += (cc * rest_w - self._cw * rest_c) / determinant
        prompt += (ww * rest_c - self._cw * rest_w) / determinant
        token = max(token, 1e-9)
        low, high = _GAIN_RANGE
        prompt = min(max(prompt, token / high), token / low)
        # It rises slowly, so that a node that has slowed down is believed again.
        fastest = max(_LEAST_SAMPLING * elapsed_s, elapsed_s - prompt * cold) / sampled
        if self.pace is not None:
            fastest = min(fastest, 1.02 * self.pace.fastest_s)
        return Pace(prompt, token, fastest)


@dataclass(slots=True)
class FleetPace:
    """The measured nodes' median: what an unmeasured node counts as, and the bound on measured ones."""

    median: Pace | None = None

    def update(self, speeds: Iterable[NodeSpeed]) -> None:
        """Take the median over `speeds` again."""
        paces = [speed.pace for speed in speeds if speed.pace is not None]
        if paces:
            self.median = Pace(
                median(pace.prompt_s for pace in paces),
                median(pace.token_s for pace in paces),
                median(pace.fastest_s for pace in paces),
            )

    def of(self, speed: NodeSpeed, places_share: float) -> Pace:
        """Return the pace to reckon with. An unmeasured node counts as slower, the fewer places it has."""
        usual = self.median
        if usual is None:
            return Pace(1.0 / _PREFILL_GAIN, 1.0 / places_share)
        if speed.pace is None:
            return Pace(usual.prompt_s, usual.token_s / places_share, usual.fastest_s)
        least = 1.0 / _MOST_ABOVE_MEDIAN
        return Pace(
            max(speed.pace.prompt_s, least * usual.prompt_s),
            max(speed.pace.token_s, least * usual.token_s),
            max(speed.pace.fastest_s, least * usual.fastest_s),
        )
