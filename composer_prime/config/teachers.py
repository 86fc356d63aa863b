"""[teachers]: models that are asked what they would have done, and what that may cost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator
from pydantic_config import BaseConfig

from composer_prime.console import pluralize
from composer_prime.errors import ConfigError
from composer_prime.llm.families import UNKNOWN, family_named, family_of

MODELS_VARIABLE = "COMPOSER_MODELS_URL"
"""Environment variable by which the launcher tells the orchestrator where it serves local teachers and base."""
OPENROUTER = "https://openrouter.ai/api/v1"
MIN_WINDOW_PAIRS = 16
"""Fewer pairs are too few for a verdict of the density gate."""
Tier = Literal["cheap", "mid", "frontier"]


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
    """The environment variable that holds the endpoint's key; to be given with any other base_url."""
    family: str | None = None
    """Its family (claude, gpt, qwen ...): a trace of this family is never shown to it. None takes it from the name."""
    tier: Tier = "mid"
    """Cheap teachers are asked first."""
    input_usd_per_mtok: float | None = Field(default=None, ge=0)
    """Price of a million prompt tokens; None takes it from genai-prices."""
    output_usd_per_mtok: float | None = Field(default=None, ge=0)
    """Price of a million answer tokens; None takes it from genai-prices."""
    max_tokens_key: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """What the endpoint calls the limit of an answer; OpenAI's reasoning models know max_completion_tokens alone."""
    temperature: float | Literal["omit"] | None = None
    """Its own, from 0 to 2; None takes teachers.temperature, omit sends none, for models that refuse any."""
    requests_per_minute: float = Field(default=0.0, ge=0)
    """Calls are spaced to keep to this; 0 does not space them."""
    max_concurrent: int = Field(default=8, ge=1)
    """Calls in flight."""

    @property
    def known_family(self) -> str:
        return self.family or family_of(self.model)

    @property
    def at_openrouter(self) -> bool:
        return not self.local and self.base_url.rstrip("/") == OPENROUTER

    @field_validator("family")
    @classmethod
    def _one_spelling(cls, family: str | None) -> str | None:
        return family if family is None else family_named(family)

    @field_validator("temperature")
    @classmethod
    def _in_range(cls, temperature: float | str | None) -> float | str | None:
        if isinstance(temperature, float) and not 0 <= temperature <= 2:
            raise ValueError(f'temperature is {temperature:g}, expected 0 to 2, or "omit" to send none')
        return temperature

    def temperature_of(self, shared: float) -> float | None:
        """What it is asked with, where the others are asked with `shared`; None sends none."""
        if self.temperature == "omit":
            return None
        return shared if self.temperature is None else self.temperature

    def api_key(self) -> str:
        """The endpoint's key, from the environment. Raises ConfigError when it is not there."""
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


class BudgetConfig(BaseConfig):
    """Hard caps. More than a call should ever cost is held before it is made; a call that does not fit is not made."""

    usd_per_call: float = Field(default=1.0, gt=0)
    """Cap of one call."""
    usd_per_trace: float = Field(default=5.0, gt=0)
    """Cap of all calls on one trace's states."""
    usd_per_run: float = Field(default=50.0, gt=0)
    """Cap of all calls, over all resumes."""
    overcharge_factor: float = Field(default=2.0, ge=1)
    """How many times its bound (the price of bytes_per_token and max_tokens) is held for a call, so that an endpoint
    that suddenly charges so many times more passes no cap, however many calls are in flight. 1 trusts endpoints."""
    bytes_per_token: float = Field(default=1.0, ge=1)
    """Fewest bytes that a prompt token is taken for when a call's cost is reserved; no tokenizer goes below 1, so that
    1 is the worst case. More lets more calls be in flight below a cap, which then holds less strictly."""


class KillSwitchConfig(BaseConfig):
    """Replay stops, and says why, when one of these is passed."""

    mean_usd_per_trace: float = Field(default=5.0, gt=0)
    """Mean cost of a trace, of those on which a call was made."""
    p95_usd_per_trace: float = Field(default=10.0, gt=0)
    """95th percentile of a trace's cost."""
    p95_s_per_step: float = Field(default=30.0, gt=0)
    """95th percentile of the time that a state's votes take."""
    error_rate: float = Field(default=0.25, gt=0, le=1)
    """Share of calls that failed for good."""
    min_states: int = Field(default=20, ge=1)
    """States on which a call was made before the switch looks."""


