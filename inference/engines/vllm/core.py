"""vLLM's LLMEngine with the calls that a node makes, in one thread. Imports vllm 0.32, and reaches into it in three
places that its interface does not cover: the partial result of an aborted request, the scheduler's load, the number of
tokens sampled so far.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import FinishReason
from vllm.v1.engine.llm_engine import LLMEngine

from composer_prime.errors import BadRequestError, EngineError
from composer_prime.wire.node import Sampling
from composer_prime.wire.types import VersionSpan
from inference.engines.vllm.messages import EngineProgress, Scored, VllmGenerate, VllmGenerated, VllmScore

_SCORE = SamplingParams(max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
_REASONS = {"stop": "stop", "length": "length", "abort": "cancelled"}


@dataclass(slots=True)
class _Running:
    """A call that vLLM works on."""

    message: VllmGenerate | VllmScore
    internal_id: str
    """vLLM's own name of the request."""


class Core:
    """A started engine; version 0 is the model folder. One thread only."""

    def __init__(self, arguments: list[str]) -> None:
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        args = EngineArgs.from_cli_args(parser.parse_args(arguments))
        if args.async_scheduling:
            raise EngineError(
                "inference.vllm.extra_args switches on async scheduling: a swap could then fall into a running step "
                "and tokens would carry the wrong version; remove it"
            )
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
        """Take a request. Raises BadRequestError where vLLM refuses it."""
        # The salt keeps blocks that older weights computed out of newer requests' prefixes.
        prompt = message.prompt_ids if isinstance(message, VllmGenerate) else message.token_ids
        salted = tokens_input(prompt, cache_salt=str(self._version))
        try:
            params = _params(message.sampling) if isinstance(message, VllmGenerate) else _SCORE
            internal_id = self._llm.add_request(str(message.call), salted, params)
        except VLLMClientError as error:
            raise BadRequestError(str(error)) from error
        self._calls[str(message.call)] = _Running(message, internal_id)

    def step(self) -> list[VllmGenerated | Scored]:
        """One forward pass of what runs; the answers of the calls that it finished."""
        if not self.busy:
            return []
        return [self._answer(output) for output in self._llm.step() if output.finished]

    def abort(self, call: int) -> VllmGenerated | Scored | None:
        """End a call; its partial answer, None where it has ended already."""
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
        """Put the weights of `version` in place. Requests that have tokens go on with their KV cache; those that have
        none start over, so that no prompt's cache mixes two versions."""
        self._llm.collective_rpc("load_from_file", args=(path,))
        self._version = version
        self._llm.set_weight_version(str(version))
        for running in list(self._calls.values()):
            if self._sampled(running) == 0:
                self._llm.abort_request([running.internal_id], internal=True)
                self.add(running.message)
        self._llm.reset_prefix_cache()

    def close(self) -> None:
        """End vLLM's worker processes, where it has any (tensor parallelism)."""
        self._llm.engine_core.shutdown()

    def progress(self) -> EngineProgress:
        scheduler = self._llm.engine_core.engine_core.scheduler
        sampled = self._finished_tokens + sum(self._sampled(running) for running in self._calls.values())
        return EngineProgress(
            running=len(scheduler.running), kv_used=float(scheduler.kv_cache_manager.usage), sampled=sampled
        )

    def _warm_up(self) -> None:
        # The first step takes seconds (lazy imports, kernels); nobody should wait for it in the middle of a rollout.
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
    # vLLM's interface accepts 0.01 to 2 only; its sampler has no such limits.
    params.temperature = sampling.temperature
    return params


def _spans(completion: CompletionOutput) -> list[VersionSpan]:
    spans = [VersionSpan(span.start, span.end, int(span.version)) for span in completion.weight_versions or []]
    return [span for span in spans if span.end > span.start]
