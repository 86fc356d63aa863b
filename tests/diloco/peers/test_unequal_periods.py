"""Peers with an H of their own in one run: a round takes what each has, by its own tokens."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from joint_run import assert_same_globals, settings, together, train
from test_missed_rounds import OUTER, PlainOuter, PlainPeer


# Peer a synchronizes every 2 steps, b every 6. Where the deadline is far, each round holds 2 steps of a and 6 of b,
# weighted by their tokens, and the joint run is that of the plain algorithm, bit for bit.
@pytest.mark.parametrize("tokens", [(3, 1), (3, 5)])
def test_each_brings_its_own_period(make_rendezvous, key_file, tokens):
    address = make_rendezvous(start_peers=2, min_peers=2).endpoint
    periods, rounds = (2, 6), 3
    waits = {"round_deadline_s": 30, "round_timeout_s": 40, "offline_timeout_s": 60}
    seen = together(*(
        partial(
            train, settings(address, key_file, name, sync_every=period, **waits, **OUTER), peer, rounds * period,
            tokens=count,
        )
        for peer, (name, period, count) in enumerate(zip("ab", periods, tokens, strict=True))
    ))  # fmt: skip
    peers = [PlainPeer(0), PlainPeer(1)]
    outer = PlainOuter(peers[0].fragment.read())
    weights = [period * count for period, count in zip(periods, tokens, strict=True)]
    for _ in range(rounds):
        start = outer.values
        locals_ = [peer.train(period) for peer, period in zip(peers, periods, strict=True)]
        outer.advance(*((start - local, weight) for local, weight in zip(locals_, weights, strict=True)))
        for peer in peers:
            peer.fragment.write(outer.values)
    assert_same_globals(*seen)
    assert torch.equal(seen[0].masters[0], outer.values) and max(seen[1].hashes) == rounds
    last = seen[0].metrics[rounds]
    assert [last[f"diloco/{name}/inner_steps"] for name in "ab"] == [*periods]
    assert [last[f"diloco/{name}/weight"] for name in "ab"] == weights
    assert last["diloco/missed_rounds"] == seen[1].metrics[rounds]["diloco/missed_rounds"] == 0