class VoiConfig(BaseConfig):
    """Value of information: a vote is asked for when what it may find is worth its price."""

    enabled: bool = False
    """Leave out votes that are not worth it; without it every state is voted on."""
    pair_value_usd: float | None = Field(default=None, gt=0)
    """What a preference pair is worth. None takes six times what a state's votes are expected to cost, on the mean of
    the states so far, so that it goes with the teachers' prices."""
    prior_disagreement: float = Field(default=0.3, gt=0, lt=1)
    """How often the votes on a state are expected to disagree and so give a pair, before any has been seen."""
    prior_weight: float = Field(default=4.0, gt=0)
    """Votes that the prior counts as."""
    explore: float = Field(default=0.05, ge=0, le=1)
    """Share of states that are voted on whatever the estimate says: it would never be corrected otherwise."""


class GateConfig(BaseConfig):
    """The density gate on pairs that are made online: measured a window at a time, and trained only where it passes."""

    window_pairs: int = Field(default=64, ge=MIN_WINDOW_PAIRS)
    """Pairs of a window: so many wait until they are measured, and more where they are of fewer than 8 traces. What is
    left when the states end is a window of its own, from 16 pairs of 8 traces on."""
    min_pairs_a_trace: float = Field(default=5.0, gt=0)
    """Pairs that a trace is to give; short traces cannot give five."""


class TeachersConfig(BaseConfig):
    teacher: list[TeacherConfig] = []
    """Teachers, of at least two families that did not write the traces."""
    online: bool = False
    """Replay while training goes on: pairs go to the run directory's pairs.jsonl."""
    states: Path | None = None
    """A states.jsonl (`composer ingest`) to replay online; None takes the run's own rollouts."""
    voters: int = Field(default=3, ge=2)
    """N: teachers whose majority decides, unless it is of one family."""
    voting: Literal["sequential", "all"] = "sequential"
    """Ask for the next vote only while the majority is open, or ask all."""
    system_prompt: str = (
        "You are a capable software agent. Continue the task from here: give the single next step, by calling a tool "
        "when one is needed, or by answering when the task is done."
    )
    """Put first where a trace has no system message of its own."""
    temperature: float = Field(default=0.0, ge=0, le=2)
    """Sampling temperature of teachers."""
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
    """States that are voted on at the same time."""
    cache_dir: Path = Path("outputs/teacher_cache")
    """Every answer is kept here; the same question is never paid for twice."""
    cache_only: bool = False
    """Answer from the cache alone: a replay that makes no call."""
    max_length_ratio: float = Field(default=4.0, ge=1)
    """A pair whose longer answer is more than this times the shorter is dropped: length would be what is learned."""
    assume_family: str | None = None
    """The family of traces that do not say which model made them; without it such states are refused."""
    score: bool = True
    """Choose among agreeing answers by the frozen base's likelihood (model.path, served locally)."""
    local_threads: int = Field(default=1, ge=1)
    """CPU threads of each local model."""
    local_start_timeout_s: float = Field(default=180.0, gt=0)
    """How long local models may take to load."""
    budget: BudgetConfig = BudgetConfig()
    """Hard caps of cost."""
    kill: KillSwitchConfig = KillSwitchConfig()
    """When replay stops by itself."""
    voi: VoiConfig = VoiConfig()
    """Which votes are worth their price."""
    gate: GateConfig = GateConfig()
    """Which of the pairs that are made online may be trained."""

    @property
    def end_timeout_s(self) -> float:
        """How long the end of a run waits for answers of an online replay: an attempt's deadline, after which none is
        to be expected; 0 where no teacher charges."""
        charged = self.online and not self.cache_only and any(not teacher.local for teacher in self.teacher)
        return self.timeout_s if charged else 0.0

    def models_served(self, base: str) -> list[str]:
        """What has to be served on this machine for a replay: local teachers, and the frozen base `base`."""
        if self.cache_only:
            return []
        models = [teacher.model for teacher in self.teacher if teacher.local]
        return list(dict.fromkeys([*models, base] if self.score else models))

    @field_validator("assume_family")
    @classmethod
    def _one_spelling(cls, family: str | None) -> str | None:
        return family if family is None else family_named(family)

    @field_validator("teacher")
    @classmethod
    def _unique_names(cls, teachers: list[TeacherConfig]) -> list[TeacherConfig]:
        names = [teacher.name for teacher in teachers]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"teachers.teacher names {twice} are used more than once: rename one of them")
        return teachers

    @model_validator(mode="after")
    def _two_families(self) -> TeachersConfig:
        families = sorted({teacher.known_family for teacher in self.teacher})
        if self.teacher and len(families) < 2:
            raise ValueError(
                f"teachers.teacher has {pluralize(len(self.teacher), 'teacher')}, all of family {families[0]!r}: "
                "agreement within one family says little; add a teacher of another family"
            )
        if self.online and not self.teacher:
            raise ValueError("teachers.online is true, but there is no [[teachers.teacher]]: add at least two")
        return self
