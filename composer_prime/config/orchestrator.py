"""[orchestrator]: sources of tasks, groups and their dispatch, the buffer, rewards, evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_config import BaseConfig

from composer_prime.address import tcp_address
from composer_prime.config.hints import HintsConfig
from composer_prime.config.sandbox import RuntimeConfig

TOOL_LOOP = "orchestrator.environments.tool_loop"
TOOL_LOOP_TURNS = 6
"""The harness that plays a source by default, and its `max_turns`."""


class PreferencesConfig(BaseConfig):
    """Preference pairs that are mixed into the steps, for replay-DPO."""

    pairs: Path | None = None
    """A pairs.jsonl; `tiny` and `tiny_code` are embedded, made from toolsmith and micro_code. None takes the run
    directory's own. A replay may still write to it: new pairs join the next pass."""
    pairs_per_step: int = Field(default=0, ge=0)
    """Pairs in each optimizer step; 0 mixes none in."""
    max_epsilon: float = Field(default=0.5, ge=0, le=0.5)
    """Pairs whose label is wrong with a higher probability are left out."""


class DemonstrationsConfig(BaseConfig):
    """Recorded conversations whose assistant turns are imitated (SFT)."""

    files: list[Path] = []
    """JSON Lines: an object a line with `messages` and, where the conversation has some, `tools`."""
    rows_per_step: int = Field(default=32, ge=1)
    """Rows in each optimizer step. Every pass shuffles the rows anew; the last step of a pass may have fewer."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the files; sets run.max_steps. None leaves run.max_steps as it is."""
    too_long: Literal["refuse", "cut", "skip"] = "refuse"
    """Rows longer than model.max_context: end the run before its first step, train their beginning, or leave them out.
    """
    eval_files: list[Path] = []
    """Held-out rows: loss and token accuracy before the first step, every orchestrator.eval.every_steps and after the
    last."""

    @field_validator("files", "eval_files")
    @classmethod
    def _no_file_twice(cls, files: list[Path]) -> list[Path]:
        if repeated := sorted({str(file) for file in files if files.count(file) > 1}):
            raise ValueError(f"{', '.join(repeated)} is named twice: name each file once")
        return files

    def steps_per_pass(self, rows: int) -> int:
        """Return how many steps a pass over `rows` rows takes."""
        return -(-rows // self.rows_per_step)


class AuxiliaryConfig(BaseConfig):
    """A scalar of the rollout that counts towards its reward."""

    name: str
    """Name of the reward part."""
    scalar: str
    """tool_errors, turn_error_rate, calls, turns, truncated, or a metric or reward part of the environment."""
    weight: float
    """Reward for one unit of the scalar; negative for what should be avoided."""


class EffortWeights(BaseConfig):
    """How much each kind of effort adds to x."""

    thinking_tokens: float = Field(default=1.0, ge=0)
    """Per token of thinking."""
    tool_call_tokens: float = Field(default=1.0, ge=0)
    """Per sampled token, thinking aside, of a turn that calls tools."""
    tool_output_tokens: float = Field(default=0.0, ge=0)
    """Per token that tools added to the context."""
    final_message_tokens: float = Field(default=1.0, ge=0)
    """Per sampled token, thinking aside, of a turn that calls no tool."""
    calls: float = Field(default=0.0, ge=0)
    """Per tool call."""
    turns: float = Field(default=0.0, ge=0)
    """Per assistant turn."""


class BehaviorConfig(BaseConfig):
    """Rewards for how a task was done, beside whether it was done (Composer 2, arXiv 2603.24477)."""

    penalty: float = Field(default=0.0, ge=0)
    """Reward lost per unit of C(x); 0 switches the effort penalty off."""
    k: float = Field(default=0.001, gt=0)
    """Scale of effort: the penalty bends at x of about 1 / k."""
    q: float = Field(default=1.0, ge=0)
    """Curvature of C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)): 0 is linear, 1 logarithmic, above 1 bounded."""
    effort: EffortWeights = EffortWeights()
    """x, as a weighted sum."""
    applies_to: Literal["all", "passed"] = "all"
    """Whether every rollout pays for effort, or only those whose own reward is above 0."""
    auxiliary: list[AuxiliaryConfig] = []
    """Further scalars."""

    @field_validator("auxiliary")
    @classmethod
    def _unique_names(cls, auxiliary: list[AuxiliaryConfig]) -> list[AuxiliaryConfig]:
        names = ["effort", *(scalar.name for scalar in auxiliary)]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(
                f"orchestrator.behaviour.auxiliary uses the names {repeated} twice ('effort' is the penalty's): rename "
                "one"
            )
        return auxiliary

    @property
    def active(self) -> bool:
        return self.penalty > 0 or bool(self.auxiliary)


class SamplingConfig(BaseConfig):
    """How the policy samples."""

    temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature; the recorded logprobs are those after it."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus; below 1 the recorded logprobs are of the renormalized nucleus."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k likeliest tokens; 0 keeps all."""
    max_tokens: int = Field(default=512, ge=1)
    """Tokens of one assistant turn."""


class MakingConfig(BaseConfig):
    """Harder tasks, made during the run of what `composer tasks make` left over in the source's folder of tasks."""

    mastered: float = Field(default=0.5, gt=0, le=1)
    """Share of the source's tasks that the policy passes nearly always, from which on more are made."""
    tasks: int = Field(default=32, ge=1)
    """Tasks that are made at one time. Those that are too easy are not played."""
    jobs: int = Field(default=1, ge=1)
    """Sandboxes at one time, at the lowest priority."""
    timeout_s: float = Field(default=3600.0, gt=0)
    """How long making them may take. What is done then counts."""


class SourceConfig(BaseConfig):
    """One source of tasks: a verifiers task set and the agent program that plays it."""

    name: str
    """Name in metrics and rollouts."""
    weight: float = Field(default=1.0, ge=0)
    """Share of groups drawn from this source, relative to the others; 0 never trains on it, only evaluates it."""
    taskset: dict[str, Any]
    """verifiers task set: `id` is an importable module, the rest its own settings."""
    eval_taskset: dict[str, Any] = {}
    """Settings that differ for evaluation (held-out tasks); empty means this source is not evaluated."""
    harness: dict[str, Any] = {"id": TOOL_LOOP}
    """verifiers harness: `id` is an importable module, the rest its own settings."""
    runtime: RuntimeConfig = RuntimeConfig()
    """Where the source's code runs, and its limits."""
    making: MakingConfig | None = None
    """Make harder tasks as the policy learns; None makes none. For coding tasks, with the curriculum Frontier."""
    workers: int = Field(default=1, ge=0)
    """Worker processes that run this source's episodes here; with 0, hosts that join run all."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Wall-clock limit of one rollout."""

    @model_validator(mode="after")
    def _is_used(self) -> SourceConfig:
        if self.weight == 0 and not self.eval_taskset:
            raise ValueError(
                f"orchestrator.source {self.name!r} has weight 0, so it is only evaluated, but no eval_taskset: add "
                "one, or raise its weight"
            )
        return self

    @property
    def max_turns(self) -> int | None:
        """Assistant turns of one rollout at most; None where the harness states no limit."""
        default = TOOL_LOOP_TURNS if self.harness.get("id") == TOOL_LOOP else None
        turns = self.harness.get("max_turns", default)
        return turns if isinstance(turns, int) else None


class EvalConfig(BaseConfig):
    """Interleaved evaluation on held-out tasks."""

    every_steps: int = Field(default=0, ge=0)
    """Evaluate before the first step, then every this many steps and after the last; 0 never."""
    tasks: int = Field(default=64, ge=1)
    """Held-out tasks of each evaluation, per source (fewer when the set is smaller)."""
    samples: int = Field(default=1, ge=1)
    """Rollouts a task."""
    pass_k: list[int] = [1]
    """k of the pass@k estimates; each at most `samples`."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of evaluation rollouts."""
    pass_threshold: float = 1.0
    """Reward from which a rollout counts as passed."""
    share: float = Field(default=0.25, gt=0, le=1)
    """Share of the concurrency that evaluation may take while training rollouts wait."""
    version_timeout_s: float = Field(default=600.0, gt=0)
    """How long an evaluation waits until the nodes have its weights."""

    def due(self, step: int, last_step: int) -> bool:
        """Whether to evaluate after `step`: before the first step, every every_steps, after the last."""
        return bool(self.every_steps and (step % self.every_steps == 0 or step == last_step))

    @model_validator(mode="after")
    def _enough_samples(self) -> EvalConfig:
        if not all(1 <= k <= self.samples for k in self.pass_k):
            largest_k = max(1, *self.pass_k)
            fitting = [k for k in self.pass_k if 1 <= k <= self.samples] or [1]
            raise ValueError(
                f"orchestrator.eval.pass_k is {self.pass_k}, but orchestrator.eval.samples is {self.samples}: pass@k "
                f"needs 1 <= k <= samples; set --orchestrator.eval.pass_k {' '.join(map(str, fitting))}"
                + (f", or --orchestrator.eval.samples {largest_k}" if largest_k > self.samples else "")
            )
        return self


class AuditConfig(BaseConfig):
    """Checks of a share of the answers, by a trusted process that holds the model (docs/explanation/security.md)."""

    enabled: bool = False
    """Whether answers are audited. Those of new nodes wait for their audit; a node that cheats gets no requests."""
    auditors: int = Field(default=1, ge=0)
    """Auditors that the launcher starts on this machine's CPU; 0 waits for `orchestrator audit`, which takes a GPU."""
    address: str = "tcp://127.0.0.1:0"
    """Where auditors connect (CURVE-encrypted, with the trainer's key)."""
    floor: float = Field(default=0.02, gt=0, le=1)
    """Least share of a known node's answers that is audited; all of a new one's are."""
    tolerance: float = Field(default=0.02, gt=0, lt=1)
    """How far a draw may lie outside of its token's interval, as a probability; logprobs may be off by 2.5 times as
    many nats on average and 25 times at most. 0.02 leaves room for bfloat16; 0.0001 suits float32 alone."""
    timeout_s: float = Field(default=300.0, gt=0)
    """How long a rollout waits for the audits of new nodes' answers before it counts as failed."""
    quarantine_s: float = Field(default=600.0, gt=0)
    """How long a node that was caught gets no requests; twice as long each time."""


class CurriculumConfig(BaseConfig):
    """A hook that chooses the next task of a source."""

    import_path: str = "orchestrator.tasks.curriculum:Shuffled"
    """`module:Class` of the curriculum; orchestrator/tasks/curriculum.py has the protocol."""
    kwargs: dict[str, Any] = {}
    """Arguments of the class."""

    @field_validator("import_path")
    @classmethod
    def _current_name(cls, import_path: str) -> str:
        """Accept the module's former name, which the config.json of older runs holds."""
        module, colon, name = import_path.partition(":")
        return f"orchestrator.tasks.curriculum:{name}" if module + colon == "orchestrator.curriculum:" else import_path


class WeightServiceConfig(BaseConfig):
    """Where nodes elsewhere pull weights, so that they do not pass through the gateway."""

    address: str | None = None
    """HOST:PORT where the launcher has `orchestrator weights` serve them over HTTP; None serves none. Nodes ask this
    port on the host by which they reach the gateway. Whoever reaches it can read the weights."""
    push: str | None = None
    """Bucket or folder of this run alone that each version is copied to: s3://, gs://, az://, file://. Nodes ask a
    bucket as well."""
    sources: list[str] = []
    """Further copies of the weight store that nodes ask: http://, https:// or bucket URLs."""
    relays: bool = True
    """Whether nodes learn which others give out weights (inference.relay); false where no node shall ask another."""

    @field_validator("address")
    @classmethod
    def _has_a_port(cls, address: str | None) -> str | None:
        if address is not None and tcp_address(address, "orchestrator.weights.address", bind=True, scheme="").port == 0:
            raise ValueError(f"orchestrator.weights.address is {address!r}: nodes need a fixed port, 1 to 65535")
        return address

    @field_validator("push", "sources")
    @classmethod
    def _are_urls(cls, urls: str | list[str] | None) -> str | list[str] | None:
        for url in urls if isinstance(urls, list) else [urls or "file://"]:
            if "://" not in url:
                raise ValueError(f"{url!r} is no URL: expected https://HOST/PATH, s3://BUCKET/PATH or the like")
        return urls

    @property
    def urls(self) -> list[str]:
        """What nodes are told; the host `*` is the gateway's."""
        served = [f"http://*:{self.address.rpartition(':')[2]}"] if self.address is not None else []
        pushed = [self.push] if self.push is not None and not self.push.startswith("file:") else []
        return [*served, *pushed, *self.sources]


class OrchestratorConfig(BaseConfig):
    address: str | None = None
    """Address of an orchestrator that runs already (tcp://host:port of its step server); None starts one here."""
    source: list[SourceConfig] = []
    """Sources of tasks; at least one, unless groups_per_step is 0."""
    groups_per_step: int = Field(default=8, ge=0)
    """Groups that make one optimizer step; 0 plays no training rollouts, so a step is its demonstrations alone."""
    group_size: int = Field(default=8, ge=2)
    """G: sibling rollouts of one task, compared with one another."""
    sampling: SamplingConfig = SamplingConfig()
    """How the policy samples while training."""
    max_staleness: int = Field(default=1, ge=0)
    """Batch N trains tokens of policy versions >= N - 1 - max_staleness; older ones of its rollouts are context. 0 is
    synchronous. [diloco]: in full sweeps."""
    max_concurrent: int = Field(default=64, ge=1)
    """Ceiling of rollouts in flight; the adaptive limit moves below it."""
    max_retries: int = Field(default=2, ge=0)
    """New attempts of a rollout whose environment failed, before its group continues without it."""
    min_group: int = Field(default=2, ge=2)
    """A group with fewer finished rollouts than this is dropped (and counted)."""
    filter_zero_advantage: bool = True
    """Leave out groups whose rollouts all got the same reward; they carry no signal."""
    train_truncated: bool = True
    """Whether the policy loss trains rollouts that a limit cut short. Off, they count only for their group's
    advantages, and with their hinted turns for SDPO (DAPO's overlong filtering, arXiv 2503.14476)."""
    max_filtered_share: float = Field(default=0.9, gt=0, le=1)
    """Warn when more than this share of the last groups was filtered out."""
    curriculum: CurriculumConfig = CurriculumConfig()
    """Which task comes next."""
    eval: EvalConfig = EvalConfig()
    """Evaluation on held-out tasks."""
    audit: AuditConfig = AuditConfig()
    """Audits of what inference nodes answer."""
    behaviour: BehaviorConfig = BehaviorConfig()
    """Rewards for how a task was done."""
    hints: HintsConfig | None = None
    """Hints at turns that went wrong, for SDPO; None looks for none."""
    preferences: PreferencesConfig = PreferencesConfig()
    """Preference pairs that are mixed into the steps, for replay-DPO."""
    demonstrations: DemonstrationsConfig = DemonstrationsConfig()
    """Recorded conversations that are mixed into the steps, for SFT."""
    gateway_port: int = Field(default=0, ge=0, le=65535)
    """Loopback HTTP port of the gateway; 0 takes a free one."""
    gateway_processes: int = Field(default=1, ge=1, le=64)
    """Processes that serve the gateway's HTTP port. Above 1, each parses, renders and encodes in front of the one that
    routes. Linux only."""
    node_address: str = "tcp://127.0.0.1:0"
    """Where inference nodes connect (CURVE-encrypted); bind a public interface for rented nodes."""
    weights: WeightServiceConfig = WeightServiceConfig()
    """Where nodes elsewhere pull weights."""
    worker_address: str | None = None
    """Where hosts of environment workers connect (CURVE-encrypted, `orchestrator join`); None admits none. Their
    heartbeats are those of inference nodes (inference.heartbeat_s, inference.lost_after_s)."""
    step_address: str = "tcp://127.0.0.1:0"
    """Where trainer ranks connect (CURVE-encrypted)."""
    no_node_timeout_s: float = Field(default=300.0, gt=0)
    """How long requests wait while no inference node is connected, before the run fails."""
    worker_start_timeout_s: float = Field(default=180.0, gt=0)
    """How long an environment worker may take to load, and how long a source without one waits for a host."""
    batch_timeout_s: float = Field(default=1800.0, gt=0)
    """How long a batch may take to fill, before the run fails and names what it waited for."""
    trainer_timeout_s: float = Field(default=3600.0, gt=0)
    """How long a ready batch may wait without a message from the trainer, before the run fails."""
    max_failed_groups: int = Field(default=32, ge=1)
    """Groups in a row that may fail for lack of finished rollouts, before the run fails and shows the last error."""

    @model_validator(mode="after")
    def _some_source_is_trained(self) -> OrchestratorConfig:
        if self.groups_per_step and self.source and not any(source.weight > 0 for source in self.source):
            names = [source.name for source in self.source]
            raise ValueError(
                f"orchestrator.source weights of {names} are all 0, so there is no task to train on: give one a weight "
                "above 0 (an evaluation alone is run.max_steps = 0)"
            )
        return self

    @model_validator(mode="after")
    def _workers_somewhere(self) -> OrchestratorConfig:
        idle = [source.name for source in self.source if not source.workers]
        if idle and self.worker_address is None:
            raise ValueError(
                f"orchestrator.source.workers is 0 for {idle}, but orchestrator.worker_address is None: nobody would "
                "play; set workers to 1, or --orchestrator.worker_address tcp://127.0.0.1:5501 for hosts that join"
            )
        if self.worker_address is not None and not self.source:
            raise ValueError(
                f"orchestrator.worker_address is {self.worker_address!r}, but orchestrator.source is empty: hosts that "
                "join would have nothing to play; leave worker_address out, or add an [[orchestrator.source]] table"
            )
        growing = [source.name for source in self.source if source.making is not None]
        if growing and self.worker_address is not None:
            raise ValueError(
                f"orchestrator.source {growing} have making, but orchestrator.worker_address is "
                f"{self.worker_address!r}: hosts that join lack the tasks that this run makes; leave out making, or "
                "worker_address"
            )
        return self

    @model_validator(mode="after")
    def _gateway_processes_are_used(self) -> OrchestratorConfig:
        if self.gateway_processes > max(1, self.max_concurrent):
            raise ValueError(
                f"orchestrator.gateway_processes is {self.gateway_processes}, but orchestrator.max_concurrent is "
                f"{self.max_concurrent}: no more rollouts ask at a time; set gateway_processes <= {self.max_concurrent}"
            )
        return self

    @field_validator("source")
    @classmethod
    def _unique_source_names(cls, sources: list[SourceConfig]) -> list[SourceConfig]:
        names = [source.name for source in sources]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"orchestrator.source names {repeated} are used more than once: rename one of them")
        return sources

    @model_validator(mode="after")
    def _groups_can_be_played(self) -> OrchestratorConfig:
        if not self.source and self.groups_per_step:
            raise ValueError(
                "orchestrator.source is empty: add at least one [[orchestrator.source]] table, or set "
                "orchestrator.groups_per_step = 0 to train demonstrations alone"
            )
        if self.min_group > self.group_size:
            raise ValueError(
                f"orchestrator.min_group is {self.min_group}, but orchestrator.group_size is {self.group_size}: every "
                f"group would be dropped; set min_group <= {self.group_size}"
            )
        return self
