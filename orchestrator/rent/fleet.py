"""Start, list, stop and watch the machines of one provider that a run has rented.

    asked -> start call -> started ... stop call -> listed until it is gone -> ended

The provider's list decides what is billed, not the record: a machine counts as ended only when it is listed no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from composer_prime.errors import ProviderError
from composer_prime.run.retry import backoff_s
from orchestrator.rent.calls import answer_to
from orchestrator.rent.provider import Instance, Offer, Order, Provider
from orchestrator.rent.rentals import Rental, RentalRecord, new_label

STOP_TIMEOUT_S = 300.0
"""How long `stop` waits until the provider lists a machine no more."""

SETUP_TIMEOUT_S = 1800.0
"""How long a machine that is set up over SSH may take until it can be reached."""

LOST_ANSWER_S = 120.0
"""How long a machine may take to be listed after a start call whose answer was lost."""

_MOST_FAILURES = 5
"""Start calls that fail one after the other before no further offer is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RentalBudget:
    """When the watch ends the machines that a run has rented of one provider. None is no limit."""

    hours: float | None = None
    """Since the oldest machine that still runs was asked for."""
    dollars: float | None = None
    """Of all machines, also ended ones, by the offers' prices since each was asked for; traffic is not in them."""

    def spent(self, rentals: list[Rental], now: float) -> str | None:
        """Return which limit is reached, counting the time that stopping may take; None while there is budget left."""
        hours = max((now - rental.asked_at for rental in rentals if rental.open), default=0.0) / 3600
        if self.hours is not None and hours >= self.hours:
            return f"{hours:.2f} hours of {self.hours:g} are over"
        margin = sum(rental.usd_per_hour for rental in rentals if rental.open) * STOP_TIMEOUT_S / 3600
        dollars = sum(rental.usd(now) for rental in rentals)
        if self.dollars is not None and dollars + margin >= self.dollars:
            return f"${dollars:.2f} of ${self.dollars:.2f} are spent, with ${margin:.2f} kept for the time of stopping"
        return None


