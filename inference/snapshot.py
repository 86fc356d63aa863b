"""A version's tensors, read from chunks on the node's disk in blocks, and patched as they are read.

    VersionFolder (receiver.py): one file a chunk --> Snapshot --block by block--> engine

So a node holds the engine's own weights and some megabytes more.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from composer_prime.errors import CorruptWeightsError, MisfitError, WeightError
from composer_prime.model_source import weight_files
from composer_prime.run.weights import WORDS, ChunkRef, Manifest, Patch, patch_starts, patches

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
Held = tuple[list[str], str, str, int]
"""Of a worker's parameter: published names, type, checksum in hexadecimal, and values without padding."""
Parts = list[tuple[Path, int]]
"""Of a file: path and bytes."""
_BLOCK_BYTES = 4 << 20
_NO_WORD = np.dtype("u1")
_SUM_ELEMENTS = 1 << 18
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def open_snapshot(manifest: Manifest, path_of: Callable[[ChunkRef], Path], base: Path) -> Snapshot:
    """Return the tensors of a version; `base` is the model folder.

    Raises CorruptWeightsError, MisfitError (adapters of another model), WeightError (no base).
    """
    name = f"weights v{manifest.version}"
    parts, patch = ([(path_of(ref), ref.size) for ref in refs] for refs in (manifest.chunks, manifest.patch))
    if manifest.kind == "adapters":
        return AdaptedSnapshot(folder_snapshot(base), Snapshot(name, [parts]), manifest)
    if manifest.kind == "delta":
        return Snapshot(name, [parts], patch, WORDS[manifest.dtype])
    return Snapshot(name, [parts])


def folder_snapshot(folder: Path) -> Snapshot:
    files = weight_files(folder)
    if not files:
        raise WeightError(f"{folder} holds no safetensors file to go back to")
    return Snapshot(str(folder), [[(path, path.stat().st_size)] for path in files])


