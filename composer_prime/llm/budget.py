"""A hard cap on money: what a call may cost at most is reserved before the call is made.

    reserve (refused: CapError) ──> call ──> settle(cost)        the difference is free again
                                          └──> no reply          all that was held stays spent

The cap is checked with everything that is held for calls in flight. So charges up to the bounds stay within it,
whatever the order of replies. A charge above its bound closes the budget: no further call is made. Only such charges,
for calls then in flight, can exceed the cap. An endpoint that has not yet kept to a bound gets one call at a time.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from composer_prime.errors import CapError


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    call: str
    state: str
    teacher: str
    usd: float
    """What is held: the most that the call should cost."""


class Budget:
    """Used by one event loop."""

    def __init__(self, cap_usd: float, record: Callable[..., None], spent_usd: float) -> None:
        """`record(kind, **values)` writes down what is "reserved", "settled" and "stopped". `spent_usd`: by earlier
        runs."""
        self._cap_usd = cap_usd
        self._record = record
        self.spent_usd = spent_usd
        """By earlier runs too."""
        self._kept = set[str]()
        """Endpoints that kept to the bound of a call."""
        # Summed each time: a running sum would keep a rounding error when nothing is in flight any more.
        self._in_flight: dict[str, Reservation] = {}
        self._by_state: dict[str, float] = defaultdict(float)
        self._settled = asyncio.Event()
        self._closing = asyncio.Event()
        self.closed: str | None = None
        """Why no call is made any more."""

    @property
    def in_flight(self) -> int:
        """Calls that are made and not settled."""
        return len(self._in_flight)

    @property
    def held_usd(self) -> float:
        """What is held for the calls in flight."""
        return sum(each.usd for each in self._in_flight.values())

    def close(self, reason: str) -> None:
        """Refuse every further call, and those that wait to be made."""
        self.closed = self.closed or reason
        self._settled.set()
        self._closing.set()

    async def pause(self, seconds: float) -> None:
        """Wait before a call. Return at once when the budget is closed."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)

    async def reserve(self, *, state: str, teacher: str, usd: float) -> Reservation:
        """Hold `usd`, the bound of a call.

        Waits while only calls in flight stand in the way, for they rarely cost their bound, or while an endpoint makes
        its first call. Raises CapError, which names the cap, when the call does not fit.
        """
        while True:
            self._check(teacher, usd)
            fits = not usd or self.spent_usd + self.held_usd + usd <= self._cap_usd
            if fits and not self._waits_for_the_first(teacher, usd):
                break
            self._settled.clear()
            await self._settled.wait()
        held = Reservation(call=secrets.token_hex(8), state=state, teacher=teacher, usd=usd)
        self._record("reserved", call=held.call, state=state, teacher=teacher, usd=usd)
        self._in_flight[held.call] = held
        return held

    def _waits_for_the_first(self, teacher: str, usd: float) -> bool:
        """Return whether a call of an endpoint that is not known to keep to its bounds has to wait for another such."""
        unknown = usd > 0 and teacher not in self._kept
        return unknown and any(each.usd > 0 and each.teacher not in self._kept for each in self._in_flight.values())

    def _check(self, teacher: str, usd: float) -> None:
        """Raise CapError where a call with bound `usd` may not be made, whatever the calls in flight will cost."""
        if self.closed is not None:
            raise CapError(self.closed)
        if usd and self.spent_usd + usd > self._cap_usd:
            raise CapError(
                f"a call to {teacher} may cost ${usd:.4f}, but ${max(self._cap_usd - self.spent_usd, 0.0):.4f} of "
                f"teachers.budget.usd_per_run = ${self._cap_usd:g} is left: raise the cap, or leave this teacher out"
            )

    def note_charge(self, held: Reservation, usd: float) -> None:
        """Close the budget when an endpoint charged more than the call's bound.

        Call it before the answer is stored and the call settled: no other call may be made meanwhile.
        """
        if usd > held.usd:
            self.close(
                f"{held.teacher} charged ${usd:.6f} for a call that may cost ${held.usd:.6f}: check that the endpoint "
                "keeps to max_tokens and counts tokens rightly, and correct its input_usd_per_mtok and "
                "output_usd_per_mtok"
            )

    def settle(self, held: Reservation, usd: float, *, status: str, **facts: object) -> None:
        """End a call that cost `usd`. `status` is ok where it was answered."""
        del self._in_flight[held.call]
        if usd <= held.usd and (status == "ok" or usd > 0):
            self._kept.add(held.teacher)
        self.spent_usd += usd
        self._by_state[held.state] += usd
        self._settled.set()
        self._record("settled", call=held.call, teacher=held.teacher, usd=usd, status=status, **facts)

    def note_stop(self, reason: str) -> None:
        """Write down that the replay ended early."""
        self._record("stopped", reason=reason)

    def take_state(self, state: str) -> float:
        """Return what calls on this state cost since the last question, failed attempts included."""
        return self._by_state.pop(state, 0.0)
