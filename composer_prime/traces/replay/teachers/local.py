"""Local teachers and the frozen base, in a process of their own (inference/model_server.py), started by name only: by
the launcher of a run, or here where no launcher did."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx

from composer_prime.config.teachers import MODELS_VARIABLE
from composer_prime.errors import DeadlineError, RoleFailedError
from composer_prime.model_source import resolve_model, weight_files

_END_S = 10.0
_LOOK_S = 0.5
_MARK_BYTES = 1 << 16


def weights_mark(model: str) -> str:
    """What tells a model's weights from others of the same name: sizes, headers and ends of its weight files.

    Raises ModelNotFoundError.
    """
    digest = hashlib.blake2b(digest_size=8)
    for path in weight_files(resolve_model(model)):
        size = path.stat().st_size
        with path.open("rb") as file:
            digest.update(size.to_bytes(8, "big") + file.read(_MARK_BYTES))
            file.seek(max(size - _MARK_BYTES, 0))
            digest.update(file.read())
    return digest.hexdigest()


@asynccontextmanager
async def models_at(models: Sequence[str], *, threads: int, start_timeout_s: float) -> AsyncIterator[str]:
    """The base URL where `models` are served: by the launcher (MODELS_VARIABLE), else by a process that ends with this.

    Raises RoleFailedError or DeadlineError.
    """
    url = os.environ.get(MODELS_VARIABLE)
    if url is None:
        async with LocalModels(models, threads=threads, start_timeout_s=start_timeout_s) as url:
            yield url
        return
    await _until_served(url, set(models), start_timeout_s)
    yield url


async def _until_served(url: str, models: set[str], timeout_s: float) -> None:
    """Raises DeadlineError, which says what was waited for and what was there."""
    found = "nothing answers there"
    try:
        async with asyncio.timeout(timeout_s), httpx.AsyncClient(base_url=url, trust_env=False) as client:
            while True:
                try:
                    listed = (await client.get("/models")).json()["data"]
                    if models <= {model["id"] for model in listed}:
                        return
                    found = f"it serves {', '.join(model['id'] for model in listed)}"
                except (httpx.HTTPError, ValueError, LookupError, TypeError):
                    pass
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        raise DeadlineError(
            f"waited {timeout_s:g} s for {', '.join(sorted(models))} at {url}, and {found}: see logs/teachers.log, or "
            "raise teachers.local_start_timeout_s"
        ) from None


class LocalModels:
    """`async with LocalModels(models, ...) as url`: models served on loopback; ends with its owner."""

    def __init__(self, models: Sequence[str], *, threads: int, start_timeout_s: float) -> None:
        self._models, self._threads, self._timeout_s = list(dict.fromkeys(models)), threads, start_timeout_s
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> str:
        """The endpoint's base URL. Raises RoleFailedError or DeadlineError."""
        command = [sys.executable, "-m", "inference.model_server", "--threads", str(self._threads)]
        for model in self._models:
            command += ["--model", model]
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads), "TOKENIZERS_PARALLELISM": "false"}
        # In a session of its own: Ctrl-C is not for the models, whose answers are waited for then.
        self._process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        names = ", ".join(self._models)
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), self._timeout_s)
        except TimeoutError:
            await self.__aexit__()
            raise DeadlineError(
                f"waited {self._timeout_s:g} s for local models ({names}) to load: raise teachers.local_start_timeout_s"
            ) from None
        except asyncio.CancelledError:
            await self.__aexit__()
            raise
        if not line:
            status = await self._process.wait()
            raise RoleFailedError(f"the server of local models ({names}) ended with status {status}; see its message")
        return json.loads(line)["url"]

    async def __aexit__(self, *_: object) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _END_S)
        except TimeoutError:
            process.kill()
            await process.wait()
