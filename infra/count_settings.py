"""Count the keys of a configuration file: `python infra/count_settings.py` prints them by section."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from composer_prime.config.problems import key_types, section_of

MOST = 220
"""A setting that nobody would turn is a constant beside its use."""


def leaf_keys() -> list[str]:
    """Return every key that holds a value, with those of elements of lists once."""
    return [key for key, kind in key_types().items() if section_of(kind) is None]


def main() -> int:
    keys = leaf_keys()
    for section, count in Counter(key.partition(".")[0] for key in keys).most_common():
        print(f"{section:<14} {count}")
    print(f"{len(keys)} settings; at most {MOST}")
    return int(len(keys) > MOST)


if __name__ == "__main__":
    raise SystemExit(main())
