"""Where the time from one synchronisation to the next goes, and which part dominates."""

from __future__ import annotations

from dataclasses import dataclass

from diloco.simulate.utilisation import Pipe, Scheme, Workload, exposed_s

NOTABLE = 0.1
"""From this share of an interval on, what is not compute is what there is to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Seconds of one interval on the training thread; what inner steps hide is in none of them."""

    compute_s: float
    codec_s: float
    """Encode, decode, average and install: never hidden."""
    link_s: float
    """Waiting for bits on their way."""
    rendezvous_s: float
    """Waiting for the rendezvous to close the round, and to handle what it relays where the link is quicker."""

    @classmethod
    def of(cls, workload: Workload, scheme: Scheme, pipe: Pipe) -> Shares:
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
        """One sentence."""
        whole = self.compute_s + self.codec_s + self.link_s + self.rendezvous_s

        def part(seconds: float) -> str:
            return f"{number(seconds)} s ({seconds / whole:.0%})"

        named = {
            "compute": "compute", "codec": "of the losses codec work", "link": "of the losses the link",
            "rendezvous": "of the losses the rendezvous",
        }  # fmt: skip
        return (
            f"from one sync to the next {part(self.compute_s)} are compute, {part(self.codec_s)} codec work on one CPU "
            f"core a rank, {part(self.link_s)} waiting for the link and {part(self.rendezvous_s)} for the rendezvous' "
            f"own work: {named[self.dominant]} dominates."
        )


def number(value: float) -> str:
    """Three digits; whole from a thousand to a million."""
    return f"{value:,.0f}" if 999.5 <= value < 1e6 else f"{value:.3g}"
