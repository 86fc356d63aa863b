"""This trainer's side: the launcher on a configuration made from the plan, as `trainer @ file.toml` runs it.

Time zero is when the environment workers have loaded and the node is attached. Rollouts are sampled from then on.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

from benchmarks.rl_throughput_sides.plan import BETAS, EPS, MAX_GRAD_NORM, MODEL, SOURCE, Plan
from benchmarks.rl_throughput_sides.processes import environment, start, watch
from benchmarks.rl_throughput_sides.report import SideResult
from composer_prime.run.keys import RunKeys
from composer_prime.run.run_dir import RunDir, read_run_id
from composer_prime.run.weights import WeightStore, open_signed

TASKSETS = {
    "single-turn": "benchmarks.rl_throughput_sides.first_call",
    "multi-turn": "orchestrator.environments.toolsmith",
}


def configuration(plan: Plan, folder: Path) -> str:
    """The run's TOML: configs/a1.toml's settings, the plan's sizes, nothing that TRL does not do as well."""
    return f"""
[run]
name = "ours"
output_dir = "{folder}"
max_steps = {plan.steps}
seed = {plan.seed}

[model]
path = "{MODEL}"
max_context = {plan.max_context}

[inference]
engine = "local"
dtype = "float32"

[orchestrator]
groups_per_step = {plan.groups}
group_size = {plan.group_size}
max_staleness = 1
max_concurrent = {3 * plan.rollouts // 2}
filter_zero_advantage = false

[orchestrator.sampling]
temperature = 1.0
max_tokens = {plan.max_tokens}

[[orchestrator.source]]
name = "{SOURCE}"
taskset = {{ id = "{TASKSETS[plan.case]}", split = "train", num_tasks = {plan.num_tasks}, seed = {plan.seed}, \
max_difficulty = {plan.max_difficulty} }}
harness = {{ id = "orchestrator.environments.tool_loop", max_turns = {plan.max_turns} }}

[trainer]
device = "cpu"
compute_dtype = "float32"

[trainer.optim]
type = "adamw"
lr = {plan.lr}
betas = [{BETAS[0]}, {BETAS[1]}]
eps = {EPS}
weight_decay = 0.0
max_grad_norm = {MAX_GRAD_NORM}

[trainer.checkpoint]
every_steps = 0

[trainer.weights]
keep = {plan.steps + 2}

[channels.policy]
objective = "dr_grpo"
correction = "dppo"
max_completion_length = {plan.max_completion}

[monitor]
"""


class _Started:
    """Notices when the run can begin to sample."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self.at: float | None = None
        self._looked = time.time()

    def look(self) -> None:
        """Sets `at` to the last look at which it was not yet so: never later than the truth."""
        if self.at is None and self._sampling():
            self.at = self._looked
        self._looked = time.time()

    def _sampling(self) -> bool:
        log = self._run_dir.log("node-0")
        return self._run_dir.journal.is_dir() and log.is_file() and "attached to run" in log.read_text(errors="replace")


def run(plan: Plan, folder: Path, timeout_s: float) -> SideResult:
    """Raises SideFailedError."""
    folder.mkdir(parents=True)
    file, log = folder / "ours.toml", folder / "ours.log"
    file.write_text(configuration(plan, folder))
    run_dir = RunDir(folder / "ours")
    started, born = _Started(run_dir), time.time()
    argv = [str(Path(sys.executable).with_name("trainer")), "@", str(file)]
    process = start(argv, plan.cores, log, environment())
    watch([process], [log], timeout_s=timeout_s, tick=started.look)
    began = started.at or born
    lines = [line for line in _lines(run_dir) if line["role"] == "trainer" and "time/step_s" in line]
    return SideResult(
        how="launcher, orchestrator, environment worker, node (1 thread), trainer (1 thread)",
        start_s=began - born,
        seconds=[line["time"] - began for line in lines],
        folders={step: model_folder(plan, run_dir, step, folder / f"step_{step}") for step in plan.points},
    )


def _lines(run_dir: RunDir) -> list[dict]:
    return [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]


def model_folder(plan: Plan, run_dir: RunDir, version: int, target: Path) -> Path:
    """The weights of a version from the run's weight store, as a folder that transformers loads."""
    store, keys = WeightStore(run_dir.weights), RunKeys(run_dir.keys)
    manifest = open_signed(store.manifest(version), keys.verifier(), run_id=read_run_id(run_dir))
    pieces = (store.chunk(ref.sha256, 0, ref.size) or b"" for ref in manifest.chunks)
    target.mkdir(parents=True)
    (target / "model.safetensors").write_bytes(b"".join(pieces))
    shutil.copyfile(plan.model / "config.json", target / "config.json")
    return target
