"""[orchestrator.hints]: which turns went wrong, who writes the hint, and where it is put. SDPO learns from it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_config import BaseConfig

from composer_prime.address import endpoint_url
from composer_prime.import_path import PartConfig, as_parts, one_of

RULES = ("tool_error", "exception", "test_failure", "schema", "repeated", "gave_up", "failed", "every")
LAYERS = ("template", "raw_error", "llm", "sibling")


class EndpointConfig(BaseConfig):
    """An OpenAI-compatible chat endpoint."""

    base_url: str
    """The part before /chat/completions, for example http://127.0.0.1:8080/v1."""
    model: str
    """Name of the model at the endpoint."""
    api_key_var: str | None = None
    """Environment variable with the API key; None sends no key."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Deadline of one call."""
    max_tokens: int = Field(default=600, ge=1)
    """Maximum tokens of an answer."""
    input_usd_per_mtok: float = Field(default=0.0, ge=0)
    """Price per million prompt tokens, in USD."""
    output_usd_per_mtok: float = Field(default=0.0, ge=0)
    """Price per million answer tokens, in USD."""
    budget_usd: float = Field(default=1.0, ge=0)
    """Budget of the run in USD. The worst-case cost of each call is reserved in advance, and charged if no reply
    reports the cost.
    """

    @field_validator("base_url")
    @classmethod
    def _is_a_prefix(cls, url: str) -> str:
        return endpoint_url(url, "base_url of an endpoint")


class LicenceConfig(BaseConfig):
    """A kind of hint is distilled only while redraws of hinted turns show that it helps, and the divergence falls."""

    share: float = Field(default=0.05, gt=0, le=1)
    """Redraws per rollout, at most."""
    trust: bool = False
    """Whether a kind of which nothing is shown yet teaches: then each does until it is seen to end."""
    file: Path | None = None
    """Redraws that `composer hints probe --save` measured for this model: they count as well."""


class HintsConfig(BaseConfig):
    detect: Annotated[list[str | PartConfig], one_of("orchestrator.hints.detect", *RULES)] = [
        "tool_error",
        "exception",
        "test_failure",
        "schema",
    ]
    """Rules that find error turns: a reply that reports a failed call; an exception or a failed test in a tool's
    output; a call that violates its tool's schema. Off by default: `repeated`, calls with the same replies as before;
    and for the last turn `gave_up` (an answer right after an error), `failed` (a reward below 0.5) and `every` (any;
    with the layer sibling: SDPO, arXiv 2601.20802). An own detector is `module:Class`, or { name = "module:Class",
    settings = { … } }; see orchestrator/hints/generate.py.
    """
    layers: Annotated[list[str | PartConfig], one_of("orchestrator.hints.layers", *LAYERS)] = ["template"]
    """Writers of the hint, in order; the first one with a hint wins: template, raw_error, llm, sibling, or
    `module:Class` of your own, with settings as in `detect`; see orchestrator/hints/generate.py.
    """
    template: list[dict[str, str]] = []
    """Templates as in orchestrator/hints/templates.toml, tried before those: tables [[orchestrator.hints.template]]."""
    llm: EndpointConfig | None = None
    """The model of the layer `llm`."""
    max_turns: int = Field(default=1, ge=1)
    """Maximum hinted turns per rollout, from the first error on; later ones are skipped and counted."""
    scope: Literal["turn", "rest", "rollout"] = "turn"
    """turn: the hint stands before the error turn, and that turn is distilled. rest: all later turns as well. rollout:
    it stands before the first turn, and all turns are distilled. The latter two hint the first error alone.
    """
    max_hint_chars: int = Field(default=600, ge=16)
    """Maximum length of a hint; longer ones are cut at a word."""
    weights: dict[str, Annotated[float, Field(ge=0)]] = {}
    """Weight of a turn's divergence by kind of error; 1 for other kinds. Turns with weight 0 are counted, but get no
    hint and are not distilled.
    """

    licence: LicenceConfig | None = None
    """Whether each kind of hint must earn its weight. None: every kind has it from the start."""

    @field_validator("layers")
    @classmethod
    def _some_layer_once(cls, layers: list[str | PartConfig]) -> list[str | PartConfig]:
        if not layers or any(layers.count(layer) > 1 for layer in layers):
            raise ValueError(f"orchestrator.hints.layers is {layers}: name at least one layer, and each only once")
        return layers

    @model_validator(mode="after")
    def _llm_has_an_endpoint(self) -> HintsConfig:
        if self.asks_model and self.llm is None:
            raise ValueError(
                f"orchestrator.hints.layers is {self.layers}, but orchestrator.hints.llm names no endpoint: set "
                "orchestrator.hints.llm.base_url and .model, or leave out 'llm'"
            )
        return self

    @model_validator(mode="after")
    def _licence_of_turns(self) -> HintsConfig:
        if self.licence is not None and self.scope != "turn":
            raise ValueError(
                f"orchestrator.hints.scope is {self.scope!r}, but [orchestrator.hints.licence] tries a hint before the "
                "error turn: set scope = 'turn', or orchestrator.hints.licence = None"
            )
        return self

    @property
    def asks_model(self) -> bool:
        """Tell whether the endpoint of `llm` is used."""
        return "llm" in {part.name for part in as_parts(self.layers)}
