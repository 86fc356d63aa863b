"""Measure replay: calls a second, and the savings of sequential voting.

    python benchmarks/replay.py calls
    python benchmarks/replay.py savings STATES.jsonl --states 300
    python benchmarks/replay.py scores [PAIRS.jsonl] --model tiny

`calls` replays made-up states against an endpoint on loopback that answers after a fixed delay, with 1, 8 and 64 calls
in flight, beside the rate that the delay alone allows (calls in flight / delay).

`savings` replays real states (`composer ingest` of toolsmith rollouts) with the three tiny teachers, at a cheap, a
middling and an expensive price. It compares two policies: all three vote; votes in sequence. Greedy answers are the
same under each. A policy's recall is the share of the pairs of the vote of all three that it
finds too, with the same two answers. `others` are pairs that only the policy has. Beside it stand the mean epsilon of
its pairs (how sure the votes were) and their mean margin: log p(chosen) - log p(rejected), a token, under the student
that made the traces. The lower the margin, the more there is to learn from a pair.

`scores` gives the processor seconds in which the density gate's answers are scored, three a pair: each with its context
again, and behind one context. It prints the largest difference between the two.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from aiohttp import web
from composer_prime.traces.replay.frozen_base import ServedScorer, base_margins

from composer_prime.config.inference import InferenceConfig
from composer_prime.config.teachers import TeachersConfig
from composer_prime.data.pairs import TINY_PAIRS, Pair
from composer_prime.errors import ConfigError
from composer_prime.traces.replay.records import ReplayRecords, read_pairs, read_records
from composer_prime.traces.replay.replay import Replay, ReplayProgress
from composer_prime.traces.replay.teachers import TeacherPool, local_models, teacher_budget
from composer_prime.traces.states import TraceState, read_states
from inference.model_server import load_served

ROOMY = {"usd_per_call": 1e6, "usd_per_trace": 1e6, "usd_per_run": 1e6}
NEVER = {"mean_usd_per_trace": 1e6, "p95_s_per_step": 1e6, "error_rate": 1.0}
STUDENT = "tiny"
"""Who made the traces."""
LOAD_S = 900.0
USD_PER_MTOK = {"tiny/teacher_a": (0.5, 1.5), "tiny/teacher_b": (1.0, 5.0), "tiny/teacher_c": (3.0, 15.0)}
"""(prompt, answer): prices of a cheap, a middling and a dear model."""


@contextlib.asynccontextmanager
async def delayed(delay_s: float):
    """An endpoint that answers every question after `delay_s`."""
    usage = {"prompt_tokens": 10, "completion_tokens": 2}
    message = {"role": "assistant", "content": "yes"}
    body = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}).encode()

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(delay_s)
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", answer)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


async def replay(
    folder: Path, config: TeachersConfig, states: list[TraceState], addresses: dict[str, str] | None = None
) -> ReplayProgress:
    budget = teacher_budget(config.budget, folder / "costs.jsonl")
    pool = TeacherPool(config, budget, addresses)
    try:
        return await Replay(config, pool, budget, ReplayRecords(folder / "pairs.jsonl", folder / "votes.jsonl")).run(
            states
        )
    finally:
        await pool.close()


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


async def calls(count: int, delay_s: float) -> None:
    os.environ["LOOPBACK_KEY"] = "made-up"
    print(f"{count} calls, an answer after {delay_s * 1000:.0f} ms")
    print(f"{'in flight':>9} {'calls/s':>9} {'floor':>9} {'share':>6}")
    async with delayed(delay_s) as url:
        for in_flight in (1, 8, 64):
            with tempfile.TemporaryDirectory() as folder:
                shared = {"base_url": url, "api_key_var": "LOOPBACK_KEY", "max_concurrent": 64}
                price = {"input_usd_per_mtok": 1.0, "output_usd_per_mtok": 1.0}
                teachers = [{"name": name, "model": name, **shared, **price} for name in ("gpt-a", "qwen-b")]
                config = TeachersConfig.model_validate(
                    {"teacher": teachers, "cache_dir": f"{folder}/cache", "concurrent_states": in_flight}
                    | {"budget": ROOMY, "kill": NEVER}
                )
                wanted = count if in_flight > 1 else max(count // 8, 2)
                start = time.perf_counter()
                progress = await replay(Path(folder), config, [state(number) for number in range(wanted // 2)])
                rate, floor = progress.calls / (time.perf_counter() - start), in_flight / delay_s
                print(f"{in_flight:>9} {rate:>9.1f} {floor:>9.1f} {rate / floor:>6.0%}", flush=True)


POLICIES = {"all vote": {"voting": "all"}, "sequential": {"voting": "sequential"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The calls and pairs of one policy."""

    calls: int
    dollars: float
    pairs: list[Pair]
    margin: float
    """Mean base margin of the pairs, under the model that made the traces, in nats a token; nan of fewer than ten."""

    @property
    def sides(self) -> set[tuple[str, str, str]]:
        return {(pair.state.state_id, _side(pair.chosen), _side(pair.rejected)) for pair in self.pairs}

    def row(self, name: str, reference: set[tuple[str, str, str]]) -> str:
        epsilon = fmean(pair.epsilon for pair in self.pairs) if self.pairs else math.nan
        recall = len(self.sides & reference) / len(reference) if reference else math.nan
        return (
            f"{name:<16} {self.calls:>6} {self.dollars:>9.5f} {len(self.pairs):>6} "
            f"{self.dollars / max(len(self.pairs), 1):>9.6f} {recall:>7.1%} "
            f"{len(self.sides - reference):>6} {epsilon:>8.3f} {self.margin:>+8.3f}"
        )


