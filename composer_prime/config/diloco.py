"""[diloco]: several clusters train one model over a thin link (Streaming DiLoCo, arXiv 2501.18512).

All peers of a run must agree on fragments and outer, which decide the global model. The rest each peer chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_config import BaseConfig

from composer_prime.address import tcp_address

BLOCK = 256
"""Parameters that share a scale in int8 and int4; even, because two 4-bit values share a byte."""

PLAIN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""It names folders and log lines."""


class CodecConfig(BaseConfig):
    type: Literal["fp32", "bf16", "int8", "int4"] = "int4"
    """Encoding of a pseudo-gradient: 32, 16, about 7.5 or 3.4 bits per parameter."""


class OuterConfig(BaseConfig):
    """Nesterov's rule. With a learning rate of 1 and no momentum the peers' models are averaged."""

    lr: float = Field(default=1.0, gt=0)
    """Outer learning rate. lr / (1 - momentum) is the gain in steady state; start near 1."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Nesterov momentum. DiLoCo's pre-training pair is lr 0.7, momentum 0.9 (arXiv 2311.08105)."""


class DilocoConfig(BaseConfig):
    """Peers, schedule and link of one joint run."""

    rendezvous: str
    """Address of `diloco rendezvous`: tcp://HOST:PORT, or tcp://[ADDRESS]:PORT for IPv6."""
    run: str = Field(pattern=PLAIN_NAME)
    """Name of the joint run; the same for all peers. Up to 64 letters, digits, dots, dashes, underscores."""
    peer_id: str = Field(pattern=PLAIN_NAME)
    """This cluster's name among the peers, in the same letters."""
    key_file: Path
    """The joint run's key, made by `diloco keygen FILE` and copied to every cluster."""
    sync_every: int = Field(default=8, ge=1)
    """H: inner steps between two synchronizations of the same parameter."""
    fragments: int = Field(default=1, ge=1)
    """P: parts of the model to synchronize in turn, one every H / P inner steps."""
    delay: int = Field(default=0, ge=0)
    """tau: inner steps that overlap with the transfer of a fragment."""
    mixing: Annotated[float, Field(ge=0, le=1)] | Literal["carry"] = 0.0
    """alpha: share of the local value to keep when the global one arrives; 0 loses the steps of the delay.
    "carry" adds their changes to the global value, so they are in the next delta."""
    codec: CodecConfig = CodecConfig()
    """Compression of deltas; the compression error is added to the next delta."""
    outer: OuterConfig = OuterConfig()
    """Outer optimizer."""
    round_deadline_s: float = Field(default=120.0, gt=0)
    """Time after a round's first complete delta for the others'; slower peers send what they have."""
    round_timeout_s: float = Field(default=600.0, gt=0)
    """How long a peer waits for a round's result before it continues alone until the next one."""
    offline_timeout_s: float = Field(default=3600.0, gt=0)
    """How long a peer trains without any round result before it gives up."""
    heal_timeout_s: float = Field(default=900.0, gt=0)
    """Time limit for a joining peer to receive the global state, or to learn that its own is current."""
    rate_limit_mbit: float | None = Field(default=None, gt=0)
    """Upload limit of each rank of this peer in Mbit/s; None: no limit."""

    @property
    def interval(self) -> int:
        """H / P: inner steps from one outer step to the next."""
        return self.sync_every // self.fragments

    @field_validator("rendezvous")
    @classmethod
    def _tcp(cls, address: str) -> str:
        tcp_address(address, "diloco.rendezvous")
        return address

    @model_validator(mode="after")
    def _fragments_divide_the_period(self) -> DilocoConfig:
        problem = wrong_schedule(self.sync_every, self.fragments, self.delay, "diloco.{}".format)
        if problem is not None:
            raise ValueError(problem)
        return self


def wrong_schedule(period: int, parts: int, delay: int, key: Callable[[str], str]) -> str | None:
    """Return what is wrong with H, P and tau, and the remedy, if anything. `key` spells a setting's name."""
    if period % parts:
        lower = max((count for count in range(1, parts) if period % count == 0), default=1)
        more = (period // parts + 1) * parts
        return (
            f"{key('sync_every')} is {period} and {key('fragments')} is {parts}: fragments must divide the "
            f"period; set {key('fragments')} to {lower} or {key('sync_every')} to {more}"
        )
    distance = period // parts
    if delay >= distance:
        return (
            f"{key('delay')} is {delay}, but a fragment is due every {key('sync_every')} / {key('fragments')} = "
            f"{distance} steps and only one may be on its way: set {key('delay')} to at most {distance - 1}"
        )
    return None
