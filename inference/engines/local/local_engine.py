"""The `local` engine: continuous batching on transformers, for laptops, CI and many-node tests.

LocalEngine is its asynchronous surface. A compute thread works for it:

    event loop --call--> inbox (SimpleQueue) --> compute thread --call_soon_threadsafe--> futures on the event loop

    while open:  make every call in the inbox (block on it only when nothing runs)
                 admit waiting requests to slots
                 one forward pass over all decoding sequences and a bounded share of prompts
                 sample, append, finish

Only that thread touches the model and the cache. A swap is exact: it happens between two forward passes. Running
requests keep their cached keys and values, but a prompt without a token yet is computed again: an answer of one
version has no other version's keys.

Every request is checked before, so that none can stop that thread.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import secrets
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import numpy as np
import torch

from composer_prime.config.inference import InferenceConfig
from composer_prime.console import GIB
from composer_prime.errors import ComposerError, ConfigError, EngineError
from composer_prime.wire.node_messages import RUNNING, Answer, Sampling, Status
from composer_prime.wire.types import VersionSpan
from inference.engines.base import ReadBack
from inference.engines.local.model import EngineStep, KvCache, LoadedModel, Segment, check_supported, plan_step
from inference.engines.sampling import (
    Rule,
    SamplingRows,
    check_prompt,
    check_sampling,
    draw_misses,
    rule_of,
    sample,
    stop_rule,
)

logger = logging.getLogger(__name__)

_CLOSE_S = 10.0
_SCORED_BYTES = 1 << 30


@dataclass(slots=True, kw_only=True, eq=False)
class EngineRequest:
    """A sequence being continued. Its token ids live in its slot's row of the cache."""

    request_id: str
    session: str
    prompt: np.ndarray
    """int32 [T]."""
    resumed: int
    """Of the prompt's last tokens: sampled before, so a stop string may begin there."""
    limit: int
    rule: Rule
    """Of its draws."""
    ends: Callable[[np.ndarray], bool]
    """Its stop rule."""
    future: asyncio.Future
    cached: int = 0
    """Prompt tokens whose keys and values were cached."""
    logprobs: list[float] = field(default_factory=list)
    """[T_new so far]."""
    versions: list[int] = field(default_factory=list)
    """[T_new so far]: of the weights that each token was sampled with."""

    def completion(self, token_ids: list[int], reason: str, first: int = 0) -> Answer:
        spans, start = [], 0
        for version, tokens in groupby(self.versions[first:]):
            end = start + len(list(tokens))
            spans.append(VersionSpan(start, end, version))
            start = end
        return Answer.of(token_ids, self.logprobs[first:], spans, reason, self.cached)


