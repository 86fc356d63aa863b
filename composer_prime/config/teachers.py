"""[teachers]: models that vote on recorded states, and what their votes may cost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_config import BaseConfig

from composer_prime.address import endpoint_url
from composer_prime.console import pluralize
from composer_prime.errors import ConfigError
from composer_prime.llm.families import UNKNOWN, family_named, family_of

MODELS_VARIABLE = "COMPOSER_MODELS_URL"
"""Environment variable through which the launcher gives the orchestrator the URL of local teachers and base."""
OPENROUTER = "https://openrouter.ai/api/v1"
MIN_WINDOW_PAIRS = 16
"""Fewer pairs are too few for a verdict of the density gate."""


class TeacherConfig(BaseConfig):
    """One teacher: a model behind an OpenAI-compatible endpoint, or one that is served here."""

    name: str
    """Name in votes, pairs and costs."""
    model: str
    """The endpoint's name of the model (OpenRouter: anthropic/claude-sonnet-4); with local, a model folder or tiny/…"""
    base_url: str = OPENROUTER
    """The endpoint; not used with local."""
    local: bool = False
    """Serve the model on this machine's loopback with the local engine; it costs nothing."""
    api_key_var: str = "OPENROUTER_API_KEY"
    """The environment variable that holds the endpoint's key; required with another base_url."""
    family: str | None = None
    """Its family (claude, gpt, qwen ...); it never sees a trace of its own family. None takes it from the name."""
    input_usd_per_mtok: float | None = Field(default=None, ge=0)
    """Price of a million prompt tokens; None takes it from genai-prices."""
    output_usd_per_mtok: float | None = Field(default=None, ge=0)
    """Price of a million answer tokens; None takes it from genai-prices. Cheap teachers are asked first."""
    max_tokens_key: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """The endpoint's name of an answer's limit; OpenAI's reasoning models know only max_completion_tokens."""
    temperature: Annotated[float, Field(ge=0, le=2)] | Literal["omit"] | None = None
    """Temperature from 0 to 2; None takes teachers.temperature, omit sends none, for models that refuse any."""
    requests_per_minute: float = Field(default=0.0, ge=0)
    """Limit of calls a minute, by spacing them; 0 has no limit."""
    max_concurrent: int = Field(default=8, ge=1)
    """Calls in flight."""

    @property
    def known_family(self) -> str:
        return self.family or family_of(self.model)

    @property
    def at_openrouter(self) -> bool:
        return not self.local and self.base_url.rstrip("/") == OPENROUTER

    @field_validator("base_url")
    @classmethod
    def _is_a_prefix(cls, url: str) -> str:
        return endpoint_url(url, "teachers.teacher.base_url")

    @field_validator("family")
    @classmethod
    def _one_spelling(cls, family: str | None) -> str | None:
        return family if family is None else family_named(family)

    def temperature_of(self, shared: float) -> float | None:
        """Return the temperature of its requests, where `shared` is that of all teachers; None sends none."""
        if self.temperature == "omit":
            return None
        return shared if self.temperature is None else self.temperature

    def api_key(self) -> str:
        """Return the endpoint's key from the environment. Raises ConfigError when it is not set."""
        key = os.environ.get(self.api_key_var)
        if not key:
            raise ConfigError(
                f"teacher {self.name!r} needs a key for {self.base_url}: set the environment variable "
                f"{self.api_key_var}, or name another with api_key_var"
            )
        return key

    @model_validator(mode="after")
    def _family_is_known(self) -> TeacherConfig:
        if self.known_family == UNKNOWN:
            raise ValueError(
                f"teachers.teacher {self.name!r} has model {self.model!r}, whose family no rule knows: a teacher must "
                'never judge traces of its own family; set family = "..." for it'
            )
        return self

    @model_validator(mode="after")
    def _key_goes_where_it_belongs(self) -> TeacherConfig:
        elsewhere = not self.local and not self.at_openrouter
        if elsewhere and "api_key_var" not in self.model_fields_set:
            raise ValueError(
                f"teachers.teacher {self.name!r} has base_url = {self.base_url!r} and no api_key_var, whose default "
                f"{self.api_key_var} names the key of {OPENROUTER}: name the variable that holds this endpoint's key"
            )
        return self

    @model_validator(mode="after")
    def _prices_come_together(self) -> TeacherConfig:
        if (self.input_usd_per_mtok is None) != (self.output_usd_per_mtok is None):
            raise ValueError(
                f"teachers.teacher {self.name!r} has input_usd_per_mtok = {self.input_usd_per_mtok} and "
                f"output_usd_per_mtok = {self.output_usd_per_mtok}: set both, or neither to take them from genai-prices"
            )
        return self


