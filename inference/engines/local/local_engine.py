"""LocalEngine, the asynchronous surface of the local engine. Read it first; compute.py has the loop.

It checks every request before the compute thread sees it, so that no request can stop that thread.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from composer_prime.config.inference import InferenceConfig
from composer_prime.errors import BadRequestError, EngineError
from composer_prime.wire.node_messages import Answer, Sampling
from inference.engines.base import EngineStats, ReadBack, check_prompt, check_sampling
from inference.engines.local.compute import Computer, EngineRequest
from inference.engines.sampling import rule_of

logger = logging.getLogger(__name__)

_CLOSE_S = 10.0
"""How long `close` waits for the compute thread, which reads commands between two steps."""


class LocalEngine:
    """Implements inference.engines.base.Engine on transformers. One instance serves one event loop."""

    def __init__(
        self, model_folder: Path, inference: InferenceConfig, max_context: int, computer: type[Computer] = Computer
    ) -> None:
        """`max_context` bounds prompt and completion together, in tokens; `computer` is the compute thread's class."""
        self._folder = model_folder
        self._config = inference
        self._context = max_context
        self._make_computer = computer
        self._computer: Computer | None = None
        self.on_token: Callable[[str, int, float], None] | None = None
        """Called with session, token and log-probability of each draw. Set it before `start`."""
        self._active: dict[str, asyncio.Future] = {}
        self._draining = False
        self._counted = (time.monotonic(), 0)

    @property
    def version(self) -> int:
        """Policy version of the weights in use; 0 is the model folder."""
        return self._computer.version if self._computer else 0

    async def start(self) -> None:
        """Raises ModelNotFoundError, ConfigError (context, memory, device) or EngineError (unsupported model)."""
        self._computer = self._make_computer(self._folder, self._config, self._context)
        self._computer.on_token = self.on_token
        self._computer.start()
        await asyncio.shield(self._computer.mail.ready)  # A cancelled start leaves it open: the model still loads.
        self._counted = (time.monotonic(), 0)

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: Sampling, session: str) -> Answer:
        """Raises BadRequestError, or EngineError (draining, closed, failed)."""
        computer = self._serving()
        if self._draining:
            raise EngineError("the engine is draining and takes no new requests")
        if request_id in self._active:
            raise BadRequestError(f"request {request_id!r} is running already")
        request = self._request(request_id, prompt_ids, sampling, session)
        self._active[request_id] = future = computer.mail.submit(computer.add, request)
        try:
            return await future
        except asyncio.CancelledError:
            computer.mail.submit(computer.cancel, request_id)
            raise
        finally:
            del self._active[request_id]

    def _request(self, request_id: str, prompt_ids: list[int], sampling: Sampling, session: str) -> EngineRequest:
        check_prompt(prompt_ids, vocab=self._serving().vocab, max_context=self._context)
        check_sampling(sampling)
        return EngineRequest(
            request_id=request_id,
            session=session,
            prompt=np.array(prompt_ids, dtype=np.int32),
            sampling=sampling,
            limit=min(self._context, len(prompt_ids) + sampling.max_tokens),
            rule=rule_of(sampling, secrets.randbits(64) if sampling.seed is None else sampling.seed),
        )

    async def progress(self, sent: Mapping[str, int]) -> dict[str, Answer]:
        """See Engine."""
        computer = self._serving()
        return await computer.mail.submit(computer.progress, dict(sent))

    async def cancel(self, request_id: str) -> None:
        if request_id in self._active:
            computer = self._serving()
            computer.mail.submit(computer.cancel, request_id)

    async def load_weights(
        self, version: int, tensors: Mapping[str, torch.Tensor], begin: Callable[[], None] = lambda: None
    ) -> None:
        """Raises MisfitError when `tensors` do not fit the model; then nothing has changed."""
        computer = self._serving()
        begin()
        await computer.mail.submit(computer.swap, version, tensors)

    async def read_back(self, names: list[str]) -> list[ReadBack]:
        """Read outside the compute thread, so that decoding continues."""
        return await asyncio.to_thread(self._serving().model.read_back, names)

    async def score(self, token_ids: list[int]) -> list[float]:
        """Raises BadRequestError."""
        _, logprobs = await self.check_draws(np.array(token_ids, np.int64), 1, Sampling(max_tokens=1))
        return logprobs.tolist()

    async def check_draws(
        self, token_ids: np.ndarray, start: int, sampling: Sampling, tolerance: float = 0.0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return misses and logprobs, each [T - start], of the tokens from `start` on of `token_ids`, int32 [T].

        inference.engines.sampling.draw_misses says what a miss is, and what `tolerance` is for. Raises BadRequestError.
        """
        computer = self._serving()
        check_prompt(token_ids.tolist(), vocab=computer.vocab, max_context=self._context, new_tokens=0)
        check_sampling(sampling)
        return await computer.mail.submit(computer.check_draws, token_ids, start, sampling, tolerance)

    async def find_stop(self, completion: np.ndarray, sampling: Sampling) -> int | None:
        """Return after how many tokens a stop rule ends `completion`, int32 [T_new]; None where none does."""
        computer = self._serving()
        return await computer.mail.submit(computer.find_stop, completion, sampling)

    async def drain(self) -> None:
        self._draining = True
        computer = self._serving()
        await computer.mail.submit(computer.drain)

    def stats(self) -> EngineStats:
        computer, now = self._computer, time.monotonic()
        if computer is None:
            return EngineStats(running=0, waiting=0, kv_used=0.0, kv_tokens=0, tokens_per_s=0.0)
        then, before = self._counted
        self._counted = (now, computer.sampled)
        running = min(computer.running, len(self._active))
        return EngineStats(
            running=running,
            waiting=len(self._active) - running,
            kv_used=computer.kv_used,
            kv_tokens=0,  # A conversation takes a slot, however short it is.
            tokens_per_s=(computer.sampled - before) / max(now - then, 1e-6),
        )

    async def close(self) -> None:
        """Fail every waiting request with an EngineError. Does not wait for an engine that still loads."""
        if self._computer is None:
            return
        mail = self._computer.mail
        mail.submit(self._computer.close)
        if not mail.ready.done():
            logger.info("closed while the model was loading")
            return
        ended, _ = await asyncio.wait([mail.ended], timeout=_CLOSE_S)
        if not ended:  # It hangs in a step. It is a daemon and ends with the process.
            logger.error("the compute thread does not end within %g s: it is left behind", _CLOSE_S)
            for future in self._active.values():
                if not future.done():
                    future.set_exception(EngineError("the local engine is closed; its compute thread hangs"))

    def _serving(self) -> Computer:
        if self._computer is None or not self._computer.mail.ready.done():
            raise EngineError("the engine is not started")
        if self._computer.mail.ended.done():
            raise EngineError(str(self._computer.mail.failure))
        return self._computer
