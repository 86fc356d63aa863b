"""`composer replay`: states in a file, pairs in another, a summary of votes and money.

Exit status: 0 replayed, 2 wrong input, 3 stopped by a cap or failing calls or no state was decided, 130 by Ctrl-C.
All are safe to repeat. The first Ctrl-C waits for the calls in flight, for they may be charged. A second one drops
them, and they count at their reservation. SIGTERM works as Ctrl-C.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from composer_prime.config import Config
from composer_prime.config.layers import read_layers
from composer_prime.config.load import resolve
from composer_prime.console import INTERRUPTED, ProgressLines, fail
from composer_prime.errors import ComposerError, ConfigError
from composer_prime.traces.replay.records import UNDECIDED, votes_beside
from composer_prime.traces.replay.replay import NO_MODEL, Replay, ReplayProgress, open_replay
from composer_prime.traces.replay.teacher_pool import cost_line
from composer_prime.traces.states import count_selected, read_states, same_file, selected_states

SERVER = (sys.executable, "-m", "inference.model_server")
NO_RUN = {
    "--run.name": "replay",
    "--orchestrator.source": json.dumps(
        [{"name": "toolsmith", "taskset": {"id": "orchestrator.environments.toolsmith"}}]
    ),
    "--model.path": NO_MODEL,
    "--model.max_context": str(1 << 30),
    "--trainer.micro_batch_tokens": str(1 << 31),
    "--teachers.online": "false",
}
"""What stands for the run where only teachers are given: no step that limits the states."""


STOPPED = 3
INTERRUPTION = "interrupted: repeat the command to continue"
_SHOW_S = 0.2
_SAME_S = 0.3
"""One signal can arrive twice: a terminal sends it to the whole process group, and `composer` passes it on as well."""
USAGE = """\
usage: composer replay STATES -o PAIRS.jsonl @ FILE.toml [--states N] [--per-trace K] [--teachers.key VALUE ...]

Asks the teachers of [teachers] for an action at each state and writes preference pairs. It also writes
PAIRS.votes.jsonl (every vote) and PAIRS.costs.jsonl (every call). Repeat the command to continue where it stopped.

