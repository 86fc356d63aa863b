"""`composer tasks make` and import: what one does with folders of tasks."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from composer_prime.console import INTERRUPTED, clock, pluralize
from composer_prime.errors import ConfigError
from orchestrator.coding.factory.candidates import FactorySettings
from orchestrator.coding.factory.factory import TaskFactory, factory_runtime
from orchestrator.coding.formats.conversion import import_tasks
from orchestrator.coding.task import check_path

_MAKE = """\
Make coding tasks from packages that have tests. SOURCE is a folder, or a git repository, of which the last commit is
taken. Every task is proven in a sandbox: some tests fail before and pass after, others pass all the time, three times
over."""

_IMPORT = """\
Make coding tasks of records in the form of SWE-bench (also Lite, Verified, SWE-Gym, SWE-smith). A record becomes a task
when its own solution passes its tests in a sandbox and an empty patch does not. The others are in refused.jsonl, with
the reason."""


def main(words: list[str]) -> int:
    options = _parser().parse_args(words)
    return options.work(options)


def _at_least(least: int | float) -> Callable[[str], int | float]:
    def number(text: str) -> int | float:
        value = type(least)(text)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"{text} is below {least}")
        return value

    return number


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def _paths(text: str) -> tuple[str, ...]:
    return tuple(map(check_path, _names(text)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="composer tasks", description="Make and import coding tasks.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    make = commands.add_parser("make", description=_MAKE, help="make tasks from packages")
    make.set_defaults(work=make_tasks)
    make.add_argument("source", nargs="+", help="folder or git repository")
    make.add_argument("-o", "--output", type=Path, required=True, help="folder of the tasks")
    kinds = ("delete", "mutate")
    make.add_argument("--kinds", nargs="+", choices=kinds, default=kinds, help="default: both")
    make.add_argument("--history", type=_at_least(0), default=0, metavar="N", help="also of the N newest commits")
    make.add_argument("--limit", type=_at_least(1), help="maximum tasks per source")
    make.add_argument("--seed", type=int, default=0, help="orders the candidates (default 0)")
    make.add_argument("--hide-tests", action="store_true", help="the agent does not see the files of the failing tests")
    make.add_argument(
        "--suite-timeout", dest="suite_timeout_s", type=_at_least(0.1), default=180.0, help="seconds of all tests (180)"
    )
    make.add_argument("--overlay", type=_paths, default=(), metavar="FILES", help="of SOURCE, not in git, by comma")
    make.add_argument("--first-tests", type=_at_least(1), default=60, help="reaching tests that prove a task (60)")
    make.add_argument("--first-seconds", dest="first_s", type=_at_least(0.1), default=8.0, help="of their files (8)")
    published = commands.add_parser("import", description=_IMPORT, help="make tasks from a published task file")
    published.set_defaults(work=import_file)
    published.add_argument("file", type=Path, help="a .jsonl or .parquet file")
    published.add_argument("-o", "--output", type=Path, required=True, help="folder of the tasks")
    clones = {"type": Path, "required": True, "metavar": "FOLDER", "help": "a clone of each: owner__name"}
    published.add_argument("--repositories", **clones)
    published.add_argument("--timeout", type=_at_least(0.1), default=300.0, help="seconds of a task's tests (300)")
    for command in (make, published):
        command.add_argument("--packages", type=_names, default=(), help="that tests need beside pytest, by comma")
        command.add_argument("--jobs", type=_at_least(1), default=os.cpu_count() or 1, help="sandboxes at once (CPUs)")
        command.add_argument("--runtime", choices=["auto", "bubblewrap", "subprocess"], default="auto", help="sandbox")
    return parser


def make_tasks(options: argparse.Namespace) -> int:
    """Make tasks. Return 0 when there are some, 1 when there are none, 130 after Ctrl-C."""
    settings = FactorySettings(**{field.name: getattr(options, field.name) for field in fields(FactorySettings)})
    factory = TaskFactory(options.output, settings, factory_runtime(options.runtime, options.packages), options.jobs)
    try:
        report = asyncio.run(_until_stopped(factory, options.source))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"interrupted: {options.output} keeps finished tasks", file=sys.stderr)
        return INTERRUPTED
    _print_report(report, options.output)
    problems = list(report["sources_refused"].values())
    if len(problems) == len(set(options.source)):
        raise ConfigError("\n".join(problems))
    for problem in problems:
        print(f"refused: {problem}", file=sys.stderr)
    return int(not report["tasks"])


async def _until_stopped(factory: TaskFactory, sources: list[str]) -> dict[str, Any]:
    """Make the tasks. SIGTERM ends the work as Ctrl-C does, with a report of what is done."""
    work = asyncio.current_task()
    assert work is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
    return await factory.make(sources)


def _print_report(report: dict[str, Any], folder: Path) -> None:
    for source, edits in report["local_edits_left_out"].items():
        print(f"{source}: the tasks are of its last commit, without {pluralize(len(edits), 'local edit')}: {edits[0]}")
    reasons = list(report["refused_by_reason"].items())
    for name, figures in report["baselines"].items():
        counts = (f"{figures[what]} {what}" for what in ("tests", "functions", "candidates", "tasks"))
        print(f"{name}: {', '.join(counts)}")
        if missing := ",".join(figures["packages_missing"]):
            print(f"{name}: tests that lack {missing} guard nothing: `uv pip install` it, and add --packages {missing}")
        if not report["tasks"]:
            reasons += [(f"{reason} (a function)", count) for reason, count in figures["functions_left_out"].items()]
    for reason, count in reasons:
        print(f"  {count} refused: {reason}")
    print(
        f"{pluralize(report['tasks'], 'task')} of {pluralize(report['candidates'], 'candidate')} in {folder} after "
        f"{clock(report['wall_s'])}; reasons of each candidate: {folder}/report.json"
    )


def import_file(options: argparse.Namespace) -> int:
    importing = import_tasks(
        options.file,
        options.output,
        runtime=factory_runtime(options.runtime, options.packages),
        repositories=options.repositories,
        timeout_s=options.timeout,
        jobs=options.jobs,
    )
    kept, refusals = asyncio.run(importing)
    for refusal in refusals[:20]:
        print(f"refused: {refusal['place']}: {refusal['reason']}", file=sys.stderr)
    refused = f"; {len(refusals)} refused: {options.output}/refused.jsonl" if refusals else ""
    print(f"{pluralize(kept, 'task')} of {pluralize(kept + len(refusals), 'record')} in {options.output}{refused}")
    return 0
