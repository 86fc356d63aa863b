"""Publishing a policy version: gathered weights -> chunks in the store -> canary -> signed manifest, in this order.

A reader that sees a manifest therefore finds every chunk that it names. Rank 0 does the work; the others only take part
in the gathering.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from composer_prime.config import Config
from composer_prime.errors import WeightError
from composer_prime.keys import RunKeys
from composer_prime.run_dir import RunDir
from composer_prime.weights.manifest import Manifest, open_signed, sign
from composer_prime.weights.store import WeightStore
from trainer.canary import CanaryScorer, prompt_ids
from trainer.gather import publication_dtype, whole_tensors
from trainer.model import empty_model
from trainer.policy import Policy
from trainer.world import World

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class Publisher:
    """Writes versions of one run into its weight store."""

    def __init__(self, config: Config, run_dir: RunDir, run_id: str, folder: Path, world: World) -> None:
        self._world, self._run_id, self._keep = world, run_id, config.trainer.weights.keep
        self.dtype = publication_dtype(config.inference.dtype, world.compute_dtype)
        if world.first:
            keys = RunKeys(run_dir.keys)
            self._signer, self._verifier = keys.signer(), keys.verifier()
            self._store = WeightStore(run_dir.weights)
            self._store.remove_partials()
            self._plain = plain_model(config, folder)
            ids = prompt_ids(folder, self._plain.config.get_text_config().vocab_size)
            self._scorer = CanaryScorer(plain_model(config, folder), ids, world.device)

    def publish(self, policy: Policy, version: int) -> int:
        """Put `version` into the store; bytes of its tensors (0 on other ranks). A collective.

        Raises WeightError (on rank 0) when the store cannot be written.
        """
        tensors = whole_tensors(policy, self._world, self.dtype)
        return self._write(tensors, version) if tensors is not None else 0

    def rewind(self, version: int) -> None:
        """Drop versions after `version`: they belong to steps that a resume takes again."""
        if self._world.first:
            self._store.rewind(version)

    def _write(self, tensors: dict[str, Tensor], version: int) -> int:
        stored = folder_names(self._plain, tensors)
        size = sum(tensor.nbytes for tensor in stored.values())
        try:
            manifest = Manifest(
                run_id=self._run_id,
                version=version,
                parent=None,
                kind="anchor",
                dtype=str(self.dtype).removeprefix("torch."),
                chunks=self._store.put_stream(safetensors_parts(stored)),
                tensors={name: hashlib.sha256(raw_bytes(tensor)).hexdigest() for name, tensor in stored.items()},
                canary=self._scorer.score(tensors),
            )
            self._store.put_manifest(version, sign(manifest, self._signer))
            self._store.prune(self._keep, lambda raw: open_signed(raw, self._verifier, run_id=self._run_id))
        except OSError as error:
            raise WeightError(
                f"policy version {version} ({size} bytes) cannot be written to {self._store.root}: {error}; free "
                "some space or lower trainer.weights.keep, then go on with --resume"
            ) from error
        return size


def plain_model(config: Config, folder: Path) -> PreTrainedModel:
    """The architecture of the published model: no adapters, ordinary attention, parameters on the meta device."""
    trainer = config.trainer.model_copy(update={"lora": None})
    attention = "eager" if config.model.attention == "eager" else "sdpa"
    return empty_model(folder, attention, config.model_copy(update={"trainer": trainer}))


def folder_names(lm: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` under the names that a saved model folder uses (some architectures are stored unfused)."""
    return {name: tensor.contiguous() for name, tensor in revert_weight_conversion(lm, dict(tensors)).items()}


def safetensors_parts(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file of CPU tensors, piece by piece: no second copy of the model is made.

    Layout: 8 bytes header length, JSON header, tensors end to end (https://huggingface.co/docs/safetensors).
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        yield raw_bytes(tensor)


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, row-major, without a copy."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