A teacher file is enough. If you put a run's file before it, states that are too long for the run's steps are skipped.
--states and --per-trace limit the states, with those followed by errors first."""
_SHORT = {"--states": "--teachers.select.states", "--per-trace": "--teachers.select.per_trace"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    states: Path
    pairs: Path
    config: Config


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    if not words or {"-h", "--help"} & set(words):
        print(USAGE)
        return 0
    try:
        arguments = parse_arguments(words)
        progress = asyncio.run(replay(arguments, SERVER))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(INTERRUPTION, file=sys.stderr)
        return INTERRUPTED
    except (ComposerError, OSError) as error:
        fail(error, command="composer replay")
    print("\n".join(replay_summary(progress, arguments.pairs)))
    if progress.stopped == INTERRUPTION:
        return INTERRUPTED
    return STOPPED if progress.stopped else 0


def parse_arguments(words: Sequence[str]) -> Arguments:
    """Raises ConfigError."""
    start = next((index for index, word in enumerate(words) if word.startswith(("@", "--"))), len(words))
    files, settings = list(words[:start]), list(words[start:])
    if len(files) != 3 or files[1] not in ("-o", "--output") or not settings:
        raise ConfigError(f"give states, -o pairs and a configuration\n{USAGE}")
    if same_file(Path(files[0]), Path(files[2])):
        raise ConfigError(f"{files[0]} and {files[2]}, states and pairs, are one file: name another file for the pairs")
    named = [(word, *word.partition("=")) for word in settings]
    settings = [_SHORT[flag] + equals + value if flag in _SHORT else word for word, flag, equals, value in named]
    layers, _ = read_layers(settings)
    if layers and not any(layer.values.keys() & {"model", "run"} for layer in layers):
        # First, so that what the user says counts.
        settings = [word for pair in NO_RUN.items() for word in pair] + settings
    config = resolve(settings).config
    if not config.teachers.teacher:
        raise ConfigError("the configuration has no [[teachers.teacher]]: add at least two, of different families")
    return Arguments(states=Path(files[0]), pairs=Path(files[2]), config=config)


async def replay(arguments: Arguments, server: Sequence[str] = ()) -> ReplayProgress:
    """Replay, and return what was done.

    Raises ConfigError when the states cannot be read, or none of them can be judged.
    """
    pairs, select = arguments.pairs, arguments.config.teachers.select
    if next(read_states(arguments.states), None) is None:
        raise ConfigError(
            f"{arguments.states} holds no states: make it with `composer ingest`, whose table says what was skipped"
        )
    total = count_selected(arguments.states, select)
    costs = pairs.with_name(f"{pairs.stem}.costs.jsonl")
    async with open_replay(arguments.config, pairs=pairs, votes=votes_beside(pairs), costs=costs, server=server) as run:
        print(cost_line(arguments.config.teachers), file=sys.stderr)
        showing = asyncio.create_task(_show(run.progress, total))
        try:
            with _interruptible(run):
                progress = await run.run(selected_states(arguments.states, select))
        finally:
            showing.cancel()
    only_refused = progress.outcomes["refused"] == progress.states
    if only_refused and progress.resumed:  # a finished replay, repeated: the others were decided then
        return progress
    if progress.states and only_refused:
        reasons = "; ".join(reason for reason, _ in progress.refusals.most_common(3))
        raise ConfigError(f"all {progress.states} states were refused: {reasons}")
    if progress.states and sum(progress.outcomes[outcome] for outcome in UNDECIDED) == progress.states:
        progress.stopped = progress.stopped or "no state was decided: correct what is named above, and repeat"
    return progress


@contextmanager
def _interruptible(run: Replay) -> Iterator[None]:
    """Make Ctrl-C or SIGTERM end the replay after the calls in flight, and a second one drop these."""
    loop, signals = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)

    def restore() -> None:
        for number in signals:
            loop.remove_signal_handler(number)

    def interrupt() -> None:
        if run.progress.stopped is None:
            loop.call_later(_SAME_S, restore)
            run.stop(INTERRUPTION)
            print(
                "ending: waiting for the calls in flight; Ctrl-C again drops them, counted at their reservation",
                file=sys.stderr,
            )

    for number in signals:
        loop.add_signal_handler(number, interrupt)
    try:
        yield
    finally:
        restore()


async def _show(progress: ReplayProgress, total: int) -> None:
    lines = ProgressLines()

    def line() -> str:
        done = progress.states + progress.resumed
        return f"replaying: {done:,} of {total:,} states, {progress.pairs} pairs, ${progress.usd:.4f}"

    while True:
        lines.tell(line)
        await asyncio.sleep(_SHOW_S)


def replay_summary(progress: ReplayProgress, pairs: Path) -> list[str]:
    """Return what a replay did, as lines."""
    votes = progress.votes
    outcomes = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in progress.outcomes.most_common())
    lines = [
        f"states    {progress.states} replayed ({outcomes or 'none'}); {progress.resumed} were done before",
        f"pairs     {progress.pairs} written to {pairs}"
        + (f"; {progress.dropped} dropped" if progress.dropped else ""),
        f"votes     {votes.calls} called, {votes.cached} from the cache, {votes.failed} failed",
        f"cost      ${progress.usd:.4f} paid now, ${progress.price_usd:.4f} as first asked",
    ]
    if progress.left_out:
        lines.append(f"left out  {progress.left_out}: {progress.why_left_out}")
    lines += [f"refused   {count}: {reason}" for reason, count in progress.refusals.most_common(3)]
    lines += [f"no vote   {count}: {reason}" for reason, count in votes.without_vote.most_common(3)]
    return [*lines, f"stopped   {progress.stopped}"] if progress.stopped else lines
