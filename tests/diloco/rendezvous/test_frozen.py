"""Frozen weights, the adapters' scale and the protocol are not exchanged, and must be the same everywhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from joint_run import Blocks, settings
from rendezvous_state import RendezvousState

from composer_prime.errors import RunMismatchError
from diloco.fragments import frozen_digest
from diloco.streaming import FROZEN_KEY, StreamingDiLoCo
from diloco.transport.messages import PROTOCOL, BeatReply, PeerHello


def adapted(seed: int = 0) -> Blocks:
    """Trains its blocks only; `seed` decides what is frozen."""
    model, base = Blocks(), Blocks(seed)
    model.embed.weight.data.copy_(base.embed.weight)
    model.embed.weight.requires_grad_(False)
    return model


def engine(model: Blocks, config, **options) -> StreamingDiLoCo:
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    return StreamingDiLoCo(model.named_parameters(), optimizer, config, **options)


# Any change of a frozen value, were it the sign of a zero, or of its type changes the digest; what is trained does not,
# and neither does the order of the parameters.
@given(at=st.integers(0, 16 * 8 - 1), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_digest(at, dtype):
    model = adapted().to(dtype)
    model.embed.weight.data.zero_()
    digest = frozen_digest(model.named_parameters())
    model.layers[1].weight.data.add_(1)
    assert frozen_digest(reversed(list(model.named_parameters()))) == digest
    assert frozen_digest(model.to(torch.float64).named_parameters()) != digest
    model.to(dtype).embed.weight.data.view(-1)[at] = -0.0
    assert frozen_digest(model.named_parameters()) != digest


# Adapters on another base model, or of another scale, are refused with both values; the same ones are not.
def test_refusals_of_other_bases(make_rendezvous, key_file):
    address = make_rendezvous().endpoint
    alpha = {"trainer.lora.alpha": "32.0"}
    with engine(adapted(), settings(address, key_file, "a"), agreed=alpha):
        for seed, agreed, message in [
            (1, alpha, r"peer b has model.path \(digest .*\) = (\w+), peer a has (?!\1)\w+: all peers"),
            (0, {"trainer.lora.alpha": "16.0"}, r"peer b has trainer.lora.alpha = 16.0, peer a has 32.0"),
            (0, {}, r"peer b has trainer.lora.alpha = None, peer a has 32.0"),
        ]:
            with pytest.raises(RunMismatchError, match=message):
                engine(adapted(seed), settings(address, key_file, "b"), agreed=agreed).__enter__()
        with engine(adapted(), settings(address, key_file, "b"), agreed=alpha) as joined:
            assert joined.outer_step == 0


# A peer of an earlier or a later release is refused by name.
@pytest.mark.parametrize("protocol", [PROTOCOL - 1, PROTOCOL + 1])
def test_other_releases(protocol):
    rendezvous = RendezvousState()
    with pytest.raises(RunMismatchError, match=f"peer b speaks {protocol}, this rendezvous {PROTOCOL}: use one"):
        rendezvous.hello("b", protocol=protocol)
    assert isinstance(rendezvous.hello("b")[0], BeatReply)


# Peers of other numbers of ranks hold other shards, and so other digests: each rank is told of the ranks.
@pytest.mark.parametrize("rank", [0, 1])
def test_other_ranks(rank):
    def hello(peer: str, rank: int, ranks: int) -> PeerHello:
        return PeerHello(
            protocol=PROTOCOL, run="joint", peer=peer, rank=rank, ranks=ranks, instance=1, outer_step=0, base_hash="",
            training=False, layout=[], settings={"trainer.ranks": str(ranks), FROZEN_KEY: f"{rank} of {ranks}"},
            round_deadline_s=1,
        )  # fmt: skip

    rendezvous = RendezvousState()
    rendezvous.handler.answer(hello("a", 0, 1))
    with pytest.raises(RunMismatchError, match=r"peer b has trainer\.ranks = 2, peer a has 1"):
        rendezvous.handler.answer(hello("b", rank, 2))
