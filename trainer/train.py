"""One trainer rank: `python -m trainer.train --run-dir DIR`, alone or under torchrun. Read `Trainer.run` first.

    orchestrator --batch N--> all ranks: forward, backward, update, ledger line, copy of the weights, next batch ...
    rank 0, in the background: a version into the weight store --StepDone N--> orchestrator
    when one is due: a checkpoint with the orchestrator, once StepDone N is noted; it is written beside the next step
    SIGTERM, SIGINT: the current step ends, a checkpoint of it is written (trainer.checkpoint.stop_timeout_s), exit

Ranks wait for the orchestrator's batch and for one another, never for inference nodes.
In a joint run the optimizer's step ends in the outer loop (diloco/streaming.py), which may wait for other clusters.

One optimizer step (`train_step`): forward and backward over the micro-batches, one read of the numbers, one update.

    for each micro-batch:  L_k = share of the step's loss (global denominators);  backward accumulates sum_k dL_k
    last micro-batch:      FSDP sums the gradients over ranks
    then, once:            sums and gradient norm to the host; all finite -> clip, update; else -> NonFiniteStepError

The host reads no number between micro-batches, so an accelerator never waits for it. A step that fails leaves the
parameters untouched.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from composer_prime.channels.sft import SftConfig, SftTerm
from composer_prime.channels.term import LossParts, TaughtTokens, Term, TermTokens, channel_metrics, total_loss
from composer_prime.config import Config, load
from composer_prime.console import start_log
from composer_prime.errors import (
    CheckpointError,
    ComposerError,
    ConfigError,
    NonFiniteError,
    NonFiniteStepError,
    RoleFailedError,
)
from composer_prime.model_source import resolve_model
from composer_prime.monitor.events import record_events
from composer_prime.monitor.metrics_file import MetricsFile
from composer_prime.plan.footprint import stop_timeout_s
from composer_prime.run.keys import RunKeys
from composer_prime.run.ledger import append_rewind, append_step
from composer_prime.run.process import end_with_parent
from composer_prime.run.run_dir import RunDir, read_run_id
from composer_prime.wire.types import RunFinished, StepReply, StepRequest, StepTotals
from diloco.streaming import StreamingDiLoCo
from trainer import world as worlds
from trainer.data import PackedRow, StepClient, Stopped, checked_row, find_endpoint, next_batch, unpack, wait_together
from trainer.head import TokenStatistics
from trainer.model.build import build_policy
from trainer.model.policy_model import AuxiliaryLogprobs, Policy, SelfTeacher
from trainer.optim import Optimizer, build_optimizer, rate
from trainer.weights.checkpoint import Checkpoints
from trainer.weights.publish import Publisher
from trainer.world import LEAVE_S, StopSignal, gather_texts, gather_words

logger = logging.getLogger("trainer")
MAX_SKIPPED_STEPS = 3
"""Steps in a row that may be skipped because loss or gradient is NaN or infinite; one more ends the run."""
ORCHESTRATOR_TIMEOUT_S = 120.0
"""Silence of the orchestrator, which answers every few seconds even if no batch is ready."""
NAMED = 8
"""The most samples that a message lists; the ledger has all of them."""


class Trainer:
    """One rank of a run."""

    def __init__(self, run_dir: RunDir, config: Config, stop: StopSignal) -> None:
        """Join the other ranks, load the model and build the parts. A collective.

        Raises ConfigError, ModelNotFoundError or another ComposerError when a part cannot be built.
        """
        channels, trainer = config.channels, config.trainer
        self.config = config
        self.run_dir = run_dir
        self.stop = stop
        stop.save_s = stop_timeout_s(config)
        run_id, model_folder = read_run_id(run_dir), resolve_model(config.model.path)
        self.world = worlds.join(trainer)
        self.policy = build_policy(config, model_folder, self.world)
        self.teacher = SelfTeacher(self.policy, channels)
        self.optimizer = build_optimizer(self.policy, trainer.optim, offloads="moments" in trainer.offload)
        self.outer = self._build_outer()
        self.terms = channels.terms(config.completion_length)
        self.publisher = Publisher(config, run_dir, run_id, model_folder, self.world, self.outer)
        self.checkpoints = Checkpoints(
            run_dir=run_dir,
            world=self.world,
            policy=self.policy,
            optimizer=self.optimizer,
            teacher=self.teacher,
            outer=self.outer,
            keep=trainer.checkpoint.keep,
        )
        self.metrics = MetricsFile(run_dir.metrics, "trainer")

    def run(self) -> None:
        """Train every step that the orchestrator has a batch for, then write final/."""
        start = self._restore()
        with (
            contextlib.closing(self._connect()) as client,
            contextlib.closing(self.publisher.background),
            contextlib.closing(self.checkpoints.background),
            self.outer or contextlib.nullcontext(),
            _told_first(),
        ):
            self._publish(client, start, [], {})
            # Before that the orchestrator may serve a batch that was packed for an older trainer.
            awaited = f"the orchestrator to note that this trainer starts after step {start}"
            wait_together(f"step {start + 1}", awaited, self.publisher.background.is_idle, self._should_stop)
            last = self._train(client, start)
            self._finish(client, start, last)

    def _build_outer(self) -> StreamingDiLoCo | None:
        """Return the loop across clusters, if any."""
        if self.config.diloco is None:
            return None
        lora = self.config.trainer.lora
        agreed = {"trainer.lora.rank": str(lora.rank), "trainer.lora.alpha": str(lora.alpha)} if lora else {}
        return StreamingDiLoCo(
            self.policy.named_parameters(),
            self.optimizer.parts[-1],
            self.config.diloco,
            agreed=agreed,
            should_stop=self.stop.is_requested,
            on_catch_up=self.teacher.catch_up,
            on_state_replaced=self.teacher.start_anew,
        )

    def _restore(self) -> int:
        """Return the step to continue from. Cut weight store and ledger back to it."""
        start = 0
        if self.config.run.resume:
            start = self._newest_checkpoint()
            self.checkpoints.load(start)
            logger.info("resumed from the checkpoint of step %d", start)
        self.publisher.rewind(start)
        if self.world.first and self.run_dir.ledger.exists():
            append_rewind(self.run_dir.ledger, start)
        return start

    def _newest_checkpoint(self) -> int:
        """Return the newest complete checkpoint that rank 0 sees: a shared disk may show others an older state."""
        steps = self.run_dir.complete_checkpoints()
        (newest,), *_ = gather_words([steps[-1] if steps else 0])
        return newest or self.run_dir.newest_checkpoint()

    def _connect(self) -> StepClient:
        endpoint = self.config.orchestrator.address or find_endpoint(
            self.run_dir.endpoints, ORCHESTRATOR_TIMEOUT_S, self.stop.is_requested
        )
        trainer, world = self.config.trainer, self.world
        rank = StepRequest(
            run_id=read_run_id(self.run_dir),
            step=0,
            rank=world.rank // trainer.context_parallel,
            world_size=world.size // trainer.context_parallel,
            max_tokens=trainer.micro_batch_tokens,
        )
        keys, silence_s = RunKeys(self.run_dir.keys).client("trainer"), ORCHESTRATOR_TIMEOUT_S
        name = "trainer" if self.policy.leads else f"follower-{world.rank}"
        return StepClient(endpoint, keys, rank, self._should_stop, silence_timeout_s=silence_s, name=name)

    def _should_stop(self) -> bool:
        """Raise an error of the publication: the awaited batch may need that version."""
        self.publisher.background.check()
        return self.stop.is_requested()

    def _train(self, client: StepClient, start: int) -> int:
        """Take steps after `start` and return the last one."""
        last = start
        while last < self._last_step(last):
            asked_at = time.monotonic()
            try:
                versions = self.publisher.accepted_versions(last + 1)
                reply = next_batch(client, last + 1, versions, self.world.context)
            except Stopped:  # on all ranks together
                saves = self.stop.save_s > 0 and self._is_unsaved(last)
                if saves and self._checkpoint(client, last):
                    logger.info("stopped after step %d: its checkpoint is written", last)
                raise
            if isinstance(reply, RunFinished):
                if reply.failed:
                    raise RoleFailedError(f"the orchestrator ended the run after step {last}: {reply.reason}")
                logger.info("no batch after step %d: %s", last, reply.reason)
                break
            last += 1
            self._train_one_step(client, reply, last, asked_at)
            self._check_skipped(client, last)
        return last

    def _check_skipped(self, client: StepClient, last: int) -> None:
        if self.optimizer.skipped <= MAX_SKIPPED_STEPS:
            return
        if self._is_unsaved(last):
            self._checkpoint(client, last)
        raise NonFiniteError(
            f"{self.optimizer.skipped} steps in a row, up to step {last}, were not finite (at most {MAX_SKIPPED_STEPS} "
            f"may be). None of them changed the parameters. Lower trainer.optim.lr or check the samples listed above, "
            "then continue with --resume"
        )

    def _last_step(self, step: int) -> int:
        """Return the step that ends the run, as known after `step`: a joint run ends by outer steps."""
        taken = self.outer.run_step - 1 if self.outer else step
        return step + max(0, self.config.run.max_steps - taken)

    def _train_one_step(self, client: StepClient, reply: StepReply, step: int, asked_at: float) -> None:
        config, received_at = self.config, time.monotonic()
        rows, totals = self._rows(reply)
        if step == 1 and reply.held_out and (scores := self._score(reply)) and self.world.first:
            self.metrics.log(0, scores)
        auxiliary = self.teacher.prepare(rows)
        read_at = time.monotonic()
        metrics, left_out = self._update(reply, rows, totals, auxiliary, step)
        trained_at = time.monotonic()
        failure = self.checkpoints.settle()  # a kill after this step leaves the checkpoint that was due before it
        settled_at = time.monotonic()
        self.stop.patience_s = max(self.stop.save_s, LEAVE_S)  # on all ranks before the ledger's line
        sample_ids = _gather_lines([sample_id for row in rows for sample_id in row.sample_ids])
        if self.world.first:
            append_step(self.run_dir.ledger, step, [] if left_out else sample_ids, left_out)
        bytes_published = self._publish(client, step, sample_ids, metrics)
        published_at = time.monotonic()
        if config.orchestrator.eval.due(step, self._last_step(step)):
            metrics |= self._score(reply)
        if _is_due(step, config.trainer.checkpoint.every_steps) and step < self._last_step(step):
            self.publisher.settle()
            self.checkpoints.begin(step, client)
        self._log(step, reply.metrics | metrics | {
            "time/wait_s": received_at - asked_at,
            "time/read_s": read_at - received_at,
            "time/publish_s": published_at - settled_at,
            "time/checkpoint_s": time.monotonic() - published_at + settled_at - trained_at,
            "time/step_s": time.monotonic() - asked_at,
            "weights/bytes": bytes_published,
            "checkpoint/failed": failure is not None,
            "tokens/total": sum(row.packed_tokens for row in rows),
            "tokens/computed": sum(row.input_ids.numel() for row in rows),
        })  # fmt: skip

    def _update(
        self,
        reply: StepReply,
        rows: list[PackedRow],
        totals: StepTotals,
        auxiliary: list[AuxiliaryLogprobs],
        step: int,
    ) -> tuple[dict[str, float], list[str]]:
        """Update the parameters, or skip the step. Return its metrics, and the samples that are left out."""
        trainer, run_step = self.config.trainer, self.outer.run_step if self.outer else step
        self.optimizer.scale_rates(rate(run_step, trainer.schedule, self.config.run.max_steps))
        if self.outer:
            self.outer.count(tokens=reply.totals.tokens)
        left_out: list[str] = []
        measured = self.terms if _is_due(step, trainer.term_norms_every) else []
        norms = term_norms(self.optimizer, measured, partial(backward, self.policy, rows, totals, run_step, auxiliary))
        given = self.policy, self.optimizer, rows, totals, self.terms
        try:
            metrics = norms | train_step(*given, step=run_step, auxiliary=auxiliary)
        except NonFiniteStepError as error:  # on all ranks alike
            left_out = error.samples
            metrics = self._skip(error, reply, step)
        metrics |= {"optim/skipped": float(self.optimizer.skipped > 0)} | (self.outer.metrics if self.outer else {})
        if not self.optimizer.skipped:
            self.teacher.follow()
        return metrics, left_out

    def _rows(self, reply: StepReply) -> tuple[list[PackedRow], StepTotals]:
        """Return this rank's rows, and the totals with what the user's own terms count."""
        share, max_tokens = self.policy.shares_prefixes, self.config.trainer.micro_batch_tokens
        terms = self.terms
        rows = [checked_row(batch, self.policy.vocabulary) for batch in reply.micro_batches]
        totals = reply.totals
        if self.config.channels.own:
            counts = [sum(term.count(row) for row in rows) * self.policy.leads for term in terms]
            over_ranks = map(sum, zip(*gather_words(counts), strict=True))
            own = {term.name: count for term, count in zip(terms, over_ranks, strict=True)}
            totals = msgspec.structs.replace(totals, own=own)
        device, context = self.world.device, self.world.context
        unpacked = [unpack(row, terms, device, share=share, max_tokens=max_tokens, context=context) for row in rows]
        return unpacked, totals

    def _score(self, reply: StepReply) -> dict[str, float]:
        """Return the metrics of held-out demonstrations, if any."""
        held_out = [checked_row(batch, self.policy.vocabulary) for batch in reply.held_out]
        imitated, share, context = [SftTerm(SftConfig())], self.policy.shares_prefixes, self.world.context
        rows = [unpack(row, imitated, self.world.device, share=share, context=context) for row in held_out]
        return score_held_out(self.policy, rows) if rows else {}

    def _skip(self, error: NonFiniteStepError, reply: StepReply, step: int) -> dict[str, float]:
        """Keep the weights, log the samples to blame, return the metrics."""
        if self.outer:
            self.outer.take_back()
        self.optimizer.skip()
        tasks = {
            sample_id: task
            for batch in reply.micro_batches
            for sample_id, task in zip(batch.sample_ids, batch.task_ids, strict=True)
            if self.policy.leads
        }
        descriptions = _gather_lines([_describe(name, tasks[name]) for name in error.samples if name in tasks])
        descriptions += [name for name in error.samples if name.startswith(("pair ", "row "))]
        more = f" and {len(descriptions) - NAMED} more" if len(descriptions) > NAMED else ""
        blamed = "; ".join(descriptions[:NAMED]) + more
        text = f"step {step} skipped ({self.optimizer.skipped} in a row): {error}. A resumed run leaves out {blamed}"
        logger.warning(text)
        return {"loss/total": math.nan, "tokens/trained": 0.0}

    def _publish(self, client: StepClient, step: int, sample_ids: list[str], metrics: Mapping[str, float]) -> int:
        """Publish the version of `step` and tell the orchestrator, in the background. Return its bytes."""
        last_step = self._last_step(step) if self.outer else None
        of_hints = "sdpo/jsd/"
        divergence = {
            name.removeprefix(of_hints): value for name, value in metrics.items() if name.startswith(of_hints)
        }

        def announce(version: int) -> None:
            client.announce(step, version, sample_ids, divergence, last_step, self.publisher.background.is_closing)

        return self.publisher.publish(self.policy, step, announce)

    def _checkpoint(self, client: StepClient, step: int) -> bool:
        """Write a checkpoint. Return False after a failure, which is logged."""
        self.publisher.settle()
        try:
            self.checkpoints.save(step, client)
        except CheckpointError:
            return False
        self.stop.patience_s = LEAVE_S
        return True

    def _is_unsaved(self, step: int) -> bool:
        """Return whether `step` was taken and rank 0 sees no checkpoint of it. A collective."""
        self.checkpoints.settle()
        return bool(gather_words([step > 0 and step not in self.run_dir.complete_checkpoints()])[0][0])

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        """Log the step on rank 0: tokens summed over ranks, the largest memory peak."""
        of_rank = [int(metrics["tokens/total"]), int(metrics["tokens/computed"]), peak_bytes(self.world.device)]
        total, computed, peaks = zip(*gather_words(of_rank), strict=True)
        metrics |= {"tokens/total": sum(total), "tokens/computed": sum(computed), "memory/peak_bytes": max(peaks)}
        if self.world.first:
            self.metrics.log(step, metrics)
            logger.info(
                "step %d: loss %.4g, reward %s, %d tokens, %.2f s (waited %.2f s)",
                step, metrics["loss/total"], metrics.get("reward/mean", "none"), metrics["tokens/total"],
                metrics["time/step_s"], metrics["time/wait_s"],
            )  # fmt: skip

    def _finish(self, client: StepClient, start: int, last: int) -> None:
        """Write final/ and the last checkpoint. Raises CheckpointError."""
        self.publisher.settle()
        if self.outer:
            final_metrics = self.outer.finish()
            if self.world.first:
                self.metrics.log(last, final_metrics)
        with self.outer.global_values() if self.outer else contextlib.nullcontext():
            self.publisher.export(self.policy, self.run_dir.final)
        if last > start and self._is_unsaved(last):
            self.checkpoints.save(last, client)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _describe(sample_id: str, task: str) -> str:
    """Name a sample by its parts: sample IDs are GROUP-SIBLING/BRANCH."""
    rollout = sample_id.rpartition("/")[0]
    return f"task {task}, group {rollout.rpartition('-')[0]}, rollout {rollout}"


# -- one step ----------------------------------------------------------------------------------------------------------


def train_step(
    policy: Policy,
    optimizer: Optimizer,
    rows: Sequence[PackedRow],
    totals: StepTotals,
    terms: Sequence[Term],
    *,
    step: int,
    auxiliary: Sequence[AuxiliaryLogprobs] | None = None,
) -> dict[str, float]:
    """Take one step, and return metrics of the whole step, all ranks. A collective.

    `terms` are those of the loss that are on, the policy loss first; `step` sets their weights. Every rank must bring
    the same number of rows; `auxiliary` has one entry a row. Raises NonFiniteStepError, on all ranks alike, before
    anything is changed.
    """
    started = time.monotonic()
    losses, not_finite, sums = backward(policy, rows, totals, step, auxiliary, terms)
    norm = optimizer.grad_norm()
    sums = dict(sorted(sums.items()))  # a policy loss of the user's may give its sums in another order on each rank
    stacked = torch.stack(list(sums.values())) * policy.leads
    dist.all_reduce(stacked)
    *summed, grad_norm = torch.cat([stacked, norm.double().reshape(1)]).tolist()
    values = dict(zip(sums, summed, strict=True))
    if not (math.isfinite(grad_norm) and math.isfinite(values["loss/total"])):
        optimizer.zero_grad()
        wrong = [name for name, value in values.items() if name.startswith("loss/") and not math.isfinite(value)]
        raise _blame(rows if policy.leads else [], losses, not_finite, grad_norm, wrong)
    computed = time.monotonic()
    lr = optimizer.step(norm)
    return (
        {"sdpo/turns": 0.0, "dpo/pairs": 0.0}
        | channel_metrics(terms, values)
        | {
            "tokens/trained": values["policy/tokens"] + values.get("sft/tokens", 0.0),
            "optim/grad_norm": grad_norm,
            "optim/lr": lr,
            "time/forward_backward_s": computed - started,
            "time/optimizer_s": time.monotonic() - computed,
        }
    )


def term_norms(
    optimizer: Optimizer, terms: Sequence[Term], gradient: Callable[[Sequence[Term]], object]
) -> dict[str, float]:
    """Return the norm of each term's own weighted gradient, which `gradient` adds, and drop it. A collective."""
    norms = {}
    for term in terms:
        gradient([term])
        norms[f"optim/grad_norm/{term.name}"] = optimizer.grad_norm().item()
        optimizer.zero_grad()
    return norms


