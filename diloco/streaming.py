"""The outer loop: Streaming DiLoCo (arXiv 2501.18512) around any optimizer. Read `_after_step` first.

    with StreamingDiLoCo(model.named_parameters(), optimizer, config) as diloco:
        for batch in data:
            ...; diloco.count(tokens=...); optimizer.step()

    after inner step H/P - tau:  delta = global - local of fragment k mod P, encoded, sent in the background
    after inner step H/P:        the round's deltas, those that pass the guards, averaged; outer step; local <- global

    join: request a source ──> its own state will do ────────────────────┬──> replay the rounds closed since ──> train
            ^                  another peer's state: check, take over ───┘         │
            └──────────────── the rounds are not kept any more <───────────────────┘

All peers apply the same deltas in the same order (`_take`). The rendezvous only relays.
Each rank hears a result over a link of its own, and waits for the others.

Departures from the paper:
1. Deltas are weighted by their tokens; their compression error is fed back.
2. H is a plan: near the deadline a peer sends the steps it has.
3. A late round's result is applied when it arrives, and missed rounds while they are kept.
4. With mixing = "carry" the steps taken during the delay are added to the new global values.
5. Work that an outcome lacks is kept (Replica); a late delta is offered again.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType

import torch
from torch import Tensor

from composer_prime.config.diloco import DilocoConfig
from composer_prime.errors import CheckpointError, ChecksumError, DeadlineError
from diloco.codec import codec_of
from diloco.fragments import POLL_S, NamedParameter, Ranks, frozen_digest, parameter_layout, partition
from diloco.global_model import AcceptedDeltas, GlobalModel, accept
from diloco.state import DeltaStatus, LocalWork, PendingDelta, Replica, delta_status, unpack_state
from diloco.transport.messages import PROTOCOL, Gone, JointKey, PeerHello, RoundOutcome, StartingState, StateHeader
from diloco.transport.peer_link import Exchange, PeerLink, RoundResult

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
        """`optimizer`: its step ends an inner step; of several the one that steps last. A collective.

        `agreed`: what else all peers must have in common, as text by its key in the TOML.
        `should_stop` turning true ends the wait for a round: its delta stays on offer and in `state`.
        `on_catch_up` gets the inner steps, beyond this peer's own, of rounds that it caught up with.
        `on_state_replaced` is called when another peer's state replaced all parameters.

        Raises ConfigError: parameters that `partition` refuses, or no key in diloco.key_file.
        """
        self.config = config
        named, ranks = list(parameters), Ranks()
        fragments = partition(named, config.fragments)
        self.replica = Replica(fragments, config, ranks)
        codec = codec_of(config.codec.type)
        settings = agreed_settings(config) | dict(agreed or {})
        settings |= {"trainer.ranks": str(ranks.size), FROZEN_KEY: frozen_digest(named)}
        hello = PeerHello(
            protocol=PROTOCOL, run=config.run, peer=config.peer_id, rank=ranks.rank, ranks=ranks.size,
            instance=ranks.smallest([secrets.randbits(62)])[0], layout=parameter_layout(fragments),
            settings=settings, round_deadline_s=config.round_deadline_s, outer_step=0, base_hash="", training=False,
            delta_bytes=max(codec.size(fragment.numel) for fragment in fragments),
        )  # fmt: skip
        self._link = PeerLink(Exchange(config, JointKey.read(config.key_file), hello, self.replica.state_to_serve))
        self._on_catch_up = on_catch_up
        self._on_state_replaced = on_state_replaced
        self.metrics: dict[str, float] = {}
        """Of the last outer step, by the names in docs/how-to/several-clusters.md."""
        self._coming = LocalWork()
        """Of the coming inner step."""
        self._stepped_at = time.monotonic()
        """When the last inner step, and the wait after it, ended."""
        self._in_step_at = time.monotonic()
        """When this peer had caught up with the others."""
        self._should_stop = should_stop
        self._optimizer = optimizer
        self._hook: torch.utils.hooks.RemovableHandle | None = None

    def __enter__(self) -> StreamingDiLoCo:
        """Join the other peers, and take over their global model if needed. A collective.

        Raises RunMismatchError (other settings or layout) or DeadlineError (diloco.heal_timeout_s).
        """
        try:
            self._link.start(self.global_model.outer_step, self.global_model.hash)
            self._join()
            self._in_step_at = self._stepped_at = time.monotonic()
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
        self._coming = self._coming.plus(LocalWork(tokens=tokens))

    def take_back(self) -> None:
        """Forget what `count` noted: the coming step changes nothing."""
        self._coming = LocalWork()

    # -- the algorithm -------------------------------------------------------------------------------------------

    def _after_step(self) -> None:
        replica = self.replica
        replica.inner += 1
        self._link.note_step()
        replica.count(self._coming.plus(LocalWork(steps=1)))
        self._coming = LocalWork()
        now = time.monotonic()
        step_s, self._stepped_at = now - self._stepped_at, now
        left_s = self._link.time_left_s(self.outer_step)
        beat_late_s = min(2.0, self.config.round_deadline_s / 4)
        hurry = left_s is not None and left_s < 1.5 * step_s + beat_late_s  # another may miss the round
        patient = replica.ranks.all(not hurry)
        prepares = replica.inner >= self.config.interval - self.config.delay
        if replica.pending is None and (prepares or not patient):
            self._prepare()
        self._complete_if_due()

    def _prepare(self) -> None:
        model, replica = self.global_model, self.replica
        fragment, work = model.fragment, replica.held[model.fragment]
        codec = codec_of(self.config.codec.type)
        data, residual_n = replica.feedback.encode(fragment, model.delta(fragment), codec)
        body = data.numpy().data.cast("B")
        header = self._link.delta_header(
            body, model.outer_step, model.hash, fragment=fragment, codec=codec.name,
            weight=float(work.tokens), inner_steps=round(work.steps),
        )  # fmt: skip
        pending = PendingDelta(header=header, body=body, residual_n=residual_n, work=work)
        replica.offer(pending, due=replica.inner + self.config.delay)
        self._link.offer(header, body)

    def _complete_if_due(self) -> None:
        if self.replica.pending is not None and self.replica.inner >= self.replica.due:
            if self._complete(self._should_stop):
                self._offer_again()
            self._stepped_at = time.monotonic()

    def _complete(self, should_stop: Callable[[], bool]) -> bool:
        """Take the due result and later ones. Return whether a round ended without this peer. A collective."""
        replica = self.replica
        began, missed = time.monotonic(), replica.totals["missed"]
        late = replica.pending is not None and replica.pending.late
        result = self._wait(0.0 if late else self.config.round_timeout_s, should_stop)
        if result is None:
            if not self.replica.ranks.any(should_stop()):
                self._go_on_alone()
            return False
        if isinstance(result, RoundResult):
            exposed_s = time.monotonic() - began
            self._take(result, exposed_s)
            replica.inner = max(0, replica.inner - self.config.interval)
            result = self._replay(result.outcome.newest, exposed_s)
        if result is not None:
            logger.warning("rejoining: %s", result.reason)
            replica.pending = None
            self._join()
        replica.restart_interval()
        self._in_step_at = time.monotonic()
        return replica.totals["missed"] > missed

    # -- when rounds and steps do not go together ----------------------------------------------------------------

    def _go_on_alone(self) -> None:
        """Train on without the due result. A collective. Raises DeadlineError after diloco.offline_timeout_s."""
        silent_s, pending = time.monotonic() - self._in_step_at, self.replica.pending
        if self.replica.ranks.any(silent_s > self.config.offline_timeout_s):
            limit_s, where = self.config.offline_timeout_s, self.config.rendezvous
            raise DeadlineError(
                f"no outcome of outer step {self.outer_step} for {silent_s:.0f} s (diloco.offline_timeout_s = "
                f"{limit_s:g}): the rendezvous at {where} last reported that it waits for {self._link.waiting_for}. "
                "Is it reachable, and are enough peers alive? Go on with --resume"
            )
        if pending is not None and not pending.late:
            self.replica.mark_late(pending)
            logger.warning("outer step %d is not complete after %.0f s; training continues", self.outer_step, silent_s)

    def _offer_again(self) -> None:
        if not self.replica.held[self.global_model.fragment].steps:
            return
        logger.warning(
            "this peer's delta came too late for outer step %d and is offered for the next one (%d rounds missed so "
            "far). If this repeats, raise diloco.round_deadline_s", self.outer_step, self.replica.totals["missed"],
        )  # fmt: skip
        self._prepare()
        if self.replica.inner >= self.replica.due:
            self._complete(self._should_stop)

    # -- results of rounds, alike on all ranks ---------------------------------------------------------------------

    def _wait(self, timeout_s: float, should_stop: Callable[[], bool] = lambda: False) -> RoundResult | Gone | None:
        """Return the result; Gone when a rank must rejoin; None after `timeout_s` or `should_stop`. A collective."""
        deadline = time.monotonic() + timeout_s
        while True:
            result = self._link.wait(min(POLL_S, timeout_s))
            rating = {RoundResult: 2, Gone: 1}.get(type(result), 0)
            goes_on = time.monotonic() < deadline and not should_stop()
            lowest, in_time = self.replica.ranks.smallest([rating, goes_on])
            if (agreed := self._agreed(result, lowest)) is not None or not in_time:
                return agreed

    def _agreed(self, result: RoundResult | Gone | None, lowest: int) -> RoundResult | Gone | None:
        """Return what all ranks take, None to ask again. `lowest`: of the ranks' ratings. A collective."""
        if lowest == 1:
            return result if isinstance(result, Gone) else Gone(reason="another rank was left behind")
        if isinstance(result, RoundResult) and lowest == 2:
            if self.replica.ranks.equal([int(result.outcome.digest[:15] or "0", 16)]):  # 60 bits
                return result
            logger.warning(
                "the ranks of this cluster got different outcomes of outer step %d and ask again. If this repeats: is "
                "%s the address of more than one rendezvous?", result.outcome.outer_step, self.config.rendezvous,
            )  # fmt: skip
            time.sleep(POLL_S)  # a rendezvous may be replacing another
            self._link.retry_round()
        elif isinstance(result, RoundResult) and self._link.rendezvous_restarted:
            self._link.retry_round()  # the other ranks get nothing unless this one takes part
        return None

    def _next(self, newest: int, timeout_s: float) -> RoundResult | Gone | None:
        """Return the next closed round up to `newest`, if any. A collective."""
        model = self.replica.global_model
        if self.replica.ranks.smallest([newest])[0] < model.outer_step:
            return None
        self._link.fetch(model.outer_step, model.hash)
        return self._wait(timeout_s)

    # -- the outer step ------------------------------------------------------------------------------------------

    def _take(self, result: RoundResult, exposed_s: float) -> None:
        """Advance the global model, and give the parameters their values. A collective.

        `exposed_s`: how long training waited for the result.
        """
        model, replica = self.replica.global_model, self.replica
        fragment = model.fragment
        accepted = self._accepted(fragment, result)
        pending, replica.pending = replica.pending, None
        offered = pending and pending.header
        status = delta_status(self.config.peer_id, offered, result.outcome.headers, accepted.rejections)
        before_n = model.masters[fragment].clone() if status == "missed" else None
        model.advance(fragment, accepted.deltas(), accepted.weights, accepted.remembered)
        self._settle_residual(fragment, status, pending)
        replica.install(fragment, status, pending, before_n)
        self._link.set_position(model.outer_step, model.hash)
        self._note_metrics(result.outcome, accepted, exposed_s)

    def _accepted(self, fragment: int, result: RoundResult) -> AcceptedDeltas:
        model = self.replica.global_model
        accepted = accept(
            result.outcome.headers, result.bodies, fragment=fragment, n=model.fragments[fragment].numel,
            ranks=self.replica.ranks, history=model.norms[fragment].tolist(),
        )  # fmt: skip
        for peer, reason in accepted.rejections.items():
            logger.warning("outer step %d: the delta of peer %s is rejected: %s", model.outer_step, peer, reason)
        for (header, _), weight, scale in zip(accepted.counted, accepted.weights, accepted.scales, strict=True):
            if weight < header.weight or scale < 1.0:
                text = "outer step %d: the delta of peer %s counts with %g of %g tokens, and at %.3g of its length"
                logger.info(text, model.outer_step, header.peer, weight, header.weight, scale)
        return accepted

    def _settle_residual(self, fragment: int, status: DeltaStatus, pending: PendingDelta | None) -> None:
        if status == "counted" and pending is not None:
            self.replica.feedback.settle(fragment, pending.residual_n)
        elif status == "predecessor":
            self.replica.feedback.reset(fragment)
            if pending is not None:
                logger.warning(
                    "outer step %d used a delta of another process of peer %s: this process's, of %.0f tokens, is lost",
                    self.replica.global_model.outer_step - 1, self.config.peer_id, pending.work.tokens,
                )  # fmt: skip

    def _note_metrics(self, outcome: RoundOutcome, accepted: AcceptedDeltas, exposed_s: float) -> None:
        totals, (bytes_sent, bytes_received) = self.replica.totals, self._link.traffic
        self.metrics = {
            "diloco/outer_step": self.replica.global_model.outer_step,
            "diloco/sweep": self.replica.global_model.sweep,
            "diloco/sync_s": exposed_s,
            "diloco/bytes_sent": bytes_sent,
            "diloco/bytes_received": bytes_received,
            "diloco/participants": len(outcome.headers),
            "diloco/rejected": len(accepted.rejections),
            "diloco/missed_rounds": totals["missed"],
            "diloco/carried_tokens": totals["carried"],
            "diloco/overwritten_tokens": totals["overwritten"],
        }
        for header in outcome.headers:
            self.metrics[f"diloco/{header.peer}/norm"] = accepted.norms[header.peer]
            self.metrics[f"diloco/{header.peer}/weight"] = header.weight
            self.metrics[f"diloco/{header.peer}/inner_steps"] = header.inner_steps

    # -- joining ---------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        """Catch up with the others. A collective. Raises DeadlineError after diloco.heal_timeout_s."""
        replica, model = self.replica, self.replica.global_model
        self._link.set_position(model.outer_step, model.hash, training=False)
        before, deadline = model.hash, time.monotonic() + self.config.heal_timeout_s
        must_rejoin: Gone | None = Gone(reason="not joined yet")
        while must_rejoin is not None:
            newest = self._choose_state(deadline)
            if replica.pending is not None:  # its result is taken when it is due
                break
            must_rejoin = self._replay(newest)
        if model.hash != before:
            replica.restart_interval()
        elif replica.pending is not None:
            self._link.offer(replica.pending.header, replica.pending.body)
        self._link.set_position(model.outer_step, model.hash, training=True)
        peer, run = self.config.peer_id, self.config.run
        logger.info("peer %s takes part in run %s from outer step %d on", peer, run, model.outer_step)

    def _replay(self, newest: int, exposed_s: float = 0.0) -> Gone | None:
        """Apply the rounds up to `newest` and those that close meanwhile; Gone when they are not kept. A collective."""
        model = self.replica.global_model
        began = model.outer_step
        while isinstance(result := self._next(newest, self.config.round_timeout_s), RoundResult):
            self._take(result, exposed_s)
            newest = result.outcome.newest
        steps_taken = (model.outer_step - began) * self.config.interval
        steps_elsewhere = steps_taken - self.replica.inner
        if model.outer_step > began and steps_elsewhere > 0:
            self._on_catch_up(steps_elsewhere)
        return result

    def _choose_state(self, deadline: float) -> int:
        """Take over the state that the rendezvous names; return the last closed round.

        A collective. Raises DeadlineError.
        """
        model = self.replica.global_model
        self._link.request_source(model.outer_step, model.hash)
        while True:
            found = self._link.join_source(POLL_S)
            ready, in_time = self.replica.ranks.smallest([found is not None, time.monotonic() < deadline])
            if ready and found is not None and self._start_from(*found):
                return found[0].newest
            if not in_time:
                raise DeadlineError(
                    f"no state to join with within diloco.heal_timeout_s = {self.config.heal_timeout_s:g} s: the "
                    f"rendezvous waits for {self._link.waiting_for}. Raise it if that only needs longer"
                )

    def _start_from(self, start: StartingState, body: bytearray) -> bool:
        model, header = self.replica.global_model, start.header
        serial = header.serial if header is not None else 0
        tensors, problem = None, ""
        same = self.replica.ranks.equal([serial, start.newest])
        if same and header is not None:
            try:
                tensors, _ = unpack_state(body)
                model.verify(tensors, header.outer_step, header.base_hash)
            except (CheckpointError, ChecksumError) as error:
                problem = f"the state that peer {header.peer} serves is refused: {error}"
                logger.warning("%s", problem)
        if not self.replica.ranks.all(same and not problem):
            self._link.request_source(model.outer_step, model.hash, refused=serial if problem else 0, reason=problem)
            return False
        self._link.release_source()
        if header is not None and tensors is not None:
            self._take_over(header, tensors)
        return True

    def _take_over(self, header: StateHeader, tensors: dict[str, Tensor]) -> None:
        tokens_given_up = self.replica.take_over(tensors, header.outer_step)
        self._on_state_replaced()
        logger.info(
            "took over the state of peer %s at outer step %d; own work on %.0f tokens is given up", header.peer,
            header.outer_step, tokens_given_up,
        )  # fmt: skip

    # -- for the trainer -----------------------------------------------------------------------------------------

    @property
    def global_model(self) -> GlobalModel:
        return self.replica.global_model

    @property
    def outer_step(self) -> int:
        return self.global_model.outer_step

    @property
    def run_step(self) -> int:
        """The coming inner step of the run, from 1, over all outer steps.

        Schedules follow it, so a peer that joins late does not warm up.
        """
        return self.outer_step * self.config.interval + self.replica.inner + 1

    @property
    def sweep(self) -> int:
        return self.global_model.sweep

    def global_values(self, *, swept: bool = False) -> contextlib.AbstractContextManager[None]:
        """Give the parameters the global model within the context; with `swept`, as of the last sweep."""
        return self.global_model.installed(swept=swept)

    def state(self) -> memoryview:
        """Return this rank's outer state for a checkpoint."""
        return self.replica.packed()

    def load(self, raw: bytes | memoryview) -> None:
        """Continue from `state`, before entering the context. Raises CheckpointError. Parameters are the caller's."""
        self.replica.load(raw)

    def finish(self) -> dict[str, int | str]:
        """End this peer's part: take the result of a round under way if it ends in time. A collective.

        Return the outer step and hash that the global model ended with, and
        `diloco/final_left_behind`: the outer step of a delta whose round did not end in time.
        """
        replica = self.replica
        if replica.pending is not None:
            self._complete(lambda: False)
        step, final_hash = self.global_model.outer_step, self.global_model.hash
        ending: dict[str, int | str] = {"diloco/final_outer_step": step, "diloco/final_hash": final_hash}
        if replica.pending is not None:
            ending["diloco/final_left_behind"] = replica.pending.header.outer_step
            logger.warning("a delta of outer step %d is left behind: its round did not end in time", step)
        if tokens_held := replica.tokens_held():
            logger.info("the global model is without this peer's last work, on %.0f tokens", tokens_held)
        self._link.set_position(step, final_hash, training=False)
        logger.info(
            "the global model ended at outer step %d, with hash %s: equal on every peer that ended at this outer step",
            step, final_hash,
        )  # fmt: skip
        return ending


def agreed_settings(config: DilocoConfig) -> dict[str, str]:
    """Return what all peers must agree on, by `diloco.` key."""
    outer = {f"diloco.outer.{name}": str(value) for name, value in config.outer.model_dump(mode="json").items()}
    return {"diloco.fragments": str(config.fragments), **outer}
