"""[orchestrator.hints]: which turns went wrong, who writes the hint, and where it is put. SDPO learns from it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_config import BaseConfig

from composer_prime.address import endpoint_url

Layer = Literal["template", "raw_error", "llm", "introspection", "sibling"]


class EndpointConfig(BaseConfig):
    """An OpenAI-compatible chat endpoint."""

    base_url: str
    """The part before /chat/completions, for example http://127.0.0.1:8080/v1."""
    model: str
    """The endpoint's name of the model."""
    api_key_var: str | None = None
    """Environment variable that holds the key; None sends none."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Deadline of one call."""
    max_tokens: int = Field(default=160, ge=1)
    """Longest answer."""
    temperature: float = Field(default=0.0, ge=0)
    """0 makes answers repeatable where the endpoint allows it."""
    max_concurrent: int = Field(default=8, ge=1)
    """Calls in flight."""
    input_usd_per_mtok: float = Field(default=0.0, ge=0)
    """Price of a million prompt tokens, USD."""
    output_usd_per_mtok: float = Field(default=0.0, ge=0)
    """Price of a million answer tokens, USD."""
    budget_usd: float = Field(default=1.0, ge=0)
    """Calls stop before the run's sum passes this. The worst case of a call is reserved before the call, and counted
    when no reply reports its cost."""
    rest_s: float = Field(default=30.0, ge=0)
    """Pause without calls after five failures in a row."""

    @field_validator("base_url")
    @classmethod
    def _is_a_prefix(cls, url: str) -> str:
        return endpoint_url(url, "base_url of an endpoint")


class JudgeConfig(EndpointConfig):
    """The endpoint of a judge. Its verdicts on long rollouts are longer than hints."""

    max_tokens: int = Field(default=600, ge=1)
    """Longest answer; a verdict that is cut short is useless."""


class HintsConfig(BaseConfig):
    detect: list[Literal["tool_error", "exception", "test_failure", "schema", "failed"]] = [
        "tool_error",
        "exception",
        "test_failure",
        "schema",
    ]
    """What makes a turn wrong: an answer that reports a failed call; an exception or a failed test in a tool's output;
    a call that breaks its tool's schema. `failed` (not by default) is the last turn of a rollout without reward, for
    which a successful sibling is an example (SDPO's feedback, arXiv 2601.20802)."""
    judge: JudgeConfig | None = None
    """A model that reads finished rollouts and flags wasteful turns and bad style."""
    layers: list[Layer] = ["template"]
    """Writers of the hint, in order; the first that has one wins."""
    templates_file: Path | None = None
    """Further templates (TOML, the format of orchestrator/hints/templates.toml); they are tried before ours."""
    llm: EndpointConfig | None = None
    """The model behind the layer `llm`."""
    introspection_max_tokens: int = Field(default=96, ge=1)
    """Longest answer of the policy to the layer `introspection`."""
    placement: Literal["message_end", "user", "system"] = "message_end"
    """Where the hint stands: at the end of the user or tool message before the turn, or as a message of its own."""
    control: Literal["none", "other_error", "other_episode"] = "none"
    """Control arms: each hint is replaced by one that answers another kind of error, or another task's error."""
    max_turns: int = Field(default=16, ge=1)
    """Most turns of one rollout that get a hint; later ones are left out and counted."""
    max_hint_chars: int = Field(default=600, ge=16)
    """A longer hint is cut at a word."""
    weights: dict[str, Annotated[float, Field(ge=0)]] = {}
    """Weight of a turn's divergence by kind of error; 1 for other kinds. Turns of a kind with weight 0 are counted, but
    get no hint and are not distilled."""
    filtered_groups: bool = True
    """Groups whose rewards are all equal give the policy loss nothing. On: SDPO still learns from their wrong turns,
    beside the groups of a step, and no other loss counts their tokens. Off: they are dropped."""
    timeout_s: float = Field(default=120.0, gt=0)
    """How long a finished group may wait for its hints; late ones are left out and counted."""

    @field_validator("layers")
    @classmethod
    def _some_layer_once(cls, layers: list[Layer]) -> list[Layer]:
        if not layers or len(set(layers)) < len(layers):
            raise ValueError(f"orchestrator.hints.layers is {layers}: name at least one layer, and each only once")
        return layers

    @model_validator(mode="after")
    def _llm_has_an_endpoint(self) -> HintsConfig:
        if "llm" in self.layers and self.llm is None:
            raise ValueError(
                f"orchestrator.hints.layers is {self.layers}, but orchestrator.hints.llm names no endpoint: set "
                "orchestrator.hints.llm.base_url and .model, or leave out the layer 'llm'"
            )
        return self
