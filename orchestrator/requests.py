"""What a worker is asked to play, in training and in evaluation: sampling settings, seeds, deadlines in one place."""

from __future__ import annotations

from dataclasses import dataclass

from composer_prime.config.orchestrator import OrchestratorConfig
from orchestrator.groups import GroupPlan, derive_seed
from orchestrator.workers.protocol import EVAL, TRAIN, RunRollout

MODEL_NAME = "policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFactory:
    config: OrchestratorConfig
    gateway_url: str
    """http://host:port/v1"""
    seed: int
    """run.seed."""

    def training(self, plan: GroupPlan, sibling: int, attempt: int) -> RunRollout:
        return self._request(
            plan.source,
            rollout_id=plan.rollout_id(sibling, attempt),
            task_index=plan.task_index,
            taskset=TRAIN,
            seed=plan.rollout_seed(sibling, attempt),
            temperature=self.config.sampling.temperature,
        )

    def evaluation(self, source: str, *, step: int, task_index: int, sample: int, attempt: int) -> RunRollout:
        """The seed does not depend on the step: evaluations differ by their weights alone."""
        name = f"eval{step}-{source}-{task_index}-{sample}" + (f"r{attempt}" if attempt else "")
        return self._request(
            source,
            rollout_id=name,
            task_index=task_index,
            taskset=EVAL,
            seed=derive_seed(self.seed, "eval", source, task_index, sample, attempt),
            temperature=self.config.eval.temperature,
        )

    def _request(
        self, source: str, *, rollout_id: str, task_index: int, taskset: str, seed: int, temperature: float
    ) -> RunRollout:
        settings = next(candidate for candidate in self.config.source if candidate.name == source)
        sampling = self.config.sampling
        return RunRollout(
            rollout_id=rollout_id,
            task_index=task_index,
            model=MODEL_NAME,
            gateway_url=self.gateway_url,
            timeout_s=settings.timeout_s,
            taskset=taskset,
            seed=seed,
            temperature=temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
        )
