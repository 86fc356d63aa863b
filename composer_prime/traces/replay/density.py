"""`composer pairs report`: two figures of a replay, pairs a trace and dollars a trace, and a threshold for the first.

Too few pairs a trace say that the teachers seldom agree against the student, or that most of its states were refused.
Pairs are counted over the traces that anybody could judge, dollars over those that a teacher was asked about, an answer
from the cache at what it cost when it was asked for. Traces that were refused would thin both out.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from composer_prime.console import fail
from composer_prime.data.pairs import PairFile, resolve_pairs
from composer_prime.errors import ComposerError, ConfigError
from composer_prime.traces.replay.records import StateRecord, latest, read_records, votes_beside

MISSED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Density:
    """The two figures, and what they are made of."""

    pairs_a_trace: float
    judged_traces: int
    """Traces with a state that was not refused."""
    usd_a_trace: float
    asked_traces: int
    """Traces for which an answer was paid, now or when the cache got it."""


def measure(records: Iterable[StateRecord], pairs: int) -> Density:
    """Measure a replay that gave `pairs`, by the last record of each state. A state that was tried twice found the
    votes of the first time in the cache."""
    decided = latest(records).values()
    judged = {record.trace for record in decided if record.outcome != "refused"}
    asked = {record.trace for record in decided if record.votes or record.calls or record.price_usd}
    usd = sum(record.price_usd for record in decided)
    return Density(
        pairs_a_trace=pairs / max(len(judged), 1),
        judged_traces=len(judged),
        usd_a_trace=usd / max(len(asked), 1),
        asked_traces=len(asked),
    )


def pairs_parser() -> argparse.ArgumentParser:
    description = "Says how many pairs a trace gave, and what a trace cost."
    parser = argparse.ArgumentParser(prog="composer pairs report", description=description)
    parser.add_argument("pairs", type=Path, help="pairs.jsonl of a replay or a run, or tiny, tiny_code")
    parser.add_argument("--min-pairs", type=float, default=0.0, help="exit with 1 where a trace gave fewer pairs")
    return parser


def main(words: list[str] | None = None) -> int:
    """Exit status: 0, 1 with fewer pairs a trace than --min-pairs, 2 for wrong input."""
    options = pairs_parser().parse_args(words)
    try:
        return report_pairs(options.pairs, options.min_pairs)
    except ComposerError as error:
        fail(error, command="composer pairs report")


def report_pairs(name: Path, min_pairs: float) -> int:
    """Print the figures of a file. Raises ConfigError."""
    path = resolve_pairs(name, Path())
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: name a pairs.jsonl that `composer replay` wrote")
    file, votes = PairFile(path), votes_beside(path)
    held = file.refresh()
    doubts = Counter(round(file.read(number).epsilon, 4) for number in range(held))
    records = list(read_records(votes))
    if not records:
        raise ConfigError(
            f"{votes} holds no votes, so traces without a pair and the cost are not known: make pairs and votes with "
            "`composer replay`"
        )
    density = measure(records, held)
    outcomes = Counter(record.outcome.replace("_", " ") for record in latest(records).values())
    listed = ", ".join(f"{count} with epsilon {epsilon:g}" for epsilon, count in sorted(doubts.items()))
    print(f"pairs       {held} ({listed or 'none'})")
    print(f"states      {', '.join(f'{count} {outcome}' for outcome, count in outcomes.most_common())}")
    print(f"a trace     {density.pairs_a_trace:.2f} pairs, over {density.judged_traces} traces that were not refused")
    print(f"cost        ${density.usd_a_trace:.4f} a trace, over {density.asked_traces} that teachers were asked about")
    if density.pairs_a_trace >= min_pairs:
        return 0
    print(f"too few     {min_pairs:g} pairs a trace are wanted (--min-pairs)")
    return MISSED
