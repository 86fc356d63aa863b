"""The weight store of a run: content-addressed chunks, and one signed manifest per policy version.

    weights/chunks/<sha256>              16 MiB pieces of a safetensors file
    weights/manifests/v000012.manifest   written after its chunks, so a manifest never names a missing chunk

The trainer writes; the orchestrator reads and passes on. Torch-free: tensors come and go as named raw bytes.

A manifest lists chunks; joined in order they are one safetensors file. A version is stored whole (an anchor), or as
what differs from an anchor. An anchor may also say what differs from the one before. The ed25519 signature covers what
a message is, and its hashes cover every byte, so no source of chunks needs trust.

What differs is a stream of patches, without loss. A file of one element type is a row of words: 2 bytes for bfloat16
and float16, 4 for float32. A patch belongs to one chunk and holds `new word - old word` (modulo 2^16 or 2^32) wherever
that is not zero: an optimizer step changes few 16-bit values, and most by one unit.

    stream of patches    one a chunk of the anchor: length of the frame (4 bytes), zstd frame
    in a frame           number of changes, bytes of gaps (4 bytes each)
                         gaps: words between two changes, as bytes of 255 that add up and one smaller byte
                         changes: signed numbers folded to 0, -1, 1, -2, ..., two to a byte, 15 for a larger one
                         the larger ones: all lowest bytes first

Half bytes because zstd finds repetitions in rows of so few values, and one costs more than what it stands for: changes
of +1 and -1 take 2.1 bits as half bytes, 2.7 as bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import zstandard
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from composer_prime.errors import ComposerError, CorruptWeightsError, SignatureError, WireError
from composer_prime.run.run_dir import remove_partials, write_atomic

CHUNK_BYTES = 16 << 20
SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "uint8": "U8"}
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_PULL_S = 60.0
"""How long a version counts as being pulled after a read."""


def is_chunk_name(text: str) -> bool:
    """Tell whether `text` is a sha256 in hexadecimal, which may be a file name."""
    return _SHA256.fullmatch(text) is not None


class ChunkRef(msgspec.Struct, frozen=True, array_like=True):
    sha256: str
    size: int
    """Bytes."""


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """A fixed prompt and its log-probabilities under the trainer's own weights."""

    token_ids: list[int]
    """[T]."""
    logprobs: list[float]
    """[T - 1]: log p(token t+1 | tokens <= t), temperature 1, of the published weights in float32."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, tag="weights"):
    """One policy version."""

    run_id: str
    version: int
    kind: str
    """anchor (whole), delta (what differs from an anchor), or adapters (low-rank factors)."""
    dtype: str
    """Of the version's tensors, but for a router's frozen bias: float32."""
    chunks: list[ChunkRef]
    """The file of the tensors, of the anchor, or of the factors: NAME.lora_A [rank, in], NAME.lora_B [out, rank],
    float32, beside what the adapters' model never trains."""
    tensors: dict[str, str]
    """By name in the model folder: `word_sum` of its values, hexadecimal. Empty with adapters."""
    canary: Canary
    adapter_scale: float = 1.0
    """With adapters: tensor NAME is that of the model folder + adapter_scale * B A, computed in float64."""
    patch: list[ChunkRef] = []
    """A stream of patches: of a delta from `chunks` to this version, of an anchor from `base`, if any, to `chunks`."""
    base: list[ChunkRef] = []
    """The file of the anchor before."""

    @property
    def refs(self) -> list[ChunkRef]:
        """All chunks that a node may need."""
        return [*self.chunks, *self.patch]

    @property
    def files(self) -> list[ChunkRef]:
        """The chunks with this version's tensors."""
        return self.refs if self.kind == "delta" else self.chunks

    @property
    def state(self) -> str:
        """A hash of the version's files."""
        return hashlib.sha256("\n".join(ref.sha256 for ref in self.files).encode()).hexdigest()


class ModelFile(msgspec.Struct, frozen=True, array_like=True):
    name: str
    chunks: list[ChunkRef]

    @property
    def size(self) -> int:
        return sum(ref.size for ref in self.chunks)


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True, tag="model_files"):
    """Configuration and tokenizer of the model folder, and the weights where versions are adapters."""

    run_id: str
    files: list[ModelFile]

    @property
    def refs(self) -> list[ChunkRef]:
        return [ref for file in self.files for ref in file.chunks]


