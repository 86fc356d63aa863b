"""Measure what one hostile node of eight costs a run: 7 honest nodes alone, then with it, over loopback.

    rollouts --HTTP--> gateway (this process) --CURVE ZMQ--> 7 honest nodes   (one process, shares one tiny model)
        |                 |      |             <-- attacks -- 1 hostile node  (a process of its own)
    a batch takes    audits <--------- verdicts ------------- `inference audit`, the model in float32

    python benchmarks/fleet_hostile.py --rounds 1 --seconds 20

All eight enroll by an invite, each with a key of its own. The honest nodes are `inference join`'s InferenceNode and
sample by the published rule; an answer takes four seconds at each of their 8 places, so that cores are not what is
measured. Rollouts go through the orchestrator's RolloutRunner, which waits for the audits of new nodes' answers, and a
batch leaves out what the gateway calls tainted. Goodput is the tokens a second that batches take.

The hostile node does all of this at once (fleet_hostile_sides/hostile.py), from as many connections as it likes:

    lies      tokens that no model drew, in the right form; some as the first half of an answer that another continues
    silence   never answers two fifths of its requests, while it reports 10^12 tokens a second
    claims    16,384 places and an endless context; the names of honest nodes
    floods    junk, empty messages, reports, hellos, answers and parts of answers to requests that it does not hold
    memory    messages of 600 MiB and of 100,000 frames, weights that it asks for and does not read

Each round starts a gateway and waits until its honest nodes are known. Exit status 1 when a verdict over all rounds is
missed: the goodput's median share, a sample with a token of the hostile node in a batch, memory that grows.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks._shared import conclude, running
from composer_prime.config import Config
from composer_prime.console import console_script
from composer_prime.model_source import resolve_model
from composer_prime.run.keys import RunKeys, write_secret
from composer_prime.run.run_dir import RunDir
from composer_prime.run.weights import CHUNK_BYTES, WeightStore
from composer_prime.wire.enrollment import INVITE_VARIABLE
from composer_prime.wire.node_messages import POLICY
from orchestrator.gateway import Gateway
from orchestrator.rollouts.rollout import Permits, RolloutRunner
from orchestrator.swarm import audits as audit_rules
from orchestrator.swarm.invite import create_invite
from orchestrator.workers.pool import RolloutReply, RunRollout
from tests.waiting import until

logger = logging.getLogger("fleet_hostile")
ROOT = Path(__file__).parents[1]
RUN_ID = HOSTILE = "hostile"
HONEST = 7
ANSWER_TOKENS, PROMPT_TOKENS = 24, 32
CONTEXT = 512
BATCH = 8
"""Rollouts."""
LEAST_SHARE = 0.85
MOST_GROWTH, MOST_PEAK = 64 << 20, 384 << 20
"""Bytes, of the gateway's process. 256 MiB may wait unread before the connection that sent the most is closed."""
TIMEOUT_S = 20.0
"""Of a rollout."""
QUARANTINE_S = 20.0
"""The default of 600 s would let it lie once only."""
PATIENCE_S = 180.0


@dataclass(slots=True)
class Player:
    """A source whose rollouts are one turn with a prompt of its own. Stands in for a worker pool."""

    http: aiohttp.ClientSession
    restarts: int = 0

    async def run(self, request: RunRollout, on_begin: Callable[[], None]) -> RolloutReply:
        on_begin()
        draw = random.Random(request.task_index)
        prompt = [draw.randrange(3, 500) for _ in range(PROMPT_TOKENS)]
        body = {"model": POLICY, "token_ids": prompt, "sampling_params": {"max_tokens": ANSWER_TOKENS}}
        headers, name = {"X-Session-ID": request.rollout_id}, f"task-{request.task_index}"
        async with self.http.post(request.gateway_url + "/inference/v1/generate", json=body, headers=headers) as reply:
            if reply.status != 200:
                return request.failed("gateway", (await reply.text())[:200])
            await reply.read()
        return RolloutReply(rollout_id=request.rollout_id, task_id=name, reward=1.0)


