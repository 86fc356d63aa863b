"""[orchestrator]: sources of tasks, groups and their dispatch, the buffer, rewards, evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator
from pydantic_config import BaseConfig

from composer_prime.config.hints import HintsConfig
from composer_prime.config.removed import removed_settings
from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.import_path import PartConfig, check_unique, one_of

TOOL_LOOP = "orchestrator.environments.tool_loop"
TOOL_LOOP_TURNS = 6
"""The harness that plays a source by default, and its `max_turns`."""


class PreferencesConfig(BaseConfig):
    """Preference pairs to add to the steps, for replay-DPO."""

    pairs: Path | None = None
    """A pairs.jsonl, or the embedded `tiny` or `tiny_code`. None: the run directory's own. The file may grow; new
    pairs are used from the next pass on."""
    pairs_per_step: int = Field(default=0, ge=0)
    """Pairs in each optimizer step; 0 uses none."""


class DemonstrationsConfig(BaseConfig):
    """Recorded conversations whose assistant turns are imitated (SFT)."""

    files: list[Path] = []
    """JSON Lines files: one object per line with `messages` and, optionally, `tools`."""
    rows_per_step: int = Field(default=32, ge=1)
    """Rows in each optimizer step. Each pass reshuffles the rows; its last step may have fewer."""
    eval_files: list[Path] = []
    """Held-out rows: loss and token accuracy before the first step, every orchestrator.eval.every_steps and at
    the end."""

    @field_validator("files", "eval_files")
    @classmethod
    def _no_file_twice(cls, files: list[Path]) -> list[Path]:
        if repeated := sorted({str(file) for file in files if files.count(file) > 1}):
            raise ValueError(f"{', '.join(repeated)} is named twice: name each file once")
        return files


class SamplingConfig(BaseConfig):
    """How the policy samples."""

    temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature; logprobs are recorded after it is applied."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; below 1, logprobs are recorded for the renormalized nucleus."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k most likely tokens; 0 keeps all."""
    max_tokens: int = Field(default=512, ge=1)
    """Maximum tokens of one assistant turn."""


class SourceConfig(BaseConfig):
    """One source of tasks: a verifiers task set and the harness that plays it."""

    name: str
    """Name in metrics and rollouts."""
    weight: float = Field(default=1.0, ge=0)
    """Share of groups from this source, relative to the others; 0 only evaluates it."""
    taskset: dict[str, Any]
    """verifiers task set: `id` is an importable module, the other keys are its settings."""
    eval_taskset: dict[str, Any] = {}
    """Settings that differ for evaluation on held-out tasks; empty: the source is not evaluated."""
    harness: dict[str, Any] = {"id": TOOL_LOOP}
    """verifiers harness: `id` is an importable module, the other keys are its settings."""
    runtime: RuntimeConfig = RuntimeConfig()
    """Where the source's code runs, and its limits."""
    workers: int = Field(default=1, ge=1)
    """Worker processes for this source."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Wall-clock limit of one rollout."""
    hang_timeout_s: float = Field(default=60.0, ge=10)
    """A worker whose event loop stands still this long, or for timeout_s, is restarted and its cause named."""

    @model_validator(mode="after")
    def _has_present_settings(self) -> SourceConfig:
        if removed := removed_settings(self.taskset, self.eval_taskset):
            raise ValueError(f"orchestrator.source {self.name!r}: {'; '.join(removed)}")
        return self

    @model_validator(mode="after")
    def _is_used(self) -> SourceConfig:
        if self.weight == 0 and not self.eval_taskset:
            raise ValueError(
                f"orchestrator.source {self.name!r} has weight 0, so it is only evaluated, but no "
                "eval_taskset: add one, or raise its weight"
            )
        return self

    @property
    def longest_stall_s(self) -> float:
        """Seconds after which a worker that stands still is restarted."""
        return min(self.hang_timeout_s, max(self.timeout_s, 10.0))

    @property
    def max_turns(self) -> int | None:
        """Assistant turns of one rollout at most, where the harness states a limit."""
        default = TOOL_LOOP_TURNS if self.harness.get("id") == TOOL_LOOP else None
        turns = self.harness.get("max_turns", default)
        return turns if isinstance(turns, int) else None


class EvalConfig(BaseConfig):
    """Interleaved evaluation on held-out tasks."""

    every_steps: int = Field(default=0, ge=0)
    """Steps between evaluations, with one before the first step and one after the last. 0: never."""
    tasks: int = Field(default=64, ge=1)
    """Held-out tasks per source in each evaluation (fewer if the set is smaller)."""
    samples: int = Field(default=1, ge=1)
    """Rollouts per task."""
    pass_k: list[int] = [1]
    """k of the pass@k estimates; each at most `samples`."""

    def due(self, step: int, last_step: int) -> bool:
        """Tell whether to evaluate after `step`."""
        return bool(self.every_steps and (step % self.every_steps == 0 or step == last_step))

    @model_validator(mode="after")
    def _enough_samples(self) -> EvalConfig:
        if not all(1 <= k <= self.samples for k in self.pass_k):
            largest_k = max(1, *self.pass_k)
            fitting = [k for k in self.pass_k if 1 <= k <= self.samples] or [1]
            raise ValueError(
                f"orchestrator.eval.pass_k is {self.pass_k}, but orchestrator.eval.samples is {self.samples}: "
                f"pass@k needs 1 <= k <= samples; set --orchestrator.eval.pass_k {' '.join(map(str, fitting))}"
                + (f", or --orchestrator.eval.samples {largest_k}" if largest_k > self.samples else "")
            )
        return self