def backward(
    policy: Policy,
    rows: Sequence[PackedRow],
    totals: StepTotals,
    step: int,
    auxiliary: Sequence[AuxiliaryLogprobs] | None,
    terms: Sequence[Term],
) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Add the gradient of all rows. Return their losses, their counts of what is not finite, and the terms' sums."""
    assert isinstance(policy, FSDPModule)
    losses: list[Tensor] = []
    not_finite: list[Tensor] = []
    sums: dict[str, Tensor] = {}
    for index, (row, of_row) in enumerate(zip(rows, auxiliary or [None] * len(rows), strict=True)):
        # A GPU sums its gradients over the ranks beside the next row's work, CPU ranks once.
        policy.set_requires_gradient_sync(row.input_ids.is_cuda or index == len(rows) - 1)
        parts, bad = loss_of(policy, row, totals, terms, step=step, auxiliary=of_row)
        parts.total.backward()
        losses.append(parts.total.detach())
        not_finite.append(bad)
        for name, value in parts.sums.items():
            sums[name] = sums[name] + value if name in sums else value.double()
    return losses, not_finite, sums


def score_held_out(policy: Policy, rows: Sequence[PackedRow]) -> dict[str, float]:
    """Return loss (nats a token) and token accuracy of held-out demonstrations, over all ranks. A collective."""
    sums = torch.zeros(3, dtype=torch.float64, device=next(policy.parameters()).device)
    was_training = policy.training
    policy.eval()
    for row in rows:
        logprobs_R, hits_R = policy.grades(row)
        count = sums.new_tensor(float(len(hits_R)))
        sums += torch.stack([logprobs_R.double().sum(), hits_R.double().sum(), count])
    policy.train(was_training)
    sums *= policy.leads
    dist.all_reduce(sums)
    logprobs, hits, tokens = sums.tolist()
    return {
        "eval/demonstrations/loss": -logprobs / tokens,
        "eval/demonstrations/token_accuracy": hits / tokens,
        "eval/demonstrations/tokens": tokens,
    }


