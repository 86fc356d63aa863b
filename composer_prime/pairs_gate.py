"""The density gate's verdict on a pairs file: PAIRS.gate.json, written by `composer pairs report`.

A file that failed may not be trained on (beta = channels.replay_dpo.weight above 0); one that was never measured may,
and the plan says so.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from composer_prime.errors import ConfigError


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    passed: bool
    reasons: list[str]
    """What was missed; empty where it passed."""
    pairs: int
    """Pairs that the file held then."""
    min_pairs_a_trace: float


def gate_file(pairs: Path) -> Path:
    return pairs.with_name(f"{pairs.stem}.gate.json")


def read_gate(pairs: Path) -> Gate | None:
    """None where the file was never measured. Raises ConfigError when the verdict cannot be read."""
    path = gate_file(pairs)
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Gate)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no verdict ({error}): run `composer pairs report {pairs}` again") from None
