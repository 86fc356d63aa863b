"""The global model of a joint run as one rank holds it: float32 masters of its shards, momentum, and their hash.

Every peer applies the same deltas in the same order with operations that round the same everywhere, so all hold equal
bits. The hash checks that at every outer step.

A sweep is an outer step of every fragment. What is published is the model as of the last full sweep, which is kept
apart while the masters of the next come in.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from composer_prime.config.diloco import OuterConfig
from composer_prime.errors import CheckpointError, ChecksumError
from diloco.fragments import Fragment
from diloco.outer_optimizer import Nesterov, largest_of, weighted_mean

_TOO_LARGE = torch.finfo(torch.float32).max / 2
"""Half of the range, which leaves room for what rounding adds."""
REMEMBERED_NORMS = 16


class GlobalModel:
    def __init__(self, fragments: Sequence[Fragment], config: OuterConfig) -> None:
        """Take the parameters as they are as outer step 0."""
        self.fragments = fragments
        self.lock = threading.Lock()
        """Held while values change. The training thread alone changes them; the link thread reads them for others."""
        self.masters: list[Tensor] = [fragment.read() for fragment in fragments]
        """float32 [numel] a fragment, on the CPU."""
        self.swept: list[Tensor] = [master.clone() for master in self.masters]
        """The masters as they were after the last full sweep."""
        self.outer = Nesterov(config.lr, config.momentum, [fragment.numel for fragment in fragments])
        self.norms = [torch.zeros(REMEMBERED_NORMS) for _ in fragments]
        """float32 [REMEMBERED_NORMS] a fragment: norms of its last deltas, 0 where there was none. All peers hold the
        same, for the guard compares with them."""
        self.outer_step = 0
        self._digests = [_digest(master) for master in self.masters]

    @property
    def hash(self) -> str:
        """Hash of this rank's masters and the outer step, blake2b-128, hexadecimal."""
        return _hash(self.outer_step, self._digests)

    @property
    def sweep(self) -> int:
        """How often every fragment has been synchronized."""
        return self.outer_step // len(self.fragments)

    def delta(self, fragment: int) -> Tensor:
        """Return the pseudo-gradient, global minus local, float32 [numel].

        The global values are rounded as in the parameters, so the rounding of the masters does not count as movement.
        """
        part = self.fragments[fragment]
        return part.rounded(self.masters[fragment]) - part.read()

    def can_advance(self, fragment: int, largest: float) -> bool:
        """Return whether an outer step along a mean of deltas leaves finite values and momentum on this rank.

        `largest`: of the deltas' absolute values. Such values are exact, so all peers decide the same.
        """
        return largest_of(self.masters[fragment]) + self.outer.reach(fragment, largest) < _TOO_LARGE

    def advance(
        self, fragment: int, deltas: Iterable[Tensor], weights: Sequence[float], norms: Sequence[float] = ()
    ) -> None:
        """Take one outer step along the mean delta; without any delta the values stay and the step counts all the same.

        `norms`: what later deltas of this fragment are compared with.
        """
        mean_n = weighted_mean(deltas, weights) if weights else None
        with self.lock:
            if norms:
                known = self.norms[fragment]
                self.norms[fragment] = torch.cat([known, torch.tensor(norms)])[-REMEMBERED_NORMS:].clone()
            if mean_n is not None:
                self.outer.step(fragment, self.masters[fragment], mean_n)
                self._digests[fragment] = _digest(self.masters[fragment])
            self.outer_step += 1
            if self.outer_step % len(self.fragments) == 0:
                for swept_n, master_n in zip(self.swept, self.masters, strict=True):
                    swept_n.copy_(master_n)

    def mixed(self, fragment: int, mixing: float, due_n: Tensor | None) -> Tensor:
        """Return alpha due + (1 - alpha) global + (now - due), float32 [numel]; alpha: `mixing`, now: local values.

        `due_n`: the values that are mixed; None for the local values of now.
        """
        master_n = self.masters[fragment]
        if mixing == 0 and due_n is None:
            return master_n
        now_n = self.fragments[fragment].read()
        local_n = now_n if due_n is None else due_n
        mixed_n = torch.lerp(master_n, local_n, mixing) if mixing > 0 else master_n
        return mixed_n if due_n is None else mixed_n + (now_n - due_n)

    def rebased(self, fragment: int, before_n: Tensor) -> Tensor:
        """Return global + (now - before), float32 [numel]: the local movement since global values `before_n`."""
        part = self.fragments[fragment]
        return self.masters[fragment] + (part.read() - part.rounded(before_n))

    def install(self, values: Sequence[Tensor]) -> None:
        """Give the parameters these values, float32 [numel] a fragment."""
        for fragment, values_n in zip(self.fragments, values, strict=True):
            fragment.write(values_n)

    @contextlib.contextmanager
    def installed(self, *, swept: bool = False) -> Iterator[None]:
        """Give the parameters the global values within the context; with `swept`, those after the last full sweep."""
        local = [fragment.read() for fragment in self.fragments]
        self.install(self.swept if swept else self.masters)
        try:
            yield
        finally:
            self.install(local)

    def tensors(self) -> dict[str, Tensor]:
        """Return masters, momentum, norms, and the last full sweep where it differs from the masters; not copies."""
        return self._tensors_at(self.outer_step)

    def _tensors_at(self, outer_step: int) -> dict[str, Tensor]:
        advanced = outer_step % len(self.fragments)  # fragments that this sweep has advanced already
        return {
            **{f"master.{index}": master for index, master in enumerate(self.masters)},
            **{f"velocity.{index}": velocity for index, velocity in enumerate(self.outer.velocity)},
            **{f"swept.{index}": values for index, values in enumerate(self.swept[:advanced])},
            **{f"norms.{index}": norms for index, norms in enumerate(self.norms)},
        }

    def verify(self, tensors: Mapping[str, Tensor], outer_step: int, expected_hash: str) -> None:
        """Raises CheckpointError when `tensors` do not fit this model, ChecksumError when they have another hash."""
        self._check_shapes(tensors, outer_step)
        digests = [_digest(tensors[f"master.{index}"]) for index in range(len(self.masters))]
        if (actual := _hash(outer_step, digests)) != expected_hash:
            raise ChecksumError(f"the state of outer step {outer_step} has hash {actual}, expected {expected_hash}")

    def load(self, tensors: Mapping[str, Tensor], outer_step: int) -> None:
        """Take over `tensors`, as of `outer_step`.

        Raises CheckpointError when one is missing or has another size; nothing is changed then.
        """
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
