"""Read JSON values from files of any content in bounded memory, and sample a file's start to detect its format.

Values come from strangers: `at`, `object_at`, `objects`, `string` and `text_of` take any value.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

CHUNK_BYTES = 1 << 20
MAX_DEPTH = 100
"""Nesting levels of a JSON value. A recursive walk takes a few frames of Python's stack a level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that one record or one context may hold. Larger ones are skipped."""

    line_bytes: int = 16 << 20
    document_bytes: int = 32 << 20
    context_chars: int = 2_000_000
    """Characters of a state's messages; about 500,000 tokens."""
    session_bytes: int = 64 << 20
    """Memory for the sessions of a file whose states wait for its end (Claude Code)."""


@dataclass(frozen=True, slots=True)
class Bad:
    """A record that holds no JSON value, with the reason."""

    reason: str


def lines(path: Path, limits: Limits, until: int = sys.maxsize) -> Iterator[Any]:
    """Yield the JSON value, or `Bad`, of every line in the first `until` bytes.

    Blank lines are not records. A line above the limit is skipped in pieces and never held.
    """
    with path.open("rb", buffering=CHUNK_BYTES) as file:
        while raw := file.readline(min(limits.line_bytes + 1, until)):
            whole, blank = raw.endswith(b"\n"), raw.isspace()
            until -= len(raw)
            if not whole and len(raw) > limits.line_bytes:
                while raw and not raw.endswith(b"\n"):
                    raw = file.readline(min(CHUNK_BYTES, until))
                    until -= len(raw)
                value: Any = Bad(f"line longer than {limits.line_bytes >> 20} MiB")
            else:
                value = None if blank else parse_json(raw, torn=not whole)
            del raw
            if not blank:
                yield value
            del value  # one line's bytes and value are never held beside those of the next


def document(path: Path, limits: Limits) -> Any:
    """Return the JSON value of a whole file, or `Bad`."""
    size = os.path.getsize(path)
    if size > limits.document_bytes:
        return Bad(f"JSON document larger than {limits.document_bytes >> 20} MiB")
    raw = path.read_bytes()
    return parse_json(raw) if raw.strip() else Bad("empty document")


def parse_json(raw: bytes, torn: bool = False) -> Any:
    """Return `raw` as a JSON value of at most MAX_DEPTH levels, or `Bad`. `torn` marks a last line without its end."""
    value = _decoded(raw, torn)
    # Brackets inside strings count too, which makes this a cheap upper bound.
    return Bad("nested too deeply") if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _is_deep(value) else value


def _decoded(raw: bytes, torn: bool) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    # Python's reader accepts NaN, lone surrogates and the like, which msgspec's stricter one refuses.
    try:
        return _without_surrogates(json.loads(raw.decode("utf-8-sig")))
    except UnicodeDecodeError:
        return Bad("not UTF-8")
    except RecursionError:
        return Bad("nested too deeply")
    except ValueError:
        return Bad("truncated last line" if torn else "not JSON")


def _is_deep(value: Any) -> bool:
    level = [value] if isinstance(value, list | dict) else []
    for _ in range(MAX_DEPTH):
        inner = (node for outer in level for node in (outer.values() if isinstance(outer, dict) else outer))
        level = [node for node in inner if isinstance(node, list | dict)]
    return bool(level)


def _without_surrogates(value: Any) -> Any:
    """Replace text that UTF-8 cannot hold and numbers that JSON cannot."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def at(value: Any, *keys: str) -> Any:
    """Return the value at the end of `keys` in nested objects; None where one of them is missing."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def object_at(value: Any, *keys: str) -> dict[str, Any]:
    """Return the object at the end of `keys`; an empty one if it is missing."""
    found = at(value, *keys)
    return found if isinstance(found, dict) else {}


def objects(value: Any) -> list[dict[str, Any]]:
    """Return the objects in a list; an empty list for any other value."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def string(value: Any) -> str | None:
    """Return `value` if it is a string, else None."""
    return value if isinstance(value, str) else None


def text_of(content: Any) -> str:
    """Return the text of a string, a block, or a list of either. Other content becomes a short mark such as [image]."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(part for block in content if (part := text_of(block)))
    return _text_of_block(content) if isinstance(content, dict) else ""


def _text_of_block(block: dict[str, Any]) -> str:
    kind = block.get("type")
    if kind in ("image", "image_url", "document", "input_image"):
        return f"[{kind}]"
    is_text = kind in ("text", "input_text", "output_text") or (kind is None and "text" in block)
    inner = block.get("text" if is_text else "content")
    return text_of(inner) if isinstance(inner, str | list) else ""


SAMPLE_RECORDS, SAMPLE_BYTES = 64, 4 << 20
"""A sample ends with the record that reaches either limit. Lines without a record count no bytes."""
SNIFF_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStart:
    """The start of a file, which a reader's `matches` looks at."""

    path: Path
    records: list[Any] = field(default_factory=list)
    """The first JSON values of a file of lines."""
    document: Any = None
    """The value of a file that is one JSON document, or `Bad`; None for a file of lines."""

    def objects(self, *keys: str) -> list[dict[str, Any]]:
        """Return the records that are objects with all of `keys`."""
        return [record for record in self.records if isinstance(record, dict) and all(key in record for key in keys)]


def take_sample(path: Path, limits: Limits | None = None) -> FileStart:
    """Return the start of a file, read as one document where that works and as lines otherwise. Raises OSError."""
    limits = limits or Limits()
    if path.is_dir():
        return FileStart(path=path)
    value = document(path, limits) if _one_document(path) else None
    if value is not None and not isinstance(value, Bad):
        return FileStart(path=path, document=value)
    records = [record for record in _first(path, limits) if not isinstance(record, Bad)]
    if isinstance(value, Bad) and not any(isinstance(record, dict) for record in records):
        return FileStart(path=path, document=value)
    return FileStart(path=path, records=records)


def _first(path: Path, limits: Limits) -> Iterator[Any]:
    size = 0
    for record in islice(lines(path, limits), SAMPLE_RECORDS):
        yield record
        size += 0 if isinstance(record, Bad) else len(msgspec.json.encode(record))
        if size >= SAMPLE_BYTES:
            break


def _one_document(path: Path) -> bool:
    """Check whether a file may be one JSON document: pretty-printed, or a single line and not named *.jsonl."""
    with path.open("rb") as file:
        head = file.read(SNIFF_BYTES)
        lone = b"\n" not in head.strip() and len(head) < SNIFF_BYTES
    if head.lstrip()[:1] not in (b"[", b"{") or path.suffix in (".jsonl", ".ndjson"):
        return False
    first_line = head.lstrip().split(b"\n", 1)[0].rstrip()
    return lone or path.suffix in (".json", ".traj") or not first_line.endswith((b"}", b"]"))
