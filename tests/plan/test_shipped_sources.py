"""Every shipped file resolves and opens: its task sets, its harnesses and its chat template."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer_prime.config.load import resolve
from composer_prime.errors import ComposerError
from composer_prime.model_source import model_ready, resolve_model
from composer_prime.plan.sandboxes import why_not_started
from orchestrator.chat_renderer import build_renderer
from orchestrator.chat_template import chat_folder
from orchestrator.tasks import source_spec

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.toml"))
SIZES: dict[str, dict[str, int | None]] = {}
"""Tasks of the task sets of each source that was opened."""
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}]
TOOL = dict(name="add", description="Adds.", parameters={"type": "object", "properties": {"a": {"type": "integer"}}})


def renderer_of(config, folder: Path):
    """Return how a worker renders, having rendered a conversation with and without a tool; None without a model."""
    try:
        if model_ready(config.model.path) is not None:
            return None
        model = resolve_model(config.model.path)
    except ComposerError:
        return None
    chosen, renderer = build_renderer(
        str(chat_folder(model, config.model.chat_template, folder)), config.model.renderer
    )
    for tools in (None, [TOOL]):
        renderer.render_ids(TALK, tools=tools, add_generation_prompt=True)
    return chosen


@pytest.mark.process  # transformers starts one when it is imported
@pytest.mark.parametrize("name", SHIPPED)
def test_the_task_sets_of_every_shipped_file_load(name, tmp_path):
    # Through the code of the environment workers. Each source has enough tasks for training, and for evaluation where
    # that is on; no held-out task is a training task. A file whose tasks a command makes names that command.
    from orchestrator.workers.verifiers_adapter import Environment
    from orchestrator.workers.worker import overlap

    over = [] if name == "diloco/two-clusters.toml" or not name.startswith(("teachers/", "diloco/")) else ["a4.toml"]
    files = [word for file in (*over, name) for word in ("@", str(CONFIGS / file))]
    config = resolve([*files, "--run.output_dir", str(tmp_path / "out")])
    renderer = renderer_of(config, tmp_path)
    for source in config.orchestrator.source:
        spec = source_spec(source, config, Path())
        if "/code-" in name or name == "code/native.toml":
            with pytest.raises(Exception, match="composer tasks make"):
                Environment(spec, "train", renderer)
            continue
        if repr(spec) not in SIZES:  # Files of one ladder have equal sources.
            opened = {taskset: Environment(spec, taskset, renderer) for taskset in spec.tasksets}
            assert overlap(opened) is None
            SIZES[repr(spec)] = {taskset: environment.num_tasks for taskset, environment in opened.items()}
        wanted = {"train": config.orchestrator.groups_per_step}
        if config.orchestrator.eval.every_steps:
            wanted["eval"] = config.orchestrator.eval.tasks
        for taskset, num_tasks in SIZES[repr(spec)].items():
            assert num_tasks is None or num_tasks >= wanted.get(taskset, 0)


# A message of bwrap and its remedy are two sentences.
def test_why_a_sandbox_does_not_start():
    assert "no user namespaces. bubblewrap needs" in why_not_started("bwrap: no user namespaces.")
