"""The whole configuration of one cluster, and the rules that hold between its sections.

Each section lives in its own module and checks itself; what two sections must agree on is checked here.
"""

from __future__ import annotations

from pydantic import model_validator
from pydantic_config import BaseConfig

from composer_prime.config.channels import ChannelsConfig
from composer_prime.config.diloco import DilocoConfig
from composer_prime.config.diloco_waits import check_waits
from composer_prime.config.inference import InferenceConfig
from composer_prime.config.model import ModelConfig
from composer_prime.config.monitor import MonitorConfig
from composer_prime.config.orchestrator import OrchestratorConfig
from composer_prime.config.run import RunConfig
from composer_prime.config.teachers import TeachersConfig
from composer_prime.config.trainer import TrainerConfig
from composer_prime.families import UNKNOWN, family_of


class Config(BaseConfig):
    """composer-prime: asynchronous reinforcement learning of agentic coders."""

    run: RunConfig
    """Name, length and folder of the run."""
    model: ModelConfig
    """The policy that is trained."""
    inference: InferenceConfig = InferenceConfig()
    """Nodes that sample from the policy."""
    orchestrator: OrchestratorConfig
    """Environments, groups, buffer, evaluation."""
    trainer: TrainerConfig = TrainerConfig()
    """FSDP2 ranks, optimizer, checkpoints."""
    channels: ChannelsConfig = ChannelsConfig()
    """The loss."""
    teachers: TeachersConfig = TeachersConfig()
    """Models that are asked what they would have done, for channel 3's pairs."""
    diloco: DilocoConfig | None = None
    """Other clusters that train the same model; without it this cluster trains alone."""
    monitor: MonitorConfig = MonitorConfig()
    """Where metrics go besides metrics.jsonl."""

    @model_validator(mode="after")
    def _joint_run(self) -> Config:
        if self.diloco is None:
            return self
        self.run._peer = self.diloco.peer_id
        period, steps = self.diloco.sync_every, self.run.max_steps
        if steps % period:
            raise ValueError(
                f"run.max_steps is {steps}, but diloco.sync_every is {period}: the last {steps % period} step(s) would "
                f"reach no other cluster; use max_steps = {steps // period * period or period}"
            )
        check_waits(self.diloco, self.trainer, self.orchestrator)
        return self

    @model_validator(mode="after")
    def _context_fits(self) -> Config:
        sampling, context = self.orchestrator.sampling, self.model.max_context
        if sampling.max_tokens >= context:
            raise ValueError(
                f"orchestrator.sampling.max_tokens is {sampling.max_tokens}, but model.max_context is {context}: "
                "a turn must leave room for its prompt; lower max_tokens or raise max_context"
            )
        if self.trainer.micro_batch_tokens < context:
            raise ValueError(
                f"trainer.micro_batch_tokens is {self.trainer.micro_batch_tokens}, but a sample may be "
                f"model.max_context = {context} tokens long: set trainer.micro_batch_tokens >= {context}"
            )
        return self

    @model_validator(mode="after")
    def _trained_on_the_whole_distribution(self) -> Config:
        sampling = self.orchestrator.sampling
        if self.run.max_steps and (sampling.top_p < 1 or sampling.top_k > 0):
            raise ValueError(
                f"orchestrator.sampling.top_p is {sampling.top_p} and top_k is {sampling.top_k}, but run.max_steps is "
                f"{self.run.max_steps}: the trainer's policy is the full softmax, and its ratio to a truncated "
                "sampler is biased on every token; set top_p = 1 and top_k = 0 (an evaluation-only run may truncate)"
            )
        return self

    @model_validator(mode="after")
    def _own_rollouts_have_a_family(self) -> Config:
        teachers = self.teachers
        unknown = family_of(self.model.path) == UNKNOWN and teachers.assume_family is None
        if teachers.online and teachers.states is None and unknown:
            raise ValueError(
                f"teachers.online replays this run's rollouts, but no rule knows the family of model.path = "
                f"{self.model.path!r}, and a teacher must never judge its own family: set teachers.assume_family"
            )
        return self

    @model_validator(mode="after")
    def _evaluation_only(self) -> Config:
        if self.run.max_steps == 0 and self.orchestrator.eval.every_steps == 0:
            raise ValueError(
                "run.max_steps is 0 (evaluation only), but orchestrator.eval.every_steps is 0 (no evaluation): "
                "set orchestrator.eval.every_steps >= 1 or run.max_steps >= 1"
            )
        return self

    @model_validator(mode="after")
    def _something_to_evaluate(self) -> Config:
        every = self.orchestrator.eval.every_steps
        if every and not any(source.eval_taskset for source in self.orchestrator.source):
            raise ValueError(
                f"orchestrator.eval.every_steps is {every}, but no [[orchestrator.source]] has an eval_taskset "
                "(held-out tasks): add one to a source, or set orchestrator.eval.every_steps = 0"
            )
        return self

    @model_validator(mode="after")
    def _channels_have_what_they_learn_from(self) -> Config:
        sdpo, replay = self.channels.sdpo.weight, self.channels.replay_dpo.weight
        per_step = self.orchestrator.preferences.pairs_per_step
        if sdpo and self.orchestrator.hints is None:
            raise ValueError(
                f"channels.sdpo.weight is {sdpo:g}, but there is no [orchestrator.hints] table, so no turn would get a "
                "hint to learn from: add the table (it may be empty), or set channels.sdpo.weight = 0"
            )
        if bool(replay) != bool(per_step):
            raise ValueError(
                f"channels.replay_dpo.weight is {replay:g} and orchestrator.preferences.pairs_per_step is {per_step}: "
                "channel 3 needs both above 0, or both 0"
            )
        return self

    @model_validator(mode="after")
    def _warmup_ends(self) -> Config:
        warmup, steps = self.trainer.schedule.warmup_steps, self.run.max_steps
        if steps and warmup >= steps:
            raise ValueError(
                f"trainer.schedule.warmup_steps is {warmup}, but run.max_steps is {steps}: the learning rate would "
                f"never reach its peak; set warmup_steps < {steps}"
            )
        return self

    @model_validator(mode="after")
    def _concurrency_covers_a_group(self) -> Config:
        ceiling, group = self.orchestrator.max_concurrent, self.orchestrator.group_size
        if ceiling < group:
            raise ValueError(
                f"orchestrator.max_concurrent is {ceiling}, but one group has orchestrator.group_size = {group} "
                f"rollouts: set max_concurrent >= {group}"
            )
        return self
