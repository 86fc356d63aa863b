"""The task sets that ship. Each imports without verifiers, because its plugin class is imported on first use.

Which questions are held out is decided here too, by a hash of the question.
"""

import hashlib
import zlib
from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal

Split = Literal["train", "eval"]


def on_first_use(package: str, module: str) -> Callable[[str], Any]:
    """Return a `__getattr__` for the module `package` that takes names from its submodule `module`."""

    def get(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{module}"), name)

    return get


def split_of(name: str, eval_share: float) -> Split:
    """Return "eval" for a share `eval_share` (0..1) of all names, which are questions or repositories."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return "eval" if int.from_bytes(digest) < eval_share * 2**64 else "train"


def split_one_in(count: int, name: str) -> Split:
    """Return "eval" for one in about `count` of all names, by their CRC-32."""
    return "eval" if zlib.crc32(name.encode()) % count == 0 else "train"