def loss_of(
    policy: Policy,
    row: PackedRow,
    totals: StepTotals,
    terms: Sequence[Term],
    *,
    step: int = 1,
    auxiliary: AuxiliaryLogprobs | None = None,
) -> tuple[LossParts, Tensor]:
    """Return one row's share of the step's loss, and how many statistics of each of its documents are not finite."""
    auxiliary = auxiliary or AuxiliaryLogprobs()
    statistics = policy(row, auxiliary.teacher)
    inputs = {}
    for term in terms:
        tokens = _tokens(term, row, statistics, auxiliary.references.get(term.name))
        inputs[term.name] = term.inputs(tokens)
    parts = total_loss(terms, inputs, totals, step)
    bad_R = ~torch.isfinite(statistics.logprobs_R.detach())
    if statistics.divergence_D is not None:
        bad_R[len(bad_R) - len(statistics.divergence_D) :] |= ~torch.isfinite(statistics.divergence_D.detach())
    not_finite = torch.zeros(len(row.names), device=bad_R.device).index_add_(0, row.document_R, bad_R.float())
    return parts, not_finite


def _tokens(term: Term, row: PackedRow, statistics: TokenStatistics, reference: Tensor | None) -> TermTokens:
    """Return the term's own tokens; none are empty, but have a gradient."""
    own, taught = row.terms[term.name], None
    chosen = slice(None) if own.head_rows is None else own.head_rows
    if term.is_taught and statistics.divergence_D is not None:
        assert statistics.teacher_entropy_D is not None and statistics.teacher_logprobs_D is not None
        taught = TaughtTokens(
            divergence=statistics.divergence_D,
            teacher_entropy=statistics.teacher_entropy_D,
            teacher_logprobs=statistics.teacher_logprobs_D,
        )
    return TermTokens(
        logprobs=statistics.logprobs_R[chosen],
        entropy=statistics.entropy_R[chosen],
        arrays=own.arrays,
        counts=own.counts,
        reference=reference,
        taught=taught,
    )