class FrozenBaseConfig(BaseConfig):
    """An endpoint of your own that serves the frozen base. Its calls are not in the budget."""

    base_url: str
    """The part before /chat/completions; it has to know vLLM's prompt_logprobs."""
    model: str = Field(min_length=1)
    """The endpoint's name of the model."""
    api_key_var: str | None = None
    """Environment variable that holds the key; None sends none."""

    @field_validator("base_url")
    @classmethod
    def _is_a_prefix(cls, url: str) -> str:
        return endpoint_url(url, "teachers.frozen_base.base_url")

    def api_key(self) -> str | None:
        """Return the endpoint's key from the environment. Raises ConfigError when it is named and not set."""
        key = os.environ.get(self.api_key_var or "")
        if self.api_key_var is not None and not key:
            raise ConfigError(
                f"teachers.frozen_base needs a key for {self.base_url}: set the environment variable "
                f"{self.api_key_var}, or leave out api_key_var for an endpoint without a key"
            )
        return key

    @property
    def mark(self) -> str:
        """Return what stands for the weights in the cache, for an endpoint does not show them."""
        return f"{self.base_url.rstrip('/')} {self.model}"


class BudgetConfig(BaseConfig):
    """Hard caps. Each call reserves more than it should ever cost; a call that does not fit is not made."""

    usd_per_call: float = Field(default=1.0, gt=0)
    """Cap of one call."""
    usd_per_trace: float = Field(default=5.0, gt=0)
    """Cap of all calls on one trace's states."""
    usd_per_run: float = Field(default=50.0, gt=0)
    """Cap of all calls, over all resumes."""


class KillSwitchConfig(BaseConfig):
    """Limits at which replay stops and reports why."""

    mean_usd_per_trace: float = Field(default=5.0, gt=0)
    """Mean cost of a trace, of those on which a call was made."""
    p95_s_per_step: float = Field(default=120.0, gt=0)
    """95th percentile of the time that endpoints take for a state's votes, without pauses before a retry. Votes come
    one after another, and a reasoning model thinks for 15 to 30 s."""
    error_rate: float = Field(default=0.25, gt=0, le=1)
    """Share of calls that failed for good."""
    min_states: int = Field(default=20, ge=1)
    """States on which a call was made before the switch looks."""


class GateConfig(BaseConfig):
    """The density gate on online pairs: it measures a window at a time, and only windows that pass are trained."""

    window_pairs: int = Field(default=64, ge=MIN_WINDOW_PAIRS)
    """Pairs of a window; more when they are of fewer than 8 traces. The rest at the end of the states is a window too,
    if it has 16 pairs of 8 traces."""
    min_pairs_a_trace: float = Field(default=5.0, gt=0)
    """Fewest pairs a trace; short traces cannot give five."""


class SelectConfig(BaseConfig):
    """Which states of a file are replayed. States that errors followed come first, and every trace has its turn."""

    states: int | None = Field(default=None, ge=1)
    """Most states of the file; None takes all."""
    per_trace: int | None = Field(default=None, ge=1)
    """Most states of one trace; None takes all."""


