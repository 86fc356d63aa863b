"""How a pseudo-gradient travels: a flat float32 vector [n] to bytes and back. CPU tensors.

    fp32, bf16      every element on its own: exact, or rounded to 16 bits
    int8, int4      symmetric integers with one bfloat16 scale a block, entropy coded

All peers decode the same values. `ErrorFeedback` adds what one encoding lost to the next delta.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import zstandard
from torch import Tensor

from composer_prime.config.diloco import BLOCK


def codec_of(name: str) -> Codec:
    """Raises ValueError for an unknown name."""
    if name in _FLOAT_TYPES:
        return FloatCodec(name)
    if name in _BITS:
        return IntegerCodec(name)
    raise ValueError(f"no codec is called {name!r}")


class ErrorFeedback:
    """The residual of every fragment: what encoding lost is added to the next delta (arXiv 1901.09847)."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.residuals: list[Tensor] = [torch.zeros(size) for size in sizes]
        """float32 [numel] a fragment."""

    def encode(self, fragment: int, delta_n: Tensor, codec: Codec) -> tuple[Tensor, Tensor]:
        """Encode the delta plus the residual. The new one counts from `settle` on.

        Return the bytes, uint8, and what they lack, float32 [numel].
        """
        target_n = delta_n + self.residuals[fragment]
        data = codec.encode(target_n)
        return data, target_n - codec.decode(data, target_n.numel())

    def settle(self, fragment: int, residual_n: Tensor) -> None:
        """Keep the residual of a counted delta; zeros where it is not finite."""
        finite = bool(torch.isfinite(residual_n).all())
        self.residuals[fragment] = residual_n if finite else torch.zeros_like(residual_n)

    def reset(self, fragment: int) -> None:
        self.residuals[fragment].zero_()


# -- one number an element ---------------------------------------------------------------------------------------

_FLOAT_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class FloatCodec:
    def __init__(self, name: str) -> None:
        self.name = name
        self.dtype = _FLOAT_TYPES[name]

    def size(self, n: int) -> int:
        """Return the bytes of an encoded vector of n elements."""
        return self.dtype.itemsize * n

    def encode(self, values_n: Tensor) -> Tensor:
        return as_bytes(values_n.to(self.dtype))

    def decode(self, data: Tensor, n: int) -> Tensor:
        _check_size(self.name, data, n, self.size(n))
        return from_bytes(data, self.dtype).to(torch.float32)


def _check_size(name: str, data: Tensor, n: int, expected: int) -> None:
    if data.numel() != expected:
        raise ValueError(f"{name}: {data.numel()} bytes, but {n} values take {expected}")


# -- blocks with one scale ---------------------------------------------------------------------------------------

SCALE = torch.bfloat16
"""It has float32's range: NaN, infinity and the smallest deltas travel."""
_BITS = {"int8": 8, "int4": 4}
_PLAIN, _ZSTD = 0, 1
_LEVEL = 1


class IntegerCodec:
    """Symmetric integers: q = round(x / s), s = max |x| / (2^(bits-1) - 1); 4 bits shifted by 8.

    Wire form: a byte that names the form, then a zstd frame or, where that is not shorter, the plain bytes:
    the scales [blocks] bfloat16, then the codes, at 4 bits two to a byte.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.bits = _BITS[name]
        self.top = 2 ** (self.bits - 1) - 1

    def size(self, n: int) -> int:
        """Return the most bytes of an encoded vector of n elements."""
        return 1 + self._plain_size(n)

    def _plain_size(self, n: int) -> int:
        return -(-n // BLOCK) * (2 + BLOCK * self.bits // 8)

    def encode(self, values_n: Tensor) -> Tensor:
        """Return uint8 [bytes]. NaN or infinity stay visible."""
        plain = self.encode_plain(values_n).numpy()
        frame = zstandard.ZstdCompressor(level=_LEVEL).compress(plain.data)
        kind, body = (_ZSTD, frame) if len(frame) < plain.nbytes else (_PLAIN, plain.tobytes())
        return torch.frombuffer(bytearray([kind]) + body, dtype=torch.uint8)

    def encode_plain(self, values_n: Tensor) -> Tensor:
        """Return uint8 [bytes] without the entropy code."""
        blocks = torch.nn.functional.pad(values_n, (0, -values_n.numel() % BLOCK)).view(-1, BLOCK)
        scales, relative = in_scale(blocks, self.top)
        # At most top + 1/4, because the scale is rounded: that rounds to top.
        codes = relative.round_().nan_to_num_().clamp_(-self.top, self.top).to(torch.int8)
        if self.bits == 4:
            pairs = (codes + 8).to(torch.uint8).reshape(-1, 2)
            codes = pairs[:, 0] | (pairs[:, 1] << 4)
        return torch.cat([as_bytes(scales.to(SCALE)), as_bytes(codes)])

    def decode(self, data: Tensor, n: int) -> Tensor:
        raw, plain_size = data.numpy().data, self._plain_size(n)
        if not len(raw) or raw[0] not in (_PLAIN, _ZSTD):
            raise ValueError(f"{self.name}: {len(raw)} bytes do not begin with {_PLAIN} (as is) or {_ZSTD} (zstd)")
        if raw[0] == _PLAIN:
            return self.decode_plain(data[1:], n)
        try:
            # First, so that a small frame cannot take all memory.
            if (announced := zstandard.frame_content_size(raw[1:])) != plain_size:
                raise ValueError(f"{self.name}: a frame of {announced} bytes, but {n} values take {plain_size}")
            plain = zstandard.ZstdDecompressor().decompress(raw[1:], allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise ValueError(f"{self.name}: {error}") from None
        return self.decode_plain(torch.frombuffer(bytearray(plain), dtype=torch.uint8), n)

    def decode_plain(self, data: Tensor, n: int) -> Tensor:
        """Reverse `encode_plain`."""
        _check_size(self.name, data, n, self._plain_size(n))
        end = 2 * -(-n // BLOCK)
        scales = from_bytes(data[:end], SCALE).to(torch.float32).view(-1, 1)
        codes = from_bytes(data[end:], torch.int8)
        if self.bits == 4:
            codes = torch.stack([data[end:] & 15, data[end:] >> 4], dim=1).to(torch.int8) - 8
        return (codes.to(torch.float32).view(-1, BLOCK) * scales).view(-1)[:n]


Codec = FloatCodec | IntegerCodec


def in_scale(blocks: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return the scales [blocks, 1], as bfloat16 rounds them (a subnormal one as 0), and `blocks` divided by them."""
    scales = (blocks.abs().amax(dim=1, keepdim=True) / top).to(SCALE).to(torch.float32)
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, torch.zeros_like(scales), scales)
    return scales, blocks / torch.where(scales == 0, torch.ones_like(scales), scales)


# -- bytes and bits ----------------------------------------------------------------------------------------------


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of `tensor` as uint8 [bytes]."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def from_bytes(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of uint8 [bytes] as [elements] of `dtype`; the copy is aligned."""
    return data.clone().view(dtype)


def shared_bytes(body: memoryview) -> Tensor:
    """Return uint8 [bytes] that shares the memory of `body`, which must be writable."""
    return torch.frombuffer(body, dtype=torch.uint8) if len(body) else torch.empty(0, dtype=torch.uint8)
