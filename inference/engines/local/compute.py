"""The compute thread: admit, forward, sample, deliver. It executes commands between two steps.

    event loop --Command--> inbox (SimpleQueue) --> this thread --call_soon_threadsafe--> futures on the event loop

    while open:  execute every command in the inbox (block on it only when nothing runs)
                 admit waiting requests to slots
                 one forward pass over all decoding sequences and a bounded share of prompts
                 sample, append, finish

Only this thread touches the model, the cache and the slot table. So a swap is exact: it happens between two forward
passes, and every token after it comes from the new version. Running requests keep their cached keys and values.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from pathlib import Path

import numpy as np
import torch

from composer_prime.config.inference import InferenceConfig
from composer_prime.errors import ComposerError, ConfigError, EngineError
from inference.engines.base import EngineCompletion
from inference.engines.local.attention import Segment, StepPlan
from inference.engines.local.kv_cache import KvCache
from inference.engines.local.loading import (
    check_context,
    check_supported,
    end_tokens,
    load_model,
    swap_weights,
    text_decoder,
)
from inference.engines.local.request import (
    Add,
    CancelRequest,
    Close,
    Command,
    Drained,
    EngineRequest,
    ScoreRequest,
    StopRule,
    Swap,
)
from inference.engines.local.sampling import SamplingRows, sample
from inference.engines.local.scheduling import EngineStep, plan_step
from inference.engines.local.slots import FamilyMemory, SlotTable

log = logging.getLogger(__name__)
GIB = 1 << 30


class Computer:
    """Owns the model. Create on the event loop, then `start`; `post` is the only thread-safe method."""

    def __init__(self, folder: Path, config: InferenceConfig, max_context: int) -> None:
        self._folder, self._config, self._context = folder, config, max_context
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._waiting: deque[EngineRequest] = deque()
        self._running: dict[int, EngineRequest] = {}
        self._drains: list[asyncio.Future] = []
        self._resolved: list[tuple[asyncio.Future, object]] = []
        self._open = True
        self.version = 0
        self.sampled = 0
        """Tokens sampled so far; the event loop computes its rate from it."""
        self.kv_used = 0.0
        self.ready: asyncio.Future = self._loop.create_future()
        self.ended: asyncio.Future = self._loop.create_future()
        """Resolves when the thread ends, for any reason."""
        self.loaded = False
        """Whether the model is loaded. Before that the thread executes no command."""
        self.failure: ComposerError | None = None
        """The error that every later call raises; set before `ended`."""
        self._thread = threading.Thread(target=self._main, name="local-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, command: Command) -> None:
        self._inbox.put(command)

    @property
    def running(self) -> int:
        return len(self._running)

    # ---- everything below runs in the compute thread -------------------------------------------------------------

    def _main(self) -> None:
        torch.set_num_threads(self._config.threads)  # An OpenMP setting: it applies to the thread that makes it.
        error: BaseException | None = None
        try:
            with torch.inference_mode():
                self._load()
                self.loaded = True
                self._resolve(self.ready, None)
                self._deliver()
                while self._open:
                    self._execute_commands()
                    self._admit()
                    self._step()
                    self._after_step()
        except ComposerError as refused:
            error = refused
        except BaseException as caught:
            log.exception("the local engine's compute thread failed")
            error = caught
        self._end(error)

    def _load(self) -> None:
        self._model = load_model(self._folder, self._config)
        check_context(self._model, self._context)
        self._device = next(self._model.parameters()).device
        self.vocab = self._model.get_input_embeddings().weight.shape[0]
        self._eos = end_tokens(self._model)
        self._decode_text = text_decoder(self._folder)
        self._takes_rows = self._model._supports_logits_to_keep()
        self._cache = KvCache()
        places = torch.arange(2, device=self._device)
        probe = StepPlan(cache=self._cache, segments=[Segment(0, 2, 0, 0)], places=places)
        self._forward(torch.zeros(1, 2, dtype=torch.int64, device=self._device), torch.arange(2)[None], probe, None)
        check_supported(self._model, self._cache.num_layers)
        share = self._device.type == "cpu" and not self._cache.windowed and self._config.local.prefix_cache
        self._shared = FamilyMemory() if share else None
        capacity = self._capacity()
        self._cache.limit(capacity, self._context)
        self._max_running = min(self._config.local.max_batch, capacity)
        self._table = SlotTable(capacity, self._context, reuse=self._config.local.prefix_cache)
        self._temperature = np.ones(capacity, dtype=np.float32)
        self._top_k = np.zeros(capacity, dtype=np.int64)
        self._top_p = np.ones(capacity, dtype=np.float32)
        self._seed = np.zeros(capacity, dtype=np.uint64)

    def _capacity(self) -> int:
        """Return the number of slots: two per running sequence when conversations are kept, if they fit the memory."""
        local = self._config.local
        useful = local.max_batch * (2 if local.prefix_cache else 1)
        slot_bytes = self._cache.bytes_per_token * self._context
        fitting = int(local.kv_cache_gib * GIB) // slot_bytes
        if fitting < 1:
            raise ConfigError(
                f"inference.local.kv_cache_gib is {local.kv_cache_gib}, but one sequence of model.max_context = "
                f"{self._context} tokens takes {slot_bytes / GIB:.2f} GiB: raise kv_cache_gib or lower max_context"
            )
        return min(useful, fitting)

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, plan: StepPlan, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the logits [R, V] of `rows` ([N, V] when None)."""
        only_rows = {"logits_to_keep": rows} if rows is not None and self._takes_rows else {}
        logits = self._model(
            input_ids=ids, position_ids=positions.to(ids.device), use_cache=False, slot_plan=plan, **only_rows
        ).logits[0]
        return logits if rows is None or only_rows else logits[rows]

    def _execute_commands(self) -> None:
        """Execute the commands in the inbox. Wait for one when there is nothing else to do."""
        block = not self._running and not self._waiting
        while self._open:
            try:
                command = self._inbox.get(block=block)
            except queue.Empty:
                return
            block = False
            self._execute(command)

    def _execute(self, command: Command) -> None:
        match command:
            case Add(request):
                self._waiting.append(request)
            case CancelRequest(request_id):
                self._cancel(request_id)
            case Swap():
                self._attempt(command.future, lambda: self._swap(command))
            case ScoreRequest(token_ids, future):
                self._attempt(future, lambda: self._score(token_ids))
            case Drained(future):
                self._drains.append(future)
            case Close():
                self._open = False

    def _attempt(self, future: asyncio.Future, action) -> None:
        """Resolve `future` with the result of `action`, or with the ComposerError that it raises."""
        try:
            self._resolve(future, action())
        except ComposerError as error:
            self._resolve(future, error)

    def _cancel(self, request_id: str) -> None:
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                self._resolve(request.future, _completion(request, [], "cancelled"))
                return
        for slot, request in list(self._running.items()):
            if request.request_id == request_id:
                self._finish(slot, "cancelled")
                return

    def _swap(self, command: Swap) -> None:
        swap_weights(self._model, command.tensors)
        self.version = command.version
        self._table.weights_changed(recompute=self._config.local.kv_at_swap == "recompute")
        for request in self._running.values():
            request.mark(self.version)

    def _score(self, token_ids: list[int]) -> list[float]:
        ids = torch.tensor([token_ids], device=self._device)
        plan = StepPlan(cache=self._cache, segments=[Segment(0, len(token_ids), 0, 0)], places=None)
        logits = self._forward(ids, torch.arange(len(token_ids))[None], plan, None)
        logp = logits[:-1].float().log_softmax(-1)
        return logp.gather(-1, ids[0, 1:, None])[:, 0].tolist()

    def _admit(self) -> None:
        kept_waiting = []
        while self._waiting and len(self._running) < self._max_running:
            request = self._waiting.popleft()
            place = self._table.place(request)
            if place is None:
                kept_waiting.append(request)
                continue
            if place.source is not None:
                self._cache.reserve(place.slot + 1, place.cached)
                self._cache.copy(place.source, place.slot, place.cached)
            self._start(request, place.slot, place.cached)
        self._waiting.extendleft(reversed(kept_waiting))

    def _start(self, request: EngineRequest, slot: int, cached: int) -> None:
        request.cached = cached
        request.stop = StopRule.of(request.sampling, self._eos, self._decode_text)
        request.mark(self.version)
        self._running[slot] = request
        self._temperature[slot] = request.sampling.temperature
        self._top_k[slot] = request.sampling.top_k
        self._top_p[slot] = request.sampling.top_p
        self._seed[slot] = request.seed

    def _step(self) -> None:
        step = plan_step(
            self._table,
            self._cache,
            list(self._running),
            self._config.local.prefill_tokens,
            self._device,
            self._shared,
        )
        if step is not None:
            self._compute(step)

    def _compute(self, step: EngineStep) -> None:
        logits = self._forward(step.input_ids, step.position_ids, step.plan, step.sample_rows)
        for slot, count in step.counts:
            self._table.computed[slot] += count
        if not step.sample_slots:
            return
        slots = np.array(step.sample_slots)
        rows = SamplingRows(
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            seed=self._seed[slots],
            position=self._table.known[slots].astype(np.uint64),
        )
        tokens, logprobs = sample(logits, rows)
        self.sampled += len(slots)
        for slot, token, logprob in zip(step.sample_slots, tokens.tolist(), logprobs.tolist(), strict=True):
            self._append(slot, token, logprob)

    def _append(self, slot: int, token: int, logprob: float) -> None:
        request = self._running[slot]
        if not np.isfinite(logprob):
            self._drop(slot)
            self._resolve(request.future, EngineError(f"weights v{self.version} give non-finite logits"))
            return
        known = self._table.append(slot, token)
        request.logprobs.append(logprob)
        if request.stop.ends(self._table.tokens[slot, len(request.prompt) : known]):
            self._finish(slot, "stop")
        elif known >= request.limit:
            self._finish(slot, "length")

    def _finish(self, slot: int, reason: str) -> None:
        request = self._running[slot]
        known = int(self._table.known[slot])
        tokens = self._table.tokens[slot, len(request.prompt) : known].tolist()
        self._drop(slot)
        self._resolve(request.future, _completion(request, tokens, reason))

    def _drop(self, slot: int) -> None:
        del self._running[slot]
        self._table.release(slot)

    def _after_step(self) -> None:
        if self._drains and not self._running and not self._waiting:
            for future in self._drains:
                self._resolve(future, None)
            self._drains.clear()
        self.kv_used = float(self._table.computed.sum()) / self._table.tokens.size
        self._deliver()

    def _resolve(self, future: asyncio.Future, outcome: object) -> None:
        self._resolved.append((future, outcome))

    def _deliver(self) -> None:
        """Send this step's outcomes to the event loop in one call."""
        if not self._resolved:
            return
        batch, self._resolved = self._resolved, []
        try:
            self._loop.call_soon_threadsafe(_settle, batch)
        except RuntimeError:
            log.debug("the event loop is closed; %d outcomes are dropped", len(batch))

    def _end(self, error: BaseException | None) -> None:
        """Fail everything that still waits, then resolve `ended`."""
        failure: ComposerError = EngineError("the local engine is closed")
        if error is not None:
            failure = error if isinstance(error, ComposerError) else EngineError(f"the local engine failed: {error!r}")
        futures = [request.future for request in [*self._waiting, *self._running.values()]] + self._drains
        while not self._inbox.empty():
            match self._inbox.get():
                case Add(request):
                    futures.append(request.future)
                case Swap(future=future) | ScoreRequest(future=future) | Drained(future=future):
                    futures.append(future)
        for future in [self.ready, *futures]:
            self._resolve(future, failure)
        self.failure = failure
        self._resolve(self.ended, None)
        self._running, self._waiting = {}, deque()
        self._model = self._cache = None
        self._deliver()


def _completion(request: EngineRequest, tokens: list[int], reason: str) -> EngineCompletion:
    return EngineCompletion(
        token_ids=tokens,
        logprobs=request.logprobs,
        version_spans=request.spans(),
        finish_reason=reason,
        prompt_cached=request.cached,
    )


def _settle(batch: list[tuple[asyncio.Future, object]]) -> None:
    """Resolve futures. Runs on the event loop."""
    for future, outcome in batch:
        if future.done():
            continue
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
