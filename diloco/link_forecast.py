"""What a link gives a joint run, by formula. Nothing is measured or sent.

    training thread      encode | waits unless tau steps hide it ......................... | decode, average, install
    link                        | up .......... | round closes | down (N - 1 deltas) |

The rendezvous has the same link. The constants are CPU times of one x86-64 core.
"""

from __future__ import annotations

from composer_prime.config import Config
from composer_prime.config.diloco import BLOCK
from composer_prime.console import pluralize
from composer_prime.errors import ComposerError
from composer_prime.model_source import model_ready, resolve_model
from composer_prime.plan.footprint import ModelShape, trained_parameters

LINKS_MBIT = (1000.0, 100.0)
ASSUMED_STEP_S = 60.0
PEERS = 2
FRAMING = 1.047
"""Bytes on the wire over bytes of a delta."""
ENCODE_NS = {"fp32": 25.0, "bf16": 25.0, "int8": 18.0, "int4": 8.0}
"""1e-9 s of one core a parameter: delta, error feedback, codec and checksum."""
DECODE_NS = 10.0
"""1e-9 s a parameter and peer: decode, guard, mean."""
INSTALL_NS = 4.0
"""1e-9 s a parameter: outer step, hash, copy into the parameters."""
ROUND_S = 0.08
"""Until a round of next to nothing is closed."""
SCALE_BITS = 16 / BLOCK
_CODEC_BITS = {"fp32": 32.0, "bf16": 16.0, "int8": 7.46 + SCALE_BITS, "int4": 3.32 + SCALE_BITS}
"""Bits a parameter, of normally distributed deltas."""


def exposed_s(size: float, bits: float, cpu_ns: float, *, mbit: float, ranks: int = 1, hidden_s: float = 0.0) -> float:
    """Return what a synchronization costs training.

    `size`: parameters of a fragment on all ranks. `bits`: of a delta on the wire.
    `cpu_ns`: to encode a parameter. `hidden_s`: compute time that overlaps with the transfer.
    """
    busy_s = size / ranks * 1e-9 * (cpu_ns + PEERS * DECODE_NS + INSTALL_NS)
    on_the_way_s = bits * PEERS**2 / (mbit * 1e6) + ROUND_S
    return busy_s + max(0.0, on_the_way_s - hidden_s)


def link_rows(config: Config) -> list[tuple[str, str]]:
    """Return (label, text) as in a plan; none without [diloco] or a model folder."""
    diloco = config.diloco
    if diloco is None:
        return []
    try:
        if model_ready(config.model.path) is not None:
            return []
    except ComposerError:  # the plan lists it as a problem
        return []
    steps, codec, ranks = diloco.interval, diloco.codec.type, config.trainer.ranks
    size = trained_parameters(config, ModelShape.read(resolve_model(config.model.path))) / diloco.fragments
    bits = size * _CODEC_BITS[codec] * FRAMING
    first = (
        f"{size / 1e6:,.1f} M parameters (one of {pluralize(diloco.fragments, 'fragment')}) every "
        f"{pluralize(steps, 'step')}, {codec}: about {_CODEC_BITS[codec]:.2g} bits each; "
        f"{PEERS} peers, {ASSUMED_STEP_S:g} s a step (assumed)"
    )
    rows = [("link", first)]
    limit = diloco.rate_limit_mbit
    for mbit in LINKS_MBIT if limit is None else (limit * ranks,):
        hidden_s = diloco.delay * ASSUMED_STEP_S
        lost_s = exposed_s(size, bits, ENCODE_NS[codec], mbit=mbit, ranks=ranks, hidden_s=hidden_s)
        interval_s = steps * ASSUMED_STEP_S
        utilization, a_day = interval_s / (interval_s + lost_s), bits / 8 * 86400 / (interval_s + lost_s)
        text = (
            f"at {mbit:,.0f} Mbit/s: utilization {utilization:.1%}, {_size(bits / 8)} each way a synchronization, "
            f"{_size(a_day)} a day"
        )
        rows.append(("", text))
    return rows


def _size(count: float) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count / 1e3:.3g} kB"
