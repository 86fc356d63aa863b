"""Held-out loss of Streaming DiLoCo against data-parallel training, by codec: python benchmarks/diloco_quality.py

A small transformer learns a random second-order Markov chain. Every scheme sees the same tokens from the same start;
what is evaluated is the global model. Peers run in turn in this process with the product's fragments, codecs, error
feedback and outer optimizer; tests/diloco shows that a run over the wire gives the same bits. Bytes are what one peer
sends: encoded deltas, or for data-parallel training a bfloat16 gradient every step.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from composer_prime.config.diloco import CodecConfig, OuterConfig
from diloco.codec import Codec, ErrorFeedback, build_codec
from diloco.fragments import partition
from diloco.global_model import GlobalModel

VOCABULARY, WIDTH, LENGTH, BATCH = 16, 48, 32, 16
CODECS = ("fp32", "int4", "e3m0", "sparse")


class Decoder(nn.Module):
    def __init__(self, seed: int, blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(blocks)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids) + self.place.weight[: ids.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


class Chain:
    """Sequences of a second-order Markov chain whose transitions are drawn once."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=generator) * 2.5
        self._transitions = logits.softmax(dim=-1)

    def batch(self, seed: int, size: int = BATCH) -> Tensor:
        """int64 [size, LENGTH + 1]."""
        generator = torch.Generator().manual_seed(seed)
        ids = [torch.randint(0, VOCABULARY, (size,), generator=generator) for _ in range(2)]
        while len(ids) < LENGTH + 1:
            ids.append(torch.multinomial(self._transitions[ids[-2], ids[-1]], 1, generator=generator)[:, 0])
        return torch.stack(ids, dim=1)


@dataclass(frozen=True, slots=True)
class Outcome:
    loss: float
    """Held-out, nats a token."""
    bytes_sent: int
    """By one peer."""
    bits: float
    """A parameter and synchronisation."""


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def held_out(model: nn.Module, chain: Chain) -> float:
    return float(loss_of(model, chain.batch(seed=10**9, size=256)))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)


def data_parallel(seed: int, peers: int, steps: int) -> Outcome:
    model, chain = Decoder(seed), Chain(seed)
    optimizer = optimizer_of(model)
    for step in range(steps):
        optimizer.zero_grad()
        for peer in range(peers):
            (loss_of(model, chain.batch(step * peers + peer)) / peers).backward()
        optimizer.step()
    count = sum(parameter.numel() for parameter in model.parameters())
    return Outcome(held_out(model, chain), 2 * count * steps, 16.0)


def streaming(seed: int, peers: int, steps: int, codec_type: str, words: argparse.Namespace) -> Outcome:
    chain, codec = Chain(seed), build_codec(CodecConfig(type=codec_type))
    outer = OuterConfig(lr=words.outer_lr, momentum=words.outer_momentum)
    models = [Decoder(seed) for _ in range(peers)]
    optimizers = [optimizer_of(model) for model in models]
    copies = [
        GlobalModel(partition(model.named_parameters(), words.fragments, "strided"), outer) for model in models
    ]
    feedback = [ErrorFeedback([len(master) for master in copy.masters]) for copy in copies]
    interval, sent = words.sync_every // words.fragments, 0
    for step in range(steps):
        for peer, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, chain.batch(step * peers + peer)).backward()
            optimizer.step()
        if (step + 1) % interval == 0:
            sent += synchronise(copies, feedback, codec)
    if len({copy.hash for copy in copies}) != 1:
        raise SystemExit("the peers' global models differ: that must not happen")
    copies[0].install_all()
    count = sum(len(master) for master in copies[0].masters)
    return Outcome(held_out(models[0], chain), sent, sent * 8 / count / (steps / words.sync_every))


def synchronise(copies: Sequence[GlobalModel], feedback: Sequence[ErrorFeedback], codec: Codec) -> int:
    """One outer step of all peers; bytes that one of them sends."""
    fragment = copies[0].outer_step % len(copies[0].fragments)
    pairs = list(zip(feedback, copies, strict=True))
    encoded = [own.encode(fragment, copy.delta(fragment), codec) for own, copy in pairs]
    deltas = [codec.decode(each.data, len(each.residual_n)) for each in encoded]
    for (own, copy), each in zip(pairs, encoded, strict=True):
        own.settle(fragment, each.residual_n)
        copy.advance(fragment, deltas, [1.0] * len(copies))
        copy.fragments[fragment].write(copy.masters[fragment])
    return encoded[0].data.numel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sync-every", type=int, default=100)
    parser.add_argument("--fragments", type=int, default=2)
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--outer-momentum", type=float, default=0.5)
    words = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{words.peers} peers, {words.steps} steps of {BATCH * LENGTH} tokens each, {words.seeds} seeds")
    print(f"H = {words.sync_every}, P = {words.fragments}, lr {words.outer_lr}, momentum {words.outer_momentum}\n")
    rows = {"data-parallel": [data_parallel(seed, words.peers, words.steps) for seed in range(words.seeds)]}
    for codec in CODECS:
        rows[codec] = [streaming(seed, words.peers, words.steps, codec, words) for seed in range(words.seeds)]
    print("scheme          loss  +- seeds  against fp32  KB sent  times fewer bytes  bits a parameter")
    base, exact = rows["data-parallel"], statistics.mean(each.loss for each in rows["fp32"])
    for name, outcomes in rows.items():
        losses = [each.loss for each in outcomes]
        mean, spread = statistics.mean(losses), statistics.stdev(losses) if len(losses) > 1 else 0.0
        fewer = base[0].bytes_sent / outcomes[0].bytes_sent
        gap, size = mean / exact - 1, outcomes[0].bytes_sent / 1e3
        bits = outcomes[0].bits
        print(f"{name:<13} {mean:6.4f}   {spread:7.4f}  {gap:+12.2%}  {size:7.0f}  {fewer:17.0f}  {bits:16.3f}")


if __name__ == "__main__":
    main()
