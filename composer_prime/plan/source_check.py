"""The task sets and the chat template of a plan, loaded for real in another process.

Only the plugins know which settings they take and how many tasks they have, and importing them takes seconds. So the
command itself stays light: it starts the program that its caller names and waits for its answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field

from composer_prime.config import Config
from composer_prime.errors import EnvironmentNotInstalledError
from composer_prime.plan.plan import Plan, eval_rows
from composer_prime.plan.preflight import find_plugin

DEADLINE_S = 300.0
"""How long the other process may take: about ten seconds, and longer on a busy machine."""


Tasks = dict[str, dict[str, int]]
"""Numbers of tasks by source and task set, `train` or `eval`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSources:
    """What loading the task sets told."""

    problems: list[str] = field(default_factory=list)
    """What the workers would refuse."""
    warnings: list[str] = field(default_factory=list)
    tasks: Tasks = field(default_factory=dict)


def check_sources(config: Config, plan: Plan, program: str, *, deadline_s: float = DEADLINE_S) -> None:
    """Add to `plan` what the workers would refuse, warnings and the numbers of tasks.

    `program`: the module that loads task sets (orchestrator/check_sources.py).
    """
    loaded = load_sources(config, program, deadline_s=deadline_s)
    plan.problems.extend(problem for problem in loaded.problems if problem not in plan.problems)
    plan.notes.extend(loaded.warnings)
    rows = [("", f"{name}: {_counts(tasks)}") for name, tasks in loaded.tasks.items()]
    place = next(index for index, (label, _) in enumerate(plan.rows) if label == "sources")
    plan.rows[place + 1 : place + 1] = rows
    place = next(index for index, (label, _) in enumerate(plan.rows) if label == "eval")
    plan.rows[place] = eval_rows(config, held_out_tasks(config, loaded.tasks))[0]


def held_out_tasks(config: Config, tasks: Tasks) -> dict[str, int]:
    """Return how many held-out tasks an evaluation plays, by source, as the orchestrator does: no more than it has."""
    wanted = config.orchestrator.eval.tasks
    available = {name: counts.get("eval") for name, counts in tasks.items()}
    return {name: wanted if count is None else min(wanted, count) for name, count in available.items()}


def load_sources(config: Config, program: str, *, deadline_s: float = DEADLINE_S) -> LoadedSources:
    """Load the task sets in another process. Loads none for a remote orchestrator."""
    installed = [source for source in config.orchestrator.source if _installed(source.taskset, source.harness)]
    if config.orchestrator.address is not None or not installed:
        return LoadedSources()
    orchestrator = config.orchestrator.model_copy(update={"source": installed})
    words = [sys.executable, "-m", program]
    text = config.model_copy(update={"orchestrator": orchestrator}).model_dump_json()
    if sys.stderr.isatty():
        print("loading the task sets in another process ...", file=sys.stderr)
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    try:
        done = subprocess.run(
            words, input=text, capture_output=True, text=True, timeout=deadline_s, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        note = f"task sets and chat template are not checked: loading them took longer than {deadline_s:g} s"
        return LoadedSources(warnings=[note])
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return LoadedSources(problems=[f"the task sets cannot be loaded (status {done.returncode}): {last}"])
    return LoadedSources(**json.loads(done.stdout.strip().splitlines()[-1]))


def _counts(tasks: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name} tasks" for name, count in tasks.items())


def _installed(taskset: dict, harness: dict) -> bool:
    """Return whether both plugins are there. `preflight` has a sentence for those that are not."""
    try:
        return bool(find_plugin("taskset", taskset, "") and find_plugin("harness", harness, ""))
    except EnvironmentNotInstalledError:
        return False
