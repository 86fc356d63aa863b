"""What only the plugins and the tokenizer know: settings of task sets, numbers of tasks, chat templates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from composer_prime.config import Config
from composer_prime.config.load import resolve
from composer_prime.console import GIB
from composer_prime.host import Machine
from composer_prime.model_source import resolve_model
from composer_prime.plan.plan import build_plan
from composer_prime.plan.sandboxes import probe, why_not_started
from composer_prime.plan.source_check import check_sources
from orchestrator import check_sources as worker_side

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.toml"))
LAPTOP = Machine(cores=2, memory_bytes=16 * GIB, gpus=())


def config_of(name: str, folder: Path, *words: str) -> Config:
    over = [] if name == "diloco/two-clusters.toml" or not name.startswith(("teachers/", "diloco/")) else ["a4.toml"]
    files = [word for file in (*over, name) for word in ("@", str(CONFIGS / file))]
    return resolve([*files, "--run.output_dir", str(folder), *words]).config


@pytest.mark.process
def test_a_plan_refuses_what_the_workers_would(tmp_path):
    # A misspelt setting of a task set fails only in a worker. A missing chat template is known before, and named once.
    model = tmp_path / "model"
    shutil.copytree(resolve_model("tiny"), model)
    for file in ("chat_template.jinja", "renderer.json"):
        (model / file).unlink(missing_ok=True)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    words = ["--model.path", str(model), "--orchestrator.source.0.taskset.splt", "train"]
    config = config_of("a1.toml", tmp_path, *words)
    plan = build_plan(config, LAPTOP)
    assert "has no chat template" in plan.problems[0] and "set model.chat_template" in plan.problems[0]
    check_sources(config, plan, "orchestrator.check_sources")
    assert "source 'toolsmith': taskset.splt: no such setting; did you mean split?" in plan.problems
    assert len(plan.problems) == 2


@pytest.mark.process  # transformers starts one when it is imported
def test_a_sandbox_that_does_not_open_here_is_named(tmp_path, monkeypatch):
    # A source whose runtime is left to its default needs bubblewrap where its code runs: a dry run says so, with the
    # remedy.
    monkeypatch.setenv("PATH", "")
    probe.cache_clear()
    problems, tasks, _ = worker_side.open_sources(config_of("code/a1.toml", tmp_path), tmp_path)
    assert len(problems) == 1 and tasks["micro_code"]["train"] == 4096
    assert "'bubblewrap', which does not work here: the program bwrap is not" in problems[0]
    probe.cache_clear()


@pytest.mark.process
def test_a_plan_counts_the_held_out_tasks_that_there_are(tmp_path):
    # As an evaluation does: no more than the task set holds, with both numbers. Held-out tasks that are training tasks
    # are named, by the sentence of `composer try`.
    words = ["--orchestrator.eval.tasks", "100000", "--orchestrator.source.0.eval_taskset.split", "train"]
    config = config_of("a1.toml", tmp_path, *words)
    plan = build_plan(config, LAPTOP)
    check_sources(config, plan, "orchestrator.check_sources")
    (row,) = [text for label, text in plan.rows if label == "eval"]
    assert row.startswith("toolsmith: 256 tasks (all available; orchestrator.eval.tasks is 100000) x ")
    (note,) = [note for note in plan.notes if "held-out" in note]
    assert note.startswith("source 'toolsmith': 256 of 256 held-out tasks have the prompt of a training task")


@pytest.mark.process
def test_a_check_that_takes_too_long_is_named(tmp_path):
    # The plan says that it has not looked, and for how long it waited.
    config = config_of("a1.toml", tmp_path)
    plan = build_plan(config, LAPTOP)
    check_sources(config, plan, "orchestrator.check_sources", deadline_s=0.01)
    assert plan.problems == [] and "task sets and chat template are not checked" in plan.notes[-1]


@pytest.mark.process  # transformers starts one when it is imported
@pytest.mark.parametrize("name", SHIPPED)
def test_the_task_sets_of_every_shipped_file_load(name, tmp_path):
    # Through the code of the environment workers: the plugins, every task, the harness, and the renderer where the
    # model's files are here. Each source has enough tasks for training, and for evaluation where that is on.
    # A configuration whose tasks a command makes names that command.
    config = config_of(name, tmp_path / "out")
    problems, tasks, warnings = worker_side.open_sources(config, tmp_path)
    if "/code-" in name:
        assert all("tasks.jsonl: no such file; make tasks with `composer tasks make" in each for each in problems)
        assert len(problems) == len(config.orchestrator.source)
        return
    assert [each for each in problems if "does not work here" not in each] == []  # such as bubblewrap
    assert warnings == []  # no held-out task is a training task
    for source in config.orchestrator.source:
        assert (tasks[source.name]["train"] or 0) >= config.orchestrator.groups_per_step
        evaluates = config.orchestrator.eval.every_steps and source.eval_taskset
        assert not evaluates or (tasks[source.name]["eval"] or 0) >= config.orchestrator.eval.tasks


# A message of bwrap and its remedy are two sentences.
def test_why_a_sandbox_does_not_start():
    assert "no user namespaces. bubblewrap needs" in why_not_started("bwrap: no user namespaces.")
