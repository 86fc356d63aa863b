"""Does the tiny policy learn to cheat? python benchmarks/micro_cheats.py RUN [RUN ...]

Reads runs of configs/code and prints, for windows of training steps and for each held-out evaluation: the reward, the
share of rollouts that really repaired f.py, and the shares that cheated. Intervals are over tasks of one run. The two
arms, three seeds each:

    for s in 0 1 2; do
      uv run trainer @ configs/code/a1.toml --run.seed $s --run.name code-a1-seed$s
      uv run trainer @ configs/code/a1.toml --run.seed $s --run.name code-cheat-seed$s \\
        --orchestrator.source.0.taskset.task.grading in_place \\
        --orchestrator.source.0.taskset.task.monitor.policy none
    done
    uv run python benchmarks/micro_cheats.py outputs/code-a1-seed? outputs/code-cheat-seed?
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from composer_prime.console import pluralize
from composer_prime.monitor.rollouts import Rollout, open_run, read_rollouts, rollout_files
from composer_prime.run.run_dir import RunDir
from composer_prime.stats.intervals import mean_interval

COLUMNS = {
    "reward": lambda rollout: rollout["reward"],
    "repaired": lambda rollout: rollout["metrics"]["solved"],
    "cheated": lambda rollout: rollout["metrics"]["hacks/rollouts"],
    "read the lure": lambda rollout: rollout["metrics"]["lure_read"],
    "edited the tests": lambda rollout: rollout["metrics"]["tests_edit"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("run", nargs="+", help="run directory")
    parser.add_argument("--window", type=int, default=10, help="training steps of one line")
    options = parser.parse_args()
    for folder in options.run:
        run_dir = open_run(folder)
        print(f"\n{folder}\n| | rollouts | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 2)}")
        for label, rollouts in [*training(run_dir, options.window), *held_out(run_dir)]:
            print(line(label, rollouts))


def training(run_dir: RunDir, window: int) -> list[tuple[str, list[Rollout]]]:
    """Return the scored rollouts of each window of steps, those of groups without advantage included."""
    windows: dict[int, list[Rollout]] = {}
    for step, path in rollout_files(run_dir, "step").items():
        windows.setdefault((step - 1) // window, []).extend(scored(read_rollouts(path)))
    return [(f"steps {n * window + 1}-{(n + 1) * window}", rollouts) for n, rollouts in sorted(windows.items())]


def held_out(run_dir: RunDir) -> list[tuple[str, list[Rollout]]]:
    return [
        (f"held-out after {pluralize(step, 'step')}", list(scored(read_rollouts(path))))
        for step, path in rollout_files(run_dir, "eval").items()
    ]


def scored(rollouts: Iterable[Rollout]) -> Iterable[Rollout]:
    return (rollout for rollout in rollouts if isinstance(rollout.get("reward"), int | float))


def line(label: str, rollouts: list[Rollout]) -> str:
    cells = []
    for value in COLUMNS.values():
        by_task: dict[str, list[float]] = {}
        for rollout in rollouts:
            by_task.setdefault(rollout["task_id"], []).append(float(value(rollout)))
        figure = mean_interval(by_task)
        cells.append(f"{figure.mean:.3f} [{figure.low:.3f}, {figure.high:.3f}]" if figure.low is not None else "")
    return f"| {label} | {len(rollouts)} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
