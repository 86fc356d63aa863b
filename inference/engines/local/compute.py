"""The compute thread: admit, forward, sample, deliver. It executes commands between two steps.

    event loop --submit--> inbox (SimpleQueue) --> this thread --call_soon_threadsafe--> futures on the event loop

    while open:  execute every command in the inbox (block on it only when nothing runs)
                 admit waiting requests to slots
                 one forward pass over all decoding sequences and a bounded share of prompts
                 sample, append, finish

Only this thread touches the model, the cache and the slot table. So a swap is exact: it happens between two forward
passes, and every token after it comes from the new version. Running requests keep their cached keys and values, but a
prompt without a token yet is computed again: an answer of one version has no other version's keys.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
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
from composer_prime.errors import ComposerError, ConfigError, EngineError
from composer_prime.wire.node_messages import RUNNING, Answer, Sampling
from composer_prime.wire.types import VersionSpan
from inference.engines.local.cached_attention import EngineStep, KvCache, Segment
from inference.engines.local.loading import LoadedModel, check_supported
from inference.engines.local.slots import SlotTable, plan_step
from inference.engines.sampling import Rule, SamplingRows, StopRule, draw_misses, rule_of, sample

log = logging.getLogger(__name__)
GIB = 1 << 30
_SCORED_BYTES = 1 << 30
"""Most bytes of float32 logits of one pass over tokens that are given."""


@dataclass(slots=True, kw_only=True, eq=False)
class EngineRequest:
    """A sequence being continued. Its token ids live in its slot's row of the slot table."""

    request_id: str
    session: str
    prompt: np.ndarray
    """int32 [T]."""
    sampling: Sampling
    limit: int
    """Ends at this many tokens, prompt and completion together."""
    rule: Rule
    """Of its draws."""
    future: asyncio.Future = field(init=False)
    """Resolved on the event loop with an Answer or an error."""
    stop: StopRule = field(init=False)
    cached: int = 0
    """Prompt tokens whose keys and values were cached."""
    logprobs: list[float] = field(default_factory=list)
    """[T_new so far]."""
    versions: list[int] = field(default_factory=list)
    """[T_new so far]: of the weights that each token was sampled with."""

    def completion(self, token_ids: list[int], reason: str, first: int = 0) -> Answer:
        """Return the answer from its token number `first` on: `token_ids`."""
        spans, start = [], 0
        for version, tokens in groupby(self.versions[first:]):
            end = start + len(list(tokens))
            spans.append(VersionSpan(start, end, version))
            start = end
        return Answer.of(token_ids, self.logprobs[first:], spans, reason, self.cached)


class Mailbox:
    """Commands from the event loop to the compute thread, and their outcomes back to the futures that wait."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[tuple[asyncio.Future, Callable[..., None], tuple]] = queue.SimpleQueue()
        self._resolved: list[tuple[asyncio.Future, object]] = []
        self.ready: asyncio.Future = self._loop.create_future()
        self.ended: asyncio.Future = self._loop.create_future()
        """Resolves when the thread ends, for any reason."""
        self.failure: ComposerError | None = None
        """The error that every later call raises; set before `ended`."""
        self._futures = {self.ready}
        """Unresolved; only the event loop touches it."""

    def submit(self, command: Callable[..., None], *args: object) -> asyncio.Future:
        """Have the thread call `command(future, *args)` between two steps. Return the future that it will resolve."""
        future = self._loop.create_future()
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        self._inbox.put((future, command, args))
        return future

    # The compute thread calls these.

    def execute(self, *, wait: bool) -> bool:
        """Execute one command. Return whether there was one; with `wait` there is."""
        try:
            future, command, args = self._inbox.get(block=wait)
        except queue.Empty:
            return False
        try:
            with _memory_errors():
                command(future, *args)
        except ComposerError as error:
            self.resolve(future, error)
        return True

    def resolve(self, future: asyncio.Future, outcome: object) -> None:
        self._resolved.append((future, outcome))

    def deliver(self) -> None:
        """Send this step's outcomes to the event loop in one call."""
        if self._resolved:
            batch, self._resolved = self._resolved, []
            self.on_loop(_settle, batch)

    def on_loop(self, callback: Callable[..., None], *args: object) -> None:
        with suppress(RuntimeError):  # The event loop is closed: nobody waits any more.
            self._loop.call_soon_threadsafe(callback, *args)

    def end(self, failure: ComposerError) -> None:
        """Fail everything that still waits, then resolve `ended`."""
        self.deliver()
        self.failure = failure
        self.on_loop(self._fail_all)

    def _fail_all(self) -> None:
        _settle([(future, self.failure) for future in list(self._futures)])
        self.ended.set_result(None)


