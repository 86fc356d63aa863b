"""Local teachers and the frozen base, in a process of their own (inference/model_server.py), started by name only."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from collections.abc import Sequence

from composer_prime.errors import DeadlineError, RoleFailedError
from composer_prime.model_source import resolve_model, weight_files

_END_S = 10.0
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
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment
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
