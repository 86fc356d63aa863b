"""Hard caps on money: more than a call should ever cost is reserved before the call is made.

    reserve (refused: CapError) ──> call ──> settle(cost)        the difference is free again
                                          └──> nothing came back    all that was held stays spent

What is held for a call is its bound times `overcharge_factor`, or times what its teacher charged last where that is
more. Sums are checked with all that is held for calls in flight, so no order of replies, and no charge up to what is
held, can pass a cap. A charge above the bound (`charged`) or above the price list closes the budget: no further call is
made. Caps can thus be passed only by what calls that were in flight then were charged beyond what was held for them. Of
teachers that have not kept to a bound yet one call at a time is in flight, so that who charges too much from the start
does so in one call.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from composer_prime.config.teachers import BudgetConfig
from composer_prime.errors import CapError
from composer_prime.run.costs import CostLedger, charge_ratio, spent


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    call: str
    trace: str
    state: str
    teacher: str
    usd: float
    """What is held: at least overcharge_factor times the bound."""
    bound_usd: float
    """The most that the call may cost by the price list."""


class Budget:
    """The money of one costs.jsonl, earlier runs of it included. One event loop uses it."""

    def __init__(self, config: BudgetConfig, path: Path) -> None:
        self._config, self._ledger = config, CostLedger(path)
        before = spent(path)
        self.spent_usd = before.usd
        self._by_trace: dict[str, float] = defaultdict(float, before.by_trace)
        self._ratios = dict(before.charge_ratios)
        self._tried: set[str] = set()
        """Teachers that kept to the bound of a call, or whose call was counted without an answer."""
        # Summed anew each time: a running sum would keep a rest of rounding when nothing is in flight any more.
        self._in_flight: dict[str, Reservation] = {}
        self._by_state: dict[str, float] = defaultdict(float)
        self._settled = asyncio.Event()
        self._closing = asyncio.Event()
        self.closed: str | None = None
        """Why no call is made any more."""

    @property
    def by_trace(self) -> Mapping[str, float]:
        """USD by trace, of earlier runs too."""
        return self._by_trace

    @property
    def in_flight(self) -> int:
        """Calls that are made and not settled."""
        return len(self._in_flight)

    def close(self, reason: str) -> None:
        """Refuse every further call, and those that wait to be made."""
        self.closed = self.closed or reason
        self._settled.set()
        self._closing.set()

    async def pause(self, seconds: float) -> None:
        """Let time pass before a call, no more of it once none may be made."""
        if seconds > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), seconds)

    async def reserve(self, *, trace: str, state: str, teacher: str, usd: float) -> Reservation:
        """Hold, for a call of bound `usd`, as many times that as its teacher may charge: overcharge_factor, or what it
        charged last where that is more.

        Waits where only calls in flight, which rarely cost their bound, are in the way, or one of another teacher that
        was not tried yet.

        Raises CapError, which names the cap, when it does not fit.
        """
        while self._refusal(trace, teacher, usd, in_flight=True) is not None or self._has_to_wait(teacher, usd):
            refusal = self._refusal(trace, teacher, usd, in_flight=False)
            if refusal is not None:
                raise refusal
            self._settled.clear()
            await self._settled.wait()
        held = usd * self._times(teacher)
        reservation = Reservation(
            call=secrets.token_hex(8), trace=trace, state=state, teacher=teacher, usd=held, bound_usd=usd
        )
        self._ledger.write(
            "reserved", call=reservation.call, trace=trace, state=state, teacher=teacher, usd=held, bound=usd
        )
        self._in_flight[reservation.call] = reservation
        return reservation

    def _times(self, teacher: str) -> float:
        """How many times its bound is held for a call."""
        return max(self._config.overcharge_factor, self._ratios.get(teacher, 0.0))

    def _has_to_wait(self, teacher: str, usd: float) -> bool:
        """Whether the call would be the second in flight of teachers that may charge and were not tried yet."""
        if usd == 0 or teacher in self._tried:
            return False
        return any(each.usd > 0 and each.teacher not in self._tried for each in self._in_flight.values())

    def _refusal(self, trace: str, teacher: str, usd: float, *, in_flight: bool) -> CapError | None:
        """Which cap a call bounded by `usd` would pass, with what is reserved for calls in flight counted or not."""
        if self.closed is not None:
            return CapError(self.closed, scope="run")
        caps = self._config
        counted = list(self._in_flight.values()) if in_flight else []
        in_trace = self._by_trace[trace] + sum(each.usd for each in counted if each.trace == trace)
        in_run = self.spent_usd + sum(each.usd for each in counted)
        held = usd * self._times(teacher)
        for scope, used, cap in (
            ("call", 0.0, caps.usd_per_call),
            ("trace", in_trace, caps.usd_per_trace),
            ("run", in_run, caps.usd_per_run),
        ):
            if used + held > cap:
                return CapError(
                    f"a call to {teacher} needs {self._needed(teacher, usd)}, but ${max(cap - used, 0.0):.4f} of "
                    f"teachers.budget.usd_per_{scope} = ${cap:g} is left: raise the cap, or leave this teacher out",
                    scope=scope,
                )
        return None

    def _needed(self, teacher: str, usd: float) -> str:
        times = self._times(teacher)
        why = "teachers.budget.overcharge_factor" if times == self._config.overcharge_factor else "as it charged last"
        return f"${usd * times:.4f}, {times:.3g} times its bound of ${usd:.4f} ({why})"

    def charged(self, reservation: Reservation, usd: float) -> None:
        """An endpoint says what it charged. Above the bound no further call is made: to be told before the call is
        settled, which waits for the answer to be kept."""
        if usd > reservation.bound_usd:
            self.close(
                f"{reservation.teacher} charged ${usd:.6f} for a call that was bounded by "
                f"${reservation.bound_usd:.6f}: lower teachers.budget.bytes_per_token, and check that the endpoint "
                "keeps to max_tokens"
            )

    def settle(self, reservation: Reservation, usd: float, *, status: str, **facts: object) -> None:
        """The call ended and cost `usd`; `status` is ok where it was answered."""
        del self._in_flight[reservation.call]
        if status == "ok" and reservation.bound_usd > 0:
            before = self._ratios.get(reservation.teacher, 0.0)
            self._ratios[reservation.teacher] = charge_ratio(before, usd, reservation.usd, reservation.bound_usd)
        if usd <= reservation.bound_usd if status == "ok" else usd > 0:
            self._tried.add(reservation.teacher)
        self.spent_usd += usd
        self._by_trace[reservation.trace] += usd
        self._by_state[reservation.state] += usd
        self._settled.set()
        self._ledger.write(
            "settled",
            call=reservation.call,
            trace=reservation.trace,
            teacher=reservation.teacher,
            usd=usd,
            status=status,
            **facts,
        )

    def stopped(self, reason: str) -> None:
        """Note that replay ended early."""
        self._ledger.write("stopped", reason=reason)

    def take_state(self, state: str) -> float:
        """What calls on this state cost since it was last asked for, failed attempts included."""
        return self._by_state.pop(state, 0.0)
