"""Keys and modules that earlier releases had, and what holds now.

In a TOML file or a flag such a key is an error that names what holds now. In the config.json of an older run it is left
out with a warning, so that the run can be read, shown and resumed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

logger = logging.getLogger(__name__)

REMOVED: dict[str, str] = {
    "orchestrator.gateway_processes": "the orchestrator's process serves the gateway's port",
    "inference.max_usd_per_million": "no node is drained for its price: `orchestrator nodes` shows dollars per million "
    "trained tokens, and `orchestrator drain NODE` sends one away",
    "inference.worth_window_s": "`orchestrator nodes` shows trained tokens a second over ten minutes",
    "orchestrator.worker_address": "workers run on the orchestrator's machine; a source's sandboxes may be elsewhere "
    "(orchestrator.source.runtime.type: modal, e2b, prime)",
    "orchestrator.min_group": "a group needs two finished rollouts",
    "orchestrator.behavior.effort": "effort is the number of sampled tokens",
    "orchestrator.behavior.applies_to": "the penalty applies to every rollout",
    "monitor.refresh_s": "the launcher prints a line for each step",
    "monitor.view": "the launcher prints a line for each step",
    "diloco.codec.density": "codecs are fp32, bf16, int8 and int4",
    "diloco.outer.muon_lr": "outer optimizers are nesterov and average; trainer.optim.type = 'muon' stays",
    "teachers.frozen_base": "no base chooses among agreeing answers: the cheapest teacher's is taken",
    "teachers.score": "no base chooses among agreeing answers: the cheapest teacher's is taken",
    "teachers.samples": "each teacher gives one answer to a state",
    "teachers.voting": "teachers are asked one by one until the majority is decided",
    "teachers.kill": "a replay stops when more than a quarter of 20 or more calls failed; teachers.budget has the caps "
    "and teachers.timeout_s the limit of an answer",
    "teachers.retry_base_s": "the first pause before a retry is a second",
    "teachers.retry_max_s": "the longest pause before a retry is 30 s",
    "teachers.local_threads": "a local model has one thread",
    "teachers.local_start_timeout_s": "local models have 180 s to load",
    "teachers.teacher.requests_per_minute": "eight calls of a teacher are in flight at most",
    "teachers.teacher.max_concurrent": "eight calls of a teacher are in flight at most",
    "teachers.max_retries": "a call is tried five times",
    "orchestrator.source.making": "make more tasks with `composer tasks make`, and start a run on them",
    "orchestrator.source.runtime.warm": "each sandbox is opened when it is needed: leave the setting out",
    "inference.relay": "nodes do not serve weights to others: have `orchestrator weights` serve them over HTTP or push "
    "them to a bucket",
    "orchestrator.weights.relays": "nodes do not serve weights to others",
    "channels.policy.ratio_level": "objective = gspo has one ratio a sequence, all others one a token",
    "channels.policy.dual_clip": "a policy loss of your own (channels.policy.import_path) does that",
    "channels.policy.cispo_cap": "the cap of cispo is 5",
    "channels.policy.correction_level": "corrections weigh tokens",
    "channels.policy.mis_cap": "channels.policy.correction is dppo, tis or none",
    "channels.policy.icepop_low": "channels.policy.correction is dppo, tis or none",
    "channels.policy.icepop_high": "channels.policy.correction is dppo, tis or none",
    "channels.policy.opsm_threshold": "channels.policy.correction is dppo, tis or none",
    "channels.policy.dppo_threshold": "the threshold of dppo is 0.2",
    "channels.policy.drift_weight": "a policy loss of your own (channels.policy.import_path) does that",
    "channels.policy.entropy_weight": "examples/own_term.py is a term that rewards entropy ([[channels.own]])",
    "channels.policy.entropy_floor": "a policy loss of your own (channels.policy.import_path) does that",
    "channels.sdpo.is_clip": "the importance weight is capped at 2",
    "channels.sdpo.entropy_weighting": "all tokens of a turn count alike",
    "channels.sdpo.entropy_scale": "all tokens of a turn count alike",
    "channels.sdpo.forward_above_entropy": "channels.sdpo.beta holds for all tokens",
    "channels.sdpo.taid_steps": "the target is the teacher from the first step on",
    "channels.sdpo.taid_start": "the target is the teacher from the first step on",
    "channels.replay_dpo.simpo_margin": "the margin of simpo is 0.5",
    "trainer.reduce_each_micro_batch": "gradients are reduced with each micro-batch on CUDA, once a step on the CPU",
    "trainer.lora.dropout": "adapters have no dropout",
    "channels.policy.kl.ema_rate": "a hundredth of the trained weights enters the reference's average at each step",
    "channels.policy.tis_cap": "the cap of tis is 2",
    "channels.sdpo.teacher.mix": "a trust_region teacher has a twentieth of the live logits",
    "channels.own.schedule": "a term of your own decides in weight_at(step)",
    "channels.sft.schedule": "the weight holds for the whole run",
    "diloco.codec.block": "256 parameters share a scale",
    "diloco.guard": "a delta is rejected at 10 times the usual norm; its weight counts 8 times the median at most",
    "diloco.partition": "blocks take turns (strided); a run with balanced cannot be resumed",
    "inference.local.prefill_tokens": "4096 prompt tokens are computed between two decode steps",
    "orchestrator.audit.timeout_s": "a rollout waits five minutes for audits of new nodes' answers",
    "orchestrator.eval.pass_threshold": "a rollout passes with a reward of 1",
    "orchestrator.gateway_port": "the port is a free one: the run folder's endpoints.json has it",
    "run.stop_grace_s": "a role that must stop has 15 seconds",
    "trainer.orchestrator_timeout_s": "the orchestrator may be silent for two minutes",
    "inference.chunk_timeout_s": "a piece of a weight chunk has half a minute",
    "inference.drain_timeout_s": "a stopping node waits five seconds for its requests",
    "monitor.project": "set the environment variable WANDB_PROJECT",
    "orchestrator.hints.filtered_groups": "SDPO trains the error turns of groups with equal rewards too",
    "orchestrator.hints.timeout_s": "a group waits two minutes for its hints",
    "orchestrator.source.runtime.limits.file_mb": "a file may have 64 MiB",
    "orchestrator.source.runtime.limits.output_kb": "256 KiB of each output are kept",
    "orchestrator.source.runtime.limits.output_mb": "a command is ended at 16 MiB of output",
    "trainer.max_skipped_steps": "a run ends after the fourth step in a row that is not finite",
    "diloco.connect_timeout_s": "the rendezvous has a minute to answer",
    "inference.canary_tolerance": "it follows from inference.dtype: 0.5 nats with bfloat16, else 0.05",
    "inference.vllm.cpu_kv_cache_gib": "give vLLM's own --kv-cache-memory-bytes in inference.vllm.extra_args",
    "inference.vllm.enforce_eager": "give vLLM's own --[no-]enforce-eager in inference.vllm.extra_args",
    "inference.vllm.start_timeout_s": "vLLM has ten minutes to start",
    "inference.vllm.swap_timeout_s": "vLLM has five minutes for a new version",
    "monitor.wandb_mode": "wandb is offline unless the environment variable WANDB_MODE says otherwise",
    "orchestrator.audit.quarantine_s": "a first quarantine takes ten minutes",
    "orchestrator.eval.share": "an evaluation beside training has a quarter of orchestrator.max_concurrent",
    "orchestrator.eval.temperature": "evaluations sample as orchestrator.sampling says",
    "orchestrator.eval.version_timeout_s": "an evaluation waits ten minutes for its weights",
    "orchestrator.hang_timeout_s": "a worker that stands still for a minute is restarted",
    "orchestrator.worker_start_timeout_s": "a worker has ten minutes to start",
    "orchestrator.hints.judge": "name 'judge' in orchestrator.hints.detect: it asks orchestrator.hints.llm, with its "
    "budget; verdicts of earlier runs are asked for again",
    "orchestrator.hints.llm.max_concurrent": "eight calls are in flight at most",
    "orchestrator.hints.llm.rest_s": "after five failures in a row nothing is asked for half a minute",
    "orchestrator.hints.llm.temperature": "the temperature is 0",
    "orchestrator.max_failed_groups": "a run ends after 32 failed groups in a row",
    "orchestrator.max_filtered_share": "an event warns above 90 %",
    "orchestrator.preferences.max_epsilon": "pairs of every epsilon are used; the losses cdpo and robust weigh them",
    "trainer.collective_timeout_s": "a collective operation may take ten minutes",
    "trainer.optim.momentum": "the momentum of muon is 0.95",
    "trainer.weights.anchor_every": "every 20th version is whole",
    "channels.sdpo.schedule.start_step": "the weight is full from step 1 on; end_step ends it",
    "channels.sdpo.schedule.warmup_steps": "the weight is full from step 1 on; end_step ends it",
    "channels.replay_dpo.schedule.start_step": "the weight is full from step 1 on; end_step ends it",
    "channels.replay_dpo.schedule.warmup_steps": "the weight is full from step 1 on; end_step ends it",
}
"""By dotted key, without positions in lists (`orchestrator.source.weight`): what holds now. A section stands for all
its keys."""
MOVED = {
    "orchestrator.environments.code": "orchestrator.coding.code",
    "orchestrator.environments.formats": "orchestrator.coding.formats",
    "orchestrator.environments.micro_code": "orchestrator.coding.micro_code",
}
"""Former name of a package that configurations name -> its present name. What lies below it moved with it."""
_SHOWN = 6


@functools.cache
def present_name(module: str) -> str:
    """Return the present name of a module. Warn once about a former one."""
    for former, present in MOVED.items():
        if module == former or module.startswith(f"{former}."):
            name = present + module.removeprefix(former)
            logger.warning("the module %s is %s now: write the new name", module, name)
            return name
    return module


REMOVED_VALUES = {("inference.local.kv_at_swap", "recompute"): "keep"}
"""(key, value that earlier releases had) -> what an older run's config.json means by it now."""


