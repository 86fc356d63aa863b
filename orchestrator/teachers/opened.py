"""A replay with all that it needs, opened and closed again: local models, teachers, budget, files."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from composer_prime.config import Config
from orchestrator.teachers.budget import Budget
from orchestrator.teachers.local import LocalModels
from orchestrator.teachers.pool import TeacherPool
from orchestrator.teachers.records import Records, only_writer
from orchestrator.teachers.replay import Replay
from orchestrator.teachers.scoring import Scorer, ServedScorer


@asynccontextmanager
async def opened(config: Config, *, pairs: Path, votes: Path, costs: Path) -> AsyncIterator[Replay]:
    """Raises ConfigError (price, key, another replay of `pairs`), RoleFailedError or DeadlineError (local models)."""
    teachers = config.teachers
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log every vote
    models = [] if teachers.cache_only else [teacher.model for teacher in teachers.teacher if teacher.local]
    base = config.model.path
    scored = teachers.score and bool(models)
    async with AsyncExitStack() as stack:
        addresses: dict[str, str] = {}
        scorer: Scorer | None = None
        stack.enter_context(only_writer(pairs))  # before what was spent is read
        budget = Budget(teachers.budget, costs)
        records = Records(pairs, votes)
        if models:
            wanted = [*models, base] if scored else models
            served = LocalModels(wanted, threads=teachers.local_threads, start_timeout_s=teachers.local_start_timeout_s)
            url = await stack.enter_async_context(served)
            addresses = dict.fromkeys(models, url)
            if scored:
                found = ServedScorer(url, base, teachers.timeout_s)
                stack.push_async_callback(found.close)
                scorer = found
        pool = TeacherPool(teachers, budget, addresses)
        stack.push_async_callback(pool.close)
        yield Replay(teachers, pool, budget, records, scorer, seed=config.run.seed)