class RentedFleet:
    """The machines of one provider. `tell` shows a line to the user."""

    def __init__(
        self, provider: Provider, record: RentalRecord, tell: Callable[[str], None], *, poll_s: float = 15.0
    ) -> None:
        self.provider = provider
        self.record = record
        self.tell = tell
        self.poll_s = poll_s

    def start(self, machines: list[Offer], count: int, run_id: str, order_of: Callable[[str, Offer], Order]) -> int:
        """Start `count` of `machines` in their order, return how many were started. Goes on after a refusal."""
        orders: dict[str, Order] = {}
        failures = 0
        for offer in machines:
            if len(orders) == count or failures == _MOST_FAILURES:
                break
            if orders or failures:
                time.sleep(self.provider.pause_s)
            order = order_of(new_label(run_id), offer)
            self.record.asked(order.label, self.provider.name, offer)
            instance_id = self._start_one(offer, order)
            if instance_id is None:
                failures += 1
                continue
            failures = 0
            orders[instance_id] = order
            self.tell(f"started {order.label}: {self.provider.name} {instance_id}, ${offer.usd_per_hour:.2f} an hour")
        self._set_up(orders)
        return len(orders)

    def _start_one(self, offer: Offer, order: Order) -> str | None:
        try:
            instance_id = self.provider.read_start(answer_to(self.provider.start_call(offer, order)))
        except ProviderError as error:
            self.tell(f"not started: {error}")
            # The call may have worked although its answer was lost.
            made = [instance for instance in self._listed() or [] if instance.label == order.label]
            if not made:
                self.record.failed(order.label, str(error))
                return None
            instance_id = made[0].instance_id
        self.record.started(order.label, instance_id)
        return instance_id

    def _listed(self) -> list[Instance] | None:
        try:
            return self.instances()
        except ProviderError as error:
            self.tell(f"the machines cannot be listed now: {error}")
            return None

    def _set_up(self, orders: dict[str, Order]) -> None:
        """Run the script on machines that cannot do so at their start. Raises ProviderError at the deadline."""
        waiting = {key: order for key, order in orders.items() if self.provider.address_call(key) is not None}
        deadline = time.monotonic() + SETUP_TIMEOUT_S
        trouble = ""
        while waiting:
            for instance_id, order in list(waiting.items()):
                try:
                    if self._set_up_one(instance_id, order):
                        del waiting[instance_id]
                        self.tell(f"set up {order.label}")
                except ProviderError as error:
                    trouble = f" (last: {error})"
            if waiting and time.monotonic() > deadline:
                raise ProviderError(
                    f"{len(waiting)} machines could not be reached within {SETUP_TIMEOUT_S:g} s: "
                    f"{', '.join(waiting)}{trouble}. They cost money until `orchestrator rent --stop`"
                )
            if waiting:
                time.sleep(self.poll_s)

    def _set_up_one(self, instance_id: str, order: Order) -> bool:
        address = self.provider.address_call(instance_id)
        setup = None if address is None else self.provider.setup_call(answer_to(address), order)
        if setup is not None:
            answer_to(setup)
        return setup is not None

    def rentals(self) -> list[Rental]:
        """Return what the run has ever asked this provider for."""
        return [rental for rental in self.record.rentals() if rental.provider == self.provider.name]

    def instances(self) -> list[Instance]:
        """Return what the provider lists of this run's machines, also those whose start seemed to fail."""
        rentals = self.rentals()
        labels = {rental.label for rental in rentals}
        ids = {rental.instance_id for rental in rentals}
        listed = self.provider.read_list(answer_to(self.provider.list_call()))
        return [
            instance
            for instance in listed
            if not instance.gone and (instance.label in labels or instance.instance_id in ids)
        ]

    def stop(self) -> None:
        """End the billing of every machine and wait until none is listed. Raises ProviderError if some remain."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        accepted: set[str] = set()
        trouble, rounds = "", 0
        while True:
            try:
                remaining = self.instances()
                trouble = self._stop_calls(remaining, accepted) or trouble
                if not remaining and not self._may_appear():
                    self._note_ended()
                    return
            except ProviderError as error:
                trouble = str(error)
                remaining = None
            if time.monotonic() > deadline:
                which = "unknown" if remaining is None else ", ".join(instance.instance_id for instance in remaining)
                raise ProviderError(
                    f"machines of {self.provider.name} are still billed after {STOP_TIMEOUT_S:g} s: {which}"
                    f"{trouble and f' ({trouble})'}. Run `orchestrator rent --stop` again, or end them on its web page"
                )
            time.sleep(backoff_s(rounds, first_s=0.5, longest_s=self.poll_s))
            rounds += 1

    def _stop_calls(self, remaining: list[Instance], accepted: set[str]) -> str:
        """Ask for the end of each machine once, again where it was refused. Return the last refusal."""
        trouble = ""
        for instance in remaining:
            if instance.instance_id in accepted:
                continue
            try:
                self.provider.read_stop(answer_to(self.provider.stop_call(instance.instance_id)))
                accepted.add(instance.instance_id)
                self.tell(f"stopping {instance.label or instance.instance_id}")
            except ProviderError as error:
                trouble = str(error)
                self.tell(f"not stopped yet: {error}")
        return trouble

    def _may_appear(self) -> bool:
        """Return whether a start call was cut off so lately that its machine may not be listed yet."""
        return any(
            rental.open and rental.instance_id is None and time.time() - rental.asked_at < LOST_ANSWER_S
            for rental in self.rentals()
        )

    def _note_ended(self) -> None:
        for rental in self.rentals():
            if rental.open:
                self.record.ended(rental.label)

    def watch(self, budget: RentalBudget) -> str:
        """Wait until the budget is spent and return why. The caller stops the machines, also when this raises."""
        while True:
            rentals = self.rentals()
            reason = budget.spent(rentals, time.time())
            if reason is None and not any(rental.open for rental in rentals):
                reason = "no machine is left"
            if reason is not None:
                return reason
            time.sleep(self.poll_s)
