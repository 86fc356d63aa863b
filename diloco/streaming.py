"""The outer loop: Streaming DiLoCo (arXiv 2501.18512) around any optimizer. Read `StreamingDiLoCo._after_step` first.

    with StreamingDiLoCo(model.named_parameters(), optimizer, config) as diloco:
        for batch in data:
            ...; diloco.count(tokens=...); optimizer.step()

    after inner step H/P - tau:  delta = global - local of fragment k mod P, encoded, sent in the background
    after inner step H/P:        the round's deltas, those that pass the guards, averaged; outer step; local <- global

Departures from the paper:
1. Deltas are weighted by the tokens they were trained on, and their compression error is fed back into the next.
2. H is what a peer plans. When another peer has opened the round and its deadline nears, this one sends what it has.
3. A round that does not come to an end in time is not dropped: training goes on, its delta stays on offer, and the
   outcome is taken when it comes. A peer that missed rounds applies them one by one as long as they are kept.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import msgspec
import torch
from torch import Tensor

from composer_prime.config.diloco import DilocoConfig
from composer_prime.errors import CheckpointError, ChecksumError, DeadlineError
from diloco.codec import ErrorFeedback, build_codec
from diloco.contributions import Accepted, accept
from diloco.fragments import Named, layout, partition
from diloco.global_model import GlobalModel, packed, unpacked
from diloco.keys import JointKey
from diloco.layout import layout_hash
from diloco.link import Arrived, Left, Link, Member
from diloco.ranks import Ranks
from diloco.schedule import Schedule
from diloco.wire import Header, checksum

logger = logging.getLogger(__name__)
_SLICE_S = 0.2
"""How often ranks that wait for a round compare notes."""


@dataclass(slots=True)
class Pending:
    """A delta that is on offer."""

    header: Header
    body: memoryview
    residual_n: Tensor


class StreamingDiLoCo:
    def __init__(
        self,
        parameters: Iterable[Named],
        optimizer: torch.optim.Optimizer,
        config: DilocoConfig,
        ranks: Ranks | None = None,
    ) -> None:
        """`optimizer`'s step ends an inner step (of several, the last that steps). Collective over `ranks`.

        Raises ConfigError when the model has too few parts or the key file is unusable.
        """
        self.config, self.ranks = config, ranks or Ranks()
        self.schedule = Schedule.of(config)
        self.fragments = partition(parameters, config.fragments, config.partition)
        self.globals = GlobalModel(self.fragments, config.outer)
        self.feedback = ErrorFeedback([fragment.numel for fragment in self.fragments])
        self._codec = build_codec(config.codec)
        tensors = layout(self.fragments)
        self._layout_hash = layout_hash(tensors)
        member = Member(rank=self.ranks.rank, ranks=self.ranks.size, layout=tensors, settings=_agreed(config))
        self._link = Link(config, JointKey.read(config.key_file), member)
        self._swept = [master.clone() for master in self.globals.masters]
        self._optimizer, self._hook = optimizer, None
        self._inner = 0
        self._due = 0
        self._pending: Pending | None = None
        self._weight = {"tokens": 0, "samples": 0, "peers": 1}
        self._step_s, self._stepped, self._heard = 0.0, time.monotonic(), time.monotonic()
        self.metrics: dict[str, float] = {}
        """Figures of the last completed outer step."""

    # -- as a context --------------------------------------------------------------------------------------------

    def __enter__(self) -> StreamingDiLoCo:
        """Join the others; may take over their global model. Raises RunMismatchError or DeadlineError."""
        try:
            self._link.start()
            self._join()
        except BaseException:
            self._link.close()
            raise
        self._hook = self._optimizer.register_step_post_hook(lambda *_: self._after_step())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._link.close()

    @contextlib.contextmanager
    def global_values(self, *, swept: bool = False) -> Iterator[None]:
        """Meanwhile the parameters hold the global model; with `swept`, as it was after the last full sweep.

        What is sampled from, evaluated and exported is the global model, never one cluster's.
        """
        local = [fragment.read() for fragment in self.fragments]
        for fragment, values_n in zip(self.fragments, self._swept if swept else self.globals.masters, strict=True):
            fragment.write(values_n)
        try:
            yield
        finally:
            for fragment, values_n in zip(self.fragments, local, strict=True):
                fragment.write(values_n)

    def count(self, *, tokens: int = 0, samples: int = 0) -> None:
        """What the coming inner step is trained on, over all ranks of this cluster."""
        self._weight["tokens"] += tokens
        self._weight["samples"] += samples

    def finish(self) -> None:
        """Take the outcome of a round that is still under way, so that no delta is left behind."""
        if self._pending is not None:
            self._complete()

    @property
    def outer_step(self) -> int:
        return self.globals.outer_step

    @property
    def sweep(self) -> int:
        """How often every fragment has been synchronised."""
        return self.schedule.sweep(self.globals.outer_step)

    # -- the loop ------------------------------------------------------------------------------------------------

    def _after_step(self) -> None:
        now = time.monotonic()
        self._inner, self._step_s, self._stepped = self._inner + 1, now - self._stepped, now
        hurry, wanted = self._look_around()
        if wanted:
            self._serve(wanted)
        if self._pending is None and (self.schedule.prepares(self._inner) or hurry):
            self._prepare()
        if self._pending is not None and self._inner >= self._due:
            self._complete()
            self._stepped = time.monotonic()

    def _look_around(self) -> tuple[bool, int]:
        """Whether another step would miss the deadline of a round that others have opened, and whose state is wanted.

        A collective: all ranks see the same.
        """
        left = self._link.left_s(self.globals.outer_step)
        hurry = left is not None and left < 1.5 * self._step_s + self._beat_margin_s
        patient, wanted = self.ranks.smallest([not hurry, self._link.state_wanted])
        return not patient, wanted

    @property
    def _beat_margin_s(self) -> float:
        return min(2.0, self.config.round_deadline_s / 4)

    def _prepare(self) -> None:
        step = self.globals.outer_step
        fragment = self.schedule.fragment(step)
        encoded = self.feedback.encode(fragment, self.globals.delta(fragment), self._codec)
        body = memoryview(encoded.data.numpy()).cast("B")
        header = Header(
            kind="delta",
            run=self.config.run,
            peer=self.config.peer_id,
            rank=self.ranks.rank,
            outer_step=step,
            base_hash=self.globals.hash,
            layout_hash=self._layout_hash,
            size=len(body),
            checksum=checksum(body),
            fragment=fragment,
            codec=self._codec.spec,
            weight=float(self._weight[self.config.weighting]),
            inner_steps=self._inner,
        )
        self._offer(Pending(self._link.seal(header), body, encoded.residual_n))
        self._due = self._inner + self.config.delay

    def _offer(self, pending: Pending) -> None:
        self._pending = pending
        self._link.begin(pending.header.outer_step, pending.header.base_hash, pending.header, pending.body)

    def _complete(self) -> None:
        """Take the outcome of the round that is under way, and of those that were closed meanwhile."""
        began = time.monotonic()
        arrived = self._await(self.config.round_timeout_s)
        if arrived is None:
            self._go_on_alone()
            return
        exposed_s = time.monotonic() - began
        while isinstance(arrived, Arrived):
            self._apply(arrived, exposed_s)
            arrived = self._fetch_next(arrived.outcome.newest)
        if isinstance(arrived, Left):
            logger.warning("joining anew: %s", arrived.reason)
            self._pending = None
            self._join()
        self._restart_interval()

    def _fetch_next(self, newest: int) -> Arrived | Left | None:
        """The next closed round of those up to `newest`; None when there is none. A collective."""
        if self.ranks.smallest([newest])[0] < self.globals.outer_step:
            return None
        self._link.begin(self.globals.outer_step, self.globals.hash)
        return self._await(self.config.round_timeout_s)

    def _restart_interval(self) -> None:
        self._pending, self._inner, self._heard = None, 0, time.monotonic()
        self._weight |= {"tokens": 0, "samples": 0}

    def _go_on_alone(self) -> None:
        silent_s = time.monotonic() - self._heard
        if self.ranks.any(silent_s > self.config.offline_timeout_s):
            raise DeadlineError(
                f"no outcome of outer step {self.globals.outer_step} for {silent_s:.0f} s "
                f"(diloco.offline_timeout_s = {self.config.offline_timeout_s:g}); is the rendezvous at "
                f"{self.config.rendezvous} reachable, and are enough peers alive? Go on with --resume"
            )
        logger.warning(
            "outer step %d is not complete after %.0f s: training goes on", self.globals.outer_step, silent_s
        )
        self._due = self._inner + self.schedule.interval

    def _await(self, timeout_s: float) -> Arrived | Left | None:
        """How the round ended, alike on all ranks: Left when one of them must join anew. A collective."""
        deadline = time.monotonic() + timeout_s
        while True:
            result = self._link.wait(_SLICE_S)
            known = {Arrived: 2, Left: 1}.get(type(result), 0)
            least, wanted, in_time = self.ranks.smallest(
                [known, self._link.state_wanted, time.monotonic() < deadline]
            )
            if wanted:
                self._serve(wanted)
            if least == 2:
                return result
            if least == 1:
                return result if isinstance(result, Left) else Left("another rank of this peer was left behind")
            if not in_time:
                return None

    def _apply(self, arrived: Arrived, exposed_s: float) -> None:
        fragment = self.schedule.fragment(self.globals.outer_step)
        headers = arrived.outcome.headers
        accepted = accept(
            headers, arrived.bodies, fragment=fragment, n=self.fragments[fragment].numel, guard=self.config.guard,
            ranks=self.ranks,
        )  # fmt: skip
        for peer, reason in accepted.reasons.items():
            logger.warning("outer step %d: the delta of peer %s is rejected: %s", self.globals.outer_step, peer, reason)
        self.globals.advance(fragment, accepted.deltas, accepted.weights)
        pending, own = self._pending, self.config.peer_id
        if pending is not None and own not in accepted.reasons and pending.header in headers:
            self.feedback.settle(fragment, pending.residual_n)
        self.globals.install(fragment, 0.0 if own in accepted.reasons else self.config.mixing)
        if self.globals.outer_step % self.config.fragments == 0:
            self._note_sweep(self.globals.masters)
        self._link.position(self.globals.outer_step, self.globals.hash)
        self._measure(arrived, accepted, exposed_s)

    def _note_sweep(self, masters: Sequence[Tensor]) -> None:
        for kept, master in zip(self._swept, masters, strict=True):
            kept.copy_(master)

    def _measure(self, arrived: Arrived, accepted: Accepted, exposed_s: float) -> None:
        sent, received = self._link.traffic
        peers = {header.peer: header for header in arrived.outcome.headers}
        self.metrics = {
            "diloco/outer_step": self.globals.outer_step,
            "diloco/sweep": self.sweep,
            "diloco/participants": len(peers),
            "diloco/rejected": len(accepted.reasons),
            "diloco/quorum": arrived.outcome.quorum_id,
            "diloco/sync_s": exposed_s,
            "diloco/bytes_sent": sent,
            "diloco/bytes_received": received,
        }
        for peer, header in peers.items():
            self.metrics[f"diloco/{peer}/norm"] = accepted.norms[peer]
            self.metrics[f"diloco/{peer}/weight"] = header.weight
            self.metrics[f"diloco/{peer}/inner_steps"] = header.inner_steps

    # -- joining, healing, checkpoints ---------------------------------------------------------------------------

    def _join(self) -> None:
        """Stand where the others stand: with what this peer has, or with the state of one of them. A collective."""
        self._link.position(self.globals.outer_step, self.globals.hash, training=False)
        before, deadline = self.globals.outer_step, time.monotonic() + self.config.heal_timeout_s
        while True:
            left = max(0.1, deadline - time.monotonic())
            found = self._link.fetch_state(self.globals.outer_step, self.globals.hash, left)
            serial = found.header.serial if found.header else 0
            low, high = self.ranks.smallest([serial, -serial])
            if low == -high:
                break
        if found.header is not None:
            self._take_over(found.header, found.body)
        missed = self._fetch_next(found.newest)
        while isinstance(missed, Arrived):
            self._apply(missed, 0.0)
            missed = self._fetch_next(found.newest)
        if found.header is not None or self.globals.outer_step != before:
            self._restart_interval()
        elif self._pending is not None:
            self._offer(self._pending)
        self._link.position(self.globals.outer_step, self.globals.hash, training=True)

    def _take_over(self, header: Header, body: bytearray) -> None:
        tensors, facts = unpacked(body)
        self.globals.load(tensors, facts["outer_step"])
        if self.globals.hash != header.base_hash:
            raise ChecksumError(
                f"the state of peer {header.peer} has hash {self.globals.hash}, its header says {header.base_hash}"
            )
        self.globals.install_all()
        self._note_sweep(self.globals.masters)
        self.feedback.reset()
        self._pending = None
        logger.info("took over the state of peer %s at outer step %d", header.peer, self.globals.outer_step)

    def _serve(self, serial: int) -> None:
        """Copy the global state and upload the copy: training may go on at once."""
        body = packed(self.globals.tensors(), {"outer_step": self.globals.outer_step})
        header = Header(
            kind="state",
            run=self.config.run,
            peer=self.config.peer_id,
            rank=self.ranks.rank,
            outer_step=self.globals.outer_step,
            base_hash=self.globals.hash,
            layout_hash=self._layout_hash,
            size=len(body),
            checksum=checksum(body),
            serial=serial,
        )
        logger.info("serving the global state of outer step %d (%.1f MB)", header.outer_step, len(body) / 1e6)
        self._link.serve_state(header, memoryview(body))

    def state(self) -> bytes:
        """This rank's outer state for a checkpoint: masters, momentum, error feedback, the delta under way."""
        tensors = self.globals.tensors()
        tensors |= {f"residual.{index}": residual for index, residual in enumerate(self.feedback.residuals)}
        tensors |= {f"swept.{index}": values for index, values in enumerate(self._swept)}
        facts: dict[str, Any] = {
            "outer_step": self.globals.outer_step, "inner": self._inner, "due": self._due, "weight": self._weight,
            "rank": self.ranks.rank, "ranks": self.ranks.size, "layout": self._layout_hash,
        }  # fmt: skip
        if self._pending is not None:
            facts["pending"] = msgspec.to_builtins(self._pending.header)
            tensors |= {
                "pending.body": torch.frombuffer(bytearray(self._pending.body), dtype=torch.uint8),
                "pending.residual": self._pending.residual_n,
            }
        return packed(tensors, facts)

    def load(self, raw: bytes) -> None:
        """Go on from `state`; before the context is entered. The parameters are restored by who saved them.

        Raises CheckpointError when it is of another layout or rank.
        """
        tensors, facts = unpacked(raw)
        ours = {"rank": self.ranks.rank, "ranks": self.ranks.size, "layout": self._layout_hash}
        theirs = {name: facts[name] for name in ours}
        if ours != theirs:
            raise CheckpointError(f"the outer state is of {theirs}, this is {ours}: resume with the same trainer.ranks")
        self.globals.load(tensors, facts["outer_step"])
        self.feedback.residuals = [tensors[f"residual.{index}"] for index in range(len(self.fragments))]
        self._note_sweep([tensors[f"swept.{index}"] for index in range(len(self.fragments))])
        self._inner, self._due, self._weight = facts["inner"], facts["due"], facts["weight"]
        if "pending" in facts:
            header = msgspec.convert(facts["pending"], Header)
            body = memoryview(tensors["pending.body"].numpy()).cast("B")
            self._pending = Pending(header, body, tensors["pending.residual"])


def _agreed(config: DilocoConfig) -> dict[str, str]:
    """What decides the global model, as `diloco.` keys and text: the same for all peers."""
    values = config.model_dump(mode="json", include={"fragments", "partition", "outer", "weighting", "guard"})
    flat: dict[str, str] = {}
    for name, value in values.items():
        inner = value if isinstance(value, dict) else {"": value}
        flat |= {f"diloco.{name}.{key}".rstrip("."): str(each) for key, each in inner.items()}
    return flat
