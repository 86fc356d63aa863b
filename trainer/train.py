"""One trainer rank: `python -m trainer.train --run-dir DIR`, alone or under torchrun. Read `Trainer.run` first.

    orchestrator --batch N--> all ranks: forward, backward, update --> rank 0: a version into the weight store
    rank 0 --ledger line, StepDone N--> orchestrator            (and a checkpoint with it, when one is due)
    SIGTERM, SIGINT: the step at hand ends, a checkpoint of it is written (trainer.checkpoint.stop_timeout_s), and out

The ranks wait for the orchestrator's batch and for one another in collectives; nobody waits for the inference nodes.
Version N is the model after step N. In a joint run the optimizer's step ends in the outer loop (diloco/streaming.py),
which may wait for other clusters, and version V is the global model after V full sweeps, published when it is new.

How much memory a rank has used at most.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import resource
import sys
import time
from pathlib import Path

import torch

from composer_prime.channels.total import max_completion_length
from composer_prime.config import Config, load
from composer_prime.config.channels import weight_sets
from composer_prime.errors import CheckpointError, ComposerError, ConfigError, RoleFailedError
from composer_prime.model_source import resolve_model
from composer_prime.monitor.metrics_file import MetricsFile
from composer_prime.run.keys import RunKeys
from composer_prime.run.ledger import append_rewind, append_step
from composer_prime.run.process import end_with_parent
from composer_prime.run.run_dir import RunDir, read_run_id
from composer_prime.wire.step import RunFinished, StepReply
from diloco.streaming import StreamingDiLoCo
from trainer import world as worlds
from trainer.data.rows import PackedRow, RowOptions, documents_of, unpack
from trainer.data.step_client import RankInfo, StepClient, Stopped, find_endpoint, next_batch
from trainer.data.teacher_cost import ReadCost, teachers_in_row
from trainer.model.build import build_policy
from trainer.optim import build_optimizer, rate
from trainer.step import LossSettings, train_step
from trainer.teacher.reference import ReferenceLogprobs
from trainer.teacher.self_teacher import SelfTeacher
from trainer.weights.checkpoint import Checkpoints
from trainer.weights.publish import Publisher, export
from trainer.world import LEAVE_S, StopSignal


def peak_bytes(device: torch.device) -> int:
    """Peak since the process began: allocated GPU memory on CUDA, resident memory of the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


logger = logging.getLogger("trainer")


