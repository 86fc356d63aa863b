"""`composer ingest PATHS... -o states.zst`: turn files of recorded agent sessions into states. Read this file first.

    file -> trace_file.py -> formats/ -> conversation.py -> trace_file.py -> TraceState
            bounded JSON     a reader    contexts, open turns  |  masking/ masks every text on entry
                             a format                          `-> Tally: a record is taken, or skipped with a reason

A file's format is found by its content, never by its name alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from composer_prime.console import INTERRUPTED, fail
from composer_prime.errors import ComposerError, ConfigError
from composer_prime.model_families import family_named
from composer_prime.traces.ingest.formats import (
    atif,
    chat_messages,
    claude_code,
    codex,
    openhands,
    own_rollouts,
    swe_agent,
)
from composer_prime.traces.ingest.trace_file import NO_TRACE, FileStart, Options, Tally, TraceFile, take_sample
from composer_prime.traces.records import TraceState, check_own, compressed_lines, is_compressed, same_file, write_state

FORMATS = (claude_code, codex, openhands, swe_agent, atif, own_rollouts, chat_messages)
"""Each has NAME, the VERSION of the format that it reads, `matches(sample)` and `read(file)`."""


def ingest(
    path: Path,
    tally: Tally | None = None,
    options: Options | None = None,
    *,
    fingerprints: set[bytes] | None = None,
    trace_ids: set[str] | None = None,
) -> Iterator[TraceState]:
    """Yield the states of one file, or of one OpenHands conversation folder, in its order.

    The file is read twice, first for the tools that it uses, and not beyond its size at the start. `tally` balances at
    the end. `fingerprints` and `trace_ids` may be shared between files. Raises OSError; bad content is counted.
    """
    options, tally = options or Options(), Tally() if tally is None else tally
    named = [reader for reader in FORMATS if options.format == reader.NAME]
    size = path.stat().st_size
    if path.is_file() and is_compressed(path):  # states, of which no states are made
        tally.skip(NO_TRACE)
        return
    sample = take_sample(path, options)
    reader = next((reader for reader in named or FORMATS if named or reader.matches(sample)), None)
    whole = sample.document
    del sample  # no lines are kept
    tally.format = f"{reader.NAME}/{reader.VERSION}" if reader else None
    file = TraceFile(
        path=path,
        whole=whole,
        options=options,
        tally=tally,
        format=tally.format or "",
        fingerprints=set() if fingerprints is None else fingerprints,
        trace_ids=set() if trace_ids is None else trace_ids,
        size=size,
    )
    if reader is None:
        file.unknown()
    else:
        file.observe(reader.read)
        yield from reader.read(file)


NOTHING = 1
SUFFIXES = {".jsonl", ".ndjson", ".json", ".traj"}
_DOCUMENTATION = """\
Read agent sessions into states, one for each assistant turn: Claude Code sessions, Codex CLI rollouts,
OpenHands, SWE-agent, mini-swe-agent, ATIF (Harbor), JSON lines of messages (SWE-smith), and own rollouts.
Folders are searched for *.jsonl, *.ndjson, *.json and *.traj. Keys, tokens, passwords, e-mail addresses and
the owners of home folders are masked."""


def main(words: list[str] | None = None) -> int:
    """Exit status: 0 with states, 1 without any, 2 for wrong input, 130 after Ctrl-C (no output is left)."""
    options = ingest_parser().parse_args(words)
    try:
        return ingest_files(options)
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return INTERRUPTED
    except ComposerError as error:
        fail(error, command="composer ingest")


def ingest_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="composer ingest", description=_DOCUMENTATION)
    parser.add_argument("paths", nargs="+", type=Path, help="trace files, or folders of them")
    parser.add_argument("-o", "--output", type=Path, required=True, help="file of states to write")
    formats = [reader.NAME for reader in FORMATS]
    parser.add_argument("--format", choices=formats, help="use this format instead of detecting it")
    parser.add_argument("--model", help="the model that made traces which name none")
    family_help = "the model's family (claude, gpt, qwen ...); overrides the traces"
    parser.add_argument("--family", type=family_named, help=family_help)
    parser.add_argument("--no-mask", action="store_true", help="do not mask secrets")
    parser.add_argument("--overwrite", action="store_true", help="replace the output file")
    return parser


def ingest_files(options: argparse.Namespace) -> int:
    if options.output.is_dir():
        raise ConfigError(f"{options.output} is a folder: name the states file with -o")
    if options.output.exists() and not options.overwrite:
        raise ConfigError(f"{options.output} exists already: give another -o, or --overwrite to replace it")
    check_own(options.output, TraceState, "states")
    files = find_files(options.paths, options.output)
    how = Options(mask=not options.no_mask, model=options.model, family=options.family, format=options.format)
    tallies = _write(files, options, how)
    for table in ingest_table(tallies):
        if table.row_count:
            Console().print(table)
    total = sum(tally.states for _, tally in tallies)
    print(f"{total} states in {options.output} (JSON lines; zstd -dc shows them)")
    return 0 if total else NOTHING


def find_files(paths: list[Path], output: Path) -> list[Path]:
    """Return the trace files in `paths`, without `output`; an OpenHands folder counts as one. Raises ConfigError."""
    files: list[Path] = []
    for path in paths:
        _check_kind(path)
        try:
            files += list(_inside(path)) if path.is_dir() else [path]
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be searched: {error.strerror}") from None
    files = [path for path in files if not same_file(path, output)]
    if not files:
        listed = ", ".join(map(str, paths))
        raise ConfigError(f"no trace files in {listed}: files end in {', '.join(sorted(SUFFIXES))}")
    return list(dict.fromkeys(files))


def _check_kind(path: Path) -> None:
    if not path.exists():
        raise ConfigError(f"{path} does not exist: give trace files or folders that hold them")
    if not (path.is_file() or path.is_dir()):
        kind = "a pipe" if path.is_fifo() else "a device or socket"
        raise ConfigError(f"{path} is {kind}, but ingestion reads its input twice: save it to a file first")


def _inside(folder: Path) -> Iterator[Path]:
    if openhands.matches(FileStart(path=folder)):
        yield folder
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield from _inside(path)
        elif path.suffix in SUFFIXES and path.is_file() and not is_compressed(path):
            yield path


def _write(files: list[Path], options: argparse.Namespace, how: Options) -> list[tuple[str, Tally]]:
    """Write all states to a sibling file, then rename it."""
    output: Path = options.output
    console = Console(stderr=True)
    partial = output.with_name(f".{output.name}.partial")
    tallies: list[tuple[str, Tally]] = []
    fingerprints, trace_ids = set[bytes](), set[str]()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with compressed_lines(partial) as sink:
            for path in track(files, "reading", console=console, transient=True, disable=not console.is_terminal):
                name, tally = path.name.encode("utf-8", "replace").decode("utf-8"), Tally()
                for state in ingest(path, tally, how, fingerprints=fingerprints, trace_ids=trace_ids):
                    sink.write(write_state(state))
                tallies.append((name, tally))
        partial.replace(output)
    except OSError as error:
        raise ConfigError(f"ingestion stopped: {error}") from None
    finally:
        with suppress(OSError):
            partial.unlink()
    return tallies


def ingest_table(tallies: list[tuple[str, Tally]]) -> list[Table]:
    """Return a table of counts by file, and one of reasons."""
    files = Table(title="taken and skipped", title_justify="left")
    files.add_column("file", overflow="fold")
    for name in ("format", "records", "taken", "skipped", "turns", "states"):
        files.add_column(name, justify="left" if name == "format" else "right", no_wrap=True)
    total = Tally()
    for name, tally in tallies:
        total.add(tally)
        files.add_row(name, tally.format or "-", *_figures(tally))
    if len(tallies) > 1:
        files.add_section()
        files.add_row("all", "", *_figures(total))
    reasons = Table("what", title="why", title_justify="left")
    reasons.add_column("reason", overflow="fold")
    for name in ("count", "files"):
        reasons.add_column(name, justify="right")
    for what, name in (("record skipped", "skipped"), ("turn passed over", "passed_over"), ("masked", "masked")):
        for reason, count in getattr(total, name).most_common():
            having = sum(reason in getattr(tally, name) for _, tally in tallies)
            reasons.add_row(what, reason, f"{count:,}", f"{having:,}")
    return [files, reasons]


def _figures(tally: Tally) -> list[str]:
    figures = (tally.seen, tally.taken, tally.skipped.total(), tally.turns, tally.states)
    return [f"{figure:,}" for figure in figures]
