"""A replay with all that it needs, opened and closed again: local models, teachers, budget, files."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from composer_prime.config import Config
from composer_prime.config.teachers import TeachersConfig
from composer_prime.errors import ConfigError, ModelNotFoundError
from orchestrator.teachers.budget import Budget
from orchestrator.teachers.local import models_at
from orchestrator.teachers.pool import TeacherPool, check_pool
from orchestrator.teachers.records import Records, only_writer
from orchestrator.teachers.replay import Replay
from orchestrator.teachers.running_gate import RunningGate
from orchestrator.teachers.scoring import KeptScorer, Scorer, ServedScorer


@asynccontextmanager
async def opened(
    config: Config, *, pairs: Path, votes: Path, costs: Path, gated: bool = False
) -> AsyncIterator[Replay]:
    """`gated`: measure the pairs as they come, for they are trained meanwhile.

    Raises ConfigError (price, key, base, another replay of `pairs`, a file of something else), RoleFailedError or
    DeadlineError (local models).
    """
    teachers = config.teachers
    await asyncio.to_thread(check_pool, teachers)  # it may convert a model
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log every vote
    base = config.model.path
    wanted = teachers.models_served(base)
    async with AsyncExitStack() as stack:
        stack.enter_context(only_writer(pairs))  # before what was spent is read
        records = Records(pairs, votes)  # first: what is no file of pairs is left alone
        budget = Budget(teachers.budget, costs)
        addresses: dict[str, str] = {}
        served: Scorer | None = None
        kept = _kept(teachers, base) if teachers.score else None
        if wanted:
            url = await stack.enter_async_context(
                models_at(wanted, threads=teachers.local_threads, start_timeout_s=teachers.local_start_timeout_s)
            )
            addresses = {teacher.model: url for teacher in teachers.teacher if teacher.local}
            if kept is not None:
                served = kept.inner = ServedScorer(url, base, teachers.timeout_s)
                stack.push_async_callback(served.close)
        pool = await asyncio.to_thread(TeacherPool, teachers, budget, addresses)  # it imports for seconds
        stack.push_async_callback(pool.close)
        gate = RunningGate(teachers.gate, records, served) if gated else None
        yield Replay(teachers, pool, budget, records, kept, seed=config.run.seed, gate=gate)


def _kept(teachers: TeachersConfig, base: str) -> KeptScorer:
    try:
        return KeptScorer(teachers.cache_dir.expanduser() / "scores", base)
    except ModelNotFoundError as error:
        raise ConfigError(
            f"{error}; the frozen base chooses among agreeing answers: to take the first of them instead, set "
            "teachers.score = false"
        ) from None
