"""The outer loop: Streaming DiLoCo (arXiv 2501.18512) around any optimizer. Read `StreamingDiLoCo._after_step` first.

    with StreamingDiLoCo(model.named_parameters(), optimizer, config) as diloco:
        for batch in data:
            ...; diloco.count(tokens=...); optimizer.step()

    after inner step H/P - tau:  delta = global - local of fragment k mod P, encoded, sent in the background
    after inner step H/P:        the round's deltas, those that pass the guards, averaged; outer step; local <- global

Departures from the paper:
1. Deltas are weighted by the tokens they were trained on, and their compression error is fed back into the next.
2. H is what a peer plans. When another peer has brought its delta and the deadline nears, this one sends what it has.
3. A round that does not come to an end in time is not dropped: training goes on, its delta stays on offer, and the
   outcome is taken when it comes. A peer that missed rounds applies them one by one as long as they are kept.
4. Work that an outcome does not hold is kept (carry.py): steps after the delay are carried on, and a peer whose delta
   came too late offers what it has at once, for the next round.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch

from composer_prime.config.diloco import DilocoConfig
from composer_prime.errors import CheckpointError, ChecksumError, DeadlineError, RunMismatchError
from diloco.carry import Fate, Offer, OwnWork, Work, fate_of
from diloco.codec import ErrorFeedback, build_codec
from diloco.contributions import accept
from diloco.exchange import Arrived, Found, Left
from diloco.figures import figures
from diloco.fragments import Named, layout, partition
from diloco.frozen import frozen_digest
from diloco.global_model import GlobalModel
from diloco.keys import JointKey
from diloco.layout import layout_hash
from diloco.link import Link
from diloco.pending import Pending
from diloco.ranks import Ranks
from diloco.schedule import Schedule
from diloco.session import Member, agreed_settings
from diloco.state_file import packed, unpacked
from diloco.wire import PROTOCOL, Header, checksum

logger = logging.getLogger(__name__)
_SLICE_S = 0.2
"""How often ranks that wait for a round compare notes."""
_TELLINGS = 3
"""How often in a row the ranks may be told of different outcomes; a rendezvous that was restarted tells them once."""


class StreamingDiLoCo:
    def __init__(
        self,
        parameters: Iterable[Named],
        optimizer: torch.optim.Optimizer,
        config: DilocoConfig,
        ranks: Ranks | None = None,
        agreed: Mapping[str, str] | None = None,
    ) -> None:
        """`optimizer`'s step ends an inner step (of several, the last that steps). Collective over `ranks`.

        `agreed`: what else all peers must have in common, as text by its key in the TOML.

        Raises ConfigError when the model has too few parts or the key file is unusable.
        """
        self.config, self.ranks = config, ranks or Ranks()
        self.schedule = Schedule.of(config)
        named = list(parameters)
        self.fragments = partition(named, config.fragments, config.partition)
        self.globals = GlobalModel(self.fragments, config.outer)
        self.work = OwnWork(self.globals, config.mixing, self.ranks)
        self.feedback = ErrorFeedback([fragment.numel for fragment in self.fragments])
        self._codec = build_codec(config.codec)
        tensors = layout(self.fragments)
        self._layout_hash = layout_hash(tensors)
        member = Member(
            rank=self.ranks.rank, ranks=self.ranks.size, instance=self.ranks.smallest([secrets.randbits(62)])[0],
            layout=tensors, frozen=frozen_digest(named), settings=agreed_settings(config) | dict(agreed or {}),
        )  # fmt: skip
        self._link = Link(config, JointKey.read(config.key_file), member)
        self._optimizer, self._hook = optimizer, None
        self._inner = 0
        self._due = 0
        self._pending: Pending | None = None
        self._disputes = 0
        """How often in a row the ranks were told of different outcomes."""
        self._step_s, self._stepped, self._heard = 0.0, time.monotonic(), time.monotonic()
        self.metrics: dict[str, float] = {}
        """Figures of the last completed outer step."""
        self.stopping: Callable[[], bool] = lambda: False
        """Turning true ends the wait for a round in mid-training: its delta stays on offer and in `state`."""
        self.replayed: Callable[[int], None] = lambda steps: None
        """Told how many inner steps more than this peer's own are behind the rounds that it has just caught up with."""
        self.replaced: Callable[[], None] = lambda: None
        """Told that all parameters come from another peer's state now: averages over their past mean nothing."""

    # -- as a context --------------------------------------------------------------------------------------------

    def __enter__(self) -> StreamingDiLoCo:
        """Join the others; may take over their global model, and waits for an outcome that was due at a checkpoint.

        Raises RunMismatchError or DeadlineError.
        """
        try:
            self._link.start(self.globals.outer_step, self.globals.hash)
            self._join()
            self._heard = self._stepped = time.monotonic()
            self._complete_if_due()
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
        held = self.globals.swept if swept else self.globals.masters
        for fragment, values_n in zip(self.fragments, held, strict=True):
            fragment.write(values_n)
        try:
            yield
        finally:
            for fragment, values_n in zip(self.fragments, local, strict=True):
                fragment.write(values_n)

    def count(self, *, tokens: int = 0, samples: int = 0) -> None:
        """What the coming inner step is trained on, over all ranks of this cluster."""
        self.work.count(Work(tokens=tokens, samples=samples))

    def finish(self) -> dict[str, int | str]:
        """Take the outcome of a round that is under way, where it ends in time; no round waits for this peer any more.

        Outer step and hash that the global model ended with: equal, rank by rank, on every peer that ended at this
        outer step. `diloco/final_left_behind` is the outer step of a delta whose round did not end in time; one that
        was late already is not waited for. A collective.
        """
        if self._pending is not None:
            self._complete(heed_stop=False)
        step, found = self.globals.outer_step, self.globals.hash
        ended: dict[str, int | str] = {"diloco/final_outer_step": step, "diloco/final_hash": found}
        if self._pending is not None:
            ended["diloco/final_left_behind"] = self._pending.header.outer_step
            logger.warning("a delta of outer step %d is left behind: its round did not end in time", step)
        if left := self.work.tokens_held():
            logger.info("the global model is without this peer's last work, on %.0f tokens", left)
        self._link.position(step, found, training=False)
        logger.info(
            "the global model ended at outer step %d, with hash %s: equal on every peer that ended at this outer step",
            step, found,
        )  # fmt: skip
        return ended

    @property
    def outer_step(self) -> int:
        return self.globals.outer_step

    @property
    def sweep(self) -> int:
        """How often every fragment has been synchronised: the policy version."""
        return self.globals.sweep

    # -- the loop ------------------------------------------------------------------------------------------------

    def _after_step(self) -> None:
        now = time.monotonic()
        self._inner, self._step_s, self._stepped = self._inner + 1, now - self._stepped, now
        self.work.count(Work(steps=1))
        hurry, wanted = self._look_around()
        if wanted:
            self._serve(wanted)
        if self._pending is None and (self.schedule.prepares(self._inner) or hurry):
            self._prepare()
        self._complete_if_due()

    def _complete_if_due(self) -> None:
        if self._pending is not None and self._inner >= self._due:
            if self._complete():
                self._offer_again()
            self._stepped = time.monotonic()

    def _look_around(self) -> tuple[bool, int]:
        """Whether another step would miss the deadline of a round that another has begun; `Link.state_wanted`.

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
        covered = self.work.held[fragment]
        encoded = self.feedback.encode(fragment, self.globals.delta(fragment), self._codec)
        body = memoryview(encoded.data.numpy()).cast("B")
        header = self._header(
            "delta", body, fragment=fragment, codec=self._codec.spec,
            weight=float(getattr(covered, self.config.weighting)), inner_steps=round(covered.steps),
        )  # fmt: skip
        self._offer(Pending(self._link.seal(header), body, encoded.residual_n, Offer(covered)))
        self._due = self._inner + self.config.delay

    def _header(self, kind: str, body: memoryview, **facts: Any) -> Header:
        """Of a body of now."""
        return Header(
            kind=kind, run=self.config.run, peer=self.config.peer_id, rank=self.ranks.rank, size=len(body),
            outer_step=self.globals.outer_step, base_hash=self.globals.hash, layout_hash=self._layout_hash,
            checksum=checksum(body), **facts,
        )  # fmt: skip

    def _offer(self, pending: Pending) -> None:
        self._pending = pending
        self._link.begin(pending.header.outer_step, pending.header.base_hash, pending.header, pending.body)

    def _complete(self, *, heed_stop: bool = True) -> bool:
        """Take the outcome of the round that is under way, and of those that were closed meanwhile.

        Whether one of them ended without this peer.
        """
        began, missed = time.monotonic(), self.work.totals.missed
        late = self._pending is not None and self._pending.offer.due is not None
        stopping = self.stopping if heed_stop else lambda: False
        arrived = self._await(0.0 if late else self.config.round_timeout_s, stopping)
        if arrived is None:
            if not self.ranks.any(stopping()):
                self._go_on_alone()
            return False
        if isinstance(arrived, Arrived):
            exposed_s = time.monotonic() - began
            self._apply(arrived, exposed_s)
            self._inner = max(0, self._inner - self.schedule.interval)
            arrived = self._replay(arrived.outcome.newest, exposed_s)
        if arrived is not None:
            logger.warning("joining anew: %s", arrived.reason)
            self._pending = None
            self._join()
        self._restart_interval()
        return self.work.totals.missed > missed

    def _offer_again(self) -> None:
        """Bring what the others went on without into the next round, before another step can make it late again."""
        if not self.work.held[self.schedule.fragment(self.globals.outer_step)].steps:
            return
        logger.warning(
            "outer step %d came too early for this peer: its work since is offered for the next (rounds missed so far: "
            "%d). When this repeats, raise diloco.round_deadline_s", self.globals.outer_step, self.work.totals.missed,
        )  # fmt: skip
        self._prepare()
        if self._inner >= self._due:
            self._complete()

    def _replay(self, newest: int, exposed_s: float) -> Left | None:
        """Apply the closed rounds up to `newest` and those that close meanwhile. A collective."""
        began = self.outer_step
        arrived = self._fetch_next(newest)
        while isinstance(arrived, Arrived):
            self._apply(arrived, exposed_s)
            arrived = self._fetch_next(arrived.outcome.newest)
        elsewhere = (self.outer_step - began) * self.schedule.interval - self._inner
        if self.outer_step > began and elsewhere > 0:
            self.replayed(elsewhere)
        return arrived

    def _fetch_next(self, newest: int) -> Arrived | Left | None:
        """The next closed round of those up to `newest`; None when there is none. A collective."""
        if self.ranks.smallest([newest])[0] < self.globals.outer_step:
            return None
        self._link.begin(self.globals.outer_step, self.globals.hash)
        return self._await(self.config.round_timeout_s)

    def _restart_interval(self) -> None:
        self._pending, self._inner, self._heard = None, 0, time.monotonic()

    def _go_on_alone(self) -> None:
        silent_s = time.monotonic() - self._heard
        if self.ranks.any(silent_s > self.config.offline_timeout_s):
            raise DeadlineError(
                f"no outcome of outer step {self.globals.outer_step} for {silent_s:.0f} s "
                f"(diloco.offline_timeout_s = {self.config.offline_timeout_s:g}): the rendezvous at "
                f"{self.config.rendezvous} said last that it waits for {self._link.waiting_for}. Is it reachable, and "
                "are enough peers alive? Go on with --resume"
            )
        if self._pending is not None and self._pending.offer.due is None:
            self.work.late(self._pending.header.fragment, self._pending.offer)
            step = self.globals.outer_step
            logger.warning("outer step %d is not complete after %.0f s: training goes on", step, silent_s)

    def _await(self, timeout_s: float, stopping: Callable[[], bool] = lambda: False) -> Arrived | Left | None:
        """How the round ended, alike on all ranks: Left when one of them must join anew. A collective.

        Raises RunMismatchError when the ranks are told of different outcomes again and again.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            result = self._link.wait(min(_SLICE_S, timeout_s))
            known = {Arrived: 2, Left: 1}.get(type(result), 0)
            least, wanted, in_time = self.ranks.smallest(
                [known, self._link.state_wanted, time.monotonic() < deadline and not stopping()]
            )
            if wanted:
                self._serve(wanted)
            if least == 2 and isinstance(result, Arrived):
                if self._told_alike(result):
                    return result
                time.sleep(_SLICE_S)  # a rendezvous may be taking another's place
                self._link.repeat()
            elif least == 0 and known == 2 and self._link.outdated:  # another rank gets nothing without this one
                self._link.repeat()
            if least == 1:
                return result if isinstance(result, Left) else Left("another rank of this peer was left behind")
            if not in_time:
                return None

    def _told_alike(self, arrived: Arrived) -> bool:
        """Whether all ranks of this peer were told of the same outcome. A collective."""
        ((lowest, highest),) = self.ranks.bounds([arrived.digest])
        self._disputes = 0 if lowest == highest else self._disputes + 1
        if self._disputes == _TELLINGS:
            raise RunMismatchError(
                f"the ranks of peer {self.config.peer_id} were told {_TELLINGS} times in a row of different outcomes "
                f"of outer step {self.globals.outer_step} ({lowest:015x} and {highest:015x}), so their parts of the "
                f"model would not fit together. Is {self.config.rendezvous} the address of more than one rendezvous? "
                "Leave one, and go on with --resume"
            )
        return not self._disputes

    def _apply(self, arrived: Arrived, exposed_s: float) -> None:
        fragment = self.schedule.fragment(self.globals.outer_step)
        headers = arrived.outcome.headers
        accepted = accept(
            headers, arrived.bodies, fragment=fragment, n=self.fragments[fragment].numel, guard=self.config.guard,
            ranks=self.ranks,
        )  # fmt: skip
        if not self.ranks.all(self.globals.can_advance(fragment, accepted.deltas)):
            accepted = accepted.without_all("the outer step along the round's mean would leave the range of float32")
        for peer, reason in accepted.reasons.items():
            logger.warning("outer step %d: the delta of peer %s is rejected: %s", self.globals.outer_step, peer, reason)
        pending, self._pending = self._pending, None
        fate = fate_of(self.config.peer_id, pending and pending.header, headers, accepted.reasons)
        before_n = self.globals.masters[fragment].clone() if fate is Fate.MISSED else None
        self.globals.advance(fragment, accepted.deltas, accepted.weights)
        if fate is Fate.COUNTED and pending is not None:
            self.feedback.settle(fragment, pending.residual_n)
        elif fate is Fate.EARLIER:
            self.feedback.reset(fragment)
            if pending is not None:
                logger.warning(
                    "outer step %d holds a delta of another process of peer %s: this one's, of %.0f tokens, is lost",
                    self.globals.outer_step - 1, self.config.peer_id, pending.offer.work.tokens,
                )  # fmt: skip
        self.work.install(fragment, fate, pending and pending.offer, before_n)
        self._link.position(self.globals.outer_step, self.globals.hash)
        sent, received = self._link.traffic
        self.metrics = {
            "diloco/outer_step": self.globals.outer_step,
            "diloco/sweep": self.sweep,
            "diloco/sync_s": exposed_s,
            "diloco/bytes_sent": sent,
            "diloco/bytes_received": received,
            **figures(arrived.outcome, accepted, self.work.totals),
        }

    # -- joining, healing, checkpoints ---------------------------------------------------------------------------

    def _join(self) -> None:
        """Stand where the others stand: with what this peer has, or with the state of one of them. A collective."""
        self._link.position(self.globals.outer_step, self.globals.hash, training=False)
        before, deadline = self.globals.hash, time.monotonic() + self.config.heal_timeout_s
        left: Left | None = Left("not joined yet")
        while left is not None:
            found = self._find_state(deadline)
            if found.header is not None:
                self._take_over(found.header, found.body)
            if self._pending is not None:  # its outcome is taken when it is due, as if this peer had not been away
                break
            left = self._replay(found.newest, 0.0)
        if self.globals.hash != before:
            self._restart_interval()
        elif self._pending is not None:
            self._offer(self._pending)
        self._link.position(self.globals.outer_step, self.globals.hash, training=True)
        config = self.config
        logger.info("peer %s takes part in run %s from outer step %d on", config.peer_id, config.run, self.outer_step)

    def _find_state(self, deadline: float) -> Found:
        """What to join with, alike on all ranks, which ask in step. A collective. Raises DeadlineError."""
        self._link.seek(self.globals.outer_step, self.globals.hash)
        while True:
            found = self._link.found(_SLICE_S)
            ready, in_time = self.ranks.smallest([found is not None, time.monotonic() < deadline])
            if ready and found is not None:
                if self.ranks.alike([found.serial, found.newest]) and self._usable(found):
                    return found
                self._link.seek(self.globals.outer_step, self.globals.hash)
            if not in_time:
                raise DeadlineError(
                    f"no state to join with within diloco.heal_timeout_s = {self.config.heal_timeout_s:g} s: the "
                    f"rendezvous waits for {self._link.waiting_for}"
                )

    def _usable(self, found: Found) -> bool:
        """Whether all ranks can take over what they found; if not, another source is asked for it. A collective."""
        problem = None
        if found.header is not None:
            try:
                self.globals.check(unpacked(found.body)[0], found.header.outer_step, found.header.base_hash)
            except (CheckpointError, ChecksumError) as error:
                problem = f"the state that peer {found.header.peer} serves is refused: {error}"
                logger.warning("%s", problem)
                self._link.refuse_state(found.serial, problem)
        return not self.ranks.any(problem is not None)

    def _take_over(self, header: Header, body: bytearray) -> None:
        self.globals.load(unpacked(body)[0], header.outer_step)
        given_up = self.work.tokens_held()
        self.work.replace_all()
        for fragment in range(len(self.fragments)):
            self.feedback.reset(fragment)
        self._restart_interval()
        self.replaced()
        logger.info(
            "took over the state of peer %s at outer step %d; own work on %.0f tokens is given up", header.peer,
            self.globals.outer_step, given_up,
        )  # fmt: skip

    def _serve(self, serial: int) -> None:
        """Copy the global state and upload the copy: training may go on at once. A damaged one is not served."""
        if not self.globals.intact:
            problem = f"its global model was damaged in memory since outer step {self.globals.outer_step}"
            logger.error("the state of peer %s is not served: %s", self.config.peer_id, problem)
            self._link.refuse_state(serial, problem)
            return
        body = packed(self.globals.tensors(), {})
        header = self._header("state", body, serial=serial)
        logger.info("serving the global state of outer step %d (%.1f MB)", header.outer_step, len(body) / 1e6)
        self._link.serve_state(header, body)

    def state(self) -> memoryview:
        """This rank's outer state for a checkpoint: masters, momentum, error feedback, the delta under way."""
        tensors = self.globals.tensors()
        tensors |= {f"residual.{index}": residual for index, residual in enumerate(self.feedback.residuals)}
        facts: dict[str, Any] = {
            "outer_step": self.globals.outer_step, "inner": self._inner, "due": self._due, "work": self.work.facts(),
            "rank": self.ranks.rank, "ranks": self.ranks.size, "layout": self._layout_hash,
        }  # fmt: skip
        if self._pending is not None:
            facts |= self._pending.facts()
            tensors |= self._pending.tensors()
        return packed(tensors, facts)

    def load(self, raw: bytes | memoryview) -> None:
        """Go on from `state`; before the context is entered. The parameters are restored by who saved them.

        Raises CheckpointError when it is of another layout or rank, or of a release whose delta under way no rendezvous
        of this one takes.
        """
        tensors, facts = unpacked(raw)
        ours = {"rank": self.ranks.rank, "ranks": self.ranks.size, "layout": self._layout_hash}
        theirs = {name: facts[name] for name in ours}
        if ours != theirs:
            raise CheckpointError(f"the outer state is of {theirs}, this is {ours}: resume with the same trainer.ranks")
        if "work" not in facts or facts.get("pending", {}).get("protocol", PROTOCOL) != PROTOCOL:
            raise CheckpointError("the outer state was written by an older release: end that run with the one it began")
        self.globals.load(tensors, facts["outer_step"])
        self.feedback.residuals = [tensors[f"residual.{index}"] for index in range(len(self.fragments))]
        self._inner, self._due = facts["inner"], facts["due"]
        self.work.restore(facts["work"])
        self._pending = Pending.restored(facts, tensors)
