"""Measure replay: calls a second against an endpoint on loopback that answers after a fixed delay.

    python -m benchmarks.replay             # 1, 8 and 64 states at once
    python -m benchmarks.replay --quick     # a smoke test

Beside it stands the rate that the delay alone allows (states at once / delay). Each state is voted on by two teachers
that agree, one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path

from aiohttp import web

from composer_prime.config.teachers import TeachersConfig
from composer_prime.traces.records import ReplayRecords, TraceState
from composer_prime.traces.replay.replay import Replay
from composer_prime.traces.replay.teacher_pool import TeacherPool, teacher_budget
from tests.chat_server import Handler, chat_server

ROOMY = {"usd_per_run": 1e6}


def answering(delay_s: float) -> Handler:
    message = {"role": "assistant", "content": "yes"}
    usage = {"prompt_tokens": 10, "completion_tokens": 2}
    body = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}).encode()

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(delay_s)
        return web.Response(body=body, content_type="application/json")

    return answer


def state(number: int) -> TraceState:
    call = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    return TraceState(
        trace_id=f"t{number // 10}",
        state_id=f"s{number}",
        step=number,
        messages=[{"role": "user", "content": f"Question {number}. " + "word " * 200}],
        student_action={"role": "assistant", "content": None, "tool_calls": [call]},
        source_model=None,
        source_family="claude",
        tools=[],
        format="made/1",
    )


async def measure(folder: Path, url: str, states: int, at_once: int) -> float:
    """Return calls a second."""
    shared = {"base_url": url, "api_key_var": "LOOPBACK_KEY"}
    price = {"input_usd_per_mtok": 1.0, "output_usd_per_mtok": 1.0}
    teachers = [{"name": model, "model": model, **shared, **price} for model in ("gpt-a", "qwen-b", "glm-c")]
    config = TeachersConfig.model_validate(
        {"teacher": teachers, "budget": ROOMY, "concurrent_states": at_once, "cache_dir": folder / "cache"}
    )
    budget = teacher_budget(config.budget, folder / "costs.jsonl")
    pool = TeacherPool(config, budget)
    records = ReplayRecords(folder / "pairs.jsonl", folder / "votes.jsonl")
    try:
        began = time.perf_counter()
        progress = await Replay(config, pool, budget, records).run(state(number) for number in range(states))
        return progress.votes.calls / (time.perf_counter() - began)
    finally:
        await pool.close()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, default=300)
    parser.add_argument("--delay-s", type=float, default=0.05)
    parser.add_argument("--quick", action="store_true", help="40 states, 8 at once")
    options = parser.parse_args()
    states, sizes = (40, (8,)) if options.quick else (options.states, (1, 8, 64))
    os.environ["LOOPBACK_KEY"] = "made-up"
    print(f"{'at once':>9} {'calls/s':>9} {'bound':>9} {'share':>6}")
    async with chat_server(answering(options.delay_s)) as url:
        for at_once in sizes:
            with tempfile.TemporaryDirectory() as folder:
                rate, bound = await measure(Path(folder), url, states, at_once), at_once / options.delay_s
            print(f"{at_once:>9} {rate:>9.1f} {bound:>9.1f} {rate / bound:>6.0%}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
