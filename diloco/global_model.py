"""The global model as one rank holds it: float32 masters, momentum, hash; and the step along deltas.

All peers apply the same deltas with operations that round alike, so all hold equal bits.
What is published is the model as of the last full sweep.

    Delta = mean_i w_i (global - local_i)
    v <- m v + Delta;   global <- global - lr (Delta + m v)   Nesterov as in torch.optim.SGD; DiLoCo, arXiv 2311.08105

Departures:
1. v starts at 0, as torch's first step does in effect.
2. Global values are float32: a step below bfloat16's resolution would vanish. Deltas are taken against the values as
   the parameters hold them.
3. Products and sums are separate operations: a fused multiply-add rounds differently.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high, median_low

import torch
from torch import Tensor

from composer_prime.config.diloco import OuterConfig
from composer_prime.errors import CheckpointError, ChecksumError
from diloco.codec import codec_of, shared_bytes
from diloco.fragments import Fragment, Ranks
from diloco.transport.messages import DeltaHeader

REMEMBERED_NORMS = 16
MAX_NORM_RATIO = 10.0
"""A delta is rejected whose norm exceeds this many times the usual one."""
MAX_SHARE = 1.5
"""The weights of one peer, of n that bring any, count at most as this over n of a round."""
LONG_NORM_RATIO = 3.0
"""A delta that is longer than this many times the usual norm is shortened to it. A late one covers more steps."""
LARGEST_NORM = math.sqrt(torch.finfo(torch.float32).max)
"""The squares of larger values are infinite in float32."""
MAX_WEIGHT = 1e15
"""In tokens; above what any round trains on."""
_LANES = 1 << 14


class GlobalModel:
    def __init__(self, fragments: Sequence[Fragment], config: OuterConfig) -> None:
        """Take the parameters as they are as outer step 0."""
        self.fragments = fragments
        self.lock = threading.Lock()
        """Held while values change: the link thread reads them."""
        self.masters: list[Tensor] = [fragment.read() for fragment in fragments]
        """float32 [numel] a fragment, on the CPU."""
        self.swept: list[Tensor] = [master.clone() for master in self.masters]
        """The masters as they were after the last full sweep."""
        self.lr, self.momentum = config.lr, config.momentum
        self.velocity = [torch.zeros(fragment.numel) for fragment in fragments] if config.momentum else []
        """float32 [numel] a fragment; empty without momentum."""
        self.norms = [torch.zeros(REMEMBERED_NORMS) for _ in fragments]
        """float32 [REMEMBERED_NORMS] a fragment: of its last deltas, 0 for none."""
        self.outer_step = 0
        self._digests = [_digest(master) for master in self.masters]

    @property
    def hash(self) -> str:
        """Hash of this rank's masters and the outer step, blake2b-128, hexadecimal."""
        return _hash(self.outer_step, self._digests)

    @property
    def fragment(self) -> int:
        """Which fragment the coming outer step synchronizes: each in turn."""
        return self.outer_step % len(self.fragments)

    @property
    def sweep(self) -> int:
        """How often every fragment has been synchronized: the policy version."""
        return self.outer_step // len(self.fragments)

    def delta(self, fragment: int) -> Tensor:
        """Return the pseudo-gradient, global minus local, float32 [numel]."""
        part = self.fragments[fragment]
        return part.rounded(self.masters[fragment]) - part.read()

    def advance(
        self, fragment: int, deltas: Iterable[Tensor], weights: Sequence[float], norms: Sequence[float] = ()
    ) -> None:
        """Take one outer step along the mean delta, if any. `norms`: what later deltas are compared with."""
        mean_n = weighted_mean(deltas, weights) if weights else None
        with self.lock:
            if norms:
                known = self.norms[fragment]
                self.norms[fragment] = torch.cat([known, torch.tensor(norms)])[-REMEMBERED_NORMS:].clone()
            if mean_n is not None:
                self._step(fragment, mean_n)
                self._digests[fragment] = _digest(self.masters[fragment])
            self.outer_step += 1
            if self.outer_step % len(self.fragments) == 0:
                for swept_n, master_n in zip(self.swept, self.masters, strict=True):
                    swept_n.copy_(master_n)

    def _step(self, fragment: int, mean_n: Tensor) -> None:
        direction_n = mean_n
        if self.velocity:
            velocity_n = self.velocity[fragment].mul_(self.momentum).add_(mean_n)
            direction_n = mean_n + velocity_n * self.momentum
        self.masters[fragment].sub_(direction_n if self.lr == 1.0 else direction_n * self.lr)

    def mixed(self, fragment: int, mixing: float, due_n: Tensor | None) -> Tensor:
        """Return alpha due + (1 - alpha) global + (now - due), float32 [numel]. Without `due_n`, due is now."""
        master_n = self.masters[fragment]
        if mixing == 0 and due_n is None:
            return master_n
        now_n = self.fragments[fragment].read()
        local_n = now_n if due_n is None else due_n
        mixed_n = torch.lerp(master_n, local_n, mixing) if mixing > 0 else master_n
        return mixed_n if due_n is None else mixed_n + (now_n - due_n)

    def rebased(self, fragment: int, before_n: Tensor) -> Tensor:
        part = self.fragments[fragment]
        return self.masters[fragment] + (part.read() - part.rounded(before_n))

    def install(self, values: Sequence[Tensor]) -> None:
        for fragment, values_n in zip(self.fragments, values, strict=True):
            fragment.write(values_n)

    @contextlib.contextmanager
    def installed(self, *, swept: bool = False) -> Iterator[None]:
        """Give the parameters the global values within the context."""
        local = [fragment.read() for fragment in self.fragments]
        self.install(self.swept if swept else self.masters)
        try:
            yield
        finally:
            self.install(local)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state, not copied; the last sweep where it differs from the masters."""
        return self._tensors_at(self.outer_step)

    def _tensors_at(self, outer_step: int) -> dict[str, Tensor]:
        advanced = outer_step % len(self.fragments)  # fragments that this sweep has advanced already
        return {
            **{f"master.{index}": master for index, master in enumerate(self.masters)},
            **{f"velocity.{index}": velocity for index, velocity in enumerate(self.velocity)},
            **{f"swept.{index}": values for index, values in enumerate(self.swept[:advanced])},
            **{f"norms.{index}": norms for index, norms in enumerate(self.norms)},
        }

    def verify(self, tensors: Mapping[str, Tensor], outer_step: int, expected_hash: str) -> None:
        """Raises CheckpointError for misfits, ChecksumError for another hash."""
        self._check_shapes(tensors, outer_step)
        digests = [_digest(tensors[f"master.{index}"]) for index in range(len(self.masters))]
        if (actual := _hash(outer_step, digests)) != expected_hash:
            raise ChecksumError(f"the state of outer step {outer_step} has hash {actual}, expected {expected_hash}")

    def load(self, tensors: Mapping[str, Tensor], outer_step: int) -> None:
        """Take over `tensors`, as of `outer_step`, or change nothing. Raises CheckpointError."""
        self._check_shapes(tensors, outer_step)
        with self.lock:
            for index, swept_n in enumerate(self.swept):
                swept_n.copy_(tensors[f"master.{index}"])  # unless the state has its own, copied below
            for name, values in self._tensors_at(outer_step).items():
                values.copy_(tensors[name])
            self.outer_step = outer_step
            self._digests = [_digest(master) for master in self.masters]

    def _check_shapes(self, tensors: Mapping[str, Tensor], outer_step: int) -> None:
        for name, own in self._tensors_at(outer_step).items():
            other = tensors.get(name)
            if other is None or other.shape != own.shape or other.dtype != own.dtype:
                shape = "missing" if other is None else f"{other.dtype} {list(other.shape)}"
                raise CheckpointError(
                    f"global state: {name} is {shape}, expected {own.dtype} {list(own.shape)}: the state is of another "
                    "model, sharding, or [diloco] outer or fragments setting"
                )


def _hash(outer_step: int, digests: Sequence[str]) -> str:
    return hashlib.blake2b(json.dumps([outer_step, digests]).encode(), digest_size=16).hexdigest()


def _digest(master_n: Tensor) -> str:
    return hashlib.blake2b(master_n.numpy().data.cast("B"), digest_size=16).hexdigest()


# -- the deltas that count ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedDeltas:
    n: int
    """Elements of the fragment on this rank."""
    counted: list[tuple[DeltaHeader, memoryview]]
    """What was accepted, encoded, in order of the peers' names."""
    weights: list[float]
    scales: list[float]
    """What each counted delta is multiplied by: 1 or, of one that is too long, less."""
    norms: dict[str, float]
    """L2 norm over all ranks, by peer."""
    remembered: list[float]
    """Norms that later rounds are compared with, none above what would have been accepted."""
    rejections: dict[str, str]
    """Why a peer's delta does not count."""

    def deltas(self) -> Iterator[Tensor]:
        """Decode float32 [n] one by one, to bound the peak of host memory."""
        for (header, body), scale in zip(self.counted, self.scales, strict=True):
            delta_n = codec_of(header.codec).decode(shared_bytes(body), self.n)
            yield delta_n if scale == 1.0 else delta_n * scale