@dataclass(slots=True)
class Ledger:
    """What batches took."""

    gateway: Gateway
    counts: Counter[str] = field(default_factory=Counter)
    """Rollouts, and `tokens` of those that were taken."""
    ready: list[tuple[str, bool, int]] = field(default_factory=list)
    """Rollout, whether the hostile node sampled any of it, and its tokens."""

    async def play(self, runner: RolloutRunner, number: int) -> None:
        name, url = f"r{number}", self.gateway.http_url
        request = RunRollout(rollout_id=name, task_index=number, model=POLICY, gateway_url=url, timeout_s=TIMEOUT_S)
        reply, records = await runner.run("s", request, order=number)
        parts = [part for record in records for part in record.answer.sampled_by]
        is_bad = any(node_id == HOSTILE for node_id, _ in parts)
        self.counts["bad offered"] += is_bad
        self.counts["bad in part"] += is_bad and len(parts) > 1
        if reply.failure is not None:
            self.counts[f"refused: {reply.failure.kind}"] += 1
            logger.info("%s: %s", reply.failure.kind, reply.failure.message)
            return
        self.ready.append((name, is_bad, sum(tokens for _, tokens in parts)))
        if len(self.ready) >= BATCH:
            self.take_batch()

    def take_batch(self) -> None:
        for name, is_bad, tokens in self.ready:
            if self.gateway.audits.is_tainted([name]):
                self.counts["tainted"] += 1
                continue
            self.counts["taken"] += 1
            self.counts["bad taken"] += is_bad
            self.counts["tokens"] += tokens
        self.ready.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One round."""

    alone: float
    """Tokens a second that batches take."""
    together: float
    grown: float
    """Bytes of the gateway's process, in the last quarter of the time with the hostile node against without it."""
    peak: float
    """The same, the highest."""
    counts: Counter[str]
    quarantines: int
    junk: int
    cut_off: int
    held: int
    """Requests that the hostile node held at a time, at most."""
    dropped_pulls: int


def settings() -> Config:
    source = {"name": "s", "taskset": {"id": "orchestrator.environments.toolsmith"}, "timeout_s": TIMEOUT_S}
    audit = {"enabled": True, "tolerance": 1e-4}
    audit_rules.TIMEOUT_S = 30.0
    audit_rules._QUARANTINE_S = QUARANTINE_S
    return Config.model_validate({
        "run": {"name": RUN_ID},
        "model": {"path": "tiny", "max_context": CONTEXT},
        "inference": {"heartbeat_s": 0.5, "lost_after_s": 4.0},
        "orchestrator": {
            "source": [source], "no_node_timeout_s": PATIENCE_S, "audit": audit,
            "sampling": {"max_tokens": ANSWER_TOKENS},
        },
    })  # fmt: skip


def invite(gateway: Gateway, run_dir: RunDir, nodes: int) -> str:
    address = gateway.node_endpoint.removeprefix("tcp://")
    return create_invite(run_dir, nodes=nodes, expires_s=3600, addresses=[address]).text()


@contextlib.contextmanager
def process(folder: Path, name: str, words: list[str], invitation: str = "") -> Iterator[None]:
    """Run a side until the block ends. What it says goes to `folder`/NAME.log."""
    path, variables = folder / f"{name}.log", os.environ | {INVITE_VARIABLE: invitation}
    with path.open("wb") as log, running(words, cwd=ROOT, env=variables, stderr=log) as side:
        yield
        if side.poll() is not None:
            raise SystemExit(f"{name} ended by itself:\n{path.read_text()[-3000:]}")


def auditor(folder: Path, keys: RunKeys, address: str) -> list[str]:
    """What `inference audit` starts, for an auditor elsewhere."""
    token = folder / "trainer.token"
    write_secret(token, keys.client("trainer").token().encode())
    words = ["--model", "tiny", "--device", "cpu", "--token-file", str(token), "--max-context", str(CONTEXT)]
    return [*console_script("inference"), "audit", address, *words]