def what_holds_now(location: Sequence[str | int]) -> str | None:
    """Return what holds in place of the key at `location`; None where it was not removed."""
    names = [str(segment) for segment in location if not str(segment).isdecimal()]
    prefixes = (".".join(names[: depth + 1]) for depth in range(len(names)))
    return next((REMOVED[prefix] for prefix in prefixes if prefix in REMOVED), None)


def without_removed(values: dict[str, Any], origin: str) -> dict[str, Any]:
    """Return the tables of an older run's config.json without removed keys. Warn of those that had a value."""
    dropped: dict[str, None] = {}
    kept = _kept(values, (), dropped)
    if dropped:
        shown = [f"{key} ({what_holds_now(key.split('.'))})" for key in list(dropped)[:_SHOWN]]
        more = f", and {len(dropped) - _SHOWN} more" if len(dropped) > _SHOWN else ""
        logger.warning("%s has settings that this release no longer has: %s%s", origin, ", ".join(shown), more)
    return kept


def _kept(node: Any, location: tuple[str, ...], dropped: dict[str, None]) -> Any:
    if isinstance(node, list):
        return [_kept(element, location, dropped) for element in node]
    if not isinstance(node, dict):
        return node
    kept = {}
    for key, value in node.items():
        where = (*location, key)
        if isinstance(value, str) and (present := REMOVED_VALUES.get((".".join(where), value))) is not None:
            logger.warning("%s = %r is gone: it is %r now", ".".join(where), value, present)
            kept[key] = present
        elif what_holds_now(where) is None:
            kept[key] = _kept(value, where, dropped)
        elif value not in (None, False, 0, "", [], {}):
            dropped[".".join(where)] = None
    return kept
