"""What two sections of a configuration must agree on: each rule names both values and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from composer_prime.config.diloco_waits import wrong_waits
from composer_prime.families import UNKNOWN, family_of
from composer_prime.wording import counted

if TYPE_CHECKING:
    from composer_prime.config.root import Config


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
            f"{counted(steps % period, 'step')} would reach no other cluster; use max_steps = "
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