class Snapshot(Mapping[str, torch.Tensor]):
    """Named tensors of safetensors files. Each lookup reads the tensor again, into new memory."""

    def __init__(self, name: str, files: list[Parts], patch: Parts | None = None, word: np.dtype = _NO_WORD) -> None:
        """`patch`: a stream of patches of such words, one for each part of the one file. Raises CorruptWeightsError."""
        self._name = name
        self._patch = patch
        self._word = word
        self._read_last: tuple[int, Patch] | None = None
        self._places: dict[str, tuple[Parts, int, torch.dtype]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        try:
            self._starts = patch_starts(self._patch_bytes, len(files[0])) if patch else []
        except ValueError as error:
            raise CorruptWeightsError(f"{name}: the stream of patches cannot be read: {error}") from None
        for parts in files:
            self._read_header(parts)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places  # Mapping's own would read the tensor

    def __getitem__(self, name: str) -> torch.Tensor:
        whole = math.prod(self.shapes[name])
        return next(self.blocks(name, whole))[1].reshape(self.shapes[name])

    def blocks(self, name: str, elements: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield start and values [n] of a tensor's blocks of at most `elements`, 4 MiB by default."""
        parts, offset, dtype = self._places[name]
        whole = math.prod(self.shapes[name])
        elements = max(1, elements or _BLOCK_BYTES // dtype.itemsize)
        for start in range(0, max(whole, 1), elements):
            raw = torch.empty(min(elements, whole - start) * dtype.itemsize, dtype=torch.uint8)
            self._read(parts, offset + start * dtype.itemsize, raw.numpy().data)
            yield start, raw.view(dtype)

    def _read_header(self, parts: Parts) -> None:
        """Layout: 8 bytes header length, JSON header, tensors (https://huggingface.co/docs/safetensors)."""
        size = sum(size for _, size in parts)
        try:
            first = bytearray(8)
            self._read(parts, 0, memoryview(first))
            start = 8 + int.from_bytes(first, "little")
            header = bytearray(start - 8 if start <= size else 0)
            self._read(parts, 8, memoryview(header))
            for name, entry in json.loads(header).items():
                if name == "__metadata__":
                    continue
                shape, dtype = tuple(map(int, entry["shape"])), _DTYPES[entry["dtype"]]
                begin, end = (start + int(offset) for offset in entry["data_offsets"])
                if not start <= begin <= end <= size or end - begin != math.prod(shape) * dtype.itemsize:
                    raise ValueError(f"tensor {name} {shape} {entry['dtype']} at bytes {begin} to {end} of {size}")
                self._places[name], self.shapes[name] = (parts, begin, dtype), shape
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise CorruptWeightsError(f"{self._name} cannot be read as safetensors: {error!r}") from None

    def _read(self, parts: Parts, offset: int, target: memoryview) -> None:
        done = 0
        for index, (path, size) in enumerate(parts):
            if offset < size and done < len(target):
                want = min(size - offset, len(target) - done)
                try:
                    with path.open("rb", buffering=0) as file:
                        file.seek(offset)
                        _fill(file, target[done : done + want])
                except (OSError, EOFError) as error:
                    raise CorruptWeightsError(f"{self._name} cannot be read from {path}: {error}") from None
                if self._patch is not None and parts is not self._patch:
                    self._amend(size, index, offset, target[done : done + want])
                done, offset = done + want, 0
            else:
                offset = max(0, offset - size)
        if done < len(target):
            raise ValueError(f"it ends {len(target) - done} bytes early")

    def _patch_bytes(self, offset: int, count: int) -> bytes:
        data = bytearray(count)
        self._read(self._patch or [], offset, memoryview(data))
        return bytes(data)

    def _amend(self, size: int, index: int, offset: int, data: memoryview) -> None:
        width = self._word.itemsize
        if offset % width or len(data) % width:
            raise CorruptWeightsError(f"{self._name}: a tensor begins or ends inside a word of {width} bytes")
        last, patch = self._read_last or (-1, None)
        if patch is None or last != index:
            start, end = self._starts[index : index + 2]
            (patch,) = patches([self._patch_bytes(start, end - start)], [size], self._word)
            self._read_last = index, patch
        patch.apply(data, offset // width)


class AdaptedSnapshot(Snapshot):
    """The tensors of a model folder plus low-rank updates: W + scale * B A, in float64, then in the version's type.

    A whole tensor among the factors takes the place of the folder's. A tensor's blocks are always the same, so that
    every look-up rounds the same.
    """

    def __init__(self, base: Snapshot, factors: Snapshot, manifest: Manifest) -> None:
        super().__init__(base._name, [])
        missing = sorted(manifest.tensors.keys() - base.keys())
        wrong = [name for name in sorted(factors) if not _fits(name, factors.shapes[name], base, factors)]
        if missing or wrong:
            raise MisfitError(
                f"weights v{manifest.version} are adapters of another model than {base._name}: it lacks {missing[:5]} "
                f"({len(missing)} in all), and of {wrong[:5]} ({len(wrong)} in all) the shapes differ; check that node "
                "and trainer use the same model.path"
            )
        self._places = {name: base._places[name] for name in manifest.tensors}
        self.shapes = {name: base.shapes[name] for name in manifest.tensors}
        self._factors = factors
        self._scale = manifest.adapter_scale
        self._dtype = getattr(torch, manifest.dtype)

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.cat([values for _, values in self.blocks(name)]).reshape(self.shapes[name])

    def blocks(self, name: str, elements: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
        if name in self._factors:
            yield from self._factors.blocks(name)
            return
        if f"{name}.lora_A" not in self._factors:
            yield from ((start, values.to(self._dtype)) for start, values in super().blocks(name))
            return
        a_ri, b_or = (self._factors[f"{name}.lora_{side}"].double() for side in "AB")
        width = a_ri.shape[1]
        rows = max(1, _BLOCK_BYTES // (8 * width))
        for start, values in super().blocks(name, rows * width):
            first = start // width
            update = b_or[first : first + rows] @ a_ri * self._scale
            yield start, (values.view(-1, width).double() + update).to(self._dtype).reshape(-1)


def _fits(factor: str, shape: tuple[int, ...], base: Snapshot, factors: Snapshot) -> bool:
    if factor in base:
        return base.shapes[factor] == shape
    name, _, side = factor.rpartition(".lora_")
    other = {"A": "B", "B": "A"}.get(side)
    whole, partner = base.shapes.get(name), factors.shapes.get(f"{name}.lora_{other}")
    if other is None or whole is None or partner is None:
        return False
    if not len(shape) == len(partner) == len(whole) == 2:
        return False
    (rank, width), (height, of_partner) = (shape, partner) if side == "A" else (partner, shape)
    return rank == of_partner and (height, width) == whole


def _fill(file, target: memoryview) -> None:
    done = 0
    while done < len(target):
        count = file.readinto(target[done:])
        if not count:
            raise EOFError(f"the file ends {len(target) - done} bytes early")
        done += count


def save_snapshot(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    names = {dtype: name for name, dtype in _DTYPES.items()}
    header: dict[str, object] = {}
    room = 128 * (len(tensors) + 1) + sum(8 * len(name) for name in tensors)  # filled up with spaces
    with path.open("wb") as file:
        file.seek(8 + room)
        end = 0
        for name in tensors:
            tensor = tensors[name].detach().cpu().contiguous()
            begin, end = end, end + tensor.nbytes
            header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        file.seek(0)
        file.write(room.to_bytes(8, "little") + json.dumps(header).encode().ljust(room))


def tensor_blocks(tensors: Mapping[str, torch.Tensor], name: str) -> Iterator[tuple[int, torch.Tensor]]:
    if isinstance(tensors, Snapshot):
        yield from tensors.blocks(name)
    else:
        yield 0, tensors[name].reshape(-1)


def word_sum(tensor: torch.Tensor) -> int:
    """Return the sum, modulo 2^64, of the squares of the values' bits, each taken as one integer.

    Order does not matter: the sum of a fused tensor is that of its parts. Padding with zeros adds 0.
    """
    bits = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
    total = 0
    for start in range(0, len(bits), _SUM_ELEMENTS):
        piece = bits[start : start + _SUM_ELEMENTS].to(torch.int64)
        total += int((piece * piece).sum())
    return total % (1 << 64)


def fold_sums(
    ranks: Sequence[Sequence[Held]], shapes: Mapping[str, tuple[int, ...]]
) -> list[tuple[list[str], str, str]]:
    """Return names, type and checksum of each parameter whose parts or copies several workers hold.

    Parts have the size of `shapes` together, and their sums add up. Copies have it each, and those that differ are
    returned one by one. What is neither is left out.
    """
    by_names: dict[tuple[str, ...], list[Held]] = defaultdict(list)
    for parameters in ranks:
        for held in parameters:
            by_names[tuple(held[0])].append(held)
    folded = []
    for names, parts in by_names.items():
        size = sum(math.prod(shapes[name]) for name in names)
        are_copies = len(ranks) == 1 or all(part[3] == size for part in parts)
        folded += [(list(names), parts[0][1], total) for total in _whole_sums(parts, size, are_copies)]
    return folded


def _whole_sums(parts: list[Held], size: int, are_copies: bool) -> list[str]:
    sums = [part[2] for part in parts]
    if are_copies:
        return sorted(set(sums))
    if sum(part[3] for part in parts) == size:
        return [f"{sum(int(part, 16) for part in sums) % (1 << 64):x}"]
    return []
