"""Publishing a policy version: gathered weights -> chunks in the store -> canary -> signed manifest, in this order.

A reader that sees a manifest therefore finds every chunk that it names. Rank 0 does the work; the others only take part
in the gathering.

Sharded masters to whole tensors under Hugging Face names, one at a time, on rank 0's CPU.

    for each parameter, all ranks: cast the shard (half the traffic for bfloat16) -> gather -> rank 0 copies to the CPU

At no moment does a device hold more than one whole tensor besides its shards.

The canary: what the published weights give for a fixed prompt, computed from those very tensors in float32.

A second model without storage runs on the published tensors: each layer's weights are cast to float32 just before the
layer runs and dropped right after, so a 16-bit model of any size needs one float32 layer at a time. Nothing of the
training setup (shards, packing, precision policy) takes part, so a fault there shows as a difference at the nodes.

final/: the trained policy as a Hugging Face folder that AutoModelForCausalLM.from_pretrained loads as it is.

The weights are those of the last published version, in the published type: what the nodes sampled from and what the
last evaluation measured. Everything but weights and config.json is taken over from the model folder.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from composer_prime.config import Config
from composer_prime.errors import CheckpointError, WeightError
from composer_prime.run.keys import RunKeys
from composer_prime.run.run_dir import RunDir
from composer_prime.run.weights import Canary, Manifest, WeightStore, open_signed, sign
from trainer.model.build import empty_model
from trainer.model.policy import Policy
from trainer.world import World


def publication_dtype(inference_dtype: str, compute_dtype: torch.dtype) -> torch.dtype:
    """What published weights are cast to: what the nodes were told to use, else the trainer's compute type."""
    return compute_dtype if inference_dtype == "auto" else getattr(torch, inference_dtype)


@torch.no_grad()
def whole_tensors(policy: Policy, world: World, dtype: torch.dtype) -> dict[str, Tensor] | None:
    """Rank 0: every parameter of the plain model (adapters merged, tied ones once) on the CPU in `dtype`; else None.

    A collective: all ranks call it. On one CPU rank the tensors may be the masters themselves: read, never write.
    """
    for module in policy.modules():
        if isinstance(module, FSDPModule):  # a forward pass without a backward leaves whole parameters behind
            module.reshard()
    kept = {}
    for name, tensor in _plain_parameters(policy):
        cast = tensor.to(dtype)
        gathered = cast.full_tensor() if isinstance(cast, DTensor) else cast
        if world.first:
            kept[name] = gathered.detach().to("cpu").contiguous()
    return kept if world.first else None


def _plain_parameters(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    if not policy.adapted:
        return policy.lm.named_parameters()
    from trainer.model.lora import merged_parameters  # peft takes seconds to import

    return merged_parameters(policy.lm)


TEXT = "The quick brown fox jumps over the lazy dog. 3 + 4 = 7, and 12 * 12 = 144."
MAX_TOKENS = 32


def prompt_ids(folder: Path, vocabulary: int) -> list[int]:
    """The fixed prompt in the model's own tokens, at most 32; evenly spread ids for a folder without a tokenizer."""
    try:
        ids = AutoTokenizer.from_pretrained(folder, local_files_only=True).encode(TEXT, add_special_tokens=False)
    except (OSError, ValueError):
        ids = []
    usable = [token for token in ids if token < vocabulary][:MAX_TOKENS]
    return usable if len(usable) >= 2 else [(1 + 7 * index) % vocabulary for index in range(MAX_TOKENS)]


class CanaryScorer:
    """Scores the prompt with any set of tensors that fits the architecture."""

    def __init__(self, lm: PreTrainedModel, token_ids: list[int], device: torch.device) -> None:
        """`lm` holds parameters on the meta device and real buffers; it is used up by this object."""
        self._lm = lm.eval()
        self._ids = torch.tensor([token_ids], device=device)
        self._device = device
        for module in lm.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))

    @torch.no_grad()
    def score(self, tensors: Mapping[str, Tensor]) -> Canary:
        """log p(token t+1 | tokens <= t) at temperature 1 under `tensors` (by parameter name, tied ones once)."""
        with self._lent(tensors):
            logits_TV = self._lm(input_ids=self._ids, use_cache=False).logits[0, :-1].float()
        logprobs_T = logits_TV.log_softmax(-1).gather(1, self._ids[0, 1:, None]).squeeze(1)
        return Canary(token_ids=self._ids[0].tolist(), logprobs=logprobs_T.tolist())

    @contextmanager
    def _lent(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """While inside, each module has its weights during its own forward pass only."""
        tied = {target: source for target, source in self._lm.all_tied_weights_keys.items()}
        handles = []
        for path, module in self._lm.named_modules():
            own = {name: f"{path}.{name}" if path else name for name, _ in module.named_parameters(recurse=False)}
            if own:
                values = {name: tensors[full] if full in tensors else tensors[tied[full]] for name, full in own.items()}
                handles += _lend(module, values, self._device)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _lend(module: nn.Module, values: Mapping[str, Tensor], device: torch.device) -> list:
    empty = dict(module.named_parameters(recurse=False))

    def fill(*_: object) -> None:
        for name, value in values.items():
            filled = nn.Parameter(value.to(device=device, dtype=torch.float32), requires_grad=False)
            setattr(module, name, filled)

    def drop(*_: object) -> None:
        for name, parameter in empty.items():
            setattr(module, name, parameter)

    return [module.register_forward_pre_hook(fill), module.register_forward_hook(drop, always_call=True)]


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


_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".index.json", ".h5", ".msgpack", ".onnx")


def export(policy: Policy, config: Config, folder: Path, target: Path, world: World, dtype: torch.dtype) -> None:
    """Write `target` (replacing it whole) on rank 0. A collective. Raises CheckpointError when it cannot be written."""
    tensors = whole_tensors(policy, world, dtype)
    if tensors is None:
        return
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        _save(tensors, config, folder, partial, dtype)
        _copy_rest(config, folder, partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    except Exception as error:  # safetensors has its own type for a full disk
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"the final model cannot be written to {target}: {error}; free some space, then go on with --resume"
        ) from error


def _save(tensors: dict[str, Tensor], config: Config, folder: Path, target: Path, dtype: torch.dtype) -> None:
    lm = plain_model(config, folder)
    lm.load_state_dict(tensors, strict=False, assign=True)
    lm.tie_weights()
    lm.config.dtype = dtype
    lm.save_pretrained(target)


def _copy_rest(config: Config, folder: Path, target: Path) -> None:
    """Tokenizer, generation settings, chat template and licence as they are in `folder`; a configured template wins."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != "config.json" and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, target / path.name)
    if config.model.chat_template is not None:
        shutil.copyfile(config.model.chat_template, target / "chat_template.jinja")
