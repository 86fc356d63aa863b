"""The outer loop: Streaming DiLoCo (arXiv 2501.18512) around any optimizer. Read `StreamingDiLoCo._after_step` first.

    with StreamingDiLoCo(model.named_parameters(), optimizer, config) as diloco:
        for batch in data:
            ...; diloco.count(tokens=...); optimizer.step()

    after inner step H/P - tau:  delta = global - local of fragment k mod P, encoded, sent in the background
    after inner step H/P:        the round's deltas, those that pass the guards, averaged; outer step; local <- global

    StreamingDiLoCo ─── when (schedule.py) ──┬─> replica.py      global model, own work, delta on offer; checkpoints
                                             ├─> outcomes.py     how a round ended, alike on all ranks
                                             ├─> outer_step.py   what it does to the replica
                                             ├─> heal.py         catching up, and joining anew where that is too far
                                             └─> serving.py      this peer's state for those that join
                                                   all of them through link.py, which works in the background

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
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType

import torch

from composer_prime.config.diloco import DilocoConfig
from diloco.codec import build_codec
from diloco.fragments import Named, frozen_digest, parameter_layout, partition
from diloco.heal import Healer
from diloco.outcomes import RoundResults, StateServer
from diloco.outer_step import OuterSteps
from diloco.ranks import Ranks
from diloco.replica import LocalWork, OfferedDelta, Pending, Replica
from diloco.schedule import Schedule, StepPace
from diloco.transport.exchange import RoundResult
from diloco.transport.keys import JointKey
from diloco.transport.link import PeerLink
from diloco.transport.session import Member, agreed_settings

logger = logging.getLogger(__name__)


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
        self.schedule, self._pace = Schedule.of(config), StepPace(min(2.0, config.round_deadline_s / 4))
        named = list(parameters)
        self.fragments = partition(named, config.fragments, config.partition)
        self.replica = Replica(self.fragments, config, self.ranks)
        self.global_model = self.replica.global_model
        self._codec = build_codec(config.codec)
        member = Member(
            rank=self.ranks.rank, ranks=self.ranks.size, instance=self.ranks.smallest([secrets.randbits(62)])[0],
            layout=parameter_layout(self.fragments), frozen=frozen_digest(named),
            settings=agreed_settings(config) | dict(agreed or {}),
        )  # fmt: skip
        self._link = PeerLink(config, JointKey.read(config.key_file), member)
        self._server = StateServer(self._link, self.global_model, config.peer_id)
        self._outcomes = RoundResults(config, self._link, self.global_model, self._server, self.ranks)
        self._steps = OuterSteps(config, self._link, self.replica, self.ranks)
        self.healer = Healer(config, self._link, self.replica, self._outcomes, self._steps, self.ranks)
        self._optimizer, self._hook = optimizer, None
        self.stopping: Callable[[], bool] = lambda: False
        """Turning true ends the wait for a round in mid-training: its delta stays on offer and in `state`."""

    def __enter__(self) -> StreamingDiLoCo:
        """Join the others; may take over their global model, and waits for an outcome that was due at a checkpoint.

        Raises RunMismatchError or DeadlineError.
        """
        try:
            self._link.start(self.global_model.outer_step, self.global_model.hash)
            self.healer.join()
            self._outcomes.heard()
            self._pace.restart()
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

    def count(self, *, tokens: int = 0, samples: int = 0) -> None:
        """What the coming inner step is trained on, over all ranks of this cluster."""
        self.replica.work.count(LocalWork(tokens=tokens, samples=samples))

    # -- the algorithm -------------------------------------------------------------------------------------------

    def _after_step(self) -> None:
        replica = self.replica
        replica.inner += 1
        replica.work.count(LocalWork(steps=1))
        self._pace.stepped()
        hurry = self._pace.would_miss(self._link.left_s(self.outer_step))
        patient, wanted = self.ranks.smallest([not hurry, self._link.state_wanted])
        if wanted:
            self._server.serve(wanted)
        if replica.pending is None and (self.schedule.prepares(replica.inner) or not patient):
            self._prepare()
        self._complete_if_due()

    def _prepare(self) -> None:
        """Offer the delta of the fragment whose turn it is."""
        model, replica = self.global_model, self.replica
        fragment = self.schedule.fragment(model.outer_step)
        covered = replica.work.held[fragment]
        encoded = replica.feedback.encode(fragment, model.delta(fragment), self._codec)
        body = memoryview(encoded.data.numpy()).cast("B")
        header = self._link.seal(self._link.header(
            "delta", body, model.outer_step, model.hash, fragment=fragment, codec=self._codec.spec,
            weight=float(getattr(covered, self.config.weighting)), inner_steps=round(covered.steps),
        ))  # fmt: skip
        replica.pending = Pending(header, body, encoded.residual_n, OfferedDelta(covered))
        replica.due = replica.inner + self.config.delay
        self._link.offer(header, body)

    def _complete_if_due(self) -> None:
        if self.replica.pending is not None and self.replica.inner >= self.replica.due:
            if self._complete():
                self._offer_again()
            self._pace.restart()

    def _complete(self, *, heed_stop: bool = True) -> bool:
        """Take the outcome of the round that is under way, and of those that were closed meanwhile.

        Whether one of them ended without this peer.
        """
        replica = self.replica
        began, missed = time.monotonic(), replica.work.totals.missed
        late = replica.pending is not None and replica.pending.offer.due is not None
        stopping = self.stopping if heed_stop else lambda: False
        arrived = self._outcomes.wait(0.0 if late else self.config.round_timeout_s, stopping)
        if arrived is None:
            if not self.ranks.any(stopping()):
                self._go_on_alone()
            return False
        if isinstance(arrived, RoundResult):
            exposed_s = time.monotonic() - began
            self._steps.take(arrived, exposed_s)
            replica.inner = max(0, replica.inner - self.schedule.interval)
            arrived = self.healer.replay(arrived.outcome.newest, exposed_s)
        if arrived is not None:
            logger.warning("joining anew: %s", arrived.reason)
            replica.pending = None
            self.healer.join()
        replica.restart_interval()
        self._outcomes.heard()
        return replica.work.totals.missed > missed

    # -- when rounds and steps do not go together ----------------------------------------------------------------

    def _go_on_alone(self) -> None:
        """The outcome is due and not here: train on, its delta stays on offer. Raises DeadlineError at last."""
        silent_s, pending = self._outcomes.silent_s(), self.replica.pending
        if pending is not None and pending.offer.due is None:
            self.replica.work.late(pending.header.fragment, pending.offer)
            logger.warning("outer step %d is not complete after %.0f s: training goes on", self.outer_step, silent_s)

    def _offer_again(self) -> None:
        """Bring what the others went on without into the next round, before another step can make it late again."""
        work = self.replica.work
        if not work.held[self.schedule.fragment(self.outer_step)].steps:
            return
        logger.warning(
            "outer step %d came too early for this peer: its work since is offered for the next (rounds missed so far: "
            "%d). When this repeats, raise diloco.round_deadline_s", self.outer_step, work.totals.missed,
        )  # fmt: skip
        self._prepare()
        if self.replica.inner >= self.replica.due:
            self._complete()

    # -- what a trainer asks -------------------------------------------------------------------------------------

    @property
    def outer_step(self) -> int:
        return self.global_model.outer_step

    @property
    def metrics(self) -> dict[str, float]:
        """Figures of the last completed outer step."""
        return self._steps.metrics

    @property
    def sweep(self) -> int:
        """How often every fragment has been synchronised: the policy version."""
        return self.global_model.sweep

    def global_values(self, *, swept: bool = False) -> contextlib.AbstractContextManager[None]:
        """Meanwhile the parameters hold the global model; with `swept`, as it was after the last full sweep.

        What is sampled from, evaluated and exported is the global model, never one cluster's.
        """
        return self.global_model.installed(swept=swept)

    def state(self) -> memoryview:
        """This rank's outer state for a checkpoint: masters, momentum, error feedback, the delta under way."""
        return self.replica.saved()

    def load(self, raw: bytes | memoryview) -> None:
        """Go on from `state`; before the context is entered. The parameters are restored by who saved them.

        Raises CheckpointError as Replica.load does.
        """
        self.replica.load(raw)

    def finish(self) -> dict[str, int | str]:
        """Take the outcome of a round that is under way, where it ends in time; no round waits for this peer any more.

        Outer step and hash that the global model ended with: equal, rank by rank, on every peer that ended at this
        outer step. `diloco/final_left_behind` is the outer step of a delta whose round did not end in time; one that
        was late already is not waited for. A collective.
        """
        replica = self.replica
        if replica.pending is not None:
            self._complete(heed_stop=False)
        step, found = self.global_model.outer_step, self.global_model.hash
        ended: dict[str, int | str] = {"diloco/final_outer_step": step, "diloco/final_hash": found}
        if replica.pending is not None:
            ended["diloco/final_left_behind"] = replica.pending.header.outer_step
            logger.warning("a delta of outer step %d is left behind: its round did not end in time", step)
        if left := replica.work.tokens_held():
            logger.info("the global model is without this peer's last work, on %.0f tokens", left)
        self._link.position(step, found, training=False)
        logger.info(
            "the global model ended at outer step %d, with hash %s: equal on every peer that ended at this outer step",
            step, found,
        )  # fmt: skip
        return ended
