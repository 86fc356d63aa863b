"""Compare what becomes of the steps that a delay hides: overwritten, mixed, or carried on; at equal tokens.

    python benchmarks/diloco_delay.py                                  # H 4, P 2, tau 1: a few minutes
    python benchmarks/diloco_delay.py --sync-every 8 --delay 2

The task, the model and the peers are those of diloco_quality.py. A delta is prepared tau steps before it is due, and
peers step in turn in this process with the product's fragments, codec, outer optimizer and rules of arrival. All
choices of one seed run side by side, on the same tokens, and the global model is evaluated.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass

import torch

from benchmarks.diloco_quality import Chain, Decoder, held_out, loss_of
from composer_prime.config.diloco import CodecConfig, OuterConfig
from diloco.codec import ErrorFeedback, build_codec
from diloco.fragments import partition
from diloco.global_model import GlobalModel
from diloco.ranks import Ranks
from diloco.state import DeltaCoverage, DeltaStatus, LocalProgress, LocalWork


@dataclass(frozen=True, slots=True)
class Arrival:
    name: str
    delay: int
    mixing: float | str


class Peer:
    def __init__(self, seed: int, arrival: Arrival, words: argparse.Namespace) -> None:
        self.network = Decoder(seed)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=words.inner_lr, weight_decay=0.0)
        parts = partition(self.network.named_parameters(), words.fragments, "strided")
        self.model = GlobalModel(parts, OuterConfig(type="average"))
        self.progress = LocalProgress(self.model, arrival.mixing, Ranks())
        self.feedback = ErrorFeedback([len(master) for master in self.model.masters])
        self.coverage = DeltaCoverage(LocalWork())


def final_loss(seed: int, arrival: Arrival, words: argparse.Namespace) -> tuple[float, float]:
    """Return the global model's held-out loss, in nats a token, and the share of the steps that was overwritten."""
    chain, codec = Chain(seed), build_codec(CodecConfig(type=words.codec))
    peers = [Peer(seed, arrival, words) for _ in range(words.peers)]
    interval = words.sync_every // words.fragments
    encoded = []
    for step in range(1, words.steps + 1):
        for index, peer in enumerate(peers):
            peer.optimizer.zero_grad()
            loss_of(peer.network, chain.batch((step - 1) * words.peers + index)).backward()
            peer.optimizer.step()
            peer.progress.count(LocalWork(steps=1, tokens=1))
        fragment = peers[0].model.outer_step % words.fragments
        if step % interval == (interval - arrival.delay) % interval and step + arrival.delay <= words.steps:
            encoded = []
            for peer in peers:
                peer.coverage = peer.progress.covered(fragment)
                encoded.append(peer.feedback.encode(fragment, peer.model.delta(fragment), codec))
        if step % interval == 0:
            deltas = [codec.decode(data, len(residual_n)) for data, residual_n in encoded]
            for peer, (_, residual_n) in zip(peers, encoded, strict=True):
                peer.feedback.settle(fragment, residual_n)
                peer.model.advance(fragment, deltas, [1.0] * len(peers))
                peer.progress.install(fragment, DeltaStatus.COUNTED, peer.coverage, None)
    assert len({peer.model.hash for peer in peers}) == 1, "the peers' global models differ: that must not happen"
    peers[0].model.install(peers[0].model.masters)
    return held_out(peers[0].network, chain), peers[0].progress.totals.overwritten / words.steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--sync-every", type=int, default=4, help="H")
    parser.add_argument("--fragments", type=int, default=2, help="P")
    parser.add_argument("--delay", type=int, default=1, help="tau; below H / P")
    parser.add_argument("--inner-lr", type=float, default=8e-3)
    parser.add_argument("--codec", default="int4")
    words = parser.parse_args()
    torch.set_num_threads(1)
    delay = words.delay
    arrivals = [
        Arrival("tau 0", 0, 0.0),
        Arrival(f"tau {delay}, overwrite", delay, 0.0),
        Arrival(f"tau {delay}, mixing .5", delay, 0.5),
        Arrival(f"tau {delay}, carry", delay, "carry"),
    ]
    results: dict[str, list[tuple[float, float]]] = {arrival.name: [] for arrival in arrivals}
    for seed in range(words.seeds):
        for arrival in arrivals:
            results[arrival.name].append(final_loss(seed, arrival, words))
        print(f"seed {seed}: " + ", ".join(f"{name} {found[-1][0]:.4f}" for name, found in results.items()), flush=True)
    base = [loss for loss, _ in results["tau 0"]]
    print(f"{'':18} {'loss':>8} {'minus tau 0 (s.e.)':>22} {'overwritten':>12}")
    for name, found in results.items():
        gaps = [loss - first for (loss, _), first in zip(found, base, strict=True)]
        error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else 0.0
        mean = statistics.mean(loss for loss, _ in found)
        print(f"{name:18} {mean:8.4f} {statistics.mean(gaps):13.4f} ({error:.4f}) {found[0][1]:12.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
