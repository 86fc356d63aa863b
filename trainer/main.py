"""The console script `trainer`: one command that runs everything its file describes on this machine.

trainer @ configs/a1.toml [@ overlay.toml] [--section.key VALUE] [--resume] [--dry-run]
"""

from __future__ import annotations

import sys

from composer_prime.console import (
    EXIT_USAGE,
    columns,
    console_main,
    exit_on_version_flag,
    fail,
    tell_waits,
    what_is_wrong,
)
from composer_prime.errors import ConfigError


def main() -> int:
    return console_main(_main)


def _main() -> int:
    exit_on_version_flag(sys.argv[1:])
    from composer_prime.config.load import parse_command_line

    config, dry_run = parse_command_line(sys.argv[1:])
    try:
        with tell_waits("checking the configuration and this machine"):
            from composer_prime.plan.plan import build_plan

            plan = build_plan(config)
        if dry_run:
            from diloco.link_forecast import link_rows

            plan.rows.extend(link_rows(config))
            print(plan.text(columns()))
            return EXIT_USAGE if plan.problems else 0
        if plan.problems:
            raise ConfigError(f"the run cannot start: {what_is_wrong(plan.problems)}")
        for note in plan.notes if not config.run.resume else []:
            print(f"note: {note}", file=sys.stderr)
        with tell_waits(f"loading the launcher and finding {config.model.path}"):
            from composer_prime.model_source import resolve_model
            from composer_prime.run.process import end_with_parent
            from trainer.launcher.launch import launch

            resolve_model(config.model.path)
        end_with_parent()  # `composer ladder run` starts one run after another
        return launch(config)
    except ConfigError as error:
        fail(error)


if __name__ == "__main__":
    raise SystemExit(main())
