"""Count the keys of a configuration file: `python infra/count_settings.py` prints them by section."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from composer_prime.config.problems import key_types, section_of
from composer_prime.import_path import PartConfig

MOST = 220
"""A setting that nobody would turn is a constant beside its use."""


def leaf_keys() -> list[str]:
    """Return every key that holds a value, with those of elements of lists once. A part is one value."""
    sections = {key: section_of(kind) for key, kind in key_types().items()}
    leaves = [key for key, section in sections.items() if section in (None, PartConfig)]
    return [key for key in leaves if sections.get(key.rpartition(".")[0]) is not PartConfig]


def main() -> int:
    keys = leaf_keys()
    for section, count in Counter(key.partition(".")[0] for key in keys).most_common():
        print(f"{section:<14} {count}")
    print(f"{len(keys)} settings; at most {MOST}")
    return int(len(keys) > MOST)


if __name__ == "__main__":
    raise SystemExit(main())
