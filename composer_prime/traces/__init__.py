"""The room of traces: sessions to states (`ingest`), states to pairs (`replay`). It needs the extra `traces`.

This file is its door. The core uses these functions and nothing behind them; commands are named in composer_prime/cli.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer_prime.config import Config
    from composer_prime.monitor.metrics_file import MetricsFile
    from composer_prime.run.run_dir import RunDir
    from composer_prime.traces.replay.online import OnlineReplay


def build_online_replay(
    config: Config, run_dir: RunDir, metrics: MetricsFile, step: Callable[[], int]
) -> OnlineReplay | None:
    """Return the replay beside a run, if any. `step`: the newest trained step."""
    if not config.teachers.online:
        return None
    from composer_prime.traces.replay.online import OnlineReplay

    return OnlineReplay(config, run_dir, metrics, step)


def cost_line(config: Config) -> str:
    """Return what a replay may cost. Raises ConfigError for an unknown price."""
    from composer_prime.traces.replay import teacher_pool

    return teacher_pool.cost_line(config.teachers)
