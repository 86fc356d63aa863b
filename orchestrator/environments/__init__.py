"""The task sets that ship, and which questions are held out: a hash of the question decides."""

import hashlib
import zlib
from typing import Literal

Split = Literal["train", "eval"]


def split_of(name: str, eval_share: float) -> Split:
    """Return "eval" for a share of all names, which are questions or repositories."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return "eval" if int.from_bytes(digest) < eval_share * 2**64 else "train"


def split_one_in(count: int, name: str) -> Split:
    """Return "eval" for one in about `count` names, by their CRC-32."""
    return "eval" if zlib.crc32(name.encode()) % count == 0 else "train"
