"""The console script `orchestrator`: the orchestrator role alone.

    orchestrator --run-dir DIR                       as the launcher starts it: reads DIR/config.json
    orchestrator @ file.toml [--section.key VALUE]   on its own: nodes and trainer connect from elsewhere
    orchestrator invite RUN_DIR                      one string with which nodes join (swarm/invite.py)
    orchestrator nodes|ban|unban RUN_DIR [NODE]      look at a live run's nodes, and send them away (swarm)

Exit status: 0 finished, 1 failed, 2 wrong configuration, 130 / 143 stopped by Ctrl-C / SIGTERM.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import secrets
import shutil
import signal
import sys
from pathlib import Path

from composer_prime.config import Config, load
from composer_prime.console import (
    EXIT_USAGE,
    columns,
    console_main,
    did_you_mean,
    exit_on_version_flag,
    fail,
    start_log,
)
from composer_prime.errors import ComposerError, ConfigError
from composer_prime.monitor.events import record_events
from composer_prime.plan.check_run_dir import check_run_folder, earlier_output, with_length_divisor
from composer_prime.run.keys import RunKeys
from composer_prime.run.process import ORCHESTRATOR_END, PARENT_VARIABLE, end_with_parent
from composer_prime.run.run_dir import RunDir, create_run_id, read_run_id, write_atomic

FAILED = 1
_COMMANDS = {
    **{name: f"orchestrator.swarm.node_commands:{name}" for name in ("nodes", "ban", "unban")},
    "invite": "orchestrator.swarm.invite",
}
"""Module with a `main`, or function, by the word after `orchestrator`."""
_USAGE = """usage: orchestrator --run-dir DIR | orchestrator @ file.toml [--section.key VALUE] [--resume] [--dry-run]
       orchestrator invite RUN_DIR (orchestrator invite --help)
       orchestrator nodes RUN_DIR | ban|unban RUN_DIR NODE (orchestrator nodes --help)"""


def main() -> int:
    return console_main(_main)


def _main() -> int:
    words = sys.argv[1:]
    exit_on_version_flag(words)
    name = words[0] if words and words[0] in _COMMANDS else ""
    try:
        if not name:
            return _serve(words)
        module, _, function = _COMMANDS[name].partition(":")
        return getattr(importlib.import_module(module), function or "main")(words[1:])
    except ConfigError as error:
        fail(error)
    except BrokenPipeError:
        raise
    except (ComposerError, OSError) as error:
        print(f"{f'orchestrator {name}'.rstrip()}: {error}", file=sys.stderr)
        return FAILED


def _serve(words: list[str]) -> int:
    ends = (signal.SIGINT, signal.SIGTERM)
    if words and words[0].isalpha():
        raise ConfigError(f"unknown command {words[0]!r}{did_you_mean(words[0], _COMMANDS)}\n\n{_USAGE}")
    if words in (["--help"], ["-h"]):
        print(f"{_USAGE}\n")
    if words[:1] == ["--run-dir"]:
        if len(words) != 2:
            raise ConfigError(_USAGE)
        run_dir = RunDir(Path(words[1]).absolute())
        config = load.read_config(run_dir.config)
        load.make_importable(config)
        if PARENT_VARIABLE in os.environ:
            ends = (ORCHESTRATOR_END,)
        end_with_parent(ends[-1], always=True)
    else:
        config, dry_run = load.parse_command_line(words)
        run_dir = RunDir(config.run_directory.absolute())
        if dry_run:
            from composer_prime.plan.plan import build_plan

            plan = build_plan(config, starter="orchestrator")
            print(plan.text(columns()))
            return EXIT_USAGE if plan.problems else 0
        _prepare(config, run_dir)
    return _run(config, run_dir, ends)


def _prepare(config: Config, run_dir: RunDir) -> None:
    for note in check_run_folder(run_dir, config, "orchestrator"):
        print(f"orchestrator: {note}", file=sys.stderr)
    config = with_length_divisor(config, run_dir)
    for path in earlier_output(run_dir, "orchestrator") if config.run.overwrite else []:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    run_dir.endpoints.unlink(missing_ok=True)
    write_atomic(run_dir.config, load.dump(config).encode())
    create_run_id(run_dir, config.run.name)
    RunKeys.create(run_dir.keys)


def _run(config: Config, run_dir: RunDir, ends: tuple[signal.Signals, ...]) -> int:
    """Serve until the run is done or a signal of `ends` comes."""
    from composer_prime.event_loop import until_signal
    from composer_prime.model_source import resolve_model
    from composer_prime.wire.node_messages import GATEWAY_TOKEN_VARIABLE
    from orchestrator.pipeline import Pipeline

    start_log()
    record_events(run_dir, "orchestrator")
    # Only this run's own workers may generate for its rollouts.
    os.environ.setdefault(GATEWAY_TOKEN_VARIABLE, secrets.token_urlsafe(24))
    run_id = read_run_id(run_dir)
    model_dir = resolve_model(config.model.path)

    async def serve() -> int:
        pipeline = Pipeline(config, run_dir, run_id, model_dir)
        gc.collect()
        gc.freeze()  # Collections would look at all modules each time.
        return await until_signal(pipeline.run(), ends)

    return asyncio.run(serve())


if __name__ == "__main__":
    raise SystemExit(main())