def accept(
    headers: Sequence[DeltaHeader],
    bodies: Sequence[memoryview],
    *,
    fragment: int,
    n: int,
    ranks: Ranks,
    history: Sequence[float] = (),
) -> AcceptedDeltas:
    """Check this rank's part of a round; a peer fails on all ranks. `history`: norms of deltas before. A collective."""
    own: list[float] = []
    undecodable: dict[str, str] = {}
    for header, body in zip(headers, bodies, strict=True):
        try:
            own.append(squared_norm(_decode(header, body, fragment, n)))
        except ValueError as error:
            own.append(math.nan)
            undecodable[header.peer] = str(error)
    squared = {header.peer: total for header, total in zip(headers, ranks.total(own), strict=True)}
    mine = dict(zip(squared, own, strict=True))
    elsewhere = [peer for peer, total in squared.items() if math.isnan(total) and mine[peer] >= 0]
    another_rank = "another rank of this cluster cannot use its part: see that rank's log"
    rejections = rejected(squared, history) | dict.fromkeys(elsewhere, another_rank) | undecodable
    offered = zip(headers, bodies, strict=True)
    counted = [(header, body) for header, body in offered if header.peer not in rejections]
    norms = {peer: math.sqrt(value) for peer, value in squared.items()}
    usual = _usual_norm(norms.values(), history)
    longest = LONG_NORM_RATIO * usual if usual else math.inf
    bound = min(LARGEST_NORM, MAX_NORM_RATIO * usual if usual else LARGEST_NORM)
    lengths = [norms[header.peer] for header, _ in counted]
    return AcceptedDeltas(
        n=n,
        counted=counted,
        weights=_capped([header.weight for header, _ in counted]),
        scales=[1.0 if length <= longest else longest / length for length in lengths],
        norms=norms,
        remembered=[min(norm, bound) for norm in norms.values() if math.isfinite(norm)],
        rejections=rejections,
    )


