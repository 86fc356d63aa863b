"""vLLM's LLMEngine with the settings and calls of a node, in one thread. Imports vllm 0.32.

Four things are not in vLLM's interface and are read from its insides, or put there: what a request has sampled so far,
the scheduler's load, the sampler (worker_extension.py), and the text before a resumed answer.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput, WeightVersionSpan
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import FinishReason
from vllm.v1.engine.llm_engine import LLMEngine

from composer_prime.config.inference import InferenceConfig
from composer_prime.errors import BadRequestError, EngineError
from composer_prime.model_source import tensor_shapes
from composer_prime.wire.node import Sampling
from composer_prime.wire.types import VersionSpan
from inference.engines.vllm.messages import EngineProgress, Scored, Setup, VllmGenerate, VllmGenerated, VllmScore
from inference.engines.vllm.rank_sums import fold
from inference.engines.vllm.worker_extension import rule_arguments

_SCORE = SamplingParams(max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
_CPU_BLOCK_TOKENS = 32
"""vLLM's default on CPU is 128: a next turn would compute up to 127 tokens again. Below 32 it slows down."""
_SLACK_TOKENS = 8
"""Decoded before the longest stop string: decoders treat the first token of a text in a way of its own."""
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
        if args.speculative_config:
            raise EngineError(
                f"inference.vllm.extra_args has the speculative config {args.speculative_config}: its tokens are not "
                "drawn by the rule that an auditor checks; remove it"
            )
        self._workers = args.tensor_parallel_size * args.pipeline_parallel_size
        self._llm = LLMEngine.from_engine_args(args)
        if on_cpu and self._llm.model_config.is_moe:
            raise EngineError(
                f"{setup.model} is a mixture of experts: vLLM packs experts on a CPU and does not load new ones into "
                "them, so that no version could be served; use a GPU, or inference.engine = 'local' where it takes the "
                "architecture"
            )
        self._llm.collective_rpc("draw_by_rule")
        self._shapes = tensor_shapes(Path(setup.model))
        """Of the published tensors: no version has others."""
        self.takes_patches = self._takes_patches()
        self._version = 0
        self._loads = 0
        """Swaps so far. Unlike a version, no two stretches of weights share the number."""
        self._llm.set_weight_version("0")
        self._keeps_conversations = config.vllm.kv_at_swap == "keep_conversations"
        self._began: dict[str, int] = {}
        """Load under which each conversation began that had a turn since the last swap."""
        self._began_before: dict[str, int] = {}
        """The same of those that had one between the last two swaps."""
        self._calls: dict[str, _Running] = {}
        self._finished_tokens = 0
        self._warm_up()

    @property
    def busy(self) -> bool:
        return self._llm.has_unfinished_requests()

    def add(self, message: VllmGenerate | VllmScore) -> None:
        """Start a request. Raises BadRequestError when vLLM refuses it."""
        prompt = message.prompt_ids if isinstance(message, VllmGenerate) else message.token_ids
        salted = tokens_input(prompt, cache_salt=str(self._first_load(message)))
        try:
            params = _params(message.sampling) if isinstance(message, VllmGenerate) else _SCORE
            internal_id = self._llm.add_request(str(message.call), salted, params)
        except VLLMClientError as error:
            raise BadRequestError(str(error)) from error
        self._calls[str(message.call)] = running = _Running(message, internal_id)
        if isinstance(message, VllmGenerate) and message.sampling.stop and message.sampling.resumed:
            self._resume_text(running, message)

    def _first_load(self, message: VllmGenerate | VllmScore) -> int:
        """Return the first load whose cache blocks a call may reuse. As a salt it keeps older ones out."""
        if isinstance(message, VllmScore) or not self._keeps_conversations:
            return self._loads
        known = self._began_before.get(message.session, self._loads)
        return self._began.setdefault(message.session, known)

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

    def load(self, version: int, path: str, patched: dict[str, list[int]] | None = None) -> None:
        """Put the weights of `version` in place; `patched` as in LoadWeights.

        Requests that have sampled tokens continue with their KV cache. The others start over, so that no prompt's cache
        mixes two versions. With inference.vllm.kv_at_swap = keep_conversations all continue, unless the version number
        falls: then the previous weights were refused.
        """
        if patched is None:
            self._llm.collective_rpc("load_from_file", args=(path,))
        else:
            self._llm.collective_rpc("patch_from_file", args=(path, patched))
        is_newer = version > self._version
        self._version = version
        self._loads += 1
        self._llm.set_weight_version(str(version))
        self._began_before, self._began = self._began if is_newer else {}, {}
        if self._keeps_conversations and is_newer:
            return
        for running in list(self._calls.values()):
            if self._sampled(running) == 0:
                self._llm.abort_request([running.internal_id], internal=True)
                self.add(running.message)
        self._llm.reset_prefix_cache()

    def read_back(self, names: list[str]) -> list[tuple[list[str], str, str]]:
        """Return names, type and checksum of each parameter that can be read, whole in all workers together."""
        return fold(self._llm.collective_rpc("read_parameters", args=(names,)), self._shapes)

    def _takes_patches(self) -> bool:
        # Patches were not tested with several workers.
        return self._workers == 1 and self._llm.collective_rpc("takes_patches", args=(list(self._shapes),))[0]

    def close(self) -> None:
        """End vLLM's worker processes, which exist with tensor parallelism only."""
        self._llm.engine_core.shutdown()

    def parts(self, sent: dict[int, int]) -> list[VllmGenerated]:
        """Return what each generate call has sampled beyond its first `sent[call]` tokens, if anything."""
        parts = []
        for call, first in sent.items():
            running = self._calls.get(str(call))
            state = running and self._llm.output_processor.request_states.get(running.internal_id)
            if state and state.detokenizer.num_output_tokens() > first:
                part = VllmGenerated(
                    call=call,
                    token_ids=state.detokenizer.output_token_ids[first:],
                    logprobs=state.logprobs_processor.logprobs.logprobs[first:],
                    version_spans=_spans(state._weight_version_spans(), first),
                    finish_reason="running",
                    prompt_cached=state.num_cached_tokens or 0,
                )
                parts.append(part)
        return parts

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
        # The first steps take seconds (lazy imports, kernels). No rollout and no canary should wait for them.
        sampling = Sampling(max_tokens=2, temperature=0.9, top_p=0.9, top_k=5, seed=0, ignore_eos=True)
        self.add(VllmGenerate(call=0, session="", prompt_ids=[0, 1, 2], sampling=sampling))
        self.add(VllmScore(call=1, token_ids=[0, 1, 2]))
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
            version_spans=_spans(completion.weight_versions),
            finish_reason=_REASONS[completion.finish_reason],
            prompt_cached=output.num_cached_tokens or 0,
        )

    def _partial(self, running: _Running) -> RequestOutput | None:
        state = self._llm.output_processor.request_states.get(running.internal_id)
        return state and state.make_request_output(
            new_token_ids=[], pooling_output=None, finish_reason=FinishReason.ABORT, stop_reason=None
        )

    def _resume_text(self, running: _Running, message: VllmGenerate) -> None:
        """Put the text that another node sampled before the request's own: a stop string may begin there."""
        window = max(len(stop.encode()) for stop in message.sampling.stop) + _SLACK_TOKENS
        tail = message.prompt_ids[-min(window, message.sampling.resumed) :]
        detokenizer = self._llm.output_processor.request_states[running.internal_id].detokenizer
        detokenizer.output_text = self._llm.get_tokenizer().decode(tail)

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
        "--worker-extension-cls": "inference.engines.vllm.worker_extension.NodeWorker",
    }
    # Without a step in flight a swap falls exactly between two tokens.
    flags = ["--no-async-scheduling", "--disable-log-stats"]
    if on_cpu:
        pairs["--kv-cache-memory-bytes"] = config.vllm.cpu_kv_cache_gib << 30
        pairs["--block-size"] = _CPU_BLOCK_TOKENS
    else:
        pairs["--gpu-memory-utilization"] = config.vllm.gpu_memory_utilization
    flags.append("--enforce-eager" if eager else "--no-enforce-eager")
    return [str(part) for pair in pairs.items() for part in pair] + flags + config.vllm.extra_args


def _params(sampling: Sampling) -> SamplingParams:
    """Return vLLM's settings. It has no part in the draws: worker_extension.RuleSampler makes them."""
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
    """Return the spans of an answer's tokens from number `first` on."""
    spans: list[VersionSpan] = []
    for label in labels or []:
        start, end, version = max(0, label.start - first), label.end - first, int(label.version)
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(spans[-1].start, end, version)
        elif end > start:
            spans.append(VersionSpan(start, end, version))
    return spans
