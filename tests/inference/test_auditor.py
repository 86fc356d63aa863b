"""In what order an auditor checks answers, with an engine that takes as long as the test says."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np

from composer_prime.config.inference import InferenceConfig
from composer_prime.wire.audit import AuditFailed, AuditRequest, AuditVerdict
from composer_prime.wire.node import Sampling
from composer_prime.wire.types import VersionSpan, pack_floats, pack_ints
from inference.audit import Auditor
from inference.engines.local.engine import LocalEngine

PASS_S = 0.02


class TimedEngine(LocalEngine):
    """Checks in PASS_S whatever is asked at the same time."""

    def __init__(self) -> None:
        pass

    async def check_draws(self, token_ids: Any, start: int, end: int, *_: Any, **__: Any):
        await asyncio.sleep(PASS_S)
        return np.zeros(end - start), np.full(end - start, -1.0, np.float32)

    async def find_stop(self, *_: Any) -> int | None:
        return None


class Receiver:
    version = 1

    async def install(self, manifest: bytes, *_: Any) -> None:
        self.version = int(manifest)


class Link:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[AuditVerdict | AuditFailed] = []

    def send(self, message: AuditVerdict | AuditFailed) -> None:
        self.sent.append(message)


def request(number: int, **changes: Any) -> AuditRequest:
    values: dict[str, Any] = {
        "audit": number,
        "prompt_ids": pack_ints([5]),
        "token_ids": pack_ints([6]),
        "logprobs": pack_floats([-1.0]),
        "parts": [1],
        "version_spans": [VersionSpan(0, 1, 1)],
        "finish_reason": "length",
        "sampling": Sampling(max_tokens=1, seed=1),
        "tolerance": 0.05,
    }
    return AuditRequest(**values | changes)


async def test_comparisons_with_an_older_version_do_not_starve():
    # Answers of the version in use come without a pause, each fourth to be compared with an older version.
    chances, link = itertools.cycle([0.9, 0.8, 0.7, 0.1]), Link()
    config: Any = InferenceConfig(device="cpu")
    parts: Any = TimedEngine(), link, Receiver()
    auditor = Auditor("a", *parts, config, chance=chances.__next__)
    auditor._manifests, auditor._welcome = {0: b"0", 1: b"1"}, SimpleNamespace(verify_key=b"", run_id="r")
    checking = asyncio.create_task(auditor._follow_weights())
    for number in range(200):
        auditor._handle(request(number))
        await asyncio.sleep(PASS_S / 4)
    checking.cancel()
    await asyncio.gather(checking, return_exceptions=True)
    assert len([verdict for verdict in link.sent if verdict.audit % 4 == 3]) > 35
