"""`composer pairs report PAIRS.jsonl --base MODEL`: measure preference pairs with the density gate."""

from __future__ import annotations

from composer_prime.errors import ConfigError

USAGE = "usage: composer pairs report PAIRS.jsonl --base MODEL [--chart FILE.svg]   (composer pairs report --help)"


def main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if words[0] != "report":
        raise ConfigError(f"composer pairs has no command {words[0]!r}\n{USAGE}")
    from composer_prime.traces.replay.density_report import main as report

    return report(words[1:])