class TeachersConfig(BaseConfig):
    teacher: list[TeacherConfig] = []
    """Teachers, of at least two families that did not write the traces."""
    online: bool = False
    """Replay during training; pairs go to the run directory's pairs.jsonl."""
    states: Path | None = None
    """A file of states (`composer ingest`) to replay online; None takes the run's own rollouts."""
    voters: int = Field(default=3, ge=2)
    """N: teachers whose majority decides, unless all of it is of one family."""
    voting: Literal["sequential", "all"] = "sequential"
    """Request the next vote only while the majority is open, or all at once."""
    system_prompt: str = (
        "You are a capable software agent. Continue the task from here: give the single next step, by calling a tool "
        "when one is needed, or by answering when the task is done."
    )
    """First message for traces without a system message."""
    temperature: float = Field(default=0.0, ge=0, le=2)
    """Sampling temperature of teachers."""
    samples: int = Field(default=1, ge=1, le=64)
    """Answers that each teacher draws for a state; its vote is split evenly over them. More than 1 needs a
    temperature."""
    max_tokens: int = Field(default=1024, ge=1)
    """Tokens of an answer; one that is cut short is no vote."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Deadline of one attempt; the end of a run waits as long for the answers of an online replay."""
    max_retries: int = Field(default=4, ge=0)
    """Further attempts after 408, 409, 429, 5xx, a lost connection, a deadline or an unreadable reply."""
    retry_base_s: float = Field(default=1.0, gt=0)
    """First pause before a retry; it doubles, with jitter."""
    retry_max_s: float = Field(default=30.0, gt=0)
    """Longest pause, also where the endpoint asks for a longer one."""
    concurrent_states: int = Field(default=8, ge=1)
    """States that get votes at the same time."""
    cache_dir: Path = Path("outputs/teacher_cache")
    """Folder of every answer; the same question is never paid for twice."""
    cache_only: bool = False
    """Answer from the cache alone; such a replay makes no call."""
    max_length_ratio: float = Field(default=4.0, ge=1)
    """A pair whose longer answer is more than this times the shorter is dropped; it would teach length."""
    assume_family: str | None = None
    """The family of traces that name no model; without it such states are refused."""
    score: bool = True
    """Choose among agreeing answers by the frozen base's likelihood."""
    frozen_base: FrozenBaseConfig | None = None
    """Where the frozen base is served; None serves model.path on this machine."""
    local_threads: int = Field(default=1, ge=1)
    """CPU threads of each local model."""
    local_start_timeout_s: float = Field(default=180.0, gt=0)
    """How long local models may take to load."""
    select: SelectConfig = SelectConfig()
    """Which states of a file are replayed; the run's own rollouts are replayed whole."""
    budget: BudgetConfig = BudgetConfig()
    """Hard caps of cost."""
    kill: KillSwitchConfig = KillSwitchConfig()
    """Limits at which replay stops by itself."""
    gate: GateConfig = GateConfig()
    """Which of the online pairs may be trained."""

    @property
    def end_timeout_s(self) -> float:
        """Seconds that the end of a run waits for answers of an online replay: an attempt's deadline, or 0 when no
        teacher charges."""
        charged = self.online and not self.cache_only and any(not teacher.local for teacher in self.teacher)
        return self.timeout_s if charged else 0.0

    def models_served(self, base: str) -> list[str]:
        """Return the models that a replay needs on this machine: local teachers, and the frozen base `base` unless an
        endpoint serves it."""
        if self.cache_only:
            return []
        models = [teacher.model for teacher in self.teacher if teacher.local]
        return list(dict.fromkeys([*models, base] if self.score and self.frozen_base is None else models))

    @field_validator("assume_family")
    @classmethod
    def _one_spelling(cls, family: str | None) -> str | None:
        return family if family is None else family_named(family)

    @field_validator("teacher")
    @classmethod
    def _unique_names(cls, teachers: list[TeacherConfig]) -> list[TeacherConfig]:
        names = [teacher.name for teacher in teachers]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"teachers.teacher names {repeated} are used more than once: rename one of them")
        return teachers

    @model_validator(mode="after")
    def _two_families(self) -> TeachersConfig:
        families = sorted({teacher.known_family for teacher in self.teacher})
        if self.teacher and len(families) < 2:
            raise ValueError(
                f"teachers.teacher has {pluralize(len(self.teacher), 'teacher')}, all of family {families[0]!r}: "
                "agreement within one family proves little; add a teacher of another family"
            )
        greedy = [teacher.name for teacher in self.teacher if teacher.temperature_of(self.temperature) == 0]
        if self.samples > 1 and greedy:
            raise ValueError(
                f"teachers.samples = {self.samples}, but {', '.join(greedy)} would draw the same answer each time at "
                "temperature 0: set teachers.temperature above 0, or samples = 1"
            )
        if self.frozen_base is not None and not self.score:
            raise ValueError(
                f"teachers.score is false, but teachers.frozen_base names {self.frozen_base.base_url}, which would "
                "choose among agreeing answers: leave out one of them"
            )
        if self.online and not self.teacher:
            raise ValueError("teachers.online is true, but there is no [[teachers.teacher]]: add at least two")
        return self