class LocalEngine:
    """Implements inference.engines.base.Engine on transformers. One instance serves one event loop."""

    def __init__(
        self, model_folder: Path, inference: InferenceConfig, max_context: int, computer: type[Computer] | None = None
    ) -> None:
        """`computer` is the compute thread's class."""
        self._folder = model_folder
        self._config = inference
        self._context = max_context
        self._make_computer = computer or Computer
        self._computer: Computer | None = None
        self.on_token: Callable[[str, int, float], None] | None = None
        """Called with session, token and log-probability of each draw. Set it before `start`."""
        self._active: dict[str, asyncio.Future] = {}
        self._counted = (time.monotonic(), 0)

    @property
    def version(self) -> int:
        return self._computer.version if self._computer else 0

    async def start(self) -> None:
        """Raises ModelNotFoundError, ConfigError or EngineError (unsupported model)."""
        self._computer = self._make_computer(self._folder, self._config, self._context, self.on_token)
        self._computer.start()
        await asyncio.shield(self._computer.mail.ready)  # A cancelled start leaves it open: the model still loads.
        self._counted = (time.monotonic(), 0)

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: Sampling, session: str) -> Answer:
        """Raises BadRequestError, or EngineError (closed, failed)."""
        computer = self._serving()
        check_prompt(prompt_ids, vocab=computer.vocab, max_context=self._context)
        check_sampling(sampling)
        request = EngineRequest(
            request_id=request_id,
            session=session,
            prompt=np.array(prompt_ids, dtype=np.int32),
            resumed=min(sampling.resumed, len(prompt_ids)),
            limit=min(self._context, len(prompt_ids) + sampling.max_tokens),
            rule=rule_of(sampling, secrets.randbits(64) if sampling.seed is None else sampling.seed),
            ends=stop_rule(sampling, computer.eos, computer.decode),
            future=computer.mail.future(),
        )
        self._active[request_id] = request.future
        computer.mail.call(computer.add, request)
        try:
            return await request.future
        except asyncio.CancelledError:
            computer.mail.call(computer.cancel, request)
            raise
        finally:
            del self._active[request_id]

    async def progress(self, sent: Mapping[str, int]) -> dict[str, Answer]:
        """See Engine."""
        computer = self._serving()
        return await computer.mail.call(computer.progress, dict(sent))

    async def load_weights(
        self, version: int, tensors: Mapping[str, torch.Tensor], begin: Callable[[], None] = lambda: None
    ) -> None:
        computer = self._serving()
        begin()
        await computer.mail.call(computer.swap, version, tensors)

    async def read_back(self, names: list[str]) -> list[ReadBack]:
        return await asyncio.to_thread(self._serving().model.read_back, names)

    async def score(self, token_ids: list[int]) -> list[float]:
        """Raises BadRequestError."""
        _, logprobs = await self.check_draws(np.array(token_ids, np.int64), 1, Sampling(max_tokens=1))
        return logprobs.tolist()

    async def check_draws(
        self, token_ids: np.ndarray, start: int, sampling: Sampling, tolerance: float = 0.0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return misses and logprobs, each [T - start], of the tokens of `token_ids`, int32 [T], as `draw_misses` does.

        Raises BadRequestError.
        """
        computer = self._serving()
        check_prompt(token_ids.tolist(), vocab=computer.vocab, max_context=self._context, new_tokens=0)
        check_sampling(sampling)
        return await computer.mail.call(computer.check_draws, token_ids, start, sampling, tolerance)

    async def find_stop(self, completion: np.ndarray, sampling: Sampling) -> int | None:
        computer = self._serving()
        ends = stop_rule(sampling, computer.eos, computer.decode)
        counts = (count for count in range(1, len(completion) + 1) if ends(completion[:count]))
        return await computer.mail.call(next, counts, None)

    def stats(self) -> Status:
        """Return the node's status, without the cache's tokens: a short conversation takes a whole slot."""
        computer, now = self._computer, time.monotonic()
        if computer is None:
            return Status(version=0, running=0, waiting=0, kv_used=0.0, tokens_per_s=0.0)
        then, before = self._counted
        self._counted = (now, computer.sampled)
        running = min(len(computer.running), len(self._active))
        return Status(
            version=computer.version,
            running=running,
            waiting=len(self._active) - running,
            kv_used=computer.kv_used,
            tokens_per_s=(computer.sampled - before) / max(now - then, 1e-6),
        )

    async def close(self) -> None:
        if self._computer is None:
            return
        mail = self._computer.mail
        mail.call(self._computer.close)
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


class Mailbox:
    """Calls of the event loop to the compute thread, and their outcomes."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[tuple[asyncio.Future, Callable[..., object], tuple]] = queue.SimpleQueue()
        self._resolved: list[tuple[asyncio.Future, object]] = []
        self._futures: set[asyncio.Future] = set()
        """Unresolved; only the event loop touches it."""
        self.ready = self.future()
        self.ended: asyncio.Future = self._loop.create_future()
        """Resolves when the thread ends, for any reason."""
        self.failure: ComposerError | None = None

    def future(self) -> asyncio.Future:
        """Return a future that the thread resolves; it fails when the thread ends before."""
        future = self._loop.create_future()
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def call(self, function: Callable[..., object], *args: object) -> asyncio.Future:
        future = self.future()
        self._inbox.put((future, function, args))
        return future

    # The compute thread calls these.

    def execute(self, *, wait: bool) -> bool:
        try:
            future, function, args = self._inbox.get(block=wait)
        except queue.Empty:
            return False
        try:
            with _memory_errors():
                self.resolve(future, function(*args))
        except ComposerError as error:
            self.resolve(future, error)
        return True

    def resolve(self, future: asyncio.Future, outcome: object) -> None:
        self._resolved.append((future, outcome))

    def deliver(self) -> None:
        if self._resolved:
            batch, self._resolved = self._resolved, []
            self.on_loop(_settle, batch)

    def on_loop(self, callback: Callable[..., None], *args: object) -> None:
        with suppress(RuntimeError):  # The event loop is closed: nobody waits any more.
            self._loop.call_soon_threadsafe(callback, *args)

    def end(self, failure: ComposerError) -> None:
        self.deliver()
        self.failure = failure
        self.on_loop(self._fail_all)

    def _fail_all(self) -> None:
        _settle([(future, self.failure) for future in list(self._futures)])
        self.ended.set_result(None)


class Computer:
    """Owns the model. Create it on the event loop; the mailbox's calls run in the thread."""

    prefill_tokens = 4096
    """Between two decode steps, so that long prompts do not stall decoding."""
    model: LoadedModel
    vocab: int
    eos: frozenset[int]
    decode: Callable[[list[int]], str] | None

    def __init__(
        self,
        folder: Path,
        config: InferenceConfig,
        max_context: int,
        on_token: Callable[[str, int, float], None] | None,
    ) -> None:
        """`on_token` is called on the event loop with session, token and log-probability of each draw."""
        self._folder = folder
        self._config = config
        self._context = max_context
        self._on_token = on_token
        self.mail = Mailbox()
        self._waiting: deque[EngineRequest] = deque()
        self.running: dict[int, EngineRequest] = {}
        """By slot."""
        self._open = True
        self.version = 0
        self.sampled = 0
        self.kv_used = 0.0

    def start(self) -> None:
        threading.Thread(target=self._main, name="local-engine", daemon=True).start()

    # ---- calls of the event loop, in the compute thread ----------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        self._waiting.append(request)

    def cancel(self, request: EngineRequest) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
        for slot in [slot for slot, one in self.running.items() if one is request]:
            self._end(slot, None)

    def progress(self, sent: dict[str, int]) -> dict[str, Answer]:
        parts = {}
        for slot, request in self.running.items():
            first = sent.get(request.request_id)
            if first is not None and first < len(request.logprobs):
                parts[request.request_id] = request.completion(self._sampled(slot, first), RUNNING, first)
        return parts

    def swap(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self.model.swap(tensors)
        self.version = version
        self._cache.weights_changed([slot for slot, request in self.running.items() if not request.logprobs])

    def check_draws(
        self, token_ids: np.ndarray, start: int, sampling: Sampling, tolerance: float
    ) -> tuple[np.ndarray, np.ndarray]:
        at_once = max(16, _SCORED_BYTES // (4 * self.vocab))
        found = [(np.zeros(0), np.zeros(0, np.float32))]
        rule = rule_of(sampling, sampling.seed or 0)
        for first in range(start, len(token_ids), at_once):
            last = min(first + at_once, len(token_ids))
            logits = self._forward_alone(token_ids[:last], rows=torch.arange(first - 1, last - 1))
            rows = SamplingRows.of([rule] * (last - first), np.arange(first, last))
            found.append(draw_misses(logits, rows, token_ids[first:last], tolerance))
        misses, logprobs = (np.concatenate(column) for column in zip(*found, strict=True))
        return misses, logprobs

    def close(self) -> None:
        self._open = False

    # ---- the loop ------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        torch.set_num_threads(self._config.threads)  # An OpenMP setting: it applies to the thread that makes it.
        failure: ComposerError = EngineError("the local engine is closed")
        try:
            with torch.inference_mode(), _memory_errors():
                self._load()
                self.mail.resolve(self.mail.ready, None)
                self.mail.deliver()
                while self._open:
                    self._make_calls()
                    self._admit()
                    if self.running:
                        order = list(self.running)
                        self._compute(plan_step(self._cache, order, self.prefill_tokens, self.model.device))
                    held = self._cache.computed[self._cache.running]  # Idle slots are given up when needed.
                    self.kv_used = float(held.sum()) / self._cache.tokens.size
                    self.mail.deliver()
        except ComposerError as error:
            failure = error
        except BaseException as error:
            logger.exception("the local engine's compute thread failed")
            failure = EngineError(f"the local engine failed: {error!r}")
        self.running, self._waiting = {}, deque()
        with suppress(AttributeError):  # Loading may have failed before.
            del self.model, self._cache
        self.mail.end(failure)

    def _load(self) -> None:
        self.model = LoadedModel(self._folder, self._config, self._context)
        # Callers read these until they hear that the thread ended.
        self.vocab, self.eos, self.decode = self.model.vocab, self.model.eos, self.model.decode
        self._cache = KvCache()
        self._forward_alone(np.zeros(2), places=torch.arange(2, device=self.model.device))
        check_supported(self.model.module, len(self._cache.layers.keys() | self._cache.states.keys()))
        capacity = self._capacity()
        self._cache.allocate(capacity, self._context)
        self._max_running = min(self._config.local.max_batch, capacity)

    def _forward_alone(
        self, token_ids: np.ndarray, *, rows: torch.Tensor | None = None, places: torch.Tensor | None = None
    ) -> torch.Tensor:
        step = EngineStep(
            cache=self._cache,
            input_ids=torch.from_numpy(token_ids.astype(np.int64))[None],
            position_ids=torch.arange(len(token_ids))[None],
            rows=rows,
            segments=[Segment(0, len(token_ids), 0, 0)],
            places=places,
        )
        return self.model.forward(step)

    def _capacity(self) -> int:
        local = self._config.local
        slot_bytes = self._cache.bytes_per_token * self._context + self._cache.bytes_per_state
        fitting = int(local.kv_cache_gib * GIB) // slot_bytes
        if fitting < 1:
            raise ConfigError(
                f"inference.local.kv_cache_gib is {local.kv_cache_gib}, but one sequence of model.max_context = "
                f"{self._context} tokens takes {slot_bytes / GIB:.2f} GiB: raise kv_cache_gib or lower max_context"
            )
        return min(2 * local.max_batch, fitting)

    def _make_calls(self) -> None:
        idle = not self.running and not self._waiting
        while self._open and self.mail.execute(wait=idle):
            idle = False

    def _admit(self) -> None:
        kept_waiting = []
        while self._waiting and len(self.running) < self._max_running:
            request = self._waiting.popleft()
            place = self._cache.place(request.prompt, request.session)
            if place is None:
                kept_waiting.append(request)
            else:
                slot, request.cached = place
                self.running[slot] = request
        self._waiting.extendleft(reversed(kept_waiting))

    def _compute(self, step: EngineStep) -> None:
        logits = self.model.forward(step)
        for group in step.groups:
            self._cache.computed[group.slot : group.slot + group.count] += 1
        for segment in step.segments:
            self._cache.computed[segment.slot] += segment.count
        if not step.slots:
            return
        requests = [self.running[slot] for slot in step.slots]
        rows = SamplingRows.of([one.rule for one in requests], self._cache.known[step.slots])
        tokens, logprobs = sample(logits, rows)
        self.sampled += len(requests)
        for slot, token, logprob in zip(step.slots, tokens.tolist(), logprobs.tolist(), strict=True):
            self._append(slot, token, logprob)

    def _append(self, slot: int, token: int, logprob: float) -> None:
        request = self.running[slot]
        if not np.isfinite(logprob):
            self._end(slot, EngineError(f"weights v{self.version} give non-finite logits"))
            return
        known = self._cache.append(slot, token)
        request.logprobs.append(logprob)
        request.versions.append(self.version)
        if self._on_token is not None:
            self.mail.on_loop(self._on_token, request.session, token, logprob)
        if request.ends(self._cache.tokens[slot, len(request.prompt) - request.resumed : known]):
            self._finish(slot, "stop")
        elif known >= request.limit:
            self._finish(slot, "length")

    def _sampled(self, slot: int, first: int = 0) -> list[int]:
        start = len(self.running[slot].prompt) + first
        return self._cache.tokens[slot, start : int(self._cache.known[slot])].tolist()

    def _finish(self, slot: int, reason: str) -> None:
        self._end(slot, self.running[slot].completion(self._sampled(slot), reason))

    def _end(self, slot: int, outcome: object) -> None:
        self._cache.release(slot)
        self.mail.resolve(self.running.pop(slot).future, outcome)


@contextmanager
def _memory_errors() -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # For a CPU's memory torch has no class.
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "can't allocate memory" not in str(error):
            raise
        traceback.clear_frames(error.__traceback__)  # Their tensors would live as long as the error.
        told, _, _ = str(error).partition("\n")
        raise EngineError(
            f"the local engine ran out of memory ({told[:300] or type(error).__name__}): lower "
            "inference.local.kv_cache_gib or model.max_context, or give it a device with more memory"
        ) from error


def _settle(batch: list[tuple[asyncio.Future, object]]) -> None:
    """Resolve futures. Runs on the event loop."""
    for future, outcome in batch:
        if future.done():
            continue
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
            future.exception()  # Mark it retrieved: nobody waits for a cancellation's future.
        else:
            future.set_result(outcome)
