"""The record of rented machines: `rentals.jsonl` in the run directory, one line before and one after each start.

    asked    a machine is about to be started; its label is unique and is also its name at the provider
    started  the provider gave it this id
    unknown  the start call ended without an answer: the machine may run, and is found by its label if it does
    failed   the provider refused
    ended    the provider lists it no more

A crash between `asked` and `started` loses no machine: it is found at the provider by its label.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from composer_prime.run.run_dir import append_line
from orchestrator.rent.provider import Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class Rental:
    """A machine that was requested."""

    label: str
    provider: str
    gpu: str
    usd_per_hour: float
    asked_at: float
    """Seconds since 1970. Billing cannot start earlier."""
    call_ended_at: float | None = None
    """When the start call ended, answered or not. None while it is under way, or if a crash interrupted it."""
    instance_id: str | None = None
    """None if the start failed or its answer was lost."""
    failed: bool = False
    ended_at: float | None = None

    @property
    def open(self) -> bool:
        """Whether it may cost money."""
        return self.ended_at is None and not self.failed

    def usd(self, now: float) -> float:
        """Return what it has cost at most: its price since it was asked for."""
        if self.failed:
            return 0.0
        return self.usd_per_hour * max((self.ended_at or now) - self.asked_at, 0.0) / 3600


def new_label(run_id: str) -> str:
    """Return a name that every provider accepts and no other machine has."""
    run = re.sub("[^a-z0-9]+", "-", run_id.lower()).strip("-")[:40]
    return f"composer-{run}-{secrets.token_hex(4)}"


class RentalRecord:
    """Reads and appends to the record. Lines are on the disk before a method returns."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "rentals.jsonl"

    def asked(self, label: str, provider: str, offer: Offer) -> None:
        gpu = f"{offer.gpus} x {offer.gpu}"
        self._append("asked", label, provider=provider, gpu=gpu, usd_per_hour=offer.usd_per_hour)

    def started(self, label: str, instance_id: str) -> None:
        self._append("started", label, instance_id=instance_id)

    def unknown(self, label: str, reason: str) -> None:
        self._append("unknown", label, reason=reason)

    def failed(self, label: str, reason: str) -> None:
        self._append("failed", label, reason=reason)

    def ended(self, label: str) -> None:
        self._append("ended", label)

    def rentals(self) -> list[Rental]:
        """Return all machines in the order in which they were asked for. A line that a crash cut short is left out."""
        rentals: dict[str, Rental] = {}
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        for line in lines:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            label, at = entry["label"], float(entry["time"])
            if entry["event"] == "asked":
                rentals[label] = Rental(
                    label=label,
                    provider=entry["provider"],
                    gpu=entry["gpu"],
                    usd_per_hour=entry["usd_per_hour"],
                    asked_at=at,
                )
            elif label in rentals:
                rentals[label] = _after(rentals[label], entry, at)
        return list(rentals.values())

    def _append(self, event: str, label: str, **values: Any) -> None:
        entry = {"time": round(time.time(), 3), "event": event, "label": label, **values}
        append_line(self.path, json.dumps(entry).encode(), sync=True)


def _after(rental: Rental, entry: dict[str, Any], at: float) -> Rental:
    if entry["event"] == "started":
        return replace(rental, instance_id=entry["instance_id"], failed=False, ended_at=None, call_ended_at=at)
    if entry["event"] == "unknown":
        return replace(rental, call_ended_at=at)
    if entry["event"] == "failed":
        return replace(rental, failed=True)
    return replace(rental, ended_at=at)
