"""Publishing a policy version: copied weights -> canary -> chunks in the store -> signed manifest -> announcement.

    for each parameter, all ranks: cast the shard (half the traffic for bfloat16) -> gather -> rank 0 copies to the CPU
    canary: logprobs of a fixed prompt, on the GPU (on a CPU the background thread computes them)
    ---- training continues; a thread of rank 0 does the rest ----
    safetensors bytes -> whole, or what differs from the versions before -> chunks -> manifest, signed -> prune
    -> announce: the orchestrator learns of the version

A version is announced after its manifest, and that is written after its chunks. Of adapters only the factors are
written: the nodes have the base. The next publication, a checkpoint and the end of the run wait for the one under way.
A device holds at most one whole tensor besides its shards. `export` writes final/ from the same tensors.

The file of a version in the store is whole (an anchor), or what differs from the last anchor:

    anchor 0 ────┬────┬────┬────────> anchor 4 ────┬────┬────         one patch to each version, from its anchor
                 1    2    3                       5    6             a new anchor has one from the anchor before

A patch compares each chunk of the anchor with the tensors in memory, so no second snapshot is held.
A version is whole after `anchor_every` others, when its patch would not be small, and when the anchor is not certain.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from huggingface_hub import save_torch_state_dict
from msgspec.structs import replace
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key, revert_weight_conversion

from composer_prime.config import Config
from composer_prime.errors import CheckpointError, ComposerError, CorruptWeightsError, WeightError
from composer_prime.model_source import tensor_shapes, weight_files
from composer_prime.run.keys import RunKeys
from composer_prime.run.run_dir import RunDir, write_remedy
from composer_prime.run.weights import (
    WORDS,
    Canary,
    ChunkRef,
    Manifest,
    WeightStore,
    difference,
    open_signed,
    safetensors_header,
    sign,
    stream_entry,
    word_sum,
)
from diloco.streaming import StreamingDiLoCo
from trainer.data import first_alone, wait_together
from trainer.model.adapters import factors, merged_parameters
from trainer.model.build import empty_model, frozen_buffers, read_model_config
from trainer.model.policy_model import Policy
from trainer.world import Background, World

logger = logging.getLogger(__name__)
Item = TypeVar("Item")
Result = TypeVar("Result")

CANARY_TEXT = "The quick brown fox jumps over the lazy dog. 3 + 4 = 7, and 12 * 12 = 144."
CANARY_TOKENS = 32
_WEIGHT_FILES = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".index.json", ".h5", ".msgpack", ".onnx")


class Publisher:
    """Writes versions of one run into its weight store.

    Version N is the model after step N, in a joint run the global model after N full sweeps of fragments.
    A run without training rollouts publishes only what an evaluation plays with.
    """

    def __init__(
        self, config: Config, run_dir: RunDir, run_id: str, folder: Path, world: World, outer: StreamingDiLoCo | None
    ) -> None:
        self._config = config
        self._folder = folder
        self._world = world
        self._outer = outer
        dtype = config.inference.dtype
        self.dtype = world.compute_dtype if dtype == "auto" else getattr(torch, dtype)
        self.version = -1
        """The version published last."""
        self._highest_version = -1
        self._copies: dict[str, Tensor] = {}
        """Published last. The next take their place: fresh memory takes twice as long to fill."""
        self.background = Background(config.trainer.threads)
        """Writes the version; idle on ranks but the first."""
        if world.first:
            store = WeightStore(run_dir.weights)
            store.remove_partials()
            signer = RunKeys(run_dir.keys).signer()
            threads = config.trainer.threads
            self._writer = VersionWriter(store, signer, run_id, keep=config.trainer.weights.keep, threads=threads)
            self._plain = plain_model(config, folder)
            self._canary = CanaryScorer(plain_model(config, folder), folder, world.device)

    def publish(self, policy: Policy, step: int, announce: Callable[[int], None] = lambda version: None) -> int:
        """Copy the version of `step`, and write it in the background unless it is there. Return the bytes of tensors.

        `announce` is called in the background with the version when it is complete. A collective; ranks but the first
        return 0 and do no more. Waits for the publication before, and raises as `settle` does.
        """
        self.settle()
        version = self._version_of(step) if self._is_needed(step) else self.version
        if version == self.version:
            self._begin(lambda: announce(version))
            return 0
        if version < self.version:  # took over the state of a peer that is further behind
            self.rewind(step)
        self.version, self._highest_version = version, max(version, self._highest_version)
        with self._outer.global_values(swept=True) if self._outer else contextlib.nullcontext():
            self._copy(policy)
            adapters = factors(policy.lm) if policy.adapted else None  # after the parameters are sharded again
        if not self._world.first:
            return 0
        written = self._adapters(adapters) or self._copies if adapters else self._copies
        size = sum(tensor.nbytes for tensor in written.values())  # the thread may clear them
        # A GPU may have no room for the canary beside a backward pass.
        canary = self._canary.score(self._copies) if self._world.device.type != "cpu" else None
        self._begin(lambda: self._finish(version, written, canary, announce))
        return size

    def _adapters(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `factors` and the frozen buffers under the folder's names; nothing where a node's folder lacks one."""
        stored, buffers = self._stored(), frozen_buffers(self._plain)
        parameters = {id(each): name for name, each in [*self._plain.named_parameters(), *buffers.items()]}
        names = {parameters[id(each)]: name for name, each in stored.items() if id(each) in parameters}
        bases = {name: name.rpartition(".")[0] for name in factors}
        if not (names.keys() >= {*bases.values()} and tensor_shapes(self._folder).keys() >= stored.keys()):
            return {}
        written = {names[name]: self._copies[name] for name in buffers}
        return written | {names[base] + name.removeprefix(base): factors[name] for name, base in bases.items()}

    def _stored(self) -> dict[str, Tensor]:
        """Return what a version has by the names of the model folder, on the meta device."""
        return revert_weight_conversion(self._plain, dict(self._plain.named_parameters()) | frozen_buffers(self._plain))

    def settle(self) -> None:
        """Wait until no publication is under way on rank 0. A collective. Raises what failed there on every rank."""
        wait_together("the next publication", "the one before", self.background.is_idle)

    def _finish(
        self, version: int, written: dict[str, Tensor], canary: Canary | None, announce: Callable[[int], None]
    ) -> None:
        """Score, write and announce a version, on the thread. `written`: factors, or all tensors."""
        tensors = self._copies
        left_out = _left_out(self._plain, self._folder, self._stored())
        adapted = [] if written is tensors else [*self._stored(), *left_out]
        canary = canary or self._canary.score(tensors)
        # some architectures are stored unfused, under other names than their parameters have
        stored = written if adapted else revert_weight_conversion(self._plain, dict(written))
        stored |= {} if adapted else _read(self._folder, left_out)
        size = sum(tensor.nbytes for tensor in written.values())
        if stored.keys() != tensors.keys():
            tensors.clear()  # They are not what is written.
        lora = self._config.trainer.lora
        manifest = Manifest(
            run_id=self._writer.run_id,
            version=version,
            kind="adapters" if adapted else "anchor",
            dtype=str(self.dtype).removeprefix("torch."),
            chunks=[],
            tensors=dict.fromkeys(adapted or stored, ""),  # their sums come with the file
            canary=canary,
            adapter_scale=lora.alpha / lora.rank if lora else 1.0,
        )
        aligned = sorted(stored.items(), key=lambda item: -item[1].element_size())  # as safetensors wants them
        contiguous = {name: tensor.contiguous() for name, tensor in aligned}
        self._writer.publish(manifest, contiguous, size)
        announce(version)

    def _copy(self, policy: Policy) -> None:
        for name, whole, dtype in whole_tensors(policy, self._world, self.dtype):
            if self._world.first:
                if name not in self._copies:
                    self._copies[name] = torch.empty(whole.shape, dtype=dtype, pin_memory=whole.is_cuda)
                self._copies[name].copy_(whole, non_blocking=True)
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)

    def rewind(self, step: int) -> None:
        """Drop the versions after that of `step`: they belong to steps that a resume takes again."""
        if self._world.first:
            self._writer.rewind(self._version_of(step), self.dtype)

    def export(self, policy: Policy, target: Path) -> None:
        """Write final/ to `target` in the published type. A collective; rank 0 writes.

        Raises CheckpointError when `target` cannot be written.
        """
        self._copies.clear()  # Rank 0 has the model once.
        export(policy, self._config, self._folder, target, self._world, self.dtype)

    def _begin(self, work: Callable[[], None]) -> None:
        if self._world.first:
            self.background.start(f"the publication of policy version {self.version}", work)

    def accepted_versions(self, step: int) -> tuple[int, int]:
        """Return the oldest and newest version that the batch of `step` may hold tokens of.

        In a joint run only the orchestrator bounds the oldest: when this peer catches up on rounds, several versions
        pass between the forming of a batch and its training.
        """
        if self._outer:
            return 0, self._highest_version
        return step - 1 - self._config.orchestrator.max_staleness, step - 1

    def _is_needed(self, step: int) -> bool:
        """Return whether nodes play with this version; the first after a start always counts."""
        orchestrator = self._config.orchestrator
        if orchestrator.groups_per_step or self.version < 0:
            return True
        return bool(orchestrator.source) and orchestrator.eval.due(step, self._config.run.max_steps)

    def _version_of(self, step: int) -> int:
        return self._outer.sweep if self._outer else step


