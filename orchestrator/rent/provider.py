"""What a provider of rented machines must do, and which of its offers are taken.

An adapter builds calls and reads answers; it never makes a call itself. `machines.py` makes them.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from composer_prime.errors import ProviderError
from orchestrator.rent.calls import Login, ProviderCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What each machine must have."""

    gpu: str | None = None
    """A model name such as H100 or RTX 4090, compared word by word; None takes any."""
    gpus: int = 1
    """GPUs of a machine, exactly."""
    gpu_memory_gb: float = 0.0
    """Of one GPU."""
    disk_gb: int = 100
    max_price: float
    """Dollars an hour for one machine."""
    min_reliability: float = 0.95
    """Share of time that the host was up, where the provider tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One kind of machine that can be rented now."""

    offer_id: str
    gpu: str
    gpus: int
    gpu_memory_gb: float | None
    disk_gb: float | None
    """How many are available; None if the provider does not report it."""
    usd_per_hour: float
    place: str = ""
    reliability: float | None = None
    stock: int | None = 1
    """Machines of this offer; None where the provider does not tell, and then as many as wanted are tried."""
    terms: tuple[tuple[str, str], ...] = ()
    """What the provider's start call needs besides the id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a machine is started with."""

    label: str
    """Name of the machine at the provider and of the node in the run; found again after a crash."""
    script: str
    """Shell script that the machine runs as its administrator. It holds the invite string."""
    disk_gb: int
    image: str | None = None
    """Container image; None takes the adapter's default."""
    ssh_key: str | None = None
    """Lambda: the name of a registered key. Prime: the path of the private key."""
    known_hosts: Path | None = None
    """Prime: where ssh keeps the host keys of this run's machines."""
    end_at: datetime | None = None
    """When the provider itself should end the machine, where it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A machine of the account, as the provider lists it."""

    instance_id: str
    label: str
    state: str
    """The provider's own word."""
    usd_per_hour: float | None = None
    gone: bool = False
    """Whether its billing has ended, although it is still listed."""


class Provider(ABC):
    """An adapter: calls as data, and what their answers mean. Readers raise ProviderError."""

    name: ClassVar[str]
    login: ClassVar[Login]
    default_image: ClassVar[str | None] = None
    needs_ssh_key: ClassVar[str] = ""
    """Why the provider's machines cannot start without `--ssh-key`; empty where they can."""
    pause_s: ClassVar[float] = 0.0
    """Between two start calls, where the provider limits their rate."""
    ends_by_itself: ClassVar[bool] = False
    """Whether the provider ends a machine at `Order.end_at` without this program."""

    @abstractmethod
    def offers_call(self, needs: Needs) -> ProviderCall: ...

    @abstractmethod
    def read_offers(self, answer: str, needs: Needs) -> list[Offer]:
        """Return what is on offer, fitting or not."""

    @abstractmethod
    def start_call(self, offer: Offer, order: Order) -> ProviderCall: ...

    @abstractmethod
    def read_start(self, answer: str) -> str:
        """Return the id of the started instance."""

    @abstractmethod
    def list_call(self) -> ProviderCall: ...

    @abstractmethod
    def read_list(self, answer: str) -> list[Instance]:
        """Return all instances of the account."""

    @abstractmethod
    def stop_call(self, instance_id: str) -> ProviderCall: ...

    @abstractmethod
    def read_stop(self, answer: str) -> None:
        """Raise ProviderError when the provider did not accept the stop."""

    def address_call(self, instance_id: str) -> ProviderCall | None:
        """Return the call that tells how to reach a machine that cannot run a script at its start, else None."""
        return None

    def setup_call(self, answer: str, order: Order) -> ProviderCall | None:
        """Return the call that runs the script there, None while the machine is not ready."""
        return None


def field_of(record: Any, name: str, subject: str) -> Any:
    """Return a field that an answer must have. Raises ProviderError that shows the record."""
    if not isinstance(record, dict) or record.get(name) is None:
        raise ProviderError(f"{subject}: the answer has no {name}: {str(record)[:300]}")
    return record[name]


def choose(offers: list[Offer], needs: Needs, count: int) -> list[Offer]:
    """Return fitting offers by price: one for each machine, then the spare ones. Raises ProviderError if too few fit.

    A spare offer is taken when a machine of an earlier one cannot be started.
    """
    suitable = sorted((offer for offer in offers if _suits(offer, needs)), key=lambda offer: offer.usd_per_hour)
    affordable = [offer for offer in suitable if offer.usd_per_hour <= needs.max_price]
    machines = [offer for offer in affordable for _ in range(count if offer.stock is None else offer.stock)]
    if len(machines) >= count:
        return machines
    kind = f"{needs.gpus} x {needs.gpu or 'any GPU'}, {needs.disk_gb} GB of disk"
    if not suitable:
        raise ProviderError(
            f"none of {len(offers)} offers has {kind}"
            + (f", {needs.gpu_memory_gb:g} GB a GPU" if needs.gpu_memory_gb else "")
            + f" and a reliability of {needs.min_reliability:g}: ask for less"
        )
    dearer = [offer for offer in suitable if offer.usd_per_hour > needs.max_price]
    remedy = f"the next costs ${dearer[0].usd_per_hour:.2f}: raise --max-price" if dearer else "ask for fewer or less"
    raise ProviderError(
        f"{len(machines)} of {count} machines ({kind}) available for at most ${needs.max_price:.2f} an hour; {remedy}"
    )


def _suits(offer: Offer, needs: Needs) -> bool:
    return (
        (needs.gpu is None or _words(needs.gpu) in _words(offer.gpu))
        and offer.gpus == needs.gpus
        and (offer.gpu_memory_gb is None or offer.gpu_memory_gb >= needs.gpu_memory_gb)
        and (offer.disk_gb is None or offer.disk_gb >= needs.disk_gb)
        and (offer.reliability is None or offer.reliability >= needs.min_reliability)
    )


def _words(name: str) -> str:
    """Return ` h100 80gb hbm3 ` for `NVIDIA H100 80GB HBM3`, so that A10 is not found in A100."""
    parts = re.findall(r"[a-z0-9]+", name.lower())
    return " " + " ".join(part for part in parts if part not in ("nvidia", "geforce", "tesla")) + " "
