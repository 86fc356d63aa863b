"""Run directories written by hand in the real form, with text that attacks the page."""

import copy
import json
from pathlib import Path
from typing import Any

from composer_prime.monitor.metrics_file import MetricsFile
from composer_prime.run.costs import write_cost
from composer_prime.run.run_dir import RunDir

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
ROLLOUT = json.loads(Path(__file__).with_name("rollout.json").read_text())


def rollout(step: int, group: int | None, number: int, reward: float | None, **more: Any) -> dict[str, Any]:
    """Return a rollout's line. `more` replaces fields."""
    line = copy.deepcopy(ROLLOUT["line"])
    user, call, reply, _ = line["turns"]
    user["text"] = HOSTILE
    if number == 1:
        call["hint"], reply["error"] = "Use a.", reply["text"]
    if reward is None:
        line |= {"status": "failed", "error": ROLLOUT["failure"]}
    return {
        **line,
        "step": step,
        "task_id": f"task-{group if group is not None else number}",
        "group": group,
        "rollout_id": f"g{group:06d}-{number}" if group is not None else f"eval{step}-s-{number}",
        "reward": reward,
        "advantage": None if reward is None else reward - 0.5,
        "parts": {"correct": reward},
        "policy_versions": [step - 1, step],
        "cost": {"prompt_tokens": 20, "sampled_tokens": 6 + number, "cpu_s": 0.1, "wall_s": 0.5},
        **more,
    }


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def make_run(root: Path, *, steps: int = 12, seed: int = 0, learns: bool = True, **settings: Any) -> RunDir:
    """Write a finished run: metrics, rollouts of two groups a step, two evaluations of eight tasks, failures, costs."""
    run_dir = RunDir(root)
    root.mkdir(parents=True)
    (root / "run_id").write_text(f"{root.name}-1\n")
    config = {
        "run": {"name": root.name, "seed": seed, "max_steps": steps},
        "model": {"path": "tiny"},
        "orchestrator": {"source": [{"name": "s", "taskset": {"id": "s"}}], "eval": {"pass_threshold": 1.0}},
        "channels": {"policy": {"objective": "dr_grpo"}, "sdpo": {"weight": 0.5}},
        **settings,
    }
    run_dir.config.write_text(json.dumps(config))
    trainer, orchestrator = MetricsFile(run_dir.metrics, "trainer"), MetricsFile(run_dir.metrics, "orchestrator")
    log_evaluation(run_dir, 0, solved=2)
    orchestrator.log(0, {"waiting_for": "batch 1: 0 of 2 groups", "gateway/nodes": 1, "queue/groups_ready": 0})
    for step in range(1, steps + 1):
        write_lines(run_dir.rollouts(step), batch(step))
        log_step(trainer, step)
        orchestrator.log(step, {"waiting_for": "", "gateway/nodes": 1, "queue/groups_ready": step % 3})
        for name, state in (("node-0", "serving"), ("node-1", "draining" if step > 2 else "loading")):
            orchestrator.log(
                step, {"node": name, "node/state": state, "node/version": step, "node/in_flight": step % 4}
            )
    orchestrator.log(steps, {"problem": f"a rollout failed {HOSTILE}"})
    log_evaluation(run_dir, steps, solved=7 if learns else 2)
    write_lines(run_dir.failed_rollouts, [rollout(1, 2, 0, None)])
    costs = root / "costs.jsonl"
    write_cost(costs, "seconds", role="trainer-0", seconds=12.0, gpu_seconds=0.0)
    write_cost(costs, "hint", endpoint="judge", usd=0.25)
    figures = {"seconds": 60.0, "tokens": 9000, "weight_bytes": 5000, "failures": 0}
    write_cost(costs, "node", node="node-0", usd=0.05, trained_tokens=8000, **figures)
    write_cost(costs, "node", node="node-1", trained_tokens=0, **figures)
    return run_dir


def batch(step: int) -> list[dict[str, Any]]:
    groups = [[rollout(step, 2 * step + group, number, float(number % 2)) for number in range(4)] for group in (0, 1)]
    return [line for group in groups for line in group]


def log_step(trainer: MetricsFile, step: int) -> None:
    figures = {"reward/mean": 0.2 + 0.02 * step, "policy/entropy": 0.5, "policy/mismatch_kl": 1e-4 * step}
    figures |= {"policy/clip_fraction": 0.0, "policy/masked_fraction": 0.01}
    times = {"time/step_s": 4.0, "time/wait_s": 1.0, "time/forward_backward_s": 2.0}
    trainer.log(step, {"loss/total": 0.1, "loss/policy": 0.1, "tokens/trained": 1000, **figures, **times})


def log_evaluation(run_dir: RunDir, step: int, *, solved: int) -> None:
    rows = [rollout(step, None, task, float(task < solved), status="evaluated") for task in range(8)]
    write_lines(run_dir.eval_rollouts(step), rows)
    share = solved / 8
    figures = {"eval/s/reward_mean": share, "eval/s/reward_mean_low": share / 2, "eval/s/reward_mean_high": 1.0}
    MetricsFile(run_dir.metrics, "orchestrator").log(step, {"time/eval_s": 1.0, **figures})