@torch.no_grad()
def whole_tensors(policy: Policy, world: World, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, torch.dtype]]:
    """Yield every parameter and frozen buffer of the plain model, on its device, and its published type. A collective.

    That is `dtype`, but float32 of buffers. Adapters are merged, and tied parameters are there once. One CPU rank gets
    its parameters themselves, in their own type, unless they are merged: read, never write.
    """
    for module in policy.modules():
        if isinstance(module, FSDPModule):  # a forward pass without a backward leaves whole parameters
            module.reshard()
    named = merged_parameters(policy.lm) if policy.adapted else policy.lm.named_parameters()
    for name, tensor in named:
        whole = tensor.detach()
        if world.size > 1 or whole.device.type != "cpu":
            whole = whole.to(dtype)  # Before it travels. On one CPU rank the copy casts.
        if isinstance(whole, DTensor):
            whole = whole.to_local() if world.size == 1 else whole.full_tensor()
        yield name, whole, dtype
    for name, buffer in frozen_buffers(policy.lm).items():
        yield name, buffer, buffer.dtype


def plain_model(config: Config, folder: Path) -> PreTrainedModel:
    """Return the published architecture: no adapters, ordinary attention, parameters on the meta device.

    Its tensors are converted as transformers converts those of `folder`, so a version has the folder's names. These
    differ from the parameters' where experts are apart, or text is a part of a model that reads pictures too.
    """
    trainer = config.trainer.model_copy(update={"lora": None})
    attention = "eager" if config.model.attention == "eager" else "sdpa"
    lm = empty_model(folder, attention, config.model_copy(update={"trainer": trainer}))
    conversions = get_model_conversion_mapping(lm)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    for name in tensor_shapes(folder):
        rename_source_key(name, renamings, converters)  # It notes which of them the folder uses.
    vars(lm)["_weight_conversions"] = [each for each in conversions if each.was_used()]
    return lm