class Trainer:
    """One rank of a run. Making it joins the other ranks, loads the model and restores the checkpoint to resume."""

    def __init__(self, run_dir: RunDir, config: Config, stop: StopSignal) -> None:
        self.run_dir, self.config, self.stop = run_dir, config, stop
        self.run_id = read_run_id(run_dir)
        self._saved = 0
        """Step of the newest checkpoint that holds what was trained; the start of the run is as good as one."""
        self.folder = resolve_model(config.model.path)
        self.world = worlds.join(config.trainer)
        self.policy = build_policy(config, self.folder, self.world)
        self.teacher = SelfTeacher(self.policy, config.channels, self._reference())
        self.read_cost = ReadCost.of(self.policy.lm.config, config.trainer)
        self.optimizer = build_optimizer(self.policy, config.trainer.optim)
        self.outer = self._outer_loop()
        self.checkpoints = Checkpoints(run_dir, self.world, config.trainer.checkpoint.keep, self.outer)
        self.publisher = Publisher(config, run_dir, self.run_id, self.folder, self.world)
        self._version, self._newest = -1, -1
        """Of the weights published last, and the highest so far."""
        self.metrics = MetricsFile(run_dir.metrics, "trainer")
        reduce_each = config.trainer.reduce_each_micro_batch
        self.settings = LossSettings(
            channels=config.channels,
            max_length=max_completion_length(config.channels, config.model.max_context),
            reduce_each=self.world.device.type == "cuda" if reduce_each is None else reduce_each,
        )

    def run(self) -> None:
        """Train every step that the orchestrator has a batch for, then write final/."""
        start = self._saved = self._restore()
        client = self._connect()
        try:
            with self.outer or contextlib.nullcontext():
                self._train(client, start)
        finally:
            client.close()

    def _train(self, client: StepClient, start: int) -> None:
        last = start
        self._attach(client, start)
        while last < self.config.run.max_steps:
            asked = time.monotonic()
            try:
                reply = next_batch(client, self.world, last + 1, self._accepted(last + 1))
            except Stopped:
                self._save_before_leaving(client, last)
                raise
            if isinstance(reply, RunFinished):
                self._check_ending(reply, last)
                break
            last += 1
            self._train_one_step(client, reply, last, asked)
        self._finish(client, start, last)

    def _outer_loop(self) -> StreamingDiLoCo | None:
        """The loop across clusters; None when this cluster trains alone."""
        if self.config.diloco is None:
            return None
        lora = self.config.trainer.lora
        agreed = {"trainer.lora.rank": str(lora.rank), "trainer.lora.alpha": str(lora.alpha)} if lora else {}
        outer = StreamingDiLoCo(
            self.policy.named_parameters(), self.optimizer.parts[-1], self.config.diloco, agreed=agreed
        )
        outer.stopping = self._stopping
        outer.healer.replayed, outer.healer.replaced = self.teacher.catch_up, self.teacher.start_anew
        return outer

    def _version_of(self, step: int) -> int:
        """Of the model after `step`, which was taken last."""
        return self.outer.sweep if self.outer else step

    def _accepted(self, step: int) -> tuple[int, int]:
        """Oldest and newest policy version that the batch of `step` may hold tokens of.

        In a joint run the orchestrator alone keeps the oldest: rounds that are caught up with make several versions
        pass between the forming of a batch and its training.
        """
        return (0, self._newest) if self.outer else (step - 1 - self.config.orchestrator.max_staleness, step - 1)

    def _publish(self, step: int) -> int:
        """Bytes published: this cluster's model, or in a joint run the global one when it has a full sweep more."""
        version = self._version_of(step)
        if version == self._version:
            return 0
        if version < self._version:  # took over the state of a peer that stood further back
            self.publisher.rewind(version)
        self._version, self._newest = version, max(version, self._newest)
        with self.outer.global_values(swept=True) if self.outer else contextlib.nullcontext():
            return self.publisher.publish(self.policy, version)

    def _restore(self) -> int:
        """The step to go on from: 0, or that of the newest complete checkpoint, whose state is then in place.

        Weight store and ledger then end there: steps that are taken again are gone, also where none was saved.
        """
        resume = self.config.run.resume
        start = self.run_dir.newest_checkpoint() if resume else 0
        if resume:
            self.checkpoints.load(start, self.policy, self.optimizer, self.teacher)
            logger.info("resumed from the checkpoint of step %d", start)
        self.publisher.rewind(self._version_of(start))
        if self.world.first and self.run_dir.ledger.exists():
            append_rewind(self.run_dir.ledger, start)
        return start

    def _connect(self) -> StepClient:
        trainer = self.config.trainer
        endpoint = self.config.orchestrator.address or find_endpoint(
            self.run_dir.endpoints, trainer.orchestrator_timeout_s, self._stopping
        )
        asked = RankInfo(
            run_id=self.run_id,
            rank=self.world.rank,
            world_size=self.world.size,
            max_tokens=trainer.micro_batch_tokens,
            silence_timeout_s=trainer.orchestrator_timeout_s,
        )
        return StepClient(endpoint, RunKeys(self.run_dir.keys).client("trainer"), asked, self._stopping)

    def _stopping(self) -> bool:
        return self.stop.requested

    def _attach(self, client: StepClient, start: int) -> None:
        """The version of `start` must be in the store before the orchestrator is told that it is."""
        self._publish(start)
        if self.world.first:
            client.done(start, self._version, [])

    def _train_one_step(self, client: StepClient, reply: StepReply, step: int, asked: float) -> None:
        """One step: train, publish, tell, checkpoint when due, log."""
        config, policy, began = self.config, self.policy, time.monotonic()
        rows = self._rows(reply)
        aids = self.teacher.prepare(rows, step)
        read = time.monotonic()
        ratio = rate(step, config.trainer.schedule, config.run.max_steps)
        if self.outer:
            self.outer.count(tokens=reply.totals.tokens, samples=reply.totals.samples)
        metrics = train_step(
            policy, self.optimizer, rows, reply.totals, self.settings, step=step, ratio=ratio, auxiliary=aids
        ) | (self.outer.metrics if self.outer else {})
        self.teacher.follow()
        trained = time.monotonic()
        size = self._publish(step)
        sample_ids = worlds.gather_texts("\n".join(name for row in rows for name in row.sample_ids))
        if self.world.first:
            ids = [name for text in sample_ids for name in text.splitlines()]
            append_step(self.run_dir.ledger, step, ids)
            client.done(step, self._version, ids)
        self.stop.patience_s = max(config.trainer.checkpoint.stop_timeout_s, LEAVE_S)
        published = time.monotonic()
        every = config.trainer.checkpoint.every_steps
        failed = every > 0 and step % every == 0 and step < config.run.max_steps and not self._checkpoint(client, step)
        self._log(step, reply.metrics | metrics | {
            "time/wait_s": began - asked,
            "time/read_s": read - began,
            "time/publish_s": published - trained,
            "time/checkpoint_s": time.monotonic() - published,
            "time/step_s": time.monotonic() - asked,
            "weights/bytes": size,
            "checkpoint/failed": failed,
            "tokens/total": sum(row.packed_tokens for row in rows),
            "tokens/computed": sum(row.input_ids.numel() for row in rows),
        })  # fmt: skip

    def _rows(self, reply: StepReply) -> list[PackedRow]:
        policy, channels = self.policy, self.config.channels
        found = [documents_of(batch, policy.vocabulary) for batch in reply.micro_batches]
        lora = self.config.trainer.lora
        in_row = teachers_in_row(
            found,
            channels,
            self.read_cost,
            share=policy.shares_prefixes,
            dropout=lora is not None and lora.dropout > 0,
        )
        options = RowOptions(
            device=self.world.device,
            share=policy.shares_prefixes,
            distil=channels.sdpo.weight > 0,
            prefer=channels.replay_dpo.weight > 0,
        )
        return [
            unpack(documents, options, teacher_in_row=wanted) for documents, wanted in zip(found, in_row, strict=True)
        ]

    def _reference(self) -> ReferenceLogprobs | None:
        if not weight_sets(self.config.channels).scores_pairs:
            return None
        return ReferenceLogprobs(self.run_dir.reference, self.folder, self.world)

    def _checkpoint(self, client: StepClient, step: int) -> bool:
        """Whether it worked. A failure in mid-run is said and survived: the checkpoint before stays usable."""
        try:
            self.checkpoints.save(step, self.policy, self.optimizer, self.teacher, client)
        except CheckpointError as error:
            logger.warning("going on without checkpoint %d: %s", step, error)
            return False
        self._saved, self.stop.patience_s = step, LEAVE_S
        return True

    def _save_before_leaving(self, client: StepClient, last: int) -> None:
        """On a stop: a checkpoint of what was trained since the newest one. A collective: all ranks stop together."""
        if last == self._saved or self.config.trainer.checkpoint.stop_timeout_s == 0:
            return
        if self._checkpoint(client, last):
            logger.info("stopped after step %d: its checkpoint is written", last)

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        """Write rank 0's line; figures that differ between ranks are summed (tokens) or the largest (memory)."""
        own = [int(metrics["tokens/total"]), int(metrics["tokens/computed"]), peak_bytes(self.world.device)]
        total, computed, peaks = zip(*worlds.gather_words(own), strict=True)
        metrics |= {"tokens/total": sum(total), "tokens/computed": sum(computed), "memory/peak_bytes": max(peaks)}
        if self.world.first:
            self.metrics.log(step, metrics)
            logger.info(
                "step %d: loss %.4g, reward %s, %d tokens, %.2f s (waited %.2f s)",
                step, metrics["loss/total"], metrics.get("reward/mean"), metrics["tokens/total"],
                metrics["time/step_s"], metrics["time/wait_s"],
            )  # fmt: skip

    def _check_ending(self, finished: RunFinished, last: int) -> None:
        if finished.failed:
            raise RoleFailedError(f"the orchestrator ended the run after step {last}: {finished.reason}")
        logger.info("no batch after step %d: %s", last, finished.reason)

    def _finish(self, client: StepClient, start: int, last: int) -> None:
        """final/ and the last checkpoint. Raises CheckpointError when either cannot be written."""
        if self.outer:
            ended = self.outer.finish()
            if self.world.first:
                self.metrics.log(last, ended)
        with self.outer.global_values() if self.outer else contextlib.nullcontext():
            export(self.policy, self.config, self.folder, self.run_dir.final, self.world, self.publisher.dtype)
        if last > start and last not in self.run_dir.complete_checkpoints():
            self.checkpoints.save(last, self.policy, self.optimizer, self.teacher, client)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 trained to the end, 1 failed (the log says why), 2 wrong configuration, 128 + n on signal n."""
    parser = argparse.ArgumentParser(prog="python -m trainer.train", description="One trainer rank of a prepared run.")
    parser.add_argument("--run-dir", type=Path, required=True, help="run directory that the launcher prepared")
    run_dir = RunDir(parser.parse_args(argv).run_dir)
    end_with_parent()
    stop = StopSignal()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stdout)
    try:
        Trainer(run_dir, load.read_config(run_dir.config), stop).run()
    except Stopped:
        return stop.exit_code
    except ComposerError as error:
        logger.error("%s: %s", type(error).__name__, error)
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        worlds.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