Body = TypeVar("Body", Manifest, ModelFiles)


class Envelope(msgspec.Struct, frozen=True):
    manifest: bytes
    signature: bytes


def sign(signed: Manifest | ModelFiles, key: Ed25519PrivateKey) -> bytes:
    """Return the wire form: msgpack of (its bytes, ed25519 signature over them)."""
    body = msgspec.msgpack.encode(signed)
    return msgspec.msgpack.encode(Envelope(body, key.sign(body)))


def open_signed(raw: bytes, key: Ed25519PublicKey, *, run_id: str) -> Manifest:
    """Return the version that `raw` describes.

    Raises WireError when it is no such message or names what cannot be a chunk, SignatureError when another key signed
    it or it is of another run.
    """
    return _opened(raw, key, run_id, Manifest)


def open_model_files(raw: bytes, key: Ed25519PublicKey, *, run_id: str) -> ModelFiles:
    """Return the model files that `raw` lists. Raises as `open_signed`, and WireError for a name with a path."""
    opened = _opened(raw, key, run_id, ModelFiles)
    for file in opened.files:
        if not _FILE_NAME.fullmatch(file.name):
            raise WireError(f"model file {file.name[:80]!r} has no plain name: its run is not to be trusted")
    return opened


def _opened(raw: bytes, key: Ed25519PublicKey, run_id: str, body: type[Body]) -> Body:
    kind = body.__struct_config__.tag
    try:
        envelope = msgspec.msgpack.decode(raw, type=Envelope)
        key.verify(envelope.signature, envelope.manifest)
        opened = msgspec.msgpack.decode(envelope.manifest, type=Manifest | ModelFiles)  # by the tag in it
    except InvalidSignature:
        raise SignatureError(
            f"the signature of this {kind} message does not match the key of run {run_id!r}: check that the node "
            "joined the right run, and join it with a fresh invite"
        ) from None
    except msgspec.DecodeError as error:
        text = f"{len(raw)} bytes are not a signed {kind} message: {error}; use one release everywhere"
        raise WireError(text) from None
    if not isinstance(opened, body):
        raise WireError(f"a signed message of another kind came for a {kind} message: its source is wrong")
    if opened.run_id != run_id:
        raise SignatureError(f"the {kind} message belongs to run {opened.run_id!r}, this is run {run_id!r}")
    for ref in opened.refs:  # the hash becomes a file name: "../" would lead out
        if not is_chunk_name(ref.sha256) or not 0 <= ref.size <= CHUNK_BYTES:
            raise WireError(
                f"the {kind} message names chunk {ref.sha256[:80]!r} of {ref.size} bytes: expected a sha256 in "
                f"hexadecimal and at most {CHUNK_BYTES} bytes; use one release everywhere"
            )
    return opened


