"""Errors out of several tasks at once."""

from __future__ import annotations

import asyncio

import pytest

from composer_prime.errors import EnvironmentWorkerError, plain_errors


async def end_by(*errors: Exception) -> None:
    async def fail(error: Exception) -> None:
        raise error

    with plain_errors():
        async with asyncio.TaskGroup() as group:
            for error in errors:
                group.create_task(fail(error))


# A command sees our error, not the group that TaskGroup makes; other errors keep their group.
def test_our_error_comes_out_of_a_group():
    with pytest.raises(EnvironmentWorkerError, match="the worker is gone"):
        asyncio.run(end_by(KeyError("x"), EnvironmentWorkerError("the worker is gone"), EnvironmentWorkerError("two")))
    with pytest.raises(ExceptionGroup):
        asyncio.run(end_by(KeyError("x")))
