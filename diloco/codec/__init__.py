"""How a pseudo-gradient travels: a flat float32 vector to bytes and back.

Every codec is a pure function of its input, so all peers decode the same values. What encoding loses is kept by
`ErrorFeedback` and added to the next delta.
"""

from __future__ import annotations

from composer_prime.config.diloco import MAX_BLOCK, CodecConfig
from diloco.codec.base import Codec, EntropyCodec, ErrorFeedback
from diloco.codec.dense import Bfloat16Codec, E3M0Codec, Float32Codec, IntegerCodec
from diloco.codec.sparse import SparseCodec

__all__ = ["Codec", "ErrorFeedback", "build_codec", "codec_from_spec"]


def build_codec(config: CodecConfig) -> Codec:
    return codec_from_spec(_spec(config))


def codec_from_spec(spec: str) -> Codec:
    """The codec that a header's `codec` field names, such as "int4/256" or "sparse/64".

    Raises ValueError when there is none of that name.
    """
    kind, _, number = spec.partition("/")
    if kind in ("fp32", "bf16") and not number:
        return Float32Codec() if kind == "fp32" else Bfloat16Codec()
    if number.isdecimal() and 0 < int(number) <= MAX_BLOCK:
        size = int(number)
        if kind in ("int8", "int4") and size % 2 == 0:
            return EntropyCodec(IntegerCodec(bits=int(kind[3:]), block=size))
        if kind == "e3m0" and size % 2 == 0:
            return EntropyCodec(E3M0Codec(block=size))
        if kind == "sparse" and size <= SparseCodec.CHUNK // 2:
            return SparseCodec(kept=size)
    raise ValueError(f"no codec is called {spec!r}")


def _spec(config: CodecConfig) -> str:
    if config.type in ("fp32", "bf16"):
        return config.type
    if config.type == "sparse":
        return f"sparse/{max(2, round(config.density * SparseCodec.CHUNK / 2) * 2)}"
    return f"{config.type}/{config.block}"
