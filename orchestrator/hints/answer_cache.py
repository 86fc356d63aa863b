"""The answers of an endpoint that were paid for, and what the run spent on it.

A file of JSON lines, one a call: {"key", "text", "cost_usd"}, without a text where the call gave no usable answer. It
is read at start. The newest texts are kept in memory; of the others only where their lines begin.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from pathlib import Path

import msgspec

logger = logging.getLogger(__name__)

_IN_MEMORY = 4096


class PaidCall(msgspec.Struct, frozen=True):
    key: str
    text: str | None
    """None for a call that may have cost something and gave nothing."""
    cost_usd: float


class AnswerCache:
    def __init__(self, path: Path | None, *, in_memory: int = _IN_MEMORY) -> None:
        """`path` None keeps the newest `in_memory` answers, and nothing on disk."""
        self._path, self._in_memory = path, in_memory
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._offsets: dict[str, int] = {}
        """Where an answer's line begins in the file."""
        self._end, self._torn = 0, False
        self._writing = asyncio.Lock()
        self.spent_usd = 0.0
        """By all calls in the file."""
        if path is not None and path.exists():
            self._scan(path)

    def newest(self, key: str) -> str | None:
        """The answer, where it is in memory."""
        if key in self._texts:
            self._texts.move_to_end(key)
        return self._texts.get(key)

    async def older(self, key: str) -> str | None:
        """The answer, where it is in the file."""
        offset = self._offsets.get(key)
        if offset is None or self._path is None:
            return None
        try:
            text = (await asyncio.to_thread(_read, self._path, offset)).text
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("an answer could not be read back from %s: %s", self._path, error)
            return None
        if text is not None:
            self._remember(key, text)
        return text

    async def add(self, call: PaidCall) -> None:
        """Keep `call`; a disk that refuses costs the line only."""
        if call.text is not None:
            self._remember(call.key, call.text)
        if self._path is None:
            return
        async with self._writing:
            line = b"\n" * self._torn + msgspec.json.encode(call) + b"\n"
            try:
                await asyncio.to_thread(_append, self._path, line)
            except OSError as error:
                logger.warning("a paid answer could not be kept in %s: %s", self._path, error)
                return
            if call.text is not None:
                self._offsets[call.key] = self._end + self._torn
            self._end, self._torn = self._end + len(line), False

    def _remember(self, key: str, text: str) -> None:
        self._texts[key] = text
        while len(self._texts) > self._in_memory:
            self._texts.popitem(last=False)

    def _scan(self, path: Path) -> None:
        with path.open("rb") as file:
            for raw in file:
                try:
                    call = msgspec.json.decode(raw, type=PaidCall)
                except msgspec.DecodeError:
                    call = None  # A torn line costs that answer only.
                if call is not None:
                    self.spent_usd += call.cost_usd
                if call is not None and call.text is not None:
                    self._offsets[call.key] = self._end
                    self._remember(call.key, call.text)
                self._end += len(raw)
                self._torn = not raw.endswith(b"\n")


def _read(path: Path, offset: int) -> PaidCall:
    with path.open("rb") as file:
        file.seek(offset)
        return msgspec.json.decode(file.readline(), type=PaidCall)


def _append(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(data)
