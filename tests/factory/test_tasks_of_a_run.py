"""Harder tasks that a run makes of what the factory left over."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from composer_prime.cli.tasks_command import main
from composer_prime.config.orchestrator import OrchestratorConfig
from composer_prime.errors import ConfigError
from orchestrator.environments.code.task import read_tasks, tree_of
from orchestrator.tasks.making import TaskMaker, task_makers
from orchestrator.tasks.sources import Sources
from tests.factory.package_made import write_package

FRONTIER = "orchestrator.tasks.curriculum:Frontier"


def config(stock: Path, curriculum: str = FRONTIER) -> OrchestratorConfig:
    source = {
        "name": "code",
        "taskset": {"id": "orchestrator.environments.code", "folder": str(stock), "split": "all"},
        "runtime": {"type": "subprocess"},
        "making": {"mastered": 0.5, "tasks": 2, "timeout_s": 400.0},
    }
    return OrchestratorConfig.model_validate({"source": [source], "curriculum": {"import_path": curriculum}})


def makers(stock: Path, run_dir: Path, *, whole: bool = True, **options: Any) -> list[TaskMaker]:
    settings = config(stock, **options)
    sources = Sources(settings, seed=0, num_tasks={"code": 2}, difficulty={"code": [0.2, 0.3]})
    return task_makers(settings.source, sources, run_dir, whole=whole)


# A source without a folder of the factory, another curriculum, and a part of the tasks are refused with the remedy.
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "composer tasks make"),
        ({"curriculum": "orchestrator.tasks.curriculum:Shuffled"}, "Shuffled.*Frontier"),
        ({"whole": False}, "task_shard"),
    ],
)
def test_what_cannot_make_tasks_is_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        makers(tmp_path, tmp_path / "run", **options)


# A round begins when enough is mastered. One that fails ends the making of tasks with an event, and not the run.
async def test_a_failed_round_is_an_event(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "making.jsonl").touch()
    maker = replace(makers(tmp_path, tmp_path / "run")[0], look_s=0.01)
    waiting = asyncio.create_task(maker.run())
    await asyncio.sleep(0.1)
    assert not waiting.done() and not caplog.records
    maker.curriculum.load_state({"drawn": 0, "rates": {"0": [1.0] * 4, "1": [1.0] * 4}})
    await asyncio.wait_for(waiting, timeout=100)
    (record,) = caplog.records
    assert "no more tasks are made" in record.getMessage() and "tasks.jsonl" in record.__dict__["event_cause"]


# Rounds make what the first command left over, none of its tasks again, and leave its folder alone. What was taken in
# stays where it is, as the workers' index has it. At the end of the stock a round says so.
@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_run_makes_what_was_left_over(tmp_path: Path) -> None:
    stock, run_dir = tmp_path / "stock", tmp_path / "run"
    words = ["--limit", "2", "--min-lines", "2", "--jobs", "1", "--runtime", "subprocess"]
    assert main(["make", str(write_package(tmp_path / "shapes_made")), "-o", str(stock), *words]) == 0
    before = {path: path.read_bytes() for path in stock.rglob("*") if path.is_file()}
    (maker,) = makers(stock, run_dir)
    curriculum = maker.curriculum
    assert asyncio.run(maker.round())
    first = list(read_tasks(maker.folder))
    assert first and curriculum.num_tasks == 2 + len(first)
    assert curriculum.difficulty == [0.2, 0.3, *(task.difficulty for task in first)]
    while asyncio.run(maker.round()):
        assert len(curriculum.difficulty) < 40
    taken = list(read_tasks(maker.folder))
    assert taken[: len(first)] == first
    assert curriculum.num_tasks == 2 + len(taken) == len({task.id for task in [*read_tasks(stock), *taken]})
    assert all(tree_of(task, maker.folder / "trees") for task in taken)
    assert {path: path.read_bytes() for path in stock.rglob("*") if path.is_file()} == before
