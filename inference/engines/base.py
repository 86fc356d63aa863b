"""The interface between a node and its engine, and which engine a node runs.

`local` and `vllm` pass tests/engines/test_engine_contract.py. An import path names an engine of one's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from composer_prime.config.inference import InferenceConfig
from composer_prime.errors import MisfitError
from composer_prime.import_path import build_part
from composer_prime.wire.node_messages import Answer, Sampling, Status

if TYPE_CHECKING:
    import torch

ENGINES = {
    "local": "inference.engines.local.local_engine:LocalEngine",
    "vllm": "inference.engines.vllm.vllm_engine:VllmEngine",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBack:
    """What one parameter in the engine's memory holds after a swap."""

    names: list[str]
    """The published tensors that it consists of."""
    dtype: str
    """Its own type, which the published values were cast to."""
    checksum: int
    """inference.snapshot.word_sum of its values."""


class Engine(Protocol):
    """What a node calls, from one event loop."""

    @property
    def version(self) -> int:
        """Return the policy version of the weights in use."""
        ...

    async def start(self) -> None:
        """Load the model folder and be ready to serve. Raises ModelNotFoundError or EngineError."""

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: Sampling, session: str) -> Answer:
        """Sample one continuation. Cancelling the awaiting task frees its place.

        Requests of one `session` share a conversation, whose cache the engine may keep.
        Raises BadRequestError when the prompt leaves no room for a token.
        """
        ...

    async def progress(self, sent: Mapping[str, int]) -> dict[str, Answer]:
        """Return what the running requests `sent` have sampled beyond their first `sent[id]` tokens, if anything."""
        ...

    async def load_weights(
        self, version: int, tensors: Mapping[str, torch.Tensor], begin: Callable[[], None] = lambda: None
    ) -> None:
        """Swap weights between two tokens. Running requests continue.

        `begin` is called before the first weight changes. A look-up in `tensors` may read a disk: keep none.
        MisfitError means that nothing has changed. After any other error the caller loads others.
        """

    async def read_back(self, names: list[str]) -> list[ReadBack]:
        """Return what the parameters of the published tensors `names` hold, without those that cannot be read."""
        ...

    async def score(self, token_ids: list[int]) -> list[float]:
        """Return log p(token t+1 | tokens <= t) at temperature 1, [T - 1]."""
        ...

    def stats(self) -> Status:
        """Return how busy it is. The node adds what it knows of the weights."""
        ...

    async def close(self) -> None:
        """Stop and free everything. An engine that hangs is left behind after some seconds."""


def build_engine(inference: InferenceConfig, model_folder: Path, max_context: int) -> Engine:
    """Return the engine that `inference.engine` names, not started. Raises ConfigError.

    `max_context` bounds prompt and completion together, in tokens.
    """
    given = {"model_folder": model_folder, "inference": inference, "max_context": max_context}
    return build_part(inference.engine.name, inference.engine.settings, ENGINES, "inference.engine", given)


def refuse_misfits(
    tensors: Mapping[str, torch.Tensor],
    expected: Mapping[str, tuple[int, ...]],
    missing: list[str],
    optional: Collection[str] = (),
) -> None:
    """Raises MisfitError naming those of `tensors` that are `missing`, not `expected`, or of another shape."""
    shapes = getattr(tensors, "shapes", None) or {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    faults = {
        "missing": missing,
        "unexpected": sorted(shapes.keys() - expected.keys() - set(optional)),
        "misshapen": [
            f"{name} {tuple(shape)} instead of {tuple(expected[name])}"
            for name, shape in shapes.items()
            if name in expected and tuple(shape) != tuple(expected[name])
        ],
    }
    faulty = [f"{kind}: {', '.join(names[:5])} ({len(names)} in all)" for kind, names in faults.items() if names]
    if faulty:
        raise MisfitError(
            "the new weights do not fit the model in use (" + "; ".join(faulty) + "); check that node and trainer use "
            "the same model.path"
        )