class Computer:
    """Owns the model. Create it on the event loop, then `start`; the mailbox's commands run in the thread."""

    prefill_tokens = 4096
    """Maximum prompt tokens between two decode steps, so that long prompts do not stall decoding."""

    def __init__(self, folder: Path, config: InferenceConfig, max_context: int) -> None:
        self._folder = folder
        self._config = config
        self._context = max_context
        self.mail = Mailbox()
        self._waiting: deque[EngineRequest] = deque()
        self._running: dict[int, EngineRequest] = {}
        self._drains: list[asyncio.Future] = []
        self._open = True
        self.version = 0
        self.sampled = 0
        """Tokens sampled so far; the event loop computes its rate from it."""
        self.kv_used = 0.0
        self.on_token: Callable[[str, int, float], None] | None = None
        """Called on the event loop with session, token and log-probability of each draw."""

    def start(self) -> None:
        threading.Thread(target=self._main, name="local-engine", daemon=True).start()

    @property
    def running(self) -> int:
        return len(self._running)

    # ---- commands: the compute thread calls them -----------------------------------------------------------------

    def add(self, future: asyncio.Future, request: EngineRequest) -> None:
        request.future = future
        request.stop = StopRule(request.sampling, self.model.eos, self.model.decode)
        self._waiting.append(request)

    def cancel(self, future: asyncio.Future, request_id: str) -> None:
        """End a request early; it is resolved with what it has."""
        self.mail.resolve(future, None)
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                self.mail.resolve(request.future, request.completion([], "cancelled"))
                return
        for slot, request in self._running.items():
            if request.request_id == request_id:
                self._finish(slot, "cancelled")
                return

    def progress(self, future: asyncio.Future, sent: dict[str, int]) -> None:
        """Resolve with what running requests have beyond their first `sent[id]` tokens."""
        parts = {}
        for slot, request in self._running.items():
            first = sent.get(request.request_id)
            if first is not None and first < len(request.logprobs):
                start, end = len(request.prompt) + first, int(self._table.known[slot])
                tokens = self._table.tokens[slot, start:end].tolist()
                parts[request.request_id] = request.completion(tokens, RUNNING, first)
        self.mail.resolve(future, parts)

    def swap(self, future: asyncio.Future, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self.model.swap(tensors)
        self.version = version
        self._table.weights_changed([slot for slot, request in self._running.items() if not request.logprobs])
        self.mail.resolve(future, None)

    def check_draws(
        self, future: asyncio.Future, token_ids: np.ndarray, start: int, sampling: Sampling, tolerance: float
    ) -> None:
        """Resolve with misses and logprobs of the tokens from `start` on, each [T - start]."""
        at_once = max(16, _SCORED_BYTES // (4 * self.model.vocab))
        found = [(np.zeros(0), np.zeros(0, np.float32))]
        rule = rule_of(sampling, sampling.seed or 0)
        for first in range(start, len(token_ids), at_once):
            last = min(first + at_once, len(token_ids))
            step = EngineStep(
                cache=self._cache,
                input_ids=torch.from_numpy(token_ids[:last].astype(np.int64))[None],
                position_ids=torch.arange(last)[None],
                rows=torch.arange(first - 1, last - 1),
                segments=[Segment(0, last, 0, 0)],
                places=None,
            )
            rows = SamplingRows.of([rule] * (last - first), np.arange(first, last))
            found.append(draw_misses(self.model.forward(step), rows, token_ids[first:last], tolerance))
        misses, logprobs = (np.concatenate(column) for column in zip(*found, strict=True))
        self.mail.resolve(future, (misses, logprobs))

    def find_stop(self, future: asyncio.Future, completion: np.ndarray, sampling: Sampling) -> None:
        """Resolve with the number of tokens after which a stop rule ends `completion`; None where none does."""
        rule = StopRule(sampling, self.model.eos, self.model.decode)
        ends = (count for count in range(1, len(completion) + 1) if rule.ends(completion[:count]))
        self.mail.resolve(future, next(ends, None))

    def drain(self, future: asyncio.Future) -> None:
        """Resolve `future` once nothing runs or waits."""
        self._drains.append(future)

    def close(self, future: asyncio.Future) -> None:
        self._open = False
        self.mail.resolve(future, None)

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
                    self._execute_commands()
                    self._admit()
                    order = list(self._running)
                    step = plan_step(self._table, self._cache, order, self.prefill_tokens, self.model.device)
                    if step is not None:
                        self._compute(step)
                    self._after_step()
        except ComposerError as error:
            failure = error
        except BaseException as error:
            log.exception("the local engine's compute thread failed")
            failure = EngineError(f"the local engine failed: {error!r}")
        self._running, self._waiting = {}, deque()
        with suppress(AttributeError):  # Loading may have failed before.
            del self.model, self._cache
        self.mail.end(failure)

    def _load(self) -> None:
        self.model = LoadedModel(self._folder, self._config, self._context)
        self.vocab = self.model.vocab  # Callers read it until they hear that the thread ended.
        self._cache = KvCache()
        probe = EngineStep(
            cache=self._cache,
            input_ids=torch.zeros(1, 2, dtype=torch.int64),
            position_ids=torch.arange(2)[None],
            rows=None,
            segments=[Segment(0, 2, 0, 0)],
            places=torch.arange(2, device=self.model.device),
        )
        self.model.forward(probe)
        check_supported(self.model.module, len(self._cache.layers))
        capacity = self._capacity()
        self._cache.allocate(capacity, self._context)
        self._max_running = min(self._config.local.max_batch, capacity)
        self._table = SlotTable(capacity, self._context)

    def _capacity(self) -> int:
        """Return the number of slots: two per running sequence, for conversations between turns, if they fit."""
        local = self._config.local
        slot_bytes = self._cache.bytes_per_token * self._context
        fitting = int(local.kv_cache_gib * GIB) // slot_bytes
        if fitting < 1:
            raise ConfigError(
                f"inference.local.kv_cache_gib is {local.kv_cache_gib}, but one sequence of model.max_context = "
                f"{self._context} tokens takes {slot_bytes / GIB:.2f} GiB: raise kv_cache_gib or lower max_context"
            )
        return min(2 * local.max_batch, fitting)

    def _execute_commands(self) -> None:
        """Execute the commands in the inbox. Wait for one when there is nothing else to do."""
        idle = not self._running and not self._waiting
        while self._open and self.mail.execute(wait=idle):
            idle = False

    def _admit(self) -> None:
        kept_waiting = []
        while self._waiting and len(self._running) < self._max_running:
            request = self._waiting.popleft()
            place = self._table.place(request.prompt, request.session)
            if place is None:
                kept_waiting.append(request)
                continue
            if place.source is not None:
                self._cache.copy(place.source, place.slot, place.cached)
            request.cached = place.cached
            self._running[place.slot] = request
        self._waiting.extendleft(reversed(kept_waiting))

    def _compute(self, step: EngineStep) -> None:
        logits = self.model.forward(step)
        for slot, count in step.counts:
            self._table.computed[slot] += count
        if not step.slots:
            return
        requests = [self._running[slot] for slot in step.slots]
        rows = SamplingRows.of([one.rule for one in requests], self._table.known[step.slots])
        tokens, logprobs = sample(logits, rows)
        self.sampled += len(requests)
        for slot, token, logprob in zip(step.slots, tokens.tolist(), logprobs.tolist(), strict=True):
            self._append(slot, token, logprob)

    def _append(self, slot: int, token: int, logprob: float) -> None:
        request = self._running[slot]
        if not np.isfinite(logprob):
            self._drop(slot)
            self.mail.resolve(request.future, EngineError(f"weights v{self.version} give non-finite logits"))
            return
        known = self._table.append(slot, token)
        request.logprobs.append(logprob)
        request.versions.append(self.version)
        if self.on_token is not None:
            self.mail.on_loop(self.on_token, request.session, token, logprob)
        begin = len(request.prompt) - min(request.sampling.resumed, len(request.prompt))
        if request.stop.ends(self._table.tokens[slot, begin:known]):
            self._finish(slot, "stop")
        elif known >= request.limit:
            self._finish(slot, "length")

    def _finish(self, slot: int, reason: str) -> None:
        request = self._running[slot]
        known = int(self._table.known[slot])
        tokens = self._table.tokens[slot, len(request.prompt) : known].tolist()
        self._drop(slot)
        self.mail.resolve(request.future, request.completion(tokens, reason))

    def _drop(self, slot: int) -> None:
        del self._running[slot]
        self._table.release(slot)

    def _after_step(self) -> None:
        if self._drains and not self._running and not self._waiting:
            for future in self._drains:
                self.mail.resolve(future, None)
            self._drains.clear()
        held = self._table.computed[self._table.running]  # Idle slots are given up when needed.
        self.kv_used = float(held.sum()) / self._table.tokens.size
        self.mail.deliver()


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Raise an EngineError with the remedy in place of errors that say that memory ran out."""
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