def _blame(
    rows: Sequence[PackedRow], losses: list[Tensor], not_finite: list[Tensor], grad_norm: float, wrong: list[str]
) -> NonFiniteStepError:
    """Return the same error on every rank. A collective. `wrong`: figures of losses that are not finite.

    Blames samples and pairs whose logits are not finite, else all of the micro-batch, else of the step.
    """
    texts, blamed = [], []
    for index in torch.stack(losses).isfinite().logical_not().nonzero()[:, 0].tolist() if rows else []:
        what, names = _blamed(rows[index], not_finite[index].tolist())
        texts.append(f"micro-batch {index} of rank {dist.get_rank()} ({what} {', '.join(names)})")
        blamed += names
    culprits = f"loss ({', '.join(wrong)}) of " + "; ".join(filter(None, gather_texts("; ".join(texts))))
    samples = _gather_lines(blamed)
    if not samples:
        culprits = "gradient, although every micro-batch's loss is finite"
        samples = _gather_lines([sample_id for row in rows for sample_id in row.sample_ids])
        names = dict.fromkeys(name for row in rows for name in row.names if name != "none")
        samples = samples or _gather_lines(list(names))
    return NonFiniteStepError(
        f"NaN or infinity in the {culprits} (gradient norm {grad_norm}). The parameters are unchanged", samples
    )