async def found(folder: Path, config: TeachersConfig, states: list[TraceState], url: str) -> Found:
    await replay(folder, config, states, dict.fromkeys(USD_PER_MTOK, url))
    records, pairs = list(read_records(folder / "votes.jsonl")), list(read_pairs(folder / "pairs.jsonl"))
    votes = [vote for record in records for vote in record.votes]
    costs = {vote.answer: vote.cost_usd for vote in votes if not vote.cached}
    scorer = ServedScorer(url, STUDENT, TeachersConfig(timeout_s=LOAD_S))
    try:
        margin = fmean((await base_margins(scorer, pairs, most=len(pairs))).real)
    except ConfigError as error:
        print(f"no margin: {error}", file=sys.stderr)
        margin = math.nan
    finally:
        await scorer.close()
    return Found(
        calls=len(votes), dollars=sum(costs.get(vote.answer, 0.0) for vote in votes), pairs=pairs, margin=margin
    )


async def savings(path: Path, count: int) -> None:
    states = list(islice(read_states(path), count))
    models = list(USD_PER_MTOK)
    with tempfile.TemporaryDirectory() as folder:
        async with local_models([*models, STUDENT], threads=1, start_timeout_s=LOAD_S) as url:
            teachers = [
                {"name": model[-1], "model": model, "local": True}
                | dict(zip(("input_usd_per_mtok", "output_usd_per_mtok"), USD_PER_MTOK[model], strict=True))
                for model in models
            ]
            shared = {"teacher": teachers, "max_tokens": 64, "system_prompt": "", "score": False}
            shared |= {"budget": ROOMY, "kill": NEVER}
            print(f"{len(states)} states of {len({state.trace_id for state in states})} traces")
            print(
                f"{'policy':<16} {'calls':>6} {'dollars':>9} {'pairs':>6} {'$/pair':>9} {'recall':>7} {'others':>6} "
                f"{'epsilon':>8} {'margin':>8}"
            )
            reference: set[tuple[str, str, str]] = set()
            for name, changes in POLICIES.items():
                own = Path(folder) / name
                # Priced votes, not cached ones, are what a policy weighs: each has a cache of its own.
                config = TeachersConfig.model_validate({**shared, **changes, "cache_dir": str(own / "cache")})
                of_policy = await found(own, config, states, url)
                reference = reference or of_policy.sides
                print(of_policy.row(name, reference), flush=True)


async def scores(pairs: list[Pair], model: str) -> None:
    served = await load_served(model, InferenceConfig(threads=1))
    rng = random.Random(0)
    asked: list[tuple[list[int], list[list[int]]]] = []
    tokens = answered = 0
    for pair in pairs:
        messages, tools = pair.state.messages, pair.state.tools
        context = served.prompt(messages, tools, opening=True)
        sides = pair.chosen, pair.rejected, rng.choice(pairs).rejected
        asked.append((context, [served.answer(context, messages, tools, side) for side in sides]))
        tokens += len(context)
        answered += sum(len(answer) for answer in asked[-1][1])
    print(f"{len(pairs)} pairs, {tokens / len(pairs):.0f} tokens a context, {answered / len(pairs) / 3:.0f} an answer")
    await served.engine.score_answers(*asked[0])  # warms up
    begun, alone = time.process_time(), []
    for context, answers in asked:
        alone.append([(await served.engine.score(context + each))[len(context) - 1 :] for each in answers])
    between, shared = time.process_time(), [await served.engine.score_answers(*each) for each in asked]
    ended = time.process_time()
    difference = max(
        abs(one - other)
        for before, after in zip(alone, shared, strict=True)
        for first, second in zip(before, after, strict=True)
        for one, other in zip(first, second, strict=True)
    )
    print(f"each with its context   {between - begun:8.2f} CPU s")
    print(f"behind one context      {ended - between:8.2f} CPU s, {(between - begun) / (ended - between):.2f} x")
    print(f"largest difference      {difference:.1e} nats of a token")
    await served.engine.close()


def _side(message: dict[str, Any]) -> str:
    return json.dumps([message.get("content"), [call["function"] for call in message.get("tool_calls") or []]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["calls", "savings", "scores"])
    parser.add_argument("path", nargs="?", type=Path, help="states.jsonl (savings) or pairs.jsonl (scores)")
    parser.add_argument("--states", type=int, default=300, help="savings: states to replay")
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--delay-s", type=float, default=0.1)
    parser.add_argument("--model", default="tiny", help="scores: the frozen base")
    options = parser.parse_args()
    if options.what == "savings" and options.path is None:
        parser.error("savings needs a states.jsonl: composer ingest RUN/rollouts -o states.jsonl")
    match options.what:
        case "calls":
            asyncio.run(calls(options.calls, options.delay_s))
        case "savings":
            asyncio.run(savings(options.path, options.states))
        case "scores":
            asyncio.run(scores(list(read_pairs(options.path or TINY_PAIRS)), options.model))


if __name__ == "__main__":
    main()
