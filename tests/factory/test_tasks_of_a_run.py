"""Harder tasks that a run makes of what the factory left over."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from composer_prime.config import Config
from composer_prime.config.orchestrator import OrchestratorConfig
from composer_prime.errors import ConfigError
from composer_prime.run.keys import RunKeys
from composer_prime.run.run_dir import RunDir
from composer_prime.wire.node import Generate, Generated
from composer_prime.wire.types import VersionSpan, ints, pack_floats, pack_ints
from orchestrator.coding.factory.making import TaskMaker, task_makers
from orchestrator.coding.task import read_tasks, tree_of
from orchestrator.coding.tasks_command import main
from orchestrator.pipeline import Pipeline
from orchestrator.tasks.sources import Sources
from tests.environments.code_rollouts_made import call
from tests.factory.package_made import write_package
from tests.orchestrator.orch_peers import MODEL, RUN_ID, PeerNode, PeerTrainer

FRONTIER = "orchestrator.tasks.curriculum:Frontier"


def config(stock: Path, curriculum: str = FRONTIER) -> OrchestratorConfig:
    source = {
        "name": "code",
        "taskset": {"id": "orchestrator.coding.code", "folder": str(stock), "split": "all"},
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
    maker.curriculum.load_state(maker.curriculum.state() | {"rates": {"0": [1.0] * 4, "1": [1.0] * 4}})
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


class SolvingNode(PeerNode):
    """Plays every task alike: copies the original over the agent's file, then stops."""

    def __init__(self, endpoint: str, keys: RunKeys, original: Path) -> None:
        super().__init__(endpoint, keys)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
        self._texts = (call("bash", command=f"cp {original} shapes_made/shapes.py"), "Done.")

    def _answer(self, request: Generate) -> None:
        if request.request_id not in self.running:
            return
        self.running.discard(request.request_id)
        is_later = "<tool_response>" in self._tokenizer.decode(ints(request.prompt_ids))
        ids = self._tokenizer.encode(self._texts[is_later] + "<|im_end|>", add_special_tokens=False)
        self._send(
            Generated(
                request_id=request.request_id,
                lease=request.lease,
                token_ids=pack_ints(np.array(ids)),
                logprobs=pack_floats(np.full(len(ids), -0.5)),
                version_spans=[VersionSpan(0, len(ids), self.version)],
                finish_reason="stop",
            )
        )


class WideTrainer(PeerTrainer):
    """Takes sequences as long as those of this task set."""

    async def ask(self, step: int, rank: int, max_tokens: int = 8192) -> Any:
        return await super().ask(step, rank, max_tokens)


# A whole orchestrator, with real workers and sandboxes: once the policy solves what there is, the factory makes harder
# tasks beside the run, and the same workers play them, without a restart.
@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_harder_tasks_are_made_and_played_while_a_run_trains(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    package, stock, run_dir = write_package(tmp_path / "shapes_made"), tmp_path / "stock", RunDir(tmp_path / RUN_ID)
    words = ["--limit", "2", "--min-lines", "2", "--jobs", "1", "--runtime", "subprocess"]
    assert main(["make", str(package), "-o", str(stock), *words]) == 0
    values = config(stock).model_dump(exclude_defaults=True)
    values["source"][0]["taskset"] |= {"monitor": {"policy": "none"}}
    values["source"][0]["timeout_s"] = 900.0
    values |= {"groups_per_step": 1, "group_size": 2, "max_concurrent": 2, "filter_zero_advantage": False}
    values |= {"worker_start_timeout_s": 900.0, "batch_timeout_s": 900.0, "no_node_timeout_s": 900.0}
    values |= {"sampling": {"max_tokens": 200}}
    model = {"path": str(MODEL), "max_context": 4096}
    run = {"name": RUN_ID, "output_dir": str(tmp_path), "max_steps": 500}
    settings = Config.model_validate({"run": run, "model": model, "orchestrator": values})
    with caplog.at_level("INFO"):
        played = asyncio.run(_play_until_one_is_grown(settings, run_dir, package / "shapes_made" / "shapes.py"))
    made = run_dir.root / "tasks" / "code"
    assert {line["reward"] for line in played} == {1.0}
    assert {line["task_id"] for line in played} & _task_ids(stock) and not _task_ids(stock) & _task_ids(made)
    hardest = [max(task.difficulty or 0.0 for task in read_tasks(folder)) for folder in (stock, made)]
    assert hardest[1] >= hardest[0]
    assert any("harder task" in record.getMessage() for record in caplog.records)


async def _play_until_one_is_grown(settings: Config, run_dir: RunDir, original: Path) -> list[dict[str, Any]]:
    """Run until a task that the run made was played. Return the rollouts of all steps."""
    keys = RunKeys.create(run_dir.keys)
    pipeline = Pipeline(settings, run_dir, RUN_ID, MODEL)
    running = asyncio.create_task(pipeline.run())
    try:
        async with asyncio.timeout(1200):
            while not run_dir.endpoints.exists():
                assert not running.done(), running.exception()
                await asyncio.sleep(0.05)
            endpoint = json.loads(run_dir.endpoints.read_text())["step"]
            node = SolvingNode(pipeline.gateway.node_endpoint, keys, original)
            async with node, WideTrainer(run_dir, endpoint) as trainer:
                return await _train_until_one_is_grown(trainer, run_dir)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _train_until_one_is_grown(trainer: PeerTrainer, run_dir: RunDir) -> list[dict[str, Any]]:
    await trainer.attach(0)
    made, played = run_dir.root / "tasks" / "code", list[dict[str, Any]]()
    for step in range(1, 500):
        await trainer.train(step)
        while not run_dir.rollouts(step).exists():  # It is written beside training.
            await asyncio.sleep(0.01)
        played += [json.loads(line) for line in run_dir.rollouts(step).read_text().splitlines()]
        if (made / "tasks.jsonl").is_file() and _task_ids(made) & {line["task_id"] for line in played}:
            return played
    raise AssertionError("no task that the run made was played in 500 steps")


def _task_ids(folder: Path) -> set[str]:
    """Return the ids of a folder's tasks, as rollouts have them."""
    return {f"code/{task.id}" for task in read_tasks(folder)}