def _blamed(row: PackedRow, bad_counts: list[int]) -> tuple[str, list[str]]:
    """Return what is wrong with a row, and the names of its culprits."""
    bad = [name for name, count in zip(row.names, bad_counts, strict=True) if count]
    what = "logits of" if bad else "samples" if row.sample_ids else "all of"
    return what, list(dict.fromkeys(bad or row.sample_ids or row.names))


def _gather_lines(lines: Sequence[str]) -> list[str]:
    return [line for text in gather_texts("\n".join(lines)) for line in text.splitlines()]


# -- the process -------------------------------------------------------------------------------------------------------


def peak_bytes(device: torch.device) -> int:
    """Return the peak since the process began: allocated GPU memory on CUDA, resident memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main(argv: list[str] | None = None) -> int:
    """Return the exit status: 0 trained to the end, 1 failed, 2 wrong configuration, 128 + n on signal n."""
    parser = argparse.ArgumentParser(prog="python -m trainer.train", description="One trainer rank of a prepared run.")
    parser.add_argument("--run-dir", type=Path, required=True, help="run directory that the launcher prepared")
    run_dir = RunDir(parser.parse_args(argv).run_dir)
    stop = StopSignal()
    end_with_parent()
    start_log(stream=sys.stdout)
    rank = os.environ.get("RANK", "0")
    record_events(run_dir, f"trainer-{rank}", level=logging.INFO if rank == "0" else logging.ERROR)
    try:
        with _told_first():
            config = load.read_config(run_dir.config)
            load.make_importable(config)
            Trainer(run_dir, config, stop).run()
    except Stopped:
        code = stop.exit_code or 128 + signal.SIGTERM  # another rank may have got the signal
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    else:
        worlds.leave()
        return 0
    # To leave the group would wait for ranks that wait for this one.
    logging.shutdown()
    os._exit(code)


@contextlib.contextmanager
def _told_first() -> Iterator[None]:
    """Log what ends the block, then raise SystemExit; the rank ends even if closing takes long."""
    try:
        yield
    except Stopped:
        raise
    except Exception as error:
        ours = isinstance(error, ComposerError)
        logger.error("%s: %s", type(error).__name__, error, exc_info=not ours)
        code = 2 if isinstance(error, ConfigError) else 1
        last = threading.Timer(LEAVE_S, os._exit, [code])
        last.daemon = True
        last.start()
        raise SystemExit(code) from None


if __name__ == "__main__":
    sys.exit(main())
