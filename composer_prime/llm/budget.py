"""Hard caps on money: more than a call should ever cost is reserved before the call is made.

    reserve (refused: CapError) ──> call ──> settle(cost)        the difference is free again
                                          └──> no reply          all that was held stays spent

A teacher's call holds OVERCHARGE times its bound, or times what its endpoint charged last where that is more. Caps are
checked with everything that is held for calls in flight. Whatever the order of replies, charges up to the held amounts
stay within every cap. A charge that no tokenizer explains, or above the held amount (`note_charge`), or above the price
list closes the budget: no further call is made. Only charges beyond the held amounts, for calls then in flight, can
exceed a cap. An endpoint that has not yet kept to such a limit gets one call at a time: if it charges too much from the
start, it does so once.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from composer_prime.errors import CapError
from composer_prime.run.costs import Spent, charge_ratio

OVERCHARGE = 2.0
"""The reservation for a call to a teacher, in multiples of the call's bound. If an endpoint suddenly charges up to this
much more, no cap is exceeded, for any number of calls in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """USD."""

    usd_per_run: float
    usd_per_trace: float = math.inf
    usd_per_call: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    call: str
    trace: str
    state: str
    teacher: str
    usd: float
    """What is held: at least the bound, OVERCHARGE times it for a teacher."""
    bound_usd: float
    """What the call should cost at most by the price list."""
    limit_usd: float
    """What an honest endpoint may charge for it."""


class Budget:
    """Used by one event loop."""

    def __init__(self, caps: Caps, record: Callable[..., None], before: Spent, *, trusted: bool = False) -> None:
        """`record(kind, **values)` writes down what is "reserved", "settled" and "stopped". `before`: what earlier runs
        spent. `trusted`: only its bound is held for a call, several calls may be in flight before the endpoint has kept
        to a bound, and a call that costs nothing is made whatever was spent."""
        self._caps = caps
        self._record = record
        self._trusted = trusted
        self.spent_usd = before.usd
        self.by_trace: dict[str, float] = defaultdict(float, before.by_trace)
        """USD, of earlier runs too."""
        self._ratios = dict(before.charge_ratios)
        self._tried: set[str] = set()
        """Endpoints that kept to the limit of a call, or whose call was counted without an answer."""
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
        if seconds > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), seconds)

    async def reserve(
        self, *, trace: str, state: str, teacher: str, usd: float, most_usd: float | None = None
    ) -> Reservation:
        """Hold money for a call with bound `usd`. `most_usd`: its cost by the worst of tokenizers, where that is more.

        Waits while only calls in flight stand in the way, for they rarely cost their bound, or while another endpoint
        makes its first call. Raises CapError, which names the cap, when the call does not fit.
        """
        while self._refusal(trace, teacher, usd, in_flight=True) is not None or self._has_to_wait(teacher, usd):
            refusal = self._refusal(trace, teacher, usd, in_flight=False)
            if refusal is not None:
                raise refusal
            self._settled.clear()
            await self._settled.wait()
        held_usd = usd * self._multiple(teacher)
        reservation = Reservation(
            call=secrets.token_hex(8),
            trace=trace,
            state=state,
            teacher=teacher,
            usd=held_usd,
            bound_usd=usd,
            limit_usd=min(usd if most_usd is None else most_usd, OVERCHARGE * usd),
        )
        self._record(
            "reserved", call=reservation.call, trace=trace, state=state, teacher=teacher, usd=held_usd, bound=usd
        )
        self._in_flight[reservation.call] = reservation
        return reservation

    def _multiple(self, teacher: str) -> float:
        """Return how many times its bound is held for a call."""
        return max(1.0 if self._trusted else OVERCHARGE, self._ratios.get(teacher, 0.0))

    def _has_to_wait(self, teacher: str, usd: float) -> bool:
        """Return whether the call would be the second in flight of endpoints that may charge and were not tried."""
        if self._trusted or usd == 0 or teacher in self._tried:
            return False
        return any(each.usd > 0 and each.teacher not in self._tried for each in self._in_flight.values())

    def _refusal(self, trace: str, teacher: str, usd: float, *, in_flight: bool) -> CapError | None:
        """Return the cap that a call with bound `usd` would pass, with or without the calls in flight."""
        if self.closed is not None:
            return CapError(self.closed, scope="run")
        if self._trusted and usd == 0:
            return None
        caps = self._caps
        counted = list(self._in_flight.values()) if in_flight else []
        in_trace = self.by_trace[trace] + sum(each.usd for each in counted if each.trace == trace)
        in_run = self.spent_usd + sum(each.usd for each in counted)
        multiple = self._multiple(teacher)
        held_usd = usd * multiple
        reason = " (as it charged last)" if multiple > OVERCHARGE else ""
        for scope, used_usd, cap_usd in (
            ("call", 0.0, caps.usd_per_call),
            ("trace", in_trace, caps.usd_per_trace),
            ("run", in_run, caps.usd_per_run),
        ):
            if used_usd + held_usd > cap_usd:
                return CapError(
                    f"a call to {teacher} needs ${held_usd:.4f}, {multiple:.3g} times its bound of ${usd:.4f}"
                    f"{reason}, but ${max(cap_usd - used_usd, 0.0):.4f} of teachers.budget.usd_per_{scope} = "
                    f"${cap_usd:g} is left: raise the cap, or leave this teacher out",
                    scope=scope,
                )
        return None

    def note_charge(self, reservation: Reservation, usd: float) -> None:
        """Close the budget when an endpoint charged more than the call's limit.

        Call it before the answer is stored and the call settled: no other call may be made meanwhile.
        """
        if usd > reservation.limit_usd:
            self.close(
                f"{reservation.teacher} charged ${usd:.6f} for a call that was bounded by "
                f"${reservation.limit_usd:.6f}: check that the endpoint keeps to max_tokens and counts tokens rightly"
            )

    def settle(self, reservation: Reservation, usd: float, *, status: str, **facts: object) -> None:
        """End a call that cost `usd`. `status` is ok where it was answered."""
        del self._in_flight[reservation.call]
        if status == "ok" and reservation.bound_usd > 0:
            before = self._ratios.get(reservation.teacher, 0.0)
            self._ratios[reservation.teacher] = charge_ratio(before, usd, reservation.usd, reservation.bound_usd)
        if usd <= reservation.limit_usd if status == "ok" else usd > 0:
            self._tried.add(reservation.teacher)
        self.spent_usd += usd
        self.by_trace[reservation.trace] += usd
        self._by_state[reservation.state] += usd
        self._settled.set()
        self._record(
            "settled",
            call=reservation.call,
            trace=reservation.trace,
            teacher=reservation.teacher,
            usd=usd,
            status=status,
            **facts,
        )

    def note_stop(self, reason: str) -> None:
        """Write down that the replay ended early."""
        self._record("stopped", reason=reason)

    def take_state(self, state: str) -> float:
        """Return what calls on this state cost since the last question, failed attempts included."""
        return self._by_state.pop(state, 0.0)