class CanaryScorer:
    """Scores a fixed prompt with the very tensors that are published, in float32.

    A second model without storage runs on them: each layer's weights are float32 just while it runs.
    Shards, packing and precision policy take no part, so a fault there shows as a difference at the nodes.
    """

    def __init__(self, lm: PreTrainedModel, folder: Path, device: torch.device) -> None:
        """Take over `lm`: parameters on the meta device, real buffers. `folder` has the tokenizer."""
        self._lm = lm.eval()
        self._device = device
        vocabulary = lm.config.get_text_config().vocab_size
        self._ids = torch.tensor([_prompt_ids(folder, vocabulary)], device=device)
        self._tensors: Mapping[str, Tensor] = {}
        for path, module in lm.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
            empty = dict(module.named_parameters(recurse=False))
            parent = lm.get_submodule(path.rpartition(".")[0])
            reader = parent if isinstance(module, nn.Conv1d) else module  # Recurrent layers read theirs without a call.
            if empty:
                reader.register_forward_pre_hook(partial(self._fill, f"{path}." if path else "", [*empty], module))
                reader.register_forward_hook(partial(_restore, empty, module), always_call=True)

    @torch.no_grad()
    def score(self, tensors: Mapping[str, Tensor]) -> Canary:
        """Return log p(token t+1 | tokens <= t) at temperature 1. `tensors`: by parameter name, tied ones once."""
        self._tensors = tensors
        for name, buffer in frozen_buffers(self._lm).items():
            buffer.copy_(tensors[name])
        logits_TV = self._lm(input_ids=self._ids, use_cache=False).logits[0, :-1].float()
        self._tensors = {}
        logprobs_T = logits_TV.log_softmax(-1).gather(1, self._ids[0, 1:, None]).squeeze(1)
        return Canary(token_ids=self._ids[0].tolist(), logprobs=logprobs_T.tolist())

    def _fill(self, prefix: str, names: list[str], module: nn.Module, *_: object) -> None:
        for name in names:
            key = prefix + name
            source = key if key in self._tensors else self._lm.all_tied_weights_keys[key]
            # It moves in its own type: half the bytes.
            moved = self._tensors[source].to(self._device, non_blocking=True)
            setattr(module, name, nn.Parameter(moved.float(), requires_grad=False))


