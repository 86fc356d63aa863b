"""The plan of a run: what would start where, what a step is, how much memory and disk it takes.

Read `build_plan` first. The rows come from here, the problems from preflight.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from composer_prime.config import Config
from composer_prime.config.hints import HintsConfig
from composer_prime.console import bulleted, fitted, gib, pluralize
from composer_prime.errors import ConfigError
from composer_prime.host import Machine, Placement, free_bytes, this_machine, uses_cuda
from composer_prime.import_path import as_parts
from composer_prime.plan.check_run_dir import Starter, folder_state
from composer_prime.plan.footprint import (
    CHECKPOINT_BYTES_PER_S,
    ModelShape,
    Need,
    checkpoint_bytes,
    disk_bytes,
    node_need,
    orchestrator_need,
    rank_need,
)
from composer_prime.plan.preflight import Findings, check_start
from composer_prime.run.run_dir import RunDir
from composer_prime.traces import cost_line

Rows = list[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    rows: Rows
    """(label, text) in order; an empty label continues the row above."""
    problems: list[str]
    """Why the run cannot start here."""
    notes: list[str]

    def text(self, width: int | None = None) -> str:
        """Return the plan as printed, wrapped at `width` characters, if given."""
        lines = [fitted(f"{label:<9} {text}", 10, width) for label, text in self.rows]
        lines += [f"{'note':<9} {note}" for note in self.notes]
        if self.problems:
            keep = "keeps" if len(self.problems) == 1 else "keep"
            lines += ["", f"{pluralize(len(self.problems), 'problem')} {keep} this run from starting here:"]
            lines.append(bulleted(self.problems))
        return "\n".join(lines)


def build_plan(config: Config, machine: Machine | None = None, *, starter: Starter | None = "launcher") -> Plan:
    """Check `config` against this machine (or `machine`) and describe a run of it.

    `starter` checks the run's folder. None is for a machine elsewhere, of which memory and disk are unknown.
    """
    machine = machine or this_machine()
    findings = check_start(config, gpus=len(machine.gpus), starter=starter)
    rows = [*_run(config), *_model(config, findings), *_roles(config, findings)]
    rows += [*_step(config), *_evaluation(config)]
    rows += _teachers(config, findings)
    if findings.shape is None:
        rows.append(("memory", f"no estimate of memory and disk: {findings.unknown_shape}"))
    else:
        here = starter is not None
        rows += _memory(config, findings.shape, machine, findings, here=here)
        rows += _disk(config, findings.shape, machine, findings, here=here)
    return Plan(rows=rows, problems=findings.problems, notes=findings.notes)


def _run(config: Config) -> Rows:
    run = config.run
    shares = [
        (source.name, f"{source.weight:g}" if source.weight else "evaluated only")
        for source in config.orchestrator.source
    ]
    sources = ", ".join(f"{name} ({share})" for name, share in shares)
    length = f"{run.max_steps} steps" if run.max_steps else "evaluation only"
    state = folder_state(RunDir(config.run_directory))
    return [
        ("run", f"{run.name}: {length}, seed {run.seed}, in {config.run_directory} ({state})"),
        ("sources", sources or "none"),
        *_loss(config),
    ]


def _loss(config: Config) -> Rows:
    sdpo, replay, sft = config.channels.sdpo, config.channels.replay_dpo, config.channels.sft
    terms = []
    if config.orchestrator.groups_per_step or not sft.weight:  # else there is no policy loss
        terms.append(_policy_text(config))
    if sdpo.weight and config.orchestrator.hints is not None:
        terms.append(f"{sdpo.weight:g} x sdpo, teacher {sdpo.teacher.kind}, {_hints_text(config.orchestrator.hints)}")
    if replay.weight:
        pairs = config.orchestrator.preferences.pairs_per_step
        terms.append(f"{replay.weight:g} x replay_dpo ({replay.loss}), {pairs} pairs per step")
    terms += [f"{own.weight:g} x {own.name}" for own in config.channels.own if own.weight]
    if sft.weight:
        settings = config.orchestrator.demonstrations
        files = ", ".join(map(str, settings.files))
        terms.append(f"{sft.weight:g} x sft on {files}")
    return [("" if number else "loss", f"+ {term}" if number else term) for number, term in enumerate(terms)]


def _hints_text(hints: HintsConfig) -> str:
    layers = " then ".join(part.name for part in as_parts(hints.layers))
    return f"hints by {layers}" + (", each kind while it has its licence" if hints.licence is not None else "")


def _policy_text(config: Config) -> str:
    policy = config.channels.policy
    length = f" (divided by {config.completion_length:,} tokens per sequence)"
    divisor = length if policy.denominator == "constant" else ""
    objective = policy.loss.name if policy.loss else policy.objective
    return f"{objective}{divisor}, off-policy correction {policy.correction}"


def _model(config: Config, findings: Findings) -> Rows:
    model, shape = config.model, findings.shape
    if shape is None:
        return [("model", f"{model.path}, context {model.max_context:,}")]
    millions = shape.parameters / 1e6
    size = f"{millions / 1e3:.2f} B" if millions >= 1e3 else f"{millions:.1f} M"
    text = f"{model.path}: {size} parameters, {shape.layers} layers of {shape.hidden}"
    return [("model", f"{text}, vocabulary {shape.vocabulary:,}, context {model.max_context:,}")]


def _roles(config: Config, findings: Findings) -> Rows:
    orchestrator, inference = config.orchestrator, config.inference
    placement = findings.placement
    if orchestrator.address:
        rows = [("roles", f"orchestrator elsewhere, at {orchestrator.address}")]
    else:
        workers = ", ".join(f"{source.workers} x {source.name}" for source in orchestrator.source)
        rows = [("roles", f"orchestrator here: 1 process and its environment workers ({workers or 'none'})")]
    if inference.nodes == 0 and orchestrator.source:
        rows.append(("", f"inference nodes elsewhere: they join at {orchestrator.node_address}"))
    for node in range(inference.nodes):
        devices = _devices(placement.nodes[node] if placement else None, inference.threads)
        rows.append(("", f"inference node-{node} here: engine {inference.engine.name}, {devices}"))
    if placement and placement.shared and inference.engine.name == "vllm":
        shared = "inference and trainer share a GPU: lower inference.vllm.gpu_memory_utilization accordingly"
        findings.notes.append(shared)
    return [*rows, ("", _trainer(config, placement))]


def _trainer(config: Config, placement: Placement | None) -> str:
    trainer = config.trainer
    if config.run.max_steps == 0:
        return "no trainer: run.max_steps is 0"
    if trainer.address:
        return f"trainer ranks elsewhere, at {trainer.address}"
    devices = _devices(placement.ranks if placement else None, trainer.threads)
    sizes = {
        "replicas": trainer.replicas,
        "ranks a row": trainer.context_parallel,
        "ranks for the experts": trainer.expert_parallel,
    }
    meshes = "".join(f", {size} {what}" for what, size in sizes.items() if size > 1)
    return f"trainer here: {pluralize(trainer.ranks, 'rank')}, FSDP2{meshes}, {devices}"


def _devices(gpus: tuple[int, ...] | None, threads: int) -> str:
    if gpus is None:
        return "GPUs that this machine lacks"
    return f"GPU {', '.join(map(str, gpus))}" if gpus else f"CPU, {pluralize(threads, 'thread')}"


def _step(config: Config) -> Rows:
    if config.run.max_steps == 0:
        return []
    orchestrator = config.orchestrator
    conversations = pluralize(orchestrator.demonstrations.rows_per_step, "recorded conversation")
    if orchestrator.groups_per_step == 0:
        return [("step", f"{conversations}, no rollouts")]
    rollouts = orchestrator.groups_per_step * orchestrator.group_size
    max_tokens = rollouts * config.model.max_context
    readers = config.trainer.ranks // config.trainer.context_parallel
    per_rank = -(-max_tokens // (config.trainer.micro_batch_tokens * readers))
    staleness = f"(max_staleness {orchestrator.max_staleness})"
    versions = f"step N trains on policy versions N-{1 + orchestrator.max_staleness} and newer {staleness}"
    if config.diloco is not None:
        sweep = f"a policy version is a full sweep, {config.diloco.sync_every} steps"
        versions = f"{sweep}; steps use the newest {staleness}"
    groups = f"{orchestrator.groups_per_step} groups x {orchestrator.group_size} rollouts = {rollouts} rollouts"
    rows = pluralize(per_rank, "micro-batch", "micro-batches")
    tokens = f"at most {max_tokens:,} tokens in {rows} of {config.trainer.micro_batch_tokens:,} a rank"
    return [
        ("step", f"{groups}; {tokens}"),
        ("", f"{versions}; {config.run.max_steps * rollouts:,} rollouts in the whole run"),
    ]


def _evaluation(config: Config) -> Rows:
    evaluation = config.orchestrator.eval
    names = [source.name for source in config.orchestrator.source if source.eval_taskset]
    files = ", ".join(map(str, config.orchestrator.demonstrations.eval_files))
    held_out = [f"{files}: loss and token accuracy"] if files else []
    if names and evaluation.every_steps:
        once = config.run.max_steps == 0
        when = "once" if once else f"before step 1, every {evaluation.every_steps} steps, at the end"
        passes = ", ".join(f"pass@{k}" for k in evaluation.pass_k)
        tasks = f"{evaluation.tasks} tasks of each of {', '.join(names)}"
        held_out.insert(0, f"{tasks}; {evaluation.samples} samples, {passes}; {when}")
    elif not files:
        held_out = ["none (orchestrator.eval.every_steps is 0 or no source has an eval_taskset)"]
    return [("" if number else "eval", text) for number, text in enumerate(held_out)]


def _teachers(config: Config, findings: Findings) -> Rows:
    teachers = config.teachers
    if not teachers.teacher:
        return []
    families = ", ".join(f"{teacher.name} ({teacher.known_family})" for teacher in teachers.teacher)
    when = "online" if teachers.online else "for `composer replay`"
    rows = [("teachers", f"{families}; {teachers.voters} votes, {when}")]
    try:
        return [*rows, ("", cost_line(config))]
    except ConfigError as error:
        findings.problems.append(str(error))
        return rows


def _memory(config: Config, shape: ModelShape, machine: Machine, findings: Findings, *, here: bool) -> Rows:
    needs = _needs(config, shape, machine)
    rows: Rows = []
    for count, need in needs:
        times = f" x {count}" if count > 1 else ""
        size = gib(need.host_bytes)
        if need.device_bytes:
            size = f"{gib(need.device_bytes)} GPU + {size}"
        largest = sorted(need.parts.items(), key=lambda part: -part[1])[:4]
        parts = ", ".join(f"{name} {gib(value)}" for name, value in largest if value)
        rows.append(("" if rows else "memory", f"about {size} {need.role}{times} ({parts})"))
        smallest = min(machine.gpus, default=need.device_bytes)
        if need.device_bytes > smallest:
            findings.notes.append(f"{need.role} may need {gib(need.device_bytes)} of a GPU's {gib(smallest)}")
    total = sum(count * need.host_bytes for count, need in needs)
    if not here:
        return [*rows, ("", f"about {gib(total)} of the machine's memory in the worst case")]
    if total > machine.memory_bytes:
        findings.notes.append(
            f"all processes together may need {gib(total)}, this machine has {gib(machine.memory_bytes)}: "
            "lower trainer.micro_batch_tokens, inference.local.max_batch or model.max_context"
        )
    return [*rows, ("", f"about {gib(total)} of this machine's {gib(machine.memory_bytes)} in the worst case")]


def _needs(config: Config, shape: ModelShape, machine: Machine) -> list[tuple[int, Need]]:
    """Return (number of processes, memory of one) of each role that starts here."""
    gpus = len(machine.gpus)
    needs = [] if config.orchestrator.address else [(1, orchestrator_need(config))]
    if config.inference.nodes:
        cuda = uses_cuda(config.inference.device, gpus)
        gpu_bytes = machine.gpus[0] if machine.gpus else None
        node = node_need(config, shape, cuda=cuda, device_bytes=gpu_bytes)
        needs.append((config.inference.nodes, node))
    if config.run.max_steps and not config.trainer.address:
        rank = rank_need(config, shape, cuda=uses_cuda(config.trainer.device, gpus))
        needs.append((config.trainer.ranks, rank))
    return needs


def _disk(config: Config, shape: ModelShape, machine: Machine, findings: Findings, *, here: bool) -> Rows:
    parts = disk_bytes(config, shape, cuda=bool(machine.gpus))
    need, free = sum(parts.values()), free_bytes(config.run_directory)
    listed = ", ".join(f"{name} {gib(value)}" for name, value in parts.items())
    limit_s, size = config.trainer.checkpoint.stop_timeout_s, checkpoint_bytes(config, shape)
    if config.run.max_steps and limit_s and size > limit_s * CHECKPOINT_BYTES_PER_S:
        seconds = size / CHECKPOINT_BYTES_PER_S
        findings.notes.append(
            f"trainer.checkpoint.stop_timeout_s is {limit_s:g}, but a checkpoint of about {gib(size)} takes "
            f"{seconds:.0f} s where the disk takes 0.5 GB/s: raise it, or leave it out, or a stop may lose steps"
        )
    if not here:
        return [("disk", f"about {gib(need)} ({listed})")]
    if need > free:
        findings.problems.append(
            f"checkpoints, weight store and final model need about {gib(need)}, but {config.run.output_dir} has "
            f"{gib(free)} free: set run.output_dir to a larger disk, or lower trainer.checkpoint.keep "
            f"({config.trainer.checkpoint.keep}) or trainer.weights.keep ({config.trainer.weights.keep})"
        )
    return [("disk", f"about {gib(need)} ({listed}); {gib(free)} free")]
