"""What a run has before its environments are loaded: handed to the parts that are built afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from composer_prime.config import Config
from composer_prime.monitor.metrics_file import MetricsFile
from composer_prime.run.run_dir import RunDir
from orchestrator.batching.batches import Batches
from orchestrator.event_loop import Notifier
from orchestrator.gateway import Gateway
from orchestrator.workers.pool import WorkerPool


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    config: Config
    run_dir: RunDir
    run_id: str
    model_dir: Path
    """Folder with the policy's tokenizer and chat template."""
    gateway: Gateway
    """Has the nodes, their accounts, and the rollouts that an audit taints."""
    pools: dict[str, WorkerPool]
    """Environment workers by source."""
    batches: Batches
    metrics: MetricsFile
    changed: Notifier
    fail: Callable[[BaseException], None]
    """Ends the run with an error."""
