"""The outer loop: Streaming DiLoCo (arXiv 2501.18512) around any optimizer. Read `StreamingDiLoCo._after_step` first.

    with StreamingDiLoCo(model.named_parameters(), optimizer, config) as diloco:
        for batch in data:
            ...; diloco.count(tokens=...); optimizer.step()

    after inner step H/P - tau:  delta = global - local of fragment k mod P, encoded, sent in the background
    after inner step H/P:        the round's deltas, those that pass the guards, averaged; outer step; local <- global

    StreamingDiLoCo ──┬─> fragments.py    the parts of the model, and when each is due
                      ├─> state.py        global model, own progress, delta on offer; checkpoints
                      └─> outer_step.py   how a round ended, alike on all ranks; catching up, or rejoining
                            all of them through transport/peer_link.py, which works in the background

Departures from the paper:
1. Deltas are weighted by the tokens they were trained on, and their compression error is fed back into the next.
2. H is a plan. When another peer's delta has arrived and the deadline is near, a peer sends the steps it has.
3. A round that does not end in time is not dropped. Training continues, the delta stays on offer, and the result is
   applied when it arrives. A peer that missed rounds applies them one by one while they are kept.
4. With mixing = "carry" the steps taken during the delay are kept. The new global values replace those that the delta
   started from, and the changes since then are added to them.
5. Work that a round's outcome lacks is kept (LocalProgress). Steps after the delay are carried over, and a peer whose
   delta came too late offers it at once for the next round.
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
from diloco.codec import codec_of
from diloco.fragments import NamedParameter, Ranks, Schedule, frozen_digest, parameter_layout, partition
from diloco.global_model import GlobalModel
from diloco.outer_step import OuterSteps
from diloco.state import LocalWork, PendingDelta, Replica
from diloco.transport.messages import PROTOCOL, JointKey, PeerHello
from diloco.transport.peer_link import PeerLink, RoundResult

logger = logging.getLogger(__name__)
FROZEN_KEY = "model.path (digest of what is not trained)"


class StreamingDiLoCo:
    def __init__(
        self,
        parameters: Iterable[NamedParameter],
        optimizer: torch.optim.Optimizer,
        config: DilocoConfig,
        agreed: Mapping[str, str] | None = None,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        on_catch_up: Callable[[int], None] = lambda steps: None,
        on_state_replaced: Callable[[], None] = lambda: None,
    ) -> None:
        """`optimizer`: its step ends an inner step; of several optimizers the one that steps last. A collective.

        `agreed`: what else all peers must have in common, as text by its key in the TOML. `should_stop` turning true
        ends the wait for a round: its delta stays on offer and in `state`. OuterSteps describes the other two.

        Raises ConfigError when the model has too few parts or the key file is unusable.
        """
        self.config = config
        self.ranks = Ranks()
        self.schedule = Schedule.of(config)
        named = list(parameters)
        fragments = partition(named, config.fragments)
        self.replica = Replica(fragments, config, self.ranks)
        self._codec = codec_of(config.codec.type)
        settings = agreed_settings(config) | dict(agreed or {})
        settings |= {"trainer.ranks": str(self.ranks.size), FROZEN_KEY: frozen_digest(named)}
        hello = PeerHello(
            protocol=PROTOCOL, run=config.run, peer=config.peer_id, rank=self.ranks.rank, ranks=self.ranks.size,
            instance=self.ranks.smallest([secrets.randbits(62)])[0], layout=parameter_layout(fragments),
            settings=settings, round_deadline_s=config.round_deadline_s, outer_step=0, base_hash="", training=False,
            delta_bytes=max(self._codec.size(fragment.numel) for fragment in fragments),
        )  # fmt: skip
        self._link = PeerLink(config, JointKey.read(config.key_file), hello, self.replica.state_to_serve)
        self._steps = OuterSteps(
            config=config, link=self._link, ranks=self.ranks, replica=self.replica, on_catch_up=on_catch_up,
            on_state_replaced=on_state_replaced,
        )  # fmt: skip
        self._coming = LocalWork()
        """What the coming inner step is trained on."""
        self._stepped_at = time.monotonic()
        """When the last inner step ended, or when the wait after it was over."""
        self._should_stop = should_stop
        self._optimizer = optimizer
        self._hook: torch.utils.hooks.RemovableHandle | None = None

    def __enter__(self) -> StreamingDiLoCo:
        """Join the other peers, and take over their global model if needed.

        Wait for an outcome that was due when the checkpoint was written. Raises RunMismatchError or DeadlineError.
        """
        try:
            self._link.start(self.global_model.outer_step, self.global_model.hash)
            self._steps.join()
            self._steps.mark_in_step()
            self._stepped_at = time.monotonic()
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

    def count(self, *, tokens: int) -> None:
        """Note the tokens that the coming inner step is trained on, over all ranks of this cluster."""
        self._coming = self._coming.plus(LocalWork(tokens=tokens))

    def take_back(self) -> None:
        """Forget what `count` noted for the coming inner step: it changes nothing, and no delta weighs it."""
        self._coming = LocalWork()

    # -- the algorithm -------------------------------------------------------------------------------------------

    def _after_step(self) -> None:
        replica = self.replica
        replica.inner += 1
        self._link.note_step()
        replica.progress.count(self._coming.plus(LocalWork(steps=1)))
        self._coming = LocalWork()
        now = time.monotonic()
        step_s, self._stepped_at = now - self._stepped_at, now
        left_s, beat_late_s = self._link.time_left_s(self.outer_step), min(2.0, self.config.round_deadline_s / 4)
        hurry = left_s is not None and left_s < 1.5 * step_s + beat_late_s  # another may miss the round
        patient = self.ranks.all(not hurry)
        if replica.pending is None and (self.schedule.prepares(replica.inner) or not patient):
            self._prepare()
        self._complete_if_due()

    def _prepare(self) -> None:
        """Offer the delta of the fragment whose turn it is."""
        model, replica = self.global_model, self.replica
        fragment = self.schedule.fragment(model.outer_step)
        work = replica.progress.held[fragment]
        data, residual_n = replica.feedback.encode(fragment, model.delta(fragment), self._codec)
        body = data.numpy().data.cast("B")
        header = self._link.delta_header(
            body, model.outer_step, model.hash, fragment=fragment, codec=self._codec.name,
            weight=float(work.tokens), inner_steps=round(work.steps),
        )  # fmt: skip
        replica.pending = PendingDelta(header=header, body=body, residual_n=residual_n, work=work)
        replica.progress.note_offer(fragment, replica.pending)
        replica.due = replica.inner + self.config.delay
        self._link.offer(header, body)

    def _complete_if_due(self) -> None:
        if self.replica.pending is not None and self.replica.inner >= self.replica.due:
            if self._complete(self._should_stop):
                self._offer_again()
            self._stepped_at = time.monotonic()

    def _complete(self, should_stop: Callable[[], bool]) -> bool:
        """Take the result of the round under way, and of those that were closed meanwhile.

        Return whether one of them ended without this peer.
        """
        replica = self.replica
        began, missed = time.monotonic(), replica.progress.totals.missed
        late = replica.pending is not None and replica.pending.late
        result = self._steps.wait(0.0 if late else self.config.round_timeout_s, should_stop)
        if result is None:
            if not self.ranks.any(should_stop()):
                self._go_on_alone()
            return False
        if isinstance(result, RoundResult):
            exposed_s = time.monotonic() - began
            self._steps.take(result, exposed_s)
            replica.inner = max(0, replica.inner - self.schedule.interval)
            result = self._steps.replay(result.outcome.newest, exposed_s)
        if result is not None:
            logger.warning("rejoining: %s", result.reason)
            replica.pending = None
            self._steps.join()
        replica.restart_interval()
        self._steps.mark_in_step()
        return replica.progress.totals.missed > missed

    # -- when rounds and steps do not go together ----------------------------------------------------------------

    def _go_on_alone(self) -> None:
        """Continue training without the result that is due. The delta stays on offer.

        Raises DeadlineError after diloco.offline_timeout_s.
        """
        silent_s, pending = self._steps.silent_s(), self.replica.pending
        if pending is not None and not pending.late:
            self.replica.progress.mark_late(pending.header.fragment, pending)
            logger.warning("outer step %d is not complete after %.0f s; training continues", self.outer_step, silent_s)

    def _offer_again(self) -> None:
        """Offer work that missed its round for the next one, before another step can make it late again."""
        progress = self.replica.progress
        if not progress.held[self.schedule.fragment(self.outer_step)].steps:
            return
        logger.warning(
            "this peer's delta came too late for outer step %d and is offered for the next one (%d rounds missed so "
            "far). If this repeats, raise diloco.round_deadline_s", self.outer_step, progress.totals.missed,
        )  # fmt: skip
        self._prepare()
        if self.replica.inner >= self.replica.due:
            self._complete(self._should_stop)

    # -- for the trainer -----------------------------------------------------------------------------------------

    @property
    def global_model(self) -> GlobalModel:
        return self.replica.global_model

    @property
    def outer_step(self) -> int:
        return self.global_model.outer_step

    @property
    def run_step(self) -> int:
        """The coming inner step of the run, from 1: those of all outer steps so far, and this peer's own since then.

        Schedules follow it, so a peer that joins late uses the others' learning rate instead of warming up.
        """
        return self.outer_step * self.schedule.interval + self.replica.inner + 1

    @property
    def metrics(self) -> dict[str, float]:
        return self._steps.metrics

    @property
    def sweep(self) -> int:
        """How often every fragment has been synchronized: the policy version."""
        return self.global_model.sweep

    def global_values(self, *, swept: bool = False) -> contextlib.AbstractContextManager[None]:
        """Give the parameters the global model within the context; with `swept`, as of the last full sweep.

        What is sampled from, evaluated and exported is the global model, never one cluster's.
        """
        return self.global_model.installed(swept=swept)

    def state(self) -> memoryview:
        """Return this rank's outer state for a checkpoint: masters, momentum, error feedback, the delta under way."""
        return self.replica.packed()

    def load(self, raw: bytes | memoryview) -> None:
        """Continue from `state`. Call this before entering the context. The caller restores the parameters.

        Raises CheckpointError as Replica.load does.
        """
        self.replica.load(raw)

    def finish(self) -> dict[str, int | str]:
        """End this peer's part: take the result of a round under way if it ends in time. A collective.

        Return the outer step and hash that the global model ended with: equal, rank by rank, on every peer that ended
        at this outer step. `diloco/final_left_behind` is the outer step of a delta whose round did not end in time; a
        delta that was late already is not waited for. From then on no round waits for this peer.
        """
        replica = self.replica
        if replica.pending is not None:
            self._complete(lambda: False)
        step, final_hash = self.global_model.outer_step, self.global_model.hash
        ending: dict[str, int | str] = {"diloco/final_outer_step": step, "diloco/final_hash": final_hash}
        if replica.pending is not None:
            ending["diloco/final_left_behind"] = replica.pending.header.outer_step
            logger.warning("a delta of outer step %d is left behind: its round did not end in time", step)
        if tokens_held := replica.progress.tokens_held():
            logger.info("the global model is without this peer's last work, on %.0f tokens", tokens_held)
        self._link.set_position(step, final_hash, training=False)
        logger.info(
            "the global model ended at outer step %d, with hash %s: equal on every peer that ended at this outer step",
            step, final_hash,
        )  # fmt: skip
        return ending


def agreed_settings(config: DilocoConfig) -> dict[str, str]:
    """Return what decides the global model, as text by `diloco.` key: the same for all peers."""
    outer = {f"diloco.outer.{name}": str(value) for name, value in config.outer.model_dump(mode="json").items()}
    return {"diloco.fragments": str(config.fragments), **outer}
