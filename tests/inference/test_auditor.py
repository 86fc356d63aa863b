"""In what order an auditor checks answers, with an engine that takes as long as the test says."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from composer_prime.config.inference import InferenceConfig
from composer_prime.wire.node_messages import AuditRequest, AuditVerdict, Sampling
from composer_prime.wire.types import VersionSpan, pack_floats, pack_ints
from inference.audit import Auditor
from inference.engines.local.local_engine import LocalEngine


class TimedEngine(LocalEngine):
    """Ends no check before `go_on`."""

    def __init__(self) -> None:
        self.checks, self.go_on = 0, asyncio.Event()

    async def check_draws(self, token_ids: Any, start: int, *_: Any, **__: Any):
        self.checks += 1
        await self.go_on.wait()
        return np.zeros(len(token_ids) - start), np.full(len(token_ids) - start, -1.0, np.float32)

    async def find_stop(self, *_: Any) -> int | None:
        return None


class Receiver:
    version = 1

    async def install(self, manifest: bytes, *_: Any) -> None:
        self.version = int(manifest)


class Link:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[AuditVerdict] = []

    def send(self, message: AuditVerdict) -> None:
        self.sent.append(message)


def request(number: int, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "audit": number,
        "prompt_ids": pack_ints([5]),
        "token_ids": pack_ints([6]),
        "logprobs": pack_floats([-1.0]),
        "sampled_by": [("n", 1)],
        "version_spans": [VersionSpan(0, 1, 1)],
        "finish_reason": "length",
        "sampling": Sampling(max_tokens=1, seed=1),
        "tolerance": 0.05,
    }
    return AuditRequest(**values | changes)


@asynccontextmanager
async def auditor():
    """An auditor that knows versions 0 and 1, its engine, and what it sends."""
    engine, link, receiver = TimedEngine(), Link(), Receiver()
    parts: tuple[Any, Any] = link, receiver
    one = Auditor("a", engine, *parts, InferenceConfig(device="cpu"))
    welcome: Any = SimpleNamespace(verify_key=b"", run_id="r")
    one._manifests, one._welcome = {0: b"0", 1: b"1"}, welcome
    checking = asyncio.create_task(one._follow_weights())
    yield one, engine, link.sent
    checking.cancel()
    await asyncio.gather(checking, return_exceptions=True)


async def test_an_answer_that_waits_for_too_long_is_dropped():
    # It came during another one's pass, and its rollout is given up before the next. No pass is spent on it.
    async with auditor() as (one, engine, sent):
        one._handle(request(1))
        while not engine.checks:
            await asyncio.sleep(0)
        one._handle(request(2, timeout_s=-1.0))
        one._handle(request(3, timeout_s=100.0))
        engine.go_on.set()
        while len(sent) < 3:
            await asyncio.sleep(0)
        assert engine.checks == 2
        assert {outcome.error is None: outcome.audit for outcome in sent if outcome.audit != 1} == {True: 3, False: 2}
