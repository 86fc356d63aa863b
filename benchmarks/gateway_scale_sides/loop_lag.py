"""python loop_lag.py @ file.toml: the orchestrator, with how late its event loop runs in its metrics.jsonl."""

from __future__ import annotations

import asyncio
import time

import numpy as np

INTERVAL_S = 0.02


async def measure(samples: list[tuple[float, float]]) -> None:
    """Add (lag, own share of it) in seconds, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due, cpu_s = loop.time() + INTERVAL_S, time.thread_time()
        await asyncio.sleep(INTERVAL_S)
        lag = max(0.0, loop.time() - due)
        samples.append((lag, min(lag, time.thread_time() - cpu_s)))


def figures(samples: list[tuple[float, float]]) -> dict[str, float]:
    """Return the figures since the last call."""
    if not samples:
        return {}
    (p50, _), (p99, own_p99) = np.percentile(samples, [50, 99], axis=0).tolist()
    samples.clear()
    return {"loop_lag/p50_s": p50, "loop_lag/p99_s": p99, "loop_lag/own_p99_s": own_p99}


def main() -> int:
    from orchestrator import main as orchestrator
    from orchestrator import pipeline

    class Measured(pipeline.Pipeline):
        async def run(self) -> None:
            samples, of_gateway = list[tuple[float, float]](), self.gateway.metrics
            self.gateway.metrics = lambda: of_gateway() | figures(samples)
            self._spawn(measure(samples))
            await super().run()

    pipeline.Pipeline = Measured
    return orchestrator.main()


if __name__ == "__main__":
    raise SystemExit(main())
