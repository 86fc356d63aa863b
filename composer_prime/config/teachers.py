"""[teachers]: models that vote on recorded states, and what their votes may cost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator
from pydantic_config import BaseConfig

from composer_prime.address import endpoint_url
from composer_prime.console import pluralize
from composer_prime.errors import ConfigError
from composer_prime.import_path import check_unique
from composer_prime.model_families import UNKNOWN, family_named, family_of

MODELS_VARIABLE = "COMPOSER_MODELS_URL"
"""Environment variable with the URL of local teachers and base, which the launcher sets."""
OPENROUTER = "https://openrouter.ai/api/v1"
Family = Annotated[str, AfterValidator(family_named)]


class TeacherConfig(BaseConfig):
    """One teacher: a model behind an OpenAI-compatible endpoint, or one served on this machine."""

    name: str
    """Name in votes, pairs and costs."""
    model: str
    """Name of the model at the endpoint (anthropic/claude-sonnet-4); with local, a model folder or tiny/…"""
    base_url: str = OPENROUTER
    """The endpoint; not used with local."""
    local: bool = False
    """Serve the model on this machine's loopback with the local engine; it costs nothing."""
    api_key_var: str = "OPENROUTER_API_KEY"
    """Environment variable with the endpoint's key; required with another base_url."""
    family: Family | None = None
    """Model family (claude, gpt ...); a teacher never sees its own family's traces. None: from the name."""
    input_usd_per_mtok: float | None = Field(default=None, ge=0)
    """Price per million prompt tokens; None: from genai-prices."""
    output_usd_per_mtok: float | None = Field(default=None, ge=0)
    """Price per million answer tokens; None: from genai-prices. Cheaper teachers vote first."""
    max_tokens_key: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """Name of the endpoint's token limit; OpenAI's reasoning models accept only max_completion_tokens."""
    temperature: Annotated[float, Field(ge=0, le=2)] | Literal["omit"] | None = None
    """None uses teachers.temperature; omit sends none, for models that refuse the parameter."""

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

    def temperature_of(self, shared: float) -> float | None:
        """Return the temperature of its requests; None sends none. `shared`: that of all teachers."""
        if self.temperature == "omit":
            return None
        return shared if self.temperature is None else self.temperature

    def api_key(self) -> str:
        """Return the endpoint's key from the environment. Raises ConfigError."""
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
                f"teachers.teacher {self.name!r} has model {self.model!r}, whose family no rule knows: no teacher "
                'may judge its own family\'s traces; set family = "..." for it'
            )
        return self

    @model_validator(mode="after")
    def _key_goes_where_it_belongs(self) -> TeacherConfig:
        elsewhere = not self.local and not self.at_openrouter
        if elsewhere and "api_key_var" not in self.model_fields_set:
            raise ValueError(
                f"teachers.teacher {self.name!r} has base_url = {self.base_url!r} and no api_key_var, whose "
                f"default {self.api_key_var} is for {OPENROUTER}: name the variable with this endpoint's key"
            )
        return self

    @model_validator(mode="after")
    def _prices_come_together(self) -> TeacherConfig:
        if (self.input_usd_per_mtok is None) != (self.output_usd_per_mtok is None):
            raise ValueError(
                f"teachers.teacher {self.name!r} has input_usd_per_mtok = {self.input_usd_per_mtok} and "
                f"output_usd_per_mtok = {self.output_usd_per_mtok}: set both, or neither for genai-prices"
            )
        return self


class BudgetConfig(BaseConfig):
    """A hard cap. Each call first reserves its worst-case cost; one that does not fit is not made."""

    usd_per_run: float = Field(default=50.0, gt=0)
    """Cap of all calls, over all resumes."""


class SelectConfig(BaseConfig):
    """Which states of a file to replay: first those followed by errors; traces take turns."""

    states: int | None = Field(default=None, ge=1)
    """Maximum states of the file; None: all."""
    per_trace: int | None = Field(default=None, ge=1)
    """Maximum states of one trace; None: all."""


class TeachersConfig(BaseConfig):
    teacher: list[TeacherConfig] = []
    """Teachers of at least two families other than the one that wrote the traces."""
    online: bool = False
    """Replay the run's own rollouts during training; writes pairs.jsonl in the run directory."""
    voters: int = Field(default=3, ge=2)
    """N: number of votes, requested one by one until the majority is decided; two families must take part."""
    system_prompt: str = (
        "You are a capable software agent. Continue the task from here: give the single next step, by calling a tool "
        "when one is needed, or by answering when the task is done."
    )
    """System message for traces without one."""
    temperature: float = Field(default=0.0, ge=0, le=2)
    """Sampling temperature of teachers."""
    max_tokens: int = Field(default=1024, ge=1)
    """Maximum tokens of an answer; a truncated answer is not a vote."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Timeout of one attempt; at its end a run waits this long for the answers of an online replay."""
    concurrent_states: int = Field(default=8, ge=1)
    """Concurrent states."""
    cache_dir: Path = Path("outputs/teacher_cache")
    """Cache of all answers; the same call is never paid for twice."""
    assume_family: Family | None = None
    """Family of traces that do not name a model; without it these states are refused."""
    select: SelectConfig = SelectConfig()
    """Which states `composer replay` takes of a file; the run's own rollouts are replayed completely."""
    budget: BudgetConfig = BudgetConfig()
    """Hard cost cap."""

    @property
    def end_timeout_s(self) -> float:
        """Seconds that the end of a run waits for answers that are paid for."""
        charged = self.online and any(not teacher.local for teacher in self.teacher)
        return self.timeout_s if charged else 0.0

    def models_served(self) -> list[str]:
        """Return the models of local teachers, each once."""
        return list(dict.fromkeys(teacher.model for teacher in self.teacher if teacher.local))

    @model_validator(mode="after")
    def _unique_names_of_two_families(self) -> TeachersConfig:
        check_unique([teacher.name for teacher in self.teacher], "teachers.teacher")
        families = sorted({teacher.known_family for teacher in self.teacher})
        if self.teacher and len(families) < 2:
            raise ValueError(
                f"teachers.teacher has {pluralize(len(self.teacher), 'teacher')}, all of family {families[0]!r}: "
                "agreement within one family proves little; add a teacher of another family"
            )
        if self.online and not self.teacher:
            raise ValueError("teachers.online is true, but there is no [[teachers.teacher]]: add at least two")
        return self
