"""vLLM's LLMEngine with the settings and calls of a node, in one thread. Imports vllm 0.32.

Three things are not in vLLM's interface and are read from its insides: the partial result of an aborted request, the
scheduler's load, and the number of tokens sampled so far.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import FinishReason
from vllm.v1.engine.llm_engine import LLMEngine

from composer_prime.config.inference import InferenceConfig
from composer_prime.errors import BadRequestError, EngineError
from composer_prime.wire.node import Sampling
from composer_prime.wire.types import VersionSpan
from inference.engines.vllm.messages import EngineProgress, Scored, Setup, VllmGenerate, VllmGenerated, VllmScore

_SCORE = SamplingParams(max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
_CPU_BLOCK_TOKENS = 32
"""vLLM's default on CPU is 128: a next turn would compute up to 127 tokens again. Below 32 it slows down."""
_REASONS = {"stop": "stop", "length": "length", "abort": "cancelled"}


@dataclass(slots=True)
class _Running:
    """A call in progress."""

    message: VllmGenerate | VllmScore
    internal_id: str
    """vLLM's own id of the request."""


class Core:
    """A started engine; version 0 is the model folder. Use it from one thread."""

    def __init__(self, setup: Setup, config: InferenceConfig, *, on_cpu: bool) -> None:
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        args = EngineArgs.from_cli_args(parser.parse_args(_engine_arguments(setup, config, on_cpu=on_cpu)))
        if args.async_scheduling:
            raise EngineError(
                "inference.vllm.extra_args switches on async scheduling: a swap could then fall into a running step "
                "and tokens would carry the wrong version; remove it"
            )
        self._workers = args.tensor_parallel_size * args.pipeline_parallel_size
        self._llm = LLMEngine.from_engine_args(args)
        self._version = 0
        self._llm.set_weight_version("0")
        self._calls: dict[str, _Running] = {}
        self._finished_tokens = 0
        self._warm_up()

    @property
    def busy(self) -> bool:
        return self._llm.has_unfinished_requests()

    def add(self, message: VllmGenerate | VllmScore) -> None:
        """Start a request. Raises BadRequestError when vLLM refuses it."""
        # The salt keeps cache blocks of older weights out of the prefixes of newer requests.
        prompt = message.prompt_ids if isinstance(message, VllmGenerate) else message.token_ids
        salted = tokens_input(prompt, cache_salt=str(self._version))
        try:
            params = _params(message.sampling) if isinstance(message, VllmGenerate) else _SCORE
            internal_id = self._llm.add_request(str(message.call), salted, params)
        except VLLMClientError as error:
            raise BadRequestError(str(error)) from error
        self._calls[str(message.call)] = _Running(message, internal_id)

    def step(self) -> list[VllmGenerated | Scored]:
        """Do one forward pass. Returns the answers of the calls that it finished."""
        if not self.busy:
            return []
        return [self._answer(output) for output in self._llm.step() if output.finished]

    def abort(self, call: int) -> VllmGenerated | Scored | None:
        """End a call. Returns its partial answer, None when it has ended already."""
        running = self._calls.get(str(call))
        if running is None:
            return None
        output = self._partial(running)
        self._llm.abort_request([running.internal_id], internal=True)
        if isinstance(running.message, VllmScore) or output is None:
            del self._calls[str(call)]
            return None
        return self._answer(output)

    def load(self, version: int, path: str) -> None:
        """Put the weights of `version` in place.

        Requests that have sampled tokens go on with their KV cache. The others start over, so that the cache of no
        prompt mixes two versions.
        """
        self._llm.collective_rpc("load_from_file", args=(path,))
        self._version = version
        self._llm.set_weight_version(str(version))
        for running in list(self._calls.values()):
            if self._sampled(running) == 0:
                self._llm.abort_request([running.internal_id], internal=True)
                self.add(running.message)
        self._llm.reset_prefix_cache()

    def read_back(self, names: list[str]) -> list[tuple[list[str], str, str]]:
        """Return names, type and checksum of each parameter; none with several workers, which split the model."""
        answers = self._llm.collective_rpc("read_parameters", args=(names,)) if self._workers == 1 else []
        return answers[0] if len(answers) == 1 else []

    def close(self) -> None:
        """End vLLM's worker processes, which exist with tensor parallelism only."""
        self._llm.engine_core.shutdown()

    def progress(self) -> EngineProgress:
        scheduler = self._llm.engine_core.engine_core.scheduler
        sampled = self._finished_tokens + sum(self._sampled(running) for running in self._calls.values())
        return EngineProgress(
            running=len(scheduler.running), kv_used=float(scheduler.kv_cache_manager.usage), sampled=sampled
        )

    def _warm_up(self) -> None:
        # The first step takes seconds (lazy imports, kernels). No rollout should wait for it.
        sampling = Sampling(max_tokens=2, temperature=0.9, top_p=0.9, top_k=5, seed=0, ignore_eos=True)
        self.add(VllmGenerate(call=0, prompt_ids=[0, 1, 2], sampling=sampling))
        while self.busy:
            self.step()
        self._finished_tokens = 0

    def _answer(self, output: RequestOutput) -> VllmGenerated | Scored:
        running = self._calls.pop(output.request_id)
        completion = output.outputs[0]
        if isinstance(running.message, VllmScore):
            return Scored(call=running.message.call, logprobs=list(output.prompt_logprobs.logprobs))
        token_ids = list(completion.token_ids)
        self._finished_tokens += len(token_ids)
        return VllmGenerated(
            call=running.message.call,
            token_ids=token_ids,
            logprobs=list(completion.logprobs.logprobs) if token_ids else [],
            version_spans=_spans(completion),
            finish_reason=_REASONS[completion.finish_reason],
            prompt_cached=output.num_cached_tokens or 0,
        )

    def _partial(self, running: _Running) -> RequestOutput | None:
        state = self._llm.output_processor.request_states.get(running.internal_id)
        return state and state.make_request_output(
            new_token_ids=[], pooling_output=None, finish_reason=FinishReason.ABORT, stop_reason=None
        )

    def _sampled(self, running: _Running) -> int:
        state = self._llm.output_processor.request_states.get(running.internal_id)
        return state.detokenizer.num_output_tokens() if state else 0