def _restore(parameters: dict[str, nn.Parameter], module: nn.Module, *_: object) -> None:
    for name, parameter in parameters.items():
        setattr(module, name, parameter)


def _prompt_ids(folder: Path, vocabulary: int) -> list[int]:
    """Return the fixed prompt in the model's own tokens, at most 32; spread ids without a tokenizer."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        ids = tokenizer.encode(CANARY_TEXT, add_special_tokens=False)
    except (OSError, ValueError):
        ids = []
    usable = [token for token in ids if token < vocabulary][:CANARY_TOKENS]
    if len(usable) >= 2:
        return usable
    return [(1 + 7 * index) % vocabulary for index in range(CANARY_TOKENS)]


def export(policy: Policy, config: Config, folder: Path, target: Path, world: World, dtype: torch.dtype) -> None:
    """Write final/, a folder that AutoModelForCausalLM.from_pretrained loads, to `target`, replacing it whole.

    Everything but weights and config.json is copied from the model folder (tokenizer, generation settings, license); a
    configured chat template takes precedence. A collective; rank 0 writes. Raises CheckpointError when `target` cannot
    be written.
    """
    wholes = whole_tensors(policy, world, dtype)
    tensors = {name: whole.to("cpu", own).contiguous() for name, whole, own in wholes if world.first}
    write = partial(_write_model, config, folder, target, tensors, dtype)
    first_alone(world, "what follows", f"the model that rank 0 writes to {target}", write)


def _write_model(config: Config, folder: Path, target: Path, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    unfinished = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        lm, settings = plain_model(config, folder), read_model_config(folder)
        stored = revert_weight_conversion(lm, tensors)
        tensors.clear()
        for name, tensor in stored.items():
            if tensor.untyped_storage().nbytes() > tensor.nbytes:  # Experts are views of one tensor; files hold none.
                stored[name] = tensor.clone()
        stored |= _read(folder, _left_out(lm, folder, stored))
        settings.architectures = settings.architectures or [type(lm).__name__]
        settings.dtype = settings.get_text_config().dtype = dtype
        settings.save_pretrained(unfinished)
        save_torch_state_dict(stored, unfinished, metadata={"format": "pt"})
        for path in sorted(folder.iterdir()):
            if path.is_file() and path.name != "config.json" and not path.name.endswith(_WEIGHT_FILES):
                shutil.copyfile(path, unfinished / path.name)
        if config.model.chat_template is not None:
            shutil.copyfile(config.model.chat_template, unfinished / "chat_template.jinja")
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)
    except Exception as error:  # safetensors has its own type for a full disk
        shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(
            f"the final model cannot be written to {target}: {error}; {write_remedy(error)}, "
            "then continue with --resume"
        ) from error


def _left_out(lm: PreTrainedModel, folder: Path, stored: Collection[str]) -> list[str]:
    """Return the names in `folder` of what `lm` leaves out by design: it is text alone, without tower or draft head.

    Nodes and final/ have it untrained.
    """
    pattern = re.compile("|".join(lm._keys_to_ignore_on_load_unexpected or ["(?!)"]))
    return [name for name in tensor_shapes(folder) if name not in stored and pattern.search(name)]


def _read(folder: Path, names: Iterable[str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        with safe_open(file, "pt") as held:
            tensors |= {name: held.get_tensor(name) for name in {*names}.intersection(held.keys())}
    return tensors


# -- the file of a version ---------------------------------------------------------------------------------------------


ANCHOR_EVERY = 20
"""Versions between two whole ones."""
_LARGEST_SHARE = 1 / 3
"""Of an anchor's bytes: no patch is larger."""