def safetensors_header(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return what comes before the values of torch's `tensors` in a file.

    8 bytes header length, JSON header, tensors end to end (https://huggingface.co/docs/safetensors).
    """
    header: dict[str, object] = {"__metadata__": metadata or {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        dtype, end = str(tensor.dtype).removeprefix("torch."), offset + tensor.nbytes
        header[name] = {"dtype": SAFETENSORS_DTYPES[dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class WeightStore:
    def __init__(self, root: Path, chunk_bytes: int = CHUNK_BYTES) -> None:
        """`chunk_bytes`: of a written chunk, at most CHUNK_BYTES, a multiple of 8."""
        self.root = root
        self.chunk_bytes = chunk_bytes
        self._chunks = root / "chunks"
        self._manifests = root / "manifests"

    def put_chunks(self, data: bytes | bytearray | memoryview) -> list[ChunkRef]:
        """Store `data` in pieces, but for those that exist."""
        view, refs = memoryview(data), []
        for start in range(0, len(view), self.chunk_bytes):
            piece = view[start : start + self.chunk_bytes]
            digest = hashlib.sha256(piece).hexdigest()
            path = self._chunks / digest
            if not path.exists() or path.stat().st_size != len(piece):
                write_atomic(path, piece)
            refs.append(ChunkRef(digest, len(piece)))
        return refs

    def put_stream(self, parts: Iterable[bytes | memoryview], run: Callable[..., Iterable] = map) -> list[ChunkRef]:
        """Do the same as `put_chunks` of all `parts` joined, with few chunks in memory; `run` does the work of map."""
        return [ref for refs in run(self.put_chunks, self.pieces(parts)) for ref in refs]

    def pieces(self, parts: Iterable[bytes | memoryview]) -> Iterator[bytearray | memoryview]:
        """Yield the bytes of all `parts` joined, in chunks."""
        pending = bytearray()
        for part in parts:
            view = memoryview(part)
            while len(pending) + len(view) >= self.chunk_bytes:
                room = self.chunk_bytes - len(pending)
                yield pending + view[:room] if pending else view[:room]
                view, pending = view[room:], bytearray()
            pending += view
        if pending:
            yield pending

    def read(self, ref: ChunkRef) -> bytes:
        """Return a whole chunk for the trainer itself: `prune` does not count that as a pull.

        Raises CorruptWeightsError when it is missing or altered; an altered one is dropped.
        """
        path = self._chunks / ref.sha256
        try:
            status, data = path.stat(), path.read_bytes()
        except OSError as error:
            raise CorruptWeightsError(f"chunk {ref.sha256} of {self.root} cannot be read: {error}") from None
        with suppress(OSError):  # reading may have set the access time
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        if hashlib.sha256(data).hexdigest() != ref.sha256:
            path.unlink(missing_ok=True)
            raise CorruptWeightsError(f"chunk {ref.sha256} of {self.root} differs from its hash")
        return data

    def put_manifest(self, version: int, signed: bytes) -> None:
        write_atomic(self._manifest_path(version), signed)

    def manifest(self, version: int) -> bytes:
        return self._manifest_path(version).read_bytes()

    def _manifest_path(self, version: int) -> Path:
        return self._manifests / f"v{version:06d}.manifest"

    def versions(self) -> list[int]:
        """Return the published versions, ascending."""
        return sorted(int(path.stem[1:]) for path in self._manifests.glob("v*.manifest") if path.stem[1:].isdigit())

    def rewind(self, version: int) -> None:
        """Drop versions after `version`, and by the next `prune` their chunks."""
        for later in self.versions():
            if later > version:
                self._manifest_path(later).unlink(missing_ok=True)

    def chunk(self, sha256: str, offset: int, size: int) -> bytes | None:
        """Return up to `size` bytes of a chunk from `offset`, for a node; None when the store has no such chunk.

        `prune` spares it by its access time. Raises OSError for what cannot be read, such as a link.
        """
        if not is_chunk_name(sha256):
            return None
        try:
            descriptor = os.open(self._chunks / sha256, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        with open(descriptor, "rb") as file:
            with suppress(OSError):  # another user's, or read-only
                os.utime(descriptor, ns=(time.time_ns(), os.fstat(descriptor).st_mtime_ns))
            file.seek(offset)
            return file.read(size)

    def remove_partials(self) -> None:
        """Drop what a killed trainer was writing, before writing again."""
        for folder in (self._chunks, self._manifests):
            remove_partials(folder)

    def prune(self, keep: int, decode: Callable[[bytes], Manifest]) -> None:
        """Drop all but the newest `keep` versions and the chunks that they name.

        Up to `keep` older versions stay while slow nodes read their chunks.
        """
        chunks = self._named_chunks(decode)
        versions = list(chunks)
        held = {sha256 for version in versions[-keep:] for sha256 in chunks[version]}
        pulled_at = {version: self._pulled_at(chunks[version] - held) for version in versions[:-keep]}
        recent = [version for version, read_s in pulled_at.items() if time.time() - read_s < _PULL_S]
        spared = sorted(recent, key=lambda version: pulled_at[version])[-keep:]
        for version in versions[:-keep]:
            if version not in spared:
                self._manifest_path(version).unlink(missing_ok=True)
        held |= {sha256 for version in spared for sha256 in chunks[version]}
        for path in self._chunks.iterdir():
            if path.name not in held and not path.name.startswith("."):
                path.unlink(missing_ok=True)

    def _named_chunks(self, decode: Callable[[bytes], Manifest]) -> dict[int, set[str]]:
        """Return the chunks that each version names. Drop unreadable manifests."""
        chunks: dict[int, set[str]] = {}
        for version in self.versions():
            try:
                chunks[version] = {ref.sha256 for ref in decode(self.manifest(version)).refs}
            except ComposerError:  # of an earlier release, or damaged: no node can use it
                self._manifest_path(version).unlink(missing_ok=True)
        return chunks

    def _pulled_at(self, chunks: Iterable[str]) -> float:
        """Return when one of `chunks` was last read since it was written, Unix seconds."""
        times_s = [0.0]
        for sha256 in chunks:
            with suppress(FileNotFoundError):
                status = (self._chunks / sha256).stat()
                times_s += [status.st_atime] if status.st_atime_ns > status.st_mtime_ns else []
        return max(times_s)


WORDS = {"bfloat16": np.dtype("<u2"), "float16": np.dtype("<u2"), "float32": np.dtype("<u4")}
"""By the version's dtype."""
_HEAD = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
_LEVEL = 1
_SUM_WORDS = 1 << 18
_WIDE = 15
"""Stands for a change that does not fit a half byte."""


@dataclass(frozen=True, slots=True)
class Patch:
    positions: np.ndarray
    """[n] uint32, ascending: which words change."""
    changes: np.ndarray
    """[n] words: new - old, never zero."""

    def apply(self, target: memoryview | bytearray, first: int = 0) -> None:
        """Change the words in `target`, the chunk's from word `first` on."""
        words = np.frombuffer(target, self.changes.dtype)
        start, end = np.searchsorted(self.positions, [first, first + len(words)])
        words[self.positions[start:end] - np.uint32(first)] += self.changes[start:end]

    def encode(self) -> bytes:
        """Return a frame before compression. Equal patches have equal bytes."""
        count, bits = len(self.positions), 8 * self.changes.itemsize
        gap_bytes = _gap_bytes(self.positions)
        signed = self.changes.view(f"<i{self.changes.itemsize}")
        folded = ((signed << 1) ^ (signed >> (bits - 1))).view(self.changes.dtype)
        halves = np.zeros(count + count % 2, np.uint8)
        halves[:count] = np.minimum(folded, _WIDE)
        wide = folded[folded >= _WIDE]
        planes = wide.view(np.uint8).reshape(len(wide), self.changes.itemsize).T
        pairs = halves[0::2] | halves[1::2] << 4
        head = _HEAD.pack(count, len(gap_bytes))
        return b"".join([head, gap_bytes.tobytes(), pairs.tobytes(), planes.tobytes()])


def _gap_bytes(positions: np.ndarray) -> np.ndarray:
    """Return the gaps between `positions`, [n] uint32, as bytes, [m] uint8, m <= n + last position / 255."""
    gaps = np.diff(positions, prepend=np.uint32(0))
    gaps[1:] -= 1
    ends = np.cumsum(gaps // 255 + 1, dtype=np.uint32) - 1
    runs = np.full(int(ends[-1]) + 1 if len(ends) else 0, 255, np.uint8)
    runs[ends] = gaps % 255
    return runs


def difference(old: bytes | memoryview, new: bytes | memoryview, word: np.dtype) -> Patch:
    """Return what turns the chunk `old` into `new`, of the same length."""
    before, after = np.frombuffer(old, word), np.frombuffer(new, word)
    positions = np.flatnonzero(before != after)
    return Patch(positions.astype(np.uint32), after[positions] - before[positions])


def stream_entry(encoded: bytes) -> bytes:
    """Return one entry of a stream of patches."""
    frame = zstandard.ZstdCompressor(level=_LEVEL).compress(encoded)
    return _LENGTH.pack(len(frame)) + frame


def patches(stream: Iterable[bytes], sizes: Iterable[int], word: np.dtype) -> Iterator[Patch]:
    """Yield the patches of a stream in pieces, one for each of an anchor's chunks of `sizes` bytes.

    Raises CorruptWeightsError; no frame takes more memory than its chunk can need.
    """
    pieces, pending = iter(stream), bytearray()

    def take(count: int, index: int) -> bytes:
        while len(pending) < count and (piece := next(pieces, None)) is not None:
            pending.extend(piece)
        taken = bytes(pending[:count])
        del pending[:count]
        if len(taken) < count:
            raise CorruptWeightsError(f"patch {index}: the stream ends {count - len(taken)} bytes early")
        return taken

    for index, size in enumerate(sizes):
        words = size // word.itemsize
        limit = _HEAD.size + words + words // 255 + 1 + words // 2 + 1 + size
        (length,) = _LENGTH.unpack(take(_LENGTH.size, index))
        if length > limit + limit // 128 + 64:
            raise CorruptWeightsError(f"patch {index}: {length} bytes for a chunk of {size}, at most {limit} fit")
        yield _decode(_decompress(take(length, index), limit, index), words, word, index)
    if pending or next(pieces, None):
        raise CorruptWeightsError("the stream of patches continues after the last chunk")


def patch_starts(read: Callable[[int, int], bytes], count: int) -> list[int]:
    """Return where each of `count` patches of a stream starts, and the last one ends. `read` takes offset and size."""
    starts = [0]
    for _ in range(count):
        (length,) = _LENGTH.unpack(read(starts[-1], _LENGTH.size))
        starts.append(starts[-1] + _LENGTH.size + length)
    return starts


def _decompress(frame: bytes, limit: int, index: int) -> bytes:
    try:
        size = zstandard.frame_content_size(frame)
        if not 0 <= size <= limit:
            raise CorruptWeightsError(f"patch {index}: its frame claims {size} bytes, at most {limit} fit")
        return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptWeightsError(f"patch {index} is not a zstd frame: {error}") from None


def _decode(raw: bytes, words: int, word: np.dtype, index: int) -> Patch:
    count, gaps = _HEAD.unpack_from(raw) if len(raw) >= _HEAD.size else (0, 0)
    pairs_at, wide_at = _HEAD.size + gaps, _HEAD.size + gaps + (count + 1) // 2
    if len(raw) < max(wide_at, _HEAD.size) or count > words or gaps > words + words // 255 + 1:
        raise CorruptWeightsError(f"patch {index}: {len(raw)} bytes do not hold {count} changes of {words} words")
    pairs = np.frombuffer(raw, np.uint8, wide_at - pairs_at, pairs_at)
    folded = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1)[:count].astype(word)
    is_wide = folded == _WIDE
    num_wide = int(np.count_nonzero(is_wide))
    if len(raw) != wide_at + num_wide * word.itemsize:
        raise CorruptWeightsError(f"patch {index}: {len(raw) - wide_at} bytes do not hold {num_wide} large changes")
    planes = np.frombuffer(raw, np.uint8, num_wide * word.itemsize, wide_at).reshape(word.itemsize, num_wide)
    folded[is_wide] = np.ascontiguousarray(planes.T).view(word).reshape(num_wide)
    runs = np.frombuffer(raw, np.uint8, gaps, _HEAD.size)
    is_end = runs != 255
    num_ends = int(np.count_nonzero(is_end))
    if num_ends != count or (gaps and not is_end[-1]):
        raise CorruptWeightsError(f"patch {index}: it has {num_ends} positions for {count} changes")
    positions = np.cumsum(runs + is_end, dtype=np.uint32)[is_end] - 1  # an end is below 255: no byte overflows
    if count and positions[-1] >= words:
        raise CorruptWeightsError(f"patch {index}: it changes word {positions[-1]} of a chunk of {words}")
    changes = (folded >> 1) ^ np.negative(folded & 1)
    if not changes.all():
        raise CorruptWeightsError(f"patch {index}: it has changes of zero")
    return Patch(positions, changes)


def word_sum(raw: bytes | memoryview, word: np.dtype) -> int:
    """Return the sum, modulo 2^64, of the squares of the words as signed numbers. It does not depend on the order.

    Engines give the same sum of what they hold (inference/snapshot.py, word_sum).
    """
    bits, total = np.frombuffer(raw, f"<i{word.itemsize}"), 0
    for start in range(0, len(bits), _SUM_WORDS):
        piece = bits[start : start + _SUM_WORDS].astype(np.int64)
        total += int(np.sum(piece * piece))
    return total % (1 << 64)
