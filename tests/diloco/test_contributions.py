"""What counts of a closed round: wrong bodies, weights and fragments of one peer are rejected, the others' stay."""

from __future__ import annotations

import math
import re

import pytest
import torch

from diloco.codec import codec_of
from diloco.fragments import Ranks
from diloco.global_model import accept, weighted_mean
from diloco.transport.messages import DeltaHeader, body_checksum


def contribution(peer: str, values: torch.Tensor, **fields) -> tuple[DeltaHeader, memoryview]:
    body = memoryview(codec_of("int8").encode(values).numpy()).cast("B")
    header = {"run": "r", "peer": peer, "rank": 0, "outer_step": 3, "base_hash": "", "layout_hash": ""}
    header |= {"size": len(body), "checksum": body_checksum(body), "fragment": 1, "codec": "int8", "weight": 2.0}
    header["inner_steps"] = 1
    return DeltaHeader(**{**header, **fields}), body


# Good ones decode; a delta that claims another fragment, an unknown codec, a length that does not fit its codec or an
# impossible weight is rejected, whoever sent it, and the reason says which it is.
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"fragment": 0}, "of fragment 0, this round is of fragment 1"),
        ({"codec": "zip"}, "no codec is called 'zip'"),
        ({"codec": "fp32"}, r"fp32: \d+ bytes, but 300 values take 1200"),
        ({"weight": math.nan}, "weight is nan, expected 0 to 1e"),
        ({"weight": -1.0}, "weight is -1"),
        ({"weight": 1e308}, "weight is 1e"),
    ],
)
def test_wrong_contributions(wrong, reason):
    values = torch.linspace(-1, 1, 300)
    good, bad = contribution("a", values), contribution("b", values, **wrong)
    found = accept([good[0], bad[0]], [good[1], bad[1]], fragment=1, n=300, ranks=Ranks())
    assert list(found.rejections) == ["b"] and re.search(reason, found.rejections["b"]) and found.weights == [2.0]
    assert torch.allclose(next(found.deltas()), values, atol=1 / 127)
    assert found.norms["a"] == pytest.approx(float(values.norm()), rel=0.01)


# A peer that claims an impossible part of the work gets at most 1.5/n of the round: before, the global model became
# this peer's own. Honest peers of unequal size count in full up to there, and peers that bring nothing are not counted.
def test_weights_are_capped():
    def weights(*claimed: float) -> list[float]:
        values = torch.linspace(-1, 1, 300)
        pairs = [contribution(name, values, weight=weight) for name, weight in zip("abc", claimed, strict=False)]
        headers, bodies = zip(*pairs, strict=True)
        return accept(headers, bodies, fragment=1, n=300, ranks=Ranks()).weights

    assert weights(100.0, 4e14, 120.0) == [100.0, 220.0, 120.0]
    assert weights(100.0, 4e14) == weights(100.0, 700.0) == [100.0, 300.0]
    assert weights(100.0, 200.0, 140.0) == [100.0, 200.0, 140.0]
    assert weights(0.0, 100.0, 400.0) == [0.0, 100.0, 300.0] and weights(0.0, 0.0) == [0.0, 0.0]
    rounded = 449491.06478873815  # 1.5 times it by 1.5 is less: two peers ended every other one by it
    assert weights(1e7, rounded, 1e-30) == pytest.approx([rounded, rounded, 1e-30])


class Rounds:
    """Rounds of one fragment, each compared with those before."""

    def __init__(self) -> None:
        self.history: list[float] = []
        self.values = torch.linspace(-1, 1, 300)

    def rejects(self, **scales: float) -> set[str]:
        pairs = [contribution(name, self.values * scale) for name, scale in scales.items()]
        headers, bodies = zip(*pairs, strict=True)
        found = accept(headers, bodies, fragment=1, n=300, ranks=Ranks(), history=self.history)
        self.history = [*self.history, *found.remembered][-16:]
        return set(found.rejections)


# Every norm is remembered at most at what would have been accepted. So a broken peer cannot make its norms the usual
# ones while another is there, and a change that is meant is accepted in the end.
def test_remembered_norms():
    rounds = Rounds()
    assert not rounds.rejects(a=1.0, b=1.0)
    assert all(rounds.rejects(a=1.0, b=1e6) == {"b"} for _ in range(40))
    alone = [rounds.rejects(b=5000.0) for _ in range(20)]
    assert alone[0] == {"b"} and alone[-1] == set()


# Peers choose their own sync_every and learning rate: half of them may have norms twelve times the others', in turn or
# always, and all count. A delta of a million times the usual norm is rejected, in the first round as in any other.
@pytest.mark.parametrize("scales", [{"a": 1.0, "b": 12.0}, {"a": 1.0, "b": 1.0, "c": 12.0, "d": 12.0}])
def test_unequal_norms_are_usual(scales):
    rounds = Rounds()
    assert not any(rounds.rejects(**scales) for _ in range(40))
    assert not any(rounds.rejects(**{name: scale}) for _ in range(10) for name, scale in scales.items())
    assert rounds.rejects(**scales | {"b": 1e6}) == {"b"} and not rounds.rejects(**scales)
    assert Rounds().rejects(**scales | {"b": 1e6}) == {"b"}


# One of two peers doubles its learning rate often enough to be twelve times the other: it counts after at most eight
# rounds, and what both have in common counts at once.
def test_a_lasting_change_is_accepted():
    rounds = Rounds()
    assert not any(rounds.rejects(a=1.0, b=1.0) for _ in range(8))
    changed = [rounds.rejects(a=1.0, b=12.0) for _ in range(9)]
    assert changed[0] == {"b"} and changed[-1] == set()
    assert not rounds.rejects(a=3000.0, b=9000.0)


# A delta that turns against the others and is as long as is accepted counts as three times the usual length. Beside
# seven others the step still goes their way. Deltas up to three times the usual are as they were.
@pytest.mark.parametrize(("against", "counts"), [(9.9, 3.0), (2.9, 2.9)])
def test_long_deltas_are_shortened(against, counts):
    values = torch.linspace(-1, 1, 300)
    pairs = [contribution(name, values * (-against if name == "h" else 1.0)) for name in "abcdefgh"]
    headers, bodies = zip(*pairs, strict=True)
    found = accept(headers, bodies, fragment=1, n=300, ranks=Ranks(), history=[float(values.norm())])
    step = weighted_mean(found.deltas(), found.weights)
    assert not found.rejections
    assert float(step @ values / (values @ values)) == pytest.approx((7 - counts) / 8, abs=0.02)