class VersionWriter:
    """The weight store of a run, as its trainer writes it: every version has a signed manifest.

    Used by one thread at a time.
    """

    def __init__(
        self, store: WeightStore, signer: Ed25519PrivateKey, run_id: str, *, keep: int,
        anchor_every: int = ANCHOR_EVERY, threads: int = 1,
    ) -> None:  # fmt: skip
        """`keep` versions stay in the store. `anchor_every` versions after an anchor the next one is whole.

        `threads` of them hash, compare, compress and write chunks.
        """
        self.run_id = run_id
        self._store = store
        self._signer = signer
        self._keep = keep
        self._anchor_every = anchor_every
        self._anchor: list[ChunkRef] = []
        """The file of the last anchor; empty where that is not certain."""
        self._header = b""
        """Of that file: names, types, shapes, order."""
        self._since_anchor = 0
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "version")
        self._dense_until = 0
        """So many versions are not compared: a step changed too many words."""

    def publish(self, manifest: Manifest, tensors: Mapping[str, Tensor], size: int) -> None:
        """Write the version of contiguous CPU `tensors` of `size` bytes, and drop old ones. Raises WeightError."""
        version = manifest.version
        try:
            manifest = self.write(manifest, tensors)
            self._store.put_manifest(version, sign(manifest, self._signer))
            self._store.prune(self._keep, self._open)
        except OSError as error:
            raise WeightError(
                f"policy version {version} ({size} bytes) cannot be written to {self._store.root}: {error}; "
                f"{write_remedy(error, ' or lower trainer.weights.keep')}, then continue with --resume"
            ) from error

    def rewind(self, version: int, dtype: torch.dtype) -> None:
        """Drop the versions after `version`. The next one builds on the newest there was, if that has `dtype`."""
        newest, versions = None, self._store.versions()
        with contextlib.suppress(ComposerError, OSError):  # Of another release, or damaged.
            newest = self._open(self._store.manifest(versions[-1])) if versions else None
        self._store.rewind(version)
        self.forget()
        if newest is not None and newest.dtype == str(dtype).removeprefix("torch."):
            self.continue_from(newest)

    def _open(self, raw: bytes) -> Manifest:
        return open_signed(raw, self._signer.public_key(), run_id=self.run_id)

    def forget(self) -> None:
        """The next version is whole."""
        self._anchor = []

    def continue_from(self, newest: Manifest) -> None:
        """Build on the anchor of the store's `newest`, from whatever version training continues: files are compared.

        Nodes that have that anchor pull no other one. The store may have lost it: then the next version is whole.
        """
        self.forget()
        chunk_bytes = self._store.chunk_bytes
        if newest.kind == "adapters" or any(ref.size != chunk_bytes for ref in newest.chunks[:-1]):
            return
        start = bytearray()
        try:
            for ref in newest.chunks:
                start += self._store.read(ref)
                if len(start) >= 8 + int.from_bytes(start[:8], "little"):
                    break
        except CorruptWeightsError as error:
            logger.warning("the next version of the weights is whole: %s", error)
            return
        self._anchor, self._since_anchor = newest.chunks, 0
        self._header = bytes(start[: 8 + int.from_bytes(start[:8], "little")])

    def write(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> Manifest:
        """Store the file of contiguous CPU `tensors`, and return the manifest with what a reader needs."""
        if manifest.kind == "adapters":
            chunks = self._store.put_stream(safetensors_parts(tensors), self._in_order)
            return replace(manifest, chunks=chunks)
        word = WORDS[manifest.dtype]
        sums = self._in_order(_sum_of, tensors.values())
        manifest = replace(manifest, tensors=dict(zip(tensors, sums, strict=True)))
        anchor, self._anchor = self._anchor, []  # a failure leaves nothing certain
        header = safetensors_header(tensors)
        patch = self._patch(anchor, tensors, word) if anchor and header == self._header else []
        self._since_anchor += 1
        if patch and self._since_anchor < self._anchor_every:
            self._anchor = anchor
            return replace(manifest, kind="delta", chunks=anchor, patch=patch)
        chunks = self._store.put_stream(safetensors_parts(tensors), self._in_order)
        self._anchor, self._header, self._since_anchor = chunks, header, 0
        return replace(manifest, kind="anchor", chunks=chunks, patch=patch, base=anchor if patch else [])

    def _patch(self, anchor: list[ChunkRef], tensors: Mapping[str, Tensor], word: np.dtype) -> list[ChunkRef]:
        """Return the patch from the anchor; none where it is not small or a chunk is lost."""
        if self._anchor_every == 1 or self._dense_until > 0:
            self._dense_until = max(0, self._dense_until - 1)
            return []
        store, limit, size = self._store, sum(ref.size for ref in anchor) * _LARGEST_SHARE, 0

        def entry_of(pair: tuple[ChunkRef, bytearray | memoryview]) -> bytes:
            return stream_entry(difference(store.read(pair[0]), memoryview(pair[1]), word).encode())

        def entries() -> Iterator[bytes]:
            nonlocal size
            pairs = zip(anchor, store.pieces(safetensors_parts(tensors)), strict=True)
            for entry in self._in_order(entry_of, pairs):
                size += len(entry)
                if size > limit:
                    return
                yield entry

        try:
            patch = store.put_stream(entries(), self._in_order)
        except CorruptWeightsError as error:
            logger.warning("the next version of the weights is whole: %s", error)
            return []
        if size <= limit:
            return patch
        self._dense_until = self._anchor_every
        return []

    def _in_order(self, work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yield what `work` makes of each item, in order, a few at a time."""
        pending: deque[Future[Result]] = deque()
        for item in items:
            pending.append(self._pool.submit(work, item))
            if len(pending) > self._threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def safetensors_parts(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file of CPU tensors, piece by piece, without a second copy of the model."""
    yield safetensors_header(tensors)
    for tensor in tensors.values():
        yield _raw_bytes(tensor)


def _sum_of(tensor: Tensor) -> str:
    return f"{word_sum(_raw_bytes(tensor), WORDS[str(tensor.dtype).removeprefix('torch.')]):x}"


def _raw_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, not copied."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
