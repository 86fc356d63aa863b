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

from composer_prime.traces.records import TraceState
from tests.chat_server import Handler, chat_server
from tests.teachers.loopback import configured, replayed, state


def answering(delay_s: float) -> Handler:
    message = {"role": "assistant", "content": "yes"}
    usage = {"prompt_tokens": 10, "completion_tokens": 2}
    body = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}).encode()

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(delay_s)
        return web.Response(body=body, content_type="application/json")

    return answer


def asked(number: int) -> TraceState:
    question = {"role": "user", "content": f"Question {number}. " + "word " * 200}
    return state(number, trace=f"t{number // 10}", messages=[question], tools=[])


async def measure(folder: Path, url: str, states: int, at_once: int) -> float:
    """Return calls a second."""
    config = configured(folder, url, budget={"usd_per_run": 1e6}, concurrent_states=at_once)
    began = time.perf_counter()
    progress = await replayed(folder, config, map(asked, range(states)))
    return progress.votes.calls / (time.perf_counter() - began)


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
