"""Compute utilization of one synchronization scheme over one link, layer by layer. No torch, no randomness.

    forward 1..L | backward L..1 |        a layer's bits are ready when its backward pass is done;
              ready: L   ...    1         they go one after the other over the link;
    link:            ====L==== ... ===1== what is left when they are needed is exposed: compute waits

    needed at: end of the step (data-parallel, DiLoCo, streaming), or tau steps later (overlapped streaming)
    utilization = compute / (compute + exposed), over the interval between two synchronizations, mean over fragments

Three constants are fitted to Table 4 of Streaming DiLoCo (arXiv 2501.18512), whose text does not state them:
BITS_PER_PARAMETER, BACKWARD_SHARE and OVERLAP_STEPS below. tests/diloco/simulate/test_simulate.py shows how well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

BITS_PER_PARAMETER = 13.4
"""Fitted: bits on the link for a nominal parameter at 16 bits (a "1B" model has fewer parameters in its layers)."""
BACKWARD_SHARE = 0.68
"""Fitted: share of a step that is the backward pass, behind which its own reductions hide."""
OVERLAP_STEPS = 1.0
"""Fitted: tau, inner steps behind which an overlapped fragment hides."""
FP4_RATIO = 4.0
"""16 bits against 4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One peer's training."""

    parameters: float
    layers: int
    step_s: float
    """Compute time of an inner step."""
    backward_share: float = BACKWARD_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """What is sent when."""

    name: str
    every: int = 1
    """H: inner steps between two synchronizations of a layer; 1 is data-parallel."""
    fragments: int = 1
    """P; strided: fragment f holds layers f, f + P, f + 2P, ..."""
    delay_steps: float = 0.0
    """tau."""
    bits: float = BITS_PER_PARAMETER
    """On the link, a parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipe:
    """What one peer's bits pass through in a reduction."""

    gbit_s: float
    latency_s: float = 0.0
    """One way."""
    factor: float = 1.0
    """How often a peer's link carries a delta's bits."""
    hops: int = 1
    """One-way trips that follow one another."""
    busy_s: float = 0.0
    """Work on the training thread a synchronization, before and after the bits are under way: never hidden."""
    handling_s: float = 0.0
    """Work on bits on their way a synchronization, beside the transfer: the slower of the two sets the pace."""
    round_s: float = 0.0
    """Further time on the way a synchronization, whatever its size."""

    def moving_s(self, bits: float) -> float:
        """Return how long `bits` of a delta take through the link and the machines on the way, without latency."""
        return max(bits * self.factor / (self.gbit_s * 1e9), self.handling_s)


def exposed_s(workload: Workload, scheme: Scheme, pipe: Pipe) -> float:
    """Return the seconds that compute waits at each synchronization, mean over the fragments."""
    layers = range(workload.layers)
    parts = [[layer for layer in layers if layer % scheme.fragments == index] for index in range(scheme.fragments)]
    needed = workload.step_s * (1 + scheme.delay_steps)
    waits = [max(0.0, _arrival_s(part, workload, scheme, pipe) - needed) for part in parts if part]
    return pipe.busy_s + sum(waits) / len(waits)


def _arrival_s(part: Sequence[int], workload: Workload, scheme: Scheme, pipe: Pipe) -> float:
    """Return when the last layer of a fragment is there, from the start of the step that sends it."""
    share, at = workload.backward_share, 0.0
    seconds = pipe.moving_s(len(part) * workload.parameters / workload.layers * scheme.bits) / len(part)
    for layer in sorted(part, reverse=True):
        ready = workload.step_s * ((1 - share) + share * (workload.layers - layer) / workload.layers)
        at = max(at, ready) + seconds
    return at + pipe.hops * pipe.latency_s + pipe.round_s


def utilization(workload: Workload, scheme: Scheme, pipe: Pipe) -> float:
    """Return compute time over wall time, 0..1."""
    compute = scheme.every / scheme.fragments * workload.step_s
    return compute / (compute + exposed_s(workload, scheme, pipe))


def bytes_per_step(workload: Workload, scheme: Scheme) -> float:
    """Return the mean bytes of a peer's own deltas (or gradients) an inner step: what it sends if each travels once."""
    return workload.parameters * scheme.bits / 8 / scheme.every


