"""How late an event loop runs.

python loop_lag.py @ file.toml      the orchestrator, with `loop_lag/*` in its metrics.jsonl
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

import numpy as np

_MAX_SAMPLES = 1 << 14


class LoopLag:
    def __init__(self, interval_s: float = 0.02) -> None:
        self._interval_s = interval_s
        self._samples = deque[tuple[float, float]](maxlen=_MAX_SAMPLES)

    async def measure(self) -> None:
        """Sample until cancelled. A window keeps the last five minutes."""
        loop = asyncio.get_running_loop()
        while True:
            due, cpu_s = loop.time() + self._interval_s, time.thread_time()
            await asyncio.sleep(self._interval_s)
            lag = max(0.0, loop.time() - due)
            self._samples.append((lag, min(lag, time.thread_time() - cpu_s)))

    def window(self) -> dict[str, float]:
        """Return the figures since the last call."""
        samples = np.array(self._samples, dtype=float).reshape(-1, 2)
        self._samples.clear()
        if not len(samples):
            return {}
        (p50, _), (p99, own_p99), (most, own_most) = np.percentile(samples, [50, 99, 100], axis=0).tolist()
        return {"p50_s": p50, "p99_s": p99, "max_s": most, "own_p99_s": own_p99, "own_max_s": own_most}


def main() -> int:
    from orchestrator import main as orchestrator
    from orchestrator import pipeline

    class Measured(pipeline.Pipeline):
        async def run(self) -> None:
            lag, of_gateway = LoopLag(), self.gateway.metrics
            self.gateway.metrics = lambda: of_gateway() | {f"loop_lag/{k}": v for k, v in lag.window().items()}
            self._spawn(lag.measure())
            await super().run()

    pipeline.Pipeline = Measured
    return orchestrator.main()


if __name__ == "__main__":
    raise SystemExit(main())
