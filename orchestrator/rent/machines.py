"""Start, list, stop and watch the machines of one provider that a run has rented.

    asked -> start call -> started ... stop call -> listed until it is gone -> ended

The provider's list decides what is billed, not the record: a machine has ended only when it is no longer listed.
A start call whose answer is lost may have worked: its rental stays open, and counts as billed, until `stop` has looked
for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from composer_prime.errors import ProviderError, ProviderLoginError, ProviderRefusedError
from composer_prime.run.rentals import Rental, RentalRecord, new_label
from composer_prime.run.retry import backoff_s
from orchestrator.rent.calls import CALL_TIMEOUT_S, answer_to
from orchestrator.rent.provider import Instance, Offer, Order, Provider
from orchestrator.rent.usefulness import RunUse

STOP_TIMEOUT_S = 300.0
"""How long `stop` waits until the provider no longer lists a machine."""

SETUP_TIMEOUT_S = 1800.0
"""How long a machine that is set up over SSH may take until it can be reached."""

LOST_ANSWER_S = 120.0
"""How long a machine may take to be listed after the end of its start call."""

_STOP_AGAIN_S = 60.0
"""How long a machine whose stop was accepted may stay listed until it is asked for again."""

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


class RentedMachines:
    """The machines of one provider."""

    def __init__(
        self,
        provider: Provider,
        record: RentalRecord,
        tell: Callable[[str], None],
        *,
        poll_s: float = 15.0,
        only: Collection[str] = (),
    ) -> None:
        """`tell` shows a line to the user. `only`: labels of the machines that are meant, by default all."""
        self.provider = provider
        self.record = record
        self.tell = tell
        self.poll_s = poll_s
        self.only = only

    def start(
        self,
        machines: list[Offer],
        count: int,
        run_id: str,
        order_of: Callable[[str, Offer], Order],
        budget: RentalBudget,
    ) -> int:
        """Start `count` of `machines` in their order. Return how many run, set up where that is needed.

        Goes on after a refusal, and ends when the budget is spent. A start whose answer is lost counts to `count`,
        because its machine may be billed. It does not count to the result.
        """
        orders: dict[str, Order] = {}
        unknown = failures = 0
        for offer in machines:
            if len(orders) + unknown == count or failures == _MOST_FAILURES:
                break
            if orders or failures:
                time.sleep(self.provider.pause_s)
            if (limit := budget.spent(self.rentals(), time.time())) is not None:
                self.tell(f"no further machine is started: {limit}")
                break
            order = order_of(new_label(run_id), offer)
            gpu = f"{offer.gpus} x {offer.gpu}"
            self.record.asked(order.label, provider=self.provider.name, gpu=gpu, usd_per_hour=offer.usd_per_hour)
            try:
                instance_id = self._start_one(offer, order)
            except (ProviderRefusedError, ProviderLoginError) as error:
                self.tell(f"not started: {error}")
                self.record.failed(order.label, str(error))
                failures += 1
                continue
            if instance_id is None:
                unknown += 1
                failures += 1
                continue
            failures = 0
            orders[instance_id] = order
            self.tell(f"started {order.label}: {self.provider.name} {instance_id}, ${offer.usd_per_hour:.2f} an hour")
        return len(orders) - self._set_up(orders, budget)

    def _start_one(self, offer: Offer, order: Order) -> str | None:
        """Return the id of the machine; None while it is unknown whether it was started.

        Raises ProviderRefusedError or ProviderLoginError if it was not started.
        """
        try:
            instance_id = self.provider.read_start(answer_to(self.provider.start_call(offer, order)))
        except (ProviderRefusedError, ProviderLoginError):
            raise
        except ProviderError as error:
            self.record.unknown(order.label, str(error))
            self.tell(f"it is not known whether {order.label} was started: {error}")
            instance_id = self._listed_id(order.label)
            if instance_id is None:
                self.tell(f"{order.label} may still appear, and then costs money until it is stopped")
                return None
        except BaseException as error:
            self.record.unknown(order.label, f"the call was cut off: {type(error).__name__}")
            raise
        self.record.started(order.label, instance_id)
        return instance_id

    def _listed_id(self, label: str) -> str | None:
        try:
            return next((found.instance_id for found in self.instances() if found.label == label), None)
        except ProviderError as error:
            self.tell(f"the machines cannot be listed now: {error}")
            return None

    def _set_up(self, orders: dict[str, Order], budget: RentalBudget) -> int:
        """Run the script on machines that cannot do so at their start. Return how many could not be reached.

        Waits until the deadline, or until the budget is spent.
        """
        waiting = {key: order for key, order in orders.items() if self.provider.address_call(key) is not None}
        deadline = time.monotonic() + SETUP_TIMEOUT_S
        troubles: dict[str, str] = {}
        limit: str | None = None
        while waiting and limit is None:
            for instance_id, order in list(waiting.items()):
                limit = budget.spent(self.rentals(), time.time())
                if limit is None and time.monotonic() > deadline:
                    limit = f"{SETUP_TIMEOUT_S:g} s are over"
                if limit is not None:
                    break
                try:
                    if self._set_up_one(instance_id, order):
                        del waiting[instance_id]
                        self.tell(f"set up {order.label}")
                except ProviderError as error:
                    if troubles.get(instance_id) != str(error):
                        self.tell(f"{order.label} is not set up yet: {error}")
                    troubles[instance_id] = str(error)
            if waiting and limit is None:
                time.sleep(self.poll_s)
        for order in waiting.values():
            self.tell(f"{order.label} could not be set up ({limit}): it costs money until it is stopped")
        return len(waiting)

    def _set_up_one(self, instance_id: str, order: Order) -> bool:
        address = self.provider.address_call(instance_id)
        setup = None if address is None else self.provider.setup_call(answer_to(address), order)
        if setup is not None:
            answer_to(setup)
        return setup is not None

    def rentals(self) -> list[Rental]:
        """Return what the run has ever asked this provider for."""
        rentals = [rental for rental in self.record.rentals() if rental.provider == self.provider.name]
        return [rental for rental in rentals if not self.only or rental.label in self.only]

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

    def refresh(self) -> list[Instance]:
        """Bring the record to what the provider lists, and return that. Raises ProviderError.

        A machine that ended by itself is recorded as ended, and one that runs although its start seemed to fail, or
        although it seemed to have ended, as started.
        """
        rentals, now = self.rentals(), time.time()
        instances = self.instances()
        for rental in rentals:
            instance = find(rental, instances)
            if instance is not None and not (rental.open and rental.instance_id):
                self.record.started(rental.label, instance.instance_id)
            if instance is None and rental.open and rental.instance_id and not _appears_s(rental, now):
                self.record.ended(rental.label)
        return instances

    def stop(self) -> None:
        """End the billing of every machine, wait until none is listed, and tell how certain that is.

        Raises ProviderError if some remain, and ProviderLoginError at once.
        """
        wait_s = max((_appears_s(rental, time.time()) for rental in self.rentals() if rental.open), default=0.0)
        deadline = time.monotonic() + wait_s + STOP_TIMEOUT_S
        asked_again_at: dict[str, float] = {}
        seen: set[str] = set()
        trouble, rounds, told_wait = "", 0, False
        while True:
            remaining: list[Instance] | None = None
            try:
                rentals, now = [rental for rental in self.rentals() if rental.open], time.time()
                remaining = self.instances()
                seen |= {rental.label for rental in rentals if find(rental, remaining) is not None}
                trouble = self._stop_calls(remaining, asked_again_at) or trouble
                absent = [rental for rental in rentals if rental.label not in seen]
                wait_s = max((_appears_s(rental, now) for rental in absent), default=0.0)
                if not remaining and not wait_s:
                    self._note_ended(rentals, absent)
                    return
                if wait_s and not told_wait:
                    told_wait = True
                    names = ", ".join(rental.label for rental in absent)
                    self.tell(f"waiting {wait_s:.0f} s for what may not be listed yet: {names}")
            except ProviderLoginError:
                raise
            except Exception as error:  # whatever went wrong, the next list may work
                if trouble != str(error):
                    self.tell(f"the machines of {self.provider.name} cannot be listed now: {error}")
                trouble = str(error)
            if time.monotonic() > deadline:
                which = "unknown" if remaining is None else ", ".join(instance.instance_id for instance in remaining)
                raise ProviderError(
                    f"machines of {self.provider.name} are still billed after {STOP_TIMEOUT_S:g} s: {which}"
                    f"{trouble and f' ({trouble})'}. Run `orchestrator rent --stop` again, or end them on its web page"
                )
            time.sleep(backoff_s(rounds, first_s=0.5, longest_s=self.poll_s))
            rounds += 1

    def _stop_calls(self, remaining: list[Instance], asked_again_at: dict[str, float]) -> str:
        """Ask for the end of each machine: again at once where it was refused, later where it was accepted.

        Return the last trouble.
        """
        trouble = ""
        for instance in remaining:
            if time.monotonic() < asked_again_at.get(instance.instance_id, 0.0):
                continue
            try:
                self.provider.read_stop(answer_to(self.provider.stop_call(instance.instance_id)))
                asked_again_at[instance.instance_id] = time.monotonic() + _STOP_AGAIN_S
                self.tell(f"stopping {instance.label or instance.instance_id}")
            except Exception as error:  # whatever went wrong with one machine, the others are stopped
                trouble = str(error)
                self.tell(f"not stopped yet: {error}")
        return trouble

    def _note_ended(self, rentals: list[Rental], absent: list[Rental]) -> None:
        machines = ", ".join(self.only) or "this run's machines"
        text = f"{self.provider.name} lists none of {machines}"
        try:
            for rental in rentals:
                self.record.ended(rental.label)
        except OSError as error:  # on a full disk too the user learns that the machines have ended
            self.tell(f"{self.record.path} cannot be written ({error.strerror}), so it still counts {rental.label} as "
                      "billed: make room, then run `orchestrator rent --stop` again")  # fmt: skip
        unknown = ", ".join(rental.label for rental in absent if rental.instance_id is None)
        if unknown:
            self.tell(f"{text}. Not certain is {unknown}: its start call got no answer, and no such machine was listed "
                      f"within {LOST_ANSWER_S:g} s. Look for it on the provider's web page")  # fmt: skip
        else:
            self.tell(f"{text}: {'they are not' if self.only else 'no machine is'} billed any more")

    def watch(self, budget: RentalBudget, use: RunUse) -> str:
        """Wait until the budget is spent or the run is over, and return why; end machines that have no use meanwhile.

        The caller stops the others, also when this raises.
        """
        asked_again_at: dict[str, float] = {}
        trouble = ""
        while True:
            rentals, now = self.rentals(), time.time()
            reason = budget.spent(rentals, now) or use.over(now)
            if reason is None and not any(rental.open for rental in rentals):
                reason = "no machine is left"
            if reason is not None:
                return reason
            try:
                use.update()
                self._stop_unused(use, asked_again_at)
            except (ProviderError, OSError) as error:  # it is tried again; the budget holds meanwhile
                if trouble != str(error):
                    self.tell(f"machines without use are still billed: {error}")
                trouble = str(error)
            time.sleep(self.poll_s)

    def _stop_unused(self, use: RunUse, asked_again_at: dict[str, float]) -> None:
        """Ask for the end of the machines that have no use, and note which have ended."""
        now = time.time()
        unused = {
            rental.label: why for rental in self.rentals() if rental.open and (why := use.unused(rental.label, now))
        }
        if not unused:
            return
        listed = self.refresh()
        for rental in self.rentals():
            instance = find(rental, listed)
            if rental.label not in unused or instance is None:
                continue
            if instance.instance_id not in asked_again_at:
                self.tell(f"{rental.label} has no use: {unused[rental.label]}")
            self._stop_calls([instance], asked_again_at)


def find(rental: Rental, instances: list[Instance]) -> Instance | None:
    """Return the machine of a rental by its id, else by its label."""
    by_id = (instance for instance in instances if instance.instance_id == rental.instance_id)
    by_label = (instance for instance in instances if instance.label == rental.label)
    return next(by_id, None) or next(by_label, None)


def _appears_s(rental: Rental, now: float) -> float:
    """Return for how many seconds the machine may yet appear in the provider's list; 0.0 when it should be there."""
    call_ended_at = rental.call_ended_at or rental.asked_at + CALL_TIMEOUT_S
    return max(call_ended_at + LOST_ANSWER_S - now, 0.0)