async def play_round(folder: Path, honest: int, seconds: float, rollouts: int) -> Figures:
    """Measure `seconds` without the hostile node and as long with it. `rollouts` are under way at a time."""
    run_dir = RunDir(folder)
    keys, store = RunKeys.create(run_dir.keys), WeightStore(run_dir.weights)
    (folder / "run_id").write_text(RUN_ID)
    [chunk] = store.put_chunks(os.urandom(CHUNK_BYTES))
    gateway = Gateway(settings(), keys, RUN_ID, store, model_dir=resolve_model("tiny"))
    await gateway.start()
    assert gateway.audits is not None
    trust, ledger, numbers = gateway.router.trust, Ledger(gateway), iter(range(1 << 60))
    side = lambda name, word: [sys.executable, "-m", f"benchmarks.fleet_hostile_sides.{name}", str(folder / name), word]
    async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as tasks:
        # More rollouts than permits: those that wait for an audit hold none.
        pools: Any = {"s": Player(http)}
        played = settings().orchestrator.model_copy(update={"max_concurrent": rollouts})
        runner = RolloutRunner(config=played, gateway=gateway, pools=pools, permits=Permits(rollouts), seed=0)

        async def client() -> None:
            while True:
                await ledger.play(runner, next(numbers))

        memory, held = [0.0], 0

        async def measure() -> tuple[float, list[float]]:
            nonlocal held
            memory, before, start = [], ledger.counts["tokens"], time.monotonic()
            while (passed := time.monotonic() - start) < seconds:
                await asyncio.sleep(0.1)
                memory.append(float(psutil.Process().memory_info().rss))
                if (hostile := gateway.router.nodes.get(HOSTILE)) is not None:
                    held = max(held, len(hostile.leases))
            return (ledger.counts["tokens"] - before) / passed, memory

        with (
            process(folder, "auditor", auditor(folder, keys, gateway.node_endpoint)),
            process(folder, "honest", side("honest", str(honest)), invite(gateway, run_dir, honest)),
        ):
            await until(lambda: len(gateway.versions()) == honest, "the honest nodes", PATIENCE_S)
            clients = [tasks.create_task(client()) for _ in range(2 * rollouts)]
            await until(lambda: not any(trust[node].is_new for node in gateway.versions()), "their audits", PATIENCE_S)
            await asyncio.sleep(2.0)
            alone, calm = await measure()
            with process(folder, HOSTILE, side(HOSTILE, chunk.sha256), invite(gateway, run_dir, 1)):
                await until(lambda: HOSTILE in gateway.versions(), "the hostile node", PATIENCE_S)
                together, memory = await measure()
            for one in clients:
                one.cancel()
    logger.info("MiB every .1 s with the hostile node: %s", [round(one / 2**20) for one in memory])
    link, usual = gateway.link, statistics.median(calm)
    await gateway.close()
    return Figures(
        alone=alone,
        together=together,
        grown=statistics.median(memory[-len(memory) // 4 :]) - usual,
        peak=max(memory) - usual,
        counts=ledger.counts,
        quarantines=trust[HOSTILE].quarantines,
        junk=link.conduct.garbage,
        cut_off=len(link.conduct.ignored),
        held=held,
        dropped_pulls=link.chunks.dropped,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0, help="of each half of a round")
    parser.add_argument("--rollouts", type=int, default=64, help="under way at a time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--verbose", action="store_true", help="print what the gateway logs")
    parser.add_argument("--quick", action="store_true", help="one short round: whether it runs")
    options = parser.parse_args()
    honest = HONEST
    if options.quick:
        honest, options.rounds, options.seconds, options.rollouts = 2, 1, 8.0, 16
    logging.basicConfig(level=logging.INFO if options.verbose else logging.CRITICAL)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    rounds: list[Figures] = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory(prefix="fleet-hostile-") as folder:
            one = asyncio.run(play_round(Path(folder), honest, options.seconds, options.rollouts))
        rounds.append(one)
        grown, peak = one.grown / 2**20, one.peak / 2**20
        print(f"{one.alone:.0f} tokens/s alone, {one.together:.0f} with it ({one.together / one.alone:.1%}); gateway "
              f"grew by {grown:.0f} MiB, at its peak by {peak:.0f}\n  {dict(one.counts)}\n  {one.quarantines} "
              f"quarantines, {one.junk} messages of junk, {one.cut_off} connections cut off, at most {one.held} "
              f"requests held, {one.dropped_pulls} pulls dropped", flush=True)  # fmt: skip
    share = statistics.median(one.together / one.alone for one in rounds)
    offered, taken = (sum(one.counts[f"bad {what}"] for one in rounds) for what in ("offered", "taken"))
    split = sum(one.counts["bad in part"] for one in rounds)
    grown, peak = max(one.grown for one in rounds), max(one.peak for one in rounds)
    did_all = all(
        one.quarantines and one.junk and one.cut_off and one.held and one.dropped_pulls and one.peak > MOST_GROWTH
        for one in rounds
    )
    answers = [
        (f"{share:.1%} of the goodput of {honest} honest nodes, at least {LEAST_SHARE:.0%}", share >= LEAST_SHARE),
        (f"{taken} bad samples in batches, {offered} were offered ({split} bad in part)", not taken and offered > 0),
        (f"the gateway grew by {grown / 2**20:.0f} MiB, at most {MOST_GROWTH >> 20}", grown <= MOST_GROWTH),
        (f"at its peak by {peak / 2**20:.0f} MiB, at most {MOST_PEAK >> 20}", peak <= MOST_PEAK),
        ("in each round it lied, was silent, flooded, hoarded, and pulled without reading", did_all),
    ]
    return conclude(answers, is_quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
