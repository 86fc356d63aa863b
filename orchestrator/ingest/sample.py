"""The beginning of a file, enough to see what format it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from orchestrator.ingest.reading import Bad, Limits, document, lines

SAMPLE_RECORDS, SAMPLE_BYTES = 64, 4 << 20
"""A sample ends with the record that reaches either; lines that hold none take no bytes."""
SNIFF_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a reader's `matches` may look at."""

    path: Path
    records: list[Any] = field(default_factory=list)
    """The first JSON values of a file of lines."""
    document: Any = None
    """The value of a file that is one JSON document, or `Bad`; None when it is a file of lines."""

    def objects(self, *keys: str) -> list[dict[str, Any]]:
        """The records that are objects with all of `keys`."""
        return [record for record in self.records if isinstance(record, dict) and all(key in record for key in keys)]


def take_sample(path: Path, limits: Limits | None = None) -> Sample:
    """Raises OSError. What may be one document is tried as one; else, and where that fails, it is a file of lines."""
    limits = limits or Limits()
    if path.is_dir():
        return Sample(path=path)
    value = document(path, limits) if _one_document(path) else None
    if value is not None and not isinstance(value, Bad):
        return Sample(path=path, document=value)
    records = [record for record in _first(path, limits) if not isinstance(record, Bad)]
    if isinstance(value, Bad) and not any(isinstance(record, dict) for record in records):
        return Sample(path=path, document=value)
    return Sample(path=path, records=records)


def _first(path: Path, limits: Limits) -> Iterator[Any]:
    """The values of a file's first lines, `Bad` ones too."""
    read: list[int] = []
    for record in islice(lines(path, limits, read.append), SAMPLE_RECORDS):
        yield record
        if isinstance(record, Bad):
            read.clear()
        if sum(read) >= SAMPLE_BYTES:
            break


def _one_document(path: Path) -> bool:
    """Whether the file may be one JSON document: pretty-printed, or a single line in a file that is not *.jsonl."""
    with path.open("rb") as file:
        head = file.read(SNIFF_BYTES)
        lone = b"\n" not in head.strip() and len(head) < SNIFF_BYTES
    first = head.lstrip()[:1]
    if first not in (b"[", b"{"):
        return False
    if path.suffix in (".jsonl", ".ndjson"):
        return False
    first_line = head.lstrip().split(b"\n", 1)[0].rstrip()
    return lone or path.suffix in (".json", ".traj") or not first_line.endswith((b"}", b"]"))
