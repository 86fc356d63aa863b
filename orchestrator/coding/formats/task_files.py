"""Read task files: JSON lines (.jsonl, .jsonl.gz), one JSON list (.json) or Parquet.

Every error names the file and the line, and says what to change. A field that is missing is answered with the names
that the record has, because task files differ in little else.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from composer_prime.errors import ConfigError

_SHOWN_FIELDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One record of a task file."""

    place: str
    """`file:line`, for messages."""
    values: dict[str, Any]

    def text(self, *names: str) -> str:
        """Return the first of these fields that the record has, as text. Raises ConfigError."""
        value = self.value(*names)
        if isinstance(value, str):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        raise ConfigError(f"{self.place}: {names[0]!r} is a {type(value).__name__}, but must be text")

    def texts(self, *names: str) -> list[str]:
        """Return a list of texts. Some files hold the list as a JSON string. Raises ConfigError."""
        value = self.value(*names)
        if isinstance(value, str):
            try:
                value = msgspec.json.decode(value)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{self.place}: {names[0]!r} is text that is not a JSON list: {error}") from None
        if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
            return value
        raise ConfigError(f"{self.place}: {names[0]!r} is a {type(value).__name__}, but must be a list of texts")

    def value(self, *names: str) -> Any:
        """Return the first of these fields that the record has. Raises ConfigError with the names that it has."""
        for name in names:
            if self.values.get(name) is not None:
                return self.values[name]
        filled = [name for name, value in self.values.items() if value is not None]
        shown = ", ".join(filled[:_SHOWN_FIELDS]) or "none"
        raise ConfigError(f"{self.place}: no field {' or '.join(map(repr, names))}; the record's fields are: {shown}")

    def has(self, *names: str) -> bool:
        """Tell whether the record has a value for every one of these fields."""
        return all(self.values.get(name) is not None for name in names)


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a file in their order.

    Raises ConfigError for a file that is missing, does not decode or has no record.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give the path of a .jsonl, .json or .parquet file")
    count = 0
    for number, values in _rows(path):
        count += 1
        if not isinstance(values, dict):
            raise ConfigError(f"{path}:{number}: a {type(values).__name__}, but each record must be a JSON object")
        yield Record(place=f"{path}:{number}", values=values)
    if not count:
        raise ConfigError(f"{path} is empty: it holds no record")


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    if path.suffix == ".parquet":
        yield from _parquet(path)
        return
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if path.suffix == ".json":
        rows = _decode(content, str(path))
        if not isinstance(rows, list):
            raise ConfigError(f"{path}: a {type(rows).__name__}, but a .json file must hold one list of records")
        yield from enumerate(rows, start=1)
        return
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            yield number, _decode(line, f"{path}:{number}")


def _decode(content: bytes, place: str) -> Any:
    try:
        return msgspec.json.decode(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}: not UTF-8 (byte {error.start} of the text); save the file as UTF-8") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{place}: not JSON: {error}") from None


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError:
        raise ConfigError(f"{path}: reading Parquet needs `uv pip install pyarrow`, or save it as .jsonl") from None
    try:
        yield from enumerate(parquet.read_table(path).to_pylist(), start=1)
    except (ArrowInvalid, OSError) as error:
        raise ConfigError(f"{path}: no Parquet file: {error}") from error
