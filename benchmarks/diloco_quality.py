"""Compare Streaming DiLoCo with data-parallel training, by codec and outer optimizer, at equal tokens.

    python benchmarks/diloco_quality.py                        # supervised: minutes
    python benchmarks/diloco_quality.py --outer average nesterov --schemes fp32 int4 --sync-every 20 100
    python benchmarks/diloco_quality.py --rl                   # RL on toolsmith, 3 seeds, H in 1, 2, 4, 8: 51 runs
    python benchmarks/diloco_quality.py --rl --steps 8 --seeds 1 --schemes fp32 --sync-every 1 4    # a part of it

diloco_quality_sides/rl.py describes the RL half. Supervised: a small transformer learns a second-order Markov chain.
Every scheme sees the same tokens from the same start, and the global model is evaluated. Peers run in turn in this
process with the product's fragments, codecs, error feedback and outer optimizer. tests/diloco shows that a run over the
wire gives the same bits. Bytes are what one peer sends: encoded deltas, or a bfloat16 gradient every step for
data-parallel training.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from composer_prime.config.diloco import OuterConfig
from diloco.codec import Codec, ErrorFeedback, codec_of
from diloco.fragments import partition
from diloco.global_model import GlobalModel

VOCABULARY, WIDTH, LENGTH, BATCH = 16, 48, 32, 16
DATA_PARALLEL = "data-parallel"
CODECS = ("fp32", "bf16", "int8", "int4")
OUTER = ("average", "nesterov")


class Decoder(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
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
    """Per parameter and synchronization."""


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def held_out(model: nn.Module, chain: Chain) -> float:
    return float(loss_of(model, chain.batch(seed=10**9, size=256)))


def optimizer_of(model: nn.Module, words: argparse.Namespace) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=words.inner_lr, weight_decay=0.0)


def data_parallel(seed: int, words: argparse.Namespace) -> Outcome:
    peers, steps = words.peers, words.steps
    model, chain = Decoder(seed), Chain(seed)
    optimizer = optimizer_of(model, words)
    for step in range(steps):
        optimizer.zero_grad()
        for peer in range(peers):
            (loss_of(model, chain.batch(step * peers + peer)) / peers).backward()
        optimizer.step()
    return Outcome(held_out(model, chain), gradient_bytes(model, steps), 16.0)


def gradient_bytes(model: nn.Module, steps: int) -> int:
    """A bfloat16 gradient at each step."""
    return 2 * sum(parameter.numel() for parameter in model.parameters()) * steps


def streaming(seed: int, codec_type: str, outer: OuterConfig, every: int, words: argparse.Namespace) -> Outcome:
    peers, steps = words.peers, words.steps
    chain, codec = Chain(seed), codec_of(codec_type)
    models = [Decoder(seed) for _ in range(peers)]
    optimizers = [optimizer_of(model, words) for model in models]
    copies = [GlobalModel(partition(model.named_parameters(), words.fragments), outer) for model in models]
    feedback = [ErrorFeedback([len(master) for master in copy.masters]) for copy in copies]
    interval, sent = every // words.fragments, 0
    for step in range(steps):
        for peer, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, chain.batch(step * peers + peer)).backward()
            optimizer.step()
        if (step + 1) % interval == 0:
            sent += synchronize(copies, feedback, codec)
    if len({copy.hash for copy in copies}) != 1:
        raise SystemExit("the peers' global models differ: that must not happen")
    copies[0].install(copies[0].masters)
    count = sum(len(master) for master in copies[0].masters)
    return Outcome(held_out(models[0], chain), sent, sent * 8 / count / (steps / every))


def synchronize(copies: Sequence[GlobalModel], feedback: Sequence[ErrorFeedback], codec: Codec) -> int:
    """One outer step of all peers; bytes that one of them sends."""
    fragment = copies[0].outer_step % len(copies[0].fragments)
    pairs = list(zip(feedback, copies, strict=True))
    encoded = [own.encode(fragment, copy.delta(fragment), codec) for own, copy in pairs]
    deltas = [codec.decode(data, len(residual_n)) for data, residual_n in encoded]
    for (own, copy), (_, residual_n) in zip(pairs, encoded, strict=True):
        own.settle(fragment, residual_n)
        copy.advance(fragment, deltas, [1.0] * len(copies))
        copy.fragments[fragment].write(copy.masters[fragment])
    return encoded[0][0].numel()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rl", action="store_true", help="real runs on toolsmith instead of the supervised task")
    parser.add_argument("--steps", type=int, help="optimizer steps (default 300; 24 with --rl)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sync-every", type=int, nargs="+", help="H (default 100; 1 2 4 8 with --rl)")
    parser.add_argument("--schemes", nargs="+", choices=CODECS, default=CODECS, help="beside data-parallel")
    supervised = parser.add_argument_group("supervised only")
    supervised.add_argument("--peers", type=int, default=2)
    supervised.add_argument("--fragments", type=int, default=2)
    inner_help = "of AdamW, in every scheme (default: 8e-3, data-parallel's best)"
    supervised.add_argument("--inner-lr", type=float, default=8e-3, help=inner_help)
    outer_default = ["average", "nesterov"]
    supervised.add_argument("--outer", nargs="+", choices=OUTER, default=outer_default, help="outer optimizers")
    supervised.add_argument("--outer-lr", type=float, default=0.7, help="of nesterov")
    supervised.add_argument("--outer-momentum", type=float, default=0.5, help="of the same")
    rl = parser.add_argument_group("with --rl only")
    rl.add_argument("--groups", type=int, default=4, help="groups of 8 rollouts, each cluster and step (default 4)")
    rl.add_argument("--eval-tasks", type=int, default=128, help="held-out tasks at the end (default 128)")
    delays_help = "inner steps while a fragment is on its way (default 0)"
    rl.add_argument("--delays", type=int, nargs="+", default=[0], metavar="TAU", help=delays_help)
    rl.add_argument("--mixings", type=_mixing, nargs="+", default=[0.0], help="of cells with a delay: 0..1 or carry")
    rl.add_argument("--results", type=Path, default=Path("outputs/diloco_quality_rl.jsonl"), help="finished cells")
    rl.add_argument("--timeout-s", type=float, default=3600.0, help="of one cell")
    parser.add_argument("--quick", action="store_true", help="a few steps of the supervised task: whether it works")
    words = parser.parse_args()
    if words.quick:
        words.rl, words.steps, words.seeds, words.sync_every, words.schemes = False, 8, 1, [4], ["int4"]
    if words.rl:
        from benchmarks.diloco_quality_sides.rl import run

        words.steps, words.sync_every = words.steps or 24, words.sync_every or [1, 2, 4, 8]
        return run(words)
    words.steps, words.sync_every = words.steps or 300, words.sync_every or [100]
    for every in words.sync_every:
        compare(words, every)
    return 0


def _mixing(word: str) -> float | str:
    return word if word == "carry" else float(word)


def compare(words: argparse.Namespace, every: int) -> None:
    """Run and print the supervised task at one H."""
    torch.set_num_threads(1)
    seeds = range(words.seeds)
    print(f"{words.peers} peers, {words.steps} steps of {BATCH * LENGTH} tokens each, seeds {seeds[0]} to {seeds[-1]}")
    print(f"H = {every}, P = {words.fragments}, AdamW at {words.inner_lr:g} within\n")
    print("outer              scheme          loss  +- seeds  to fp32  to data-parallel  KB sent  fewer bytes    bits")
    plain = [data_parallel(seed, words) for seed in seeds]
    print(row("", DATA_PARALLEL, plain, plain, plain), flush=True)
    for outer in (outer_of(kind, words) for kind in words.outer):
        exact: list[Outcome] = []
        for scheme in dict.fromkeys(("fp32", *words.schemes)):
            outcomes = [streaming(seed, scheme, outer, every, words) for seed in seeds]
            exact = exact or outcomes
            print(row(name_of(outer), scheme, outcomes, exact, plain), flush=True)
    print()


def outer_of(kind: str, words: argparse.Namespace) -> OuterConfig:
    rates = {} if kind == "average" else {"lr": words.outer_lr, "momentum": words.outer_momentum}
    return OuterConfig.model_validate(rates)


def name_of(outer: OuterConfig) -> str:
    return "average" if outer == OuterConfig() else f"nesterov {outer.lr:g}/{outer.momentum:g}"


def row(
    outer: str, scheme: str, outcomes: Sequence[Outcome], exact: Sequence[Outcome], plain: Sequence[Outcome]
) -> str:
    """`exact`: with fp32 and the same outer optimizer; `plain`: data-parallel."""
    losses = [each.loss for each in outcomes]
    mean, spread = statistics.mean(losses), statistics.stdev(losses) if len(losses) > 1 else 0.0
    to_exact, to_plain = (mean / statistics.mean(each.loss for each in others) - 1 for others in (exact, plain))
    sent, bits = (statistics.mean(getattr(each, name) for each in outcomes) for name in ("bytes_sent", "bits"))
    return (
        f"{outer:<17}  {scheme:<13} {mean:6.4f}   {spread:7.4f}  {to_exact:+7.2%}  {to_plain:+16.2%}  "
        f"{sent / 1e3:7.0f}  {plain[0].bytes_sent / sent:11.0f}  {bits:6.3f}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