def grid(low: float = -1.0, high: float = 3.0, count: int = 50) -> list[float]:
    """Return bandwidths in Gbit/s, evenly spaced in their logarithm; the default is that of Table 4."""
    return [10 ** (low + (high - low) * index / (count - 1)) for index in range(count)]


def required_gbit(
    workload: Workload,
    scheme: Scheme,
    target: float,
    bandwidths: Sequence[float],
    pipe_of: Callable[[float], Pipe] = lambda gbit: Pipe(gbit_s=gbit),
) -> float | None:
    """Return the first of `bandwidths` (rising) with which utilization reaches `target`; None when none does.

    `pipe_of`: the pipe at a bandwidth; by default a link that carries a delta once and nothing else.
    """
    return next((each for each in bandwidths if utilization(workload, scheme, pipe_of(each)) >= target), None)


def paper_schemes(workload: Workload, every: int = 100, layers_a_fragment: int = 3) -> list[Scheme]:
    """Return the five rows of Table 4."""
    parts = workload.layers // layers_a_fragment
    return [
        Scheme(name="data-parallel"),
        Scheme(name="diloco", every=every),
        Scheme(name="streaming", every=every, fragments=parts),
        Scheme(name="streaming, overlapped", every=every, fragments=parts, delay_steps=OVERLAP_STEPS),
        Scheme(
            name="streaming, overlapped, 4 bits", every=every, fragments=parts, delay_steps=OVERLAP_STEPS,
            bits=BITS_PER_PARAMETER / FP4_RATIO,
        ),
    ]  # fmt: skip


NOTABLE = 0.1
"""From this share of an interval on, a loss is named as dominant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalShares:
    """Seconds of one interval on the training thread; what inner steps hide is in none of them."""

    compute_s: float
    codec_s: float
    """Encode, decode, average and install: never hidden."""
    link_s: float
    """Waiting for bits on their way."""
    rendezvous_s: float
    """Waiting for the rendezvous to close the round, and to handle what it relays where the link is faster."""

    @classmethod
    def of(cls, workload: Workload, scheme: Scheme, pipe: Pipe) -> IntervalShares:
        waits_s = exposed_s(workload, scheme, pipe) - pipe.busy_s
        bits = workload.parameters / scheme.fragments * scheme.bits
        on_link_s = bits * pipe.factor / (pipe.gbit_s * 1e9)
        slower_s = pipe.moving_s(bits) - on_link_s + pipe.round_s
        whole_s = on_link_s + pipe.hops * pipe.latency_s + slower_s
        handled_s = waits_s * slower_s / whole_s if whole_s else 0.0
        return cls(
            compute_s=scheme.every / scheme.fragments * workload.step_s, codec_s=pipe.busy_s,
            link_s=waits_s - handled_s, rendezvous_s=handled_s,
        )  # fmt: skip

    @property
    def dominant(self) -> str:
        """The largest loss (codec, link or rendezvous), or compute where all losses together are below NOTABLE."""
        losses = {"codec": self.codec_s, "link": self.link_s, "rendezvous": self.rendezvous_s}
        lost_s = sum(losses.values())
        if lost_s < NOTABLE * (self.compute_s + lost_s):
            return "compute"
        return max(losses, key=lambda name: losses[name])

    def text(self) -> str:
        """Return one sentence."""
        whole = self.compute_s + self.codec_s + self.link_s + self.rendezvous_s

        def part(seconds: float) -> str:
            return f"{three_digits(seconds)} s ({seconds / whole:.0%})"

        dominant = {
            "compute": "compute", "codec": "of the losses codec work", "link": "of the losses the link",
            "rendezvous": "of the losses the rendezvous",
        }[self.dominant]  # fmt: skip
        return (
            f"from one sync to the next {part(self.compute_s)} are compute, {part(self.codec_s)} codec work on one CPU "
            f"core a rank, {part(self.link_s)} waiting for the link and {part(self.rendezvous_s)} for the rendezvous' "
            f"own work: {dominant} dominates."
        )


def three_digits(value: float) -> str:
    """Return three digits; whole numbers from a thousand to a million."""
    return f"{value:,.0f}" if 999.5 <= value < 1e6 else f"{value:.3g}"
