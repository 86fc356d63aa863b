"""The global model of a joint run as one rank holds it: float32 masters of its shards, momentum, and their hash.

A sweep is an outer step of every fragment. What is published is the model as of the last full one, which is kept apart
while the masters of the next come in.

Every peer applies the same deltas in the same order with operations that round the same everywhere, so all hold equal
bits. The hash says so at every outer step.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from composer_prime.config.diloco import OuterConfig
from composer_prime.errors import CheckpointError, ChecksumError
from diloco.fragments import Fragment
from diloco.outer import build_outer, largest_of, weighted_mean
from diloco.ranks import Ranks

_TOO_LARGE = torch.finfo(torch.float32).max / 2
"""Half, to be above what rounding adds."""


class GlobalModel:
    def __init__(self, fragments: Sequence[Fragment], config: OuterConfig, ranks: Ranks | None = None) -> None:
        """The parameters as they are become outer step 0. `ranks` hold the shards; None: torch's default
        process group, and where there is none this rank alone.

        Raises ConfigError when the outer optimizer cannot work on them.
        """
        self.fragments = fragments
        self.masters: list[Tensor] = [fragment.read() for fragment in fragments]
        """float32 [numel] a fragment, on the CPU."""
        self.swept: list[Tensor] = [master.clone() for master in self.masters]
        """The masters as they were after the last full sweep."""
        self.outer = build_outer(config, fragments, ranks or Ranks())
        self.outer_step = 0
        self._digests = [_digest(master) for master in self.masters]

    @property
    def hash(self) -> str:
        """Of this rank's masters and the outer step, blake2b-128, hexadecimal."""
        return _hash(self.outer_step, self._digests)

    @property
    def intact(self) -> bool:
        """Whether the masters are still what `hash` was taken of; reads them all."""
        return [_digest(master) for master in self.masters] == self._digests

    @property
    def sweep(self) -> int:
        """How often every fragment has been synchronised."""
        return self.outer_step // len(self.fragments)

    def delta(self, fragment: int) -> Tensor:
        """The pseudo-gradient, global minus local, float32 [numel].

        Global as the parameters hold it: what rounding to their type took off the masters is nobody's movement.
        """
        part = self.fragments[fragment]
        return part.held(self.masters[fragment]) - part.read()

    def can_advance(self, fragment: int, deltas: Sequence[Tensor]) -> bool:
        """Whether an outer step along a mean of `deltas` leaves finite values on this rank, momentum included.

        It looks at largest absolute values, which are exact, so all peers find the same.
        """
        largest = max(map(largest_of, deltas), default=0.0)
        return largest_of(self.masters[fragment]) + self.outer.reach(fragment, largest) < _TOO_LARGE

    def advance(self, fragment: int, deltas: Sequence[Tensor], weights: Sequence[float]) -> None:
        """One outer step along the mean delta; without any delta the values stay and the step counts all the same.

        Muon's is a collective: all ranks give deltas, or none does.
        """
        if deltas:
            self.outer.step(fragment, self.masters[fragment], weighted_mean(deltas, weights))
            self._digests[fragment] = _digest(self.masters[fragment])
        self.outer_step += 1
        if self.outer_step % len(self.fragments) == 0:
            self._note_sweep()

    def _note_sweep(self) -> None:
        for kept_n, master_n in zip(self.swept, self.masters, strict=True):
            kept_n.copy_(master_n)

    def mixed(self, fragment: int, mixing: float, due_n: Tensor | None) -> Tensor:
        """alpha due + (1 - alpha) global + (now - due), float32 [numel], alpha being `mixing`.

        now: the local values; `due_n`: those that are mixed, None for now itself.
        """
        master_n = self.masters[fragment]
        if mixing == 0 and due_n is None:
            return master_n
        now_n = self.fragments[fragment].read()
        kept_n = now_n if due_n is None else due_n
        mixed_n = torch.lerp(master_n, kept_n, mixing) if mixing > 0 else master_n
        return mixed_n if due_n is None else mixed_n + (now_n - due_n)

    def rebased(self, fragment: int, before_n: Tensor) -> Tensor:
        """global + (now - before), float32 [numel]: the local movement since global values `before_n`, from today's."""
        part = self.fragments[fragment]
        return self.masters[fragment] + (part.read() - part.held(before_n))

    def install_all(self) -> None:
        """Give the parameters the global values."""
        for fragment, master_n in zip(self.fragments, self.masters, strict=True):
            fragment.write(master_n)

    @contextlib.contextmanager
    def installed(self, *, swept: bool = False) -> Iterator[None]:
        """Meanwhile the parameters hold the global values; with `swept`, those after the last full sweep."""
        local = [fragment.read() for fragment in self.fragments]
        held = self.swept if swept else self.masters
        for fragment, values_n in zip(self.fragments, held, strict=True):
            fragment.write(values_n)
        try:
            yield
        finally:
            for fragment, values_n in zip(self.fragments, local, strict=True):
                fragment.write(values_n)

    def tensors(self) -> dict[str, Tensor]:
        """Masters, momentum and what the last full sweep left where it is not the masters, by name; not copies."""
        return self._tensors_at(self.outer_step)

    def _tensors_at(self, outer_step: int) -> dict[str, Tensor]:
        begun = outer_step % len(self.fragments)  # fragments that the sweep under way has behind it
        return {
            **{f"master.{index}": master for index, master in enumerate(self.masters)},
            **{f"velocity.{index}": velocity for index, velocity in enumerate(self.outer.velocity)},
            **{f"swept.{index}": values for index, values in enumerate(self.swept[:begun])},
        }

    def checked(self, tensors: Mapping[str, Tensor], outer_step: int, expected_hash: str) -> list[str]:
        """Digests of the masters in `tensors`, for `load`.

        Raises CheckpointError when they are no state for it, ChecksumError when they have another hash.
        """
        self._check_shapes(tensors, outer_step)
        digests = [_digest(tensors[f"master.{index}"]) for index in range(len(self.masters))]
        if (found := _hash(outer_step, digests)) != expected_hash:
            raise ChecksumError(f"the state of outer step {outer_step} has hash {found}, expected {expected_hash}")
        return digests

    def load(self, tensors: Mapping[str, Tensor], outer_step: int, digests: list[str] | None = None) -> None:
        """Take over `tensors`, as of `outer_step`. `digests`: what `checked` returned for them; None: taken here.

        Raises CheckpointError when one is missing or has another size; nothing is changed then.
        """
        self._check_shapes(tensors, outer_step)
        for index, kept_n in enumerate(self.swept):
            kept_n.copy_(tensors[f"master.{index}"])  # unless the state names it, below
        for name, own in self._tensors_at(outer_step).items():
            own.copy_(tensors[name])
        self.outer_step = outer_step
        self._digests = [_digest(master) for master in self.masters] if digests is None else digests

    def _check_shapes(self, tensors: Mapping[str, Tensor], outer_step: int) -> None:
        for name, own in self._tensors_at(outer_step).items():
            given = tensors.get(name)
            if given is None or given.shape != own.shape or given.dtype != own.dtype:
                shape = "missing" if given is None else f"{given.dtype} {list(given.shape)}"
                raise CheckpointError(
                    f"global state: {name} is {shape}, expected {own.dtype} {list(own.shape)}: the state is of another "
                    "model, sharding, or [diloco] outer or fragments setting"
                )


def _hash(outer_step: int, digests: Sequence[str]) -> str:
    return hashlib.blake2b(json.dumps([outer_step, digests]).encode(), digest_size=16).hexdigest()


def _digest(master_n: Tensor) -> str:
    return hashlib.blake2b(memoryview(master_n.numpy()).cast("B"), digest_size=16).hexdigest()