def rejected(squared_norms: Mapping[str, float], history: Sequence[float] = ()) -> dict[str, str]:
    """Return why each rejected peer's delta does not count, by the norms of whole deltas."""
    norms = {peer: math.sqrt(value) for peer, value in squared_norms.items() if math.isfinite(value)}
    reasons = {peer: "it holds NaN or infinity" for peer in squared_norms if peer not in norms}
    usual = _usual_norm(norms.values(), history)
    for peer, norm in norms.items():
        if norm > LARGEST_NORM:
            reasons[peer] = f"its norm {norm:.4g} is above {LARGEST_NORM:.4g}: no model can be trained with such values"
        elif usual and norm > MAX_NORM_RATIO * usual:
            reasons[peer] = (
                f"its norm {norm:.4g} is above {MAX_NORM_RATIO:g} times the usual "
                f"{usual:.4g} of this round and those before"
            )
    return reasons


def _usual_norm(norms: Iterable[float], history: Sequence[float]) -> float | None:
    """Return the norm that deltas may exceed by MAX_NORM_RATIO; None when nothing is known.

    It is the larger of the median of `history` and the low median of this round, so what peers have in common passes.
    Half of the peers may train with another rate: of an even number the higher middle norm counts, up to the ratio.
    """
    of_round, before = [[norm for norm in each if 0 < norm < math.inf] for each in (norms, history)]
    if not before:
        return _median(of_round) if of_round else None
    return max(_median(before), median_low(of_round) if len(of_round) > 1 else 0.0)


def _median(norms: Sequence[float]) -> float:
    return min(median_high(norms), MAX_NORM_RATIO * median_low(norms))


def _capped(weights: Sequence[float]) -> list[float]:
    """Return the weights, none above MAX_SHARE / n of the sum of n: a claim must not own the model."""
    largest = sorted((weight for weight in weights if weight > 0), reverse=True)
    n, possible = len(largest), range(math.ceil(len(largest) / MAX_SHARE))
    # Where `count` of them get the cap. The least is that of those which do.
    caps = [MAX_SHARE * sum(largest[count:]) / (n - MAX_SHARE * count) for count in possible]
    return [min([weight, *caps]) for weight in weights]


def squared_norm(delta_n: Tensor) -> float:
    """Return the sum of squares in float64, with the same bits on any machine: by lanes, which are rounded once."""
    lanes = torch.zeros(_LANES, dtype=torch.float64)
    for part in delta_n.split(_LANES):
        lanes[: len(part)] += part.to(torch.float64).square_()
    return math.fsum(lanes.tolist())


def _decode(header: DeltaHeader, body: memoryview, fragment: int, n: int) -> Tensor:
    if header.fragment != fragment:
        raise ValueError(f"it is of fragment {header.fragment}, this round is of fragment {fragment}")
    if not 0 <= header.weight <= MAX_WEIGHT:
        raise ValueError(f"its weight is {header.weight:g}, expected 0 to {MAX_WEIGHT:g}")
    return codec_of(header.codec).decode(shared_bytes(body), n)


def weighted_mean(deltas: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """Return sum_i (w_i / sum w) delta_i, float32 [numel], one delta at a time. Weights all 0 count the same."""
    total = sum(weights)
    shares = [1.0 / len(weights)] * len(weights)
    if total > 0:
        shares = [weight / total for weight in weights]
    each_n = iter(deltas)
    mean_n = next(each_n) * shares[0]
    for share in shares[1:]:
        mean_n.add_(next(each_n) * share)
    return mean_n