def _engine_arguments(setup: Setup, config: InferenceConfig, *, on_cpu: bool) -> list[str]:
    """Return the command line of vLLM's engine. `extra_args` come last, so they win."""
    dtype = config.dtype if config.dtype != "auto" else "float32" if on_cpu else "bfloat16"
    eager = config.vllm.enforce_eager if config.vllm.enforce_eager is not None else on_cpu
    pairs = {
        "--model": setup.model,
        "--dtype": dtype,
        "--max-model-len": setup.max_context,
        "--max-num-seqs": config.vllm.max_num_seqs,
        "--tensor-parallel-size": config.vllm.tensor_parallel,
        # Logprobs of the sampling distribution, as the trainer computes them again.
        "--logprobs-mode": "processed_logprobs",
        "--worker-extension-cls": "inference.engines.vllm.worker_extension.WeightLoader",
        # For requests without a seed: two nodes must not draw the same noise.
        "--seed": secrets.randbits(31),
    }
    # Without a step in flight a swap falls exactly between two tokens.
    flags = ["--no-async-scheduling", "--disable-log-stats"]
    if on_cpu:
        pairs["--kv-cache-memory-bytes"] = config.vllm.cpu_kv_cache_gib << 30
        pairs["--block-size"] = _CPU_BLOCK_TOKENS
        # A seeded request whose prompt is prefilled in parts stops the whole engine on CPU (its generator has no
        # offset to rewind), so prompts are prefilled whole.
        pairs["--max-num-batched-tokens"] = max(setup.max_context, config.vllm.max_num_seqs, 2048)
        flags.append("--no-enable-chunked-prefill")
    else:
        pairs["--gpu-memory-utilization"] = config.vllm.gpu_memory_utilization
    flags.append("--enforce-eager" if eager else "--no-enforce-eager")
    return [str(part) for pair in pairs.items() for part in pair] + flags + config.vllm.extra_args


def _params(sampling: Sampling) -> SamplingParams:
    params = SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=min(sampling.temperature, 1.0),
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        skip_clone=True,  # made for one request; a clone would check the temperature below again
    )
    # vLLM's interface accepts 0.01 to 2 only. Its sampler has no such limits.
    params.temperature = sampling.temperature
    return params


def _spans(completion: CompletionOutput) -> list[VersionSpan]:
    spans: list[VersionSpan] = []
    for span in completion.weight_versions or []:
        if spans and spans[-1].version == int(span.version):
            spans[-1] = VersionSpan(spans[-1].start, span.end, spans[-1].version)
        elif span.end > span.start:
            spans.append(VersionSpan(span.start, span.end, int(span.version)))
    return spans
