"""How the event loop's delays are measured."""

import asyncio
import time

from orchestrator.event_loop import LoopLag


async def test_loop_lag_sees_a_blocked_loop():
    """A block of 80 ms shows as the largest lag, as own lag if it was work; the window starts anew."""
    lag = LoopLag(interval_s=0.005)
    measuring = asyncio.create_task(lag.measure())
    await asyncio.sleep(0.2)
    time.sleep(0.08)
    await asyncio.sleep(0.02)
    stats = lag.window()
    assert stats["max_s"] >= 0.07 and stats["p50_s"] < stats["max_s"]
    assert stats["own_max_s"] < stats["max_s"]
    busy_until = time.thread_time() + 0.08
    while time.thread_time() < busy_until:
        pass
    await asyncio.sleep(0.02)
    assert lag.window()["own_max_s"] >= 0.07
    await asyncio.sleep(0.02)
    assert set(lag.metrics()) == {f"loop_lag/{name}_s" for name in ("p50", "p99", "max", "own_p99")}
    measuring.cancel()
    assert lag.window() == {}
