"""Load everything that a run's environment workers load: `python -m orchestrator.check_sources < config.json`.

`trainer --dry-run`, `orchestrator --dry-run` and `composer plan` start it (plan/source_check.py), because
only the plugins know their settings, and importing verifiers takes seconds. Its last line on stdout is a JSON object:
`problems` and `warnings`, sentences, and `tasks`, the number of tasks by source and task set.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from composer_prime.config import Config
from composer_prime.config.load import make_importable
from composer_prime.errors import ComposerError, ConfigError
from composer_prime.model_source import model_ready, resolve_model
from composer_prime.plan.preflight import check_chat_template
from composer_prime.run.process import end_with_parent
from orchestrator.chat_template import RENDER_ERRORS, chat_folder
from orchestrator.tasks.sources import source_spec
from orchestrator.workers.pool import check_runtimes

if TYPE_CHECKING:
    from renderers import RendererConfig
    from renderers.base import Message, ToolSpec

_CONVERSATION: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
]
_TOOL: ToolSpec = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}


def open_sources(config: Config, scratch: Path) -> tuple[list[str], dict[str, dict[str, int]], list[str]]:
    """Return what is wrong, the number of tasks by source and task set, and warnings. `scratch`: an empty folder."""
    from orchestrator.workers.verifiers_adapter import Environment
    from orchestrator.workers.worker import overlap, runtime_types

    problems: list[str] = []
    warnings: list[str] = []
    renderer = None
    try:
        renderer = _check_chat(config, scratch)
    except ComposerError as error:
        problems.append(str(error))
    tasks: dict[str, dict[str, int]] = {}
    for source in config.orchestrator.source:
        spec = source_spec(source, model_path="", renderer=None, max_context=config.model.max_context)
        environments: dict[str, Environment] = {}
        for name in spec.tasksets:
            try:
                environments[name] = Environment(spec, name, renderer)
            except Exception as error:
                kind = "" if isinstance(error, ComposerError) else f"{type(error).__name__}: "
                text = f"{kind}{error}"
                problems.append(text if source.name in text else f"source {source.name!r}, {name}: {text}")
                break  # The other task set is this one with other settings, and would fail alike.
            tasks.setdefault(source.name, {})[name] = environments[name].num_tasks
        if (sentence := overlap(environments)) is not None:
            warnings.append(f"source {source.name!r}: {sentence}")
        runtimes = {kind for environment in environments.values() for kind in runtime_types(environment)}
        if config.orchestrator.address is None:
            try:  # The type that the source names was checked before (composer_prime/plan/preflight.py).
                check_runtimes(source.name, runtimes - {source.runtime.type})
            except ConfigError as error:
                problems.append(str(error))
    return problems, tasks, warnings


def _check_chat(config: Config, scratch: Path) -> RendererConfig | None:
    """Render as a worker would. Return the renderer's configuration, or None without the model's folder."""
    from orchestrator.chat_renderer import build_renderer

    try:
        if model_ready(config.model.path) is not None:
            return None
        folder = resolve_model(config.model.path)
    except ComposerError:
        return None
    check_chat_template(config, folder)
    folder = chat_folder(folder, config.model.chat_template, scratch)
    chosen, renderer = build_renderer(str(folder), config.model.renderer)
    for tools in (None, [_TOOL]):
        try:
            renderer.render_ids(_CONVERSATION, tools=tools, add_generation_prompt=True)
        except RENDER_ERRORS as error:
            what = "a conversation with a tool" if tools else "a conversation"
            raise ConfigError(
                f"the chat template of {config.model.path!r} cannot render {what}: {error}; repair it, or set "
                "model.chat_template to another"
            ) from None
    return chosen


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle.
    end_with_parent(signal.SIGKILL)
    config = Config.model_validate_json(sys.stdin.read())
    make_importable(config)
    with tempfile.TemporaryDirectory(prefix="composer-check-") as scratch:
        problems, tasks, warnings = open_sources(config, Path(scratch))
    print(json.dumps({"problems": problems, "tasks": tasks, "warnings": warnings}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