class AuditConfig(BaseConfig):
    """Audits of a share of the answers by a trusted process with the model (docs/explanation/security.md)."""

    enabled: bool = False
    """Audit answers. Answers of new nodes wait for their audit; a node that cheats gets no requests."""
    auditors: int = Field(default=1, ge=0)
    """Auditors to start on this machine's CPU; 0 waits for `inference audit`, which can use a GPU."""
    floor: float = Field(default=0.02, gt=0, le=1)
    """Minimum share of audited answers of a known node; all answers of a new node are audited."""
    tolerance: float = Field(default=0.05, gt=0, lt=1)
    """How far a draw may lie outside of its token's interval, as a probability. Logprobs may differ by 1.5 times
    this in nats on average, 12 times at most. Use 0.05 for bfloat16; 0.0001 is enough for float32."""


class WeightCopiesConfig(BaseConfig):
    """The places where nodes on other machines download weights without the gateway."""

    sources: list[Annotated[str, Field(pattern="^https?://")]] = []
    """Copies of the weight store: http:// or https:// URLs. The host `*` stands for the gateway's."""


class OrchestratorConfig(BaseConfig):
    address: str | None = None
    """Address of a running orchestrator (tcp://host:port of its step server); None starts one here."""
    source: list[SourceConfig] = []
    """Sources of tasks; at least one unless groups_per_step is 0."""
    groups_per_step: int = Field(default=8, ge=0)
    """Groups per optimizer step; 0 plays no training rollouts, so a step contains only demonstrations."""
    group_size: int = Field(default=8, ge=2)
    """G: rollouts of one task. Their advantages compare them with one another, so one alone has none."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of rollouts, those of evaluations too."""
    max_staleness: int = Field(default=1, ge=0)
    """Batch N trains tokens of policy versions >= N - 1 - max_staleness; older ones are context. 0 is synchronous.
    With [diloco], counted in full sweeps."""
    max_concurrent: int = Field(default=64, ge=1)
    """Rollouts that run at a time."""
    max_retries: int = Field(default=2, ge=0)
    """Retries of a failed rollout before its group continues without it."""
    filter_zero_advantage: bool = True
    """Drop groups whose rollouts all got the same reward; they carry no signal."""
    train_truncated: bool = True
    """Train truncated rollouts with the policy loss. Off: they count only for their group's advantages, and SDPO
    trains their hinted turns (DAPO's overlong filtering, arXiv 2503.14476)."""
    train_side_calls: bool = False
    """Train calls on the side, such as for a title, with the rollout's advantage, to which they add noise alone."""
    record_tokens: bool = False
    """Write sampled tokens with their log-probabilities to rollouts/, for `composer view`."""
    curriculum: Annotated[PartConfig, one_of("orchestrator.curriculum", "shuffled", "frontier")] = PartConfig(
        name="shuffled"
    )
    """What chooses the next task of a source: shuffled (the default), frontier, or `module:Class` of your own; see the
    protocol in orchestrator/tasks.py."""
    eval: EvalConfig = EvalConfig()
    """Evaluation on held-out tasks."""
    audit: AuditConfig = AuditConfig()
    """Audits of inference nodes' answers."""
    hints: HintsConfig | None = None
    """Hints at error turns, for SDPO; None: no hints."""
    preferences: PreferencesConfig = PreferencesConfig()
    """Preference pairs to add to the steps, for replay-DPO."""
    demonstrations: DemonstrationsConfig = DemonstrationsConfig()
    """Recorded conversations to add to the steps, for SFT."""
    node_address: str = "tcp://127.0.0.1:0"
    """Where inference nodes connect (CURVE-encrypted); bind a public interface for rented nodes."""
    weights: WeightCopiesConfig = WeightCopiesConfig()
    """Where nodes on other machines download weights."""
    step_address: str = "tcp://127.0.0.1:0"
    """Where trainer ranks connect (CURVE-encrypted)."""
    no_node_timeout_s: float = Field(default=300.0, gt=0)
    """How long requests wait for a connected inference node before the run fails."""
    batch_timeout_s: float = Field(default=1800.0, gt=0)
    """Time limit to fill a batch; then the run fails and reports what it was waiting for."""
    trainer_timeout_s: float = Field(default=3600.0, gt=0)
    """How long a ready batch may wait for a message from the trainer before the run fails."""

    @model_validator(mode="after")
    def _groups_can_be_played(self) -> OrchestratorConfig:
        names = [source.name for source in self.source]
        check_unique(names, "orchestrator.source")
        if self.groups_per_step and self.source and not any(source.weight > 0 for source in self.source):
            raise ValueError(
                f"orchestrator.source weights of {names} are all 0, so there is no task to train on: give one a "
                "weight above 0 (an evaluation alone is run.max_steps = 0)"
            )
        if not self.source and self.groups_per_step:
            raise ValueError(
                "orchestrator.source is empty: add one [[orchestrator.source]] table or more, or set "
                "orchestrator.groups_per_step = 0 to train demonstrations alone"
            )
        return self
