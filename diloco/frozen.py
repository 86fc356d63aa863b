"""What adapters are trained on: peers that average them must have the same frozen parameters, bit for bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from diloco.codec.base import as_bytes
from diloco.fragments import Named, shard


def frozen_digest(parameters: Iterable[Named]) -> str:
    """Of this rank's shards of the parameters that are not trained, in order of their names: blake2b-128, hexadecimal.

    Equal for equal values, types and sharding. Takes about a second a gigabyte, and memory for one parameter.
    """
    digest = hashlib.blake2b(digest_size=16)
    frozen = {name: parameter for name, parameter in parameters if not parameter.requires_grad}
    for name in sorted(frozen):
        own = shard(frozen[name]).detach().cpu()
        digest.update(json.dumps([name, str(own.dtype), list(own.shape)]).encode())
        digest.update(memoryview(as_bytes(own).numpy()))
    return digest.hexdigest()
