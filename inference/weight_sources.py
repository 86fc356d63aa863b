"""Where weight chunks come from: copies of the store over HTTP or in buckets, and last the gateway's own link.

    WeightSources.read --fastest per open read--> HttpSource | BucketSource
         none of them gives the chunk, after a short wait --> GatewayLink

No source is trusted. Each answer is bounded in bytes and time, and VersionFolder hashes every chunk. A source that
fails is put aside for a while; one whose chunk was wrong for ten minutes. Manifests never come from here: the gateway
sends them, so a source cannot offer an old version as a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import aiohttp
from yarl import URL

from composer_prime.errors import ComposerError, ConfigError, DeadlineError
from composer_prime.run.bucket import Bucket
from composer_prime.run.retry import backoff_s
from composer_prime.run.weights import CHUNK_BYTES
from inference.versions import CHUNK_TIMEOUT_S, PIECE_BYTES, ChunkSource

logger = logging.getLogger(__name__)

_LEAST_BYTES = 64 << 10
"""A read that ends early counts as progress from this many bytes on."""
_FIRST_ASIDE_S, _LONGEST_ASIDE_S, _WRONG_ASIDE_S = 5.0, 300.0, 600.0
_POLL_S = 0.5
_PATIENCE_S = 10.0
"""How long a version may take to reach a copy of the store before the gateway is asked for it."""
_MAX_SOURCES = 64
_MAX_GIVERS = 4096
"""The most chunks whose sources are remembered."""


class HttpSource(ChunkSource):
    """A host that serves the weight store's folder: `orchestrator weights`, nginx, a public bucket.

    Without Range support a read transfers the whole chunk.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        """Raises ConfigError unless `url` is http://HOST or https://HOST, with a path or without."""
        try:
            self._url = URL(url.rstrip("/"))
        except ValueError as error:
            raise ConfigError(f"{url!r} is not an address of weights: {error}") from None
        if self._url.scheme not in ("http", "https") or not self._url.host or self._url.query_string:
            raise ConfigError(f"{url!r} is not an address of weights; expected http://HOST:PORT or https://HOST/PATH")
        self.name = str(self._url.with_user(None))
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def read(self, sha256: str, offset: int) -> bytes | None:
        """Raises DeadlineError when too little comes in time, OSError for anything else than bytes of the chunk."""
        received, skip = bytearray(), 0
        try:
            async with asyncio.timeout(self._timeout_s) as deadline, self._asking(sha256, offset) as response:
                self._check(response, offset)
                if response.status in (404, 410):
                    return None
                if response.status == 416:
                    return b""
                limit = PIECE_BYTES
                if response.status == 200:
                    skip, limit = offset, CHUNK_BYTES + 1
                    deadline.reschedule(asyncio.get_running_loop().time() + self._timeout_s * limit / PIECE_BYTES)
                while len(received) < limit and (part := await response.content.read(limit - len(received))):
                    received += part
        except TimeoutError:
            if len(received) - skip < _LEAST_BYTES:
                raise DeadlineError(
                    f"waited {self._timeout_s:g} s for weight chunk {sha256} at byte "
                    f"{offset} from {self.name}, {len(received)} bytes came"
                ) from None
        except (aiohttp.ClientError, ValueError) as error:
            if len(received) - skip < _LEAST_BYTES:
                raise OSError(f"{self.name}: {type(error).__name__}: {error}") from None
        return bytes(memoryview(received)[skip:])

    def _asking(self, sha256: str, offset: int) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        if self._session is None:
            self._session = aiohttp.ClientSession(auto_decompress=False)
        headers = {"Range": f"bytes={offset}-{offset + PIECE_BYTES - 1}", "Accept-Encoding": "identity"}
        return self._session.get(self._url / "chunks" / sha256, headers=headers, allow_redirects=False)

    def _check(self, response: aiohttp.ClientResponse, offset: int) -> None:
        """Raise OSError for an answer that cannot be bytes of a chunk."""
        if target := response.headers.get("Location"):
            host = response.url.join(URL(target)).host or "elsewhere"
            raise OSError(f"{self.name} redirects to {host}: give that address itself, if it is to be asked")
        if response.status not in (200, 206, 404, 410, 416):
            raise OSError(f"{self.name} answers {response.status} {response.reason}")
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise OSError(f"{self.name} sends {response.headers['Content-Encoding']!r} content, asked for as it is")
        if response.status == 206:
            first = re.match(r"bytes ([0-9]+)-", response.headers.get("Content-Range", ""))
            if first is None or int(first[1]) != offset:
                raise OSError(
                    f"{self.name} sends {response.headers.get('Content-Range')!r}, asked for bytes from {offset}"
                )

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


class BucketSource(ChunkSource):
    """A bucket or folder that fsspec reaches."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """Raises ConfigError as Bucket does."""
        self._bucket = Bucket(url)
        self.name = self._bucket.url
        self._timeout_s = timeout_s

    async def read(self, sha256: str, offset: int) -> bytes | None:
        """Raises DeadlineError when the driver does not answer in time, or OSError."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes | None] = loop.create_future()

        def settle(piece: bytes | None, error: Exception | None) -> None:
            if not answer.done():
                answer.set_result(piece) if error is None else answer.set_exception(error)

        def read() -> None:
            piece, error = None, None
            try:
                piece = self._bucket.chunk(sha256, offset, PIECE_BYTES)
            except Exception as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the node has ended
                loop.call_soon_threadsafe(settle, piece, error)

        # A thread of its own: the driver may hang, and the shared threads hash and write.
        threading.Thread(target=read, name="bucket", daemon=True).start()
        try:
            return await asyncio.wait_for(answer, self._timeout_s)
        except TimeoutError:
            raise DeadlineError(
                f"waited {self._timeout_s:g} s for weight chunk {sha256} at byte {offset} from {self.name}"
            ) from None

    async def close(self) -> None:
        pass


Opened = HttpSource | BucketSource


def open_source(url: str, timeout_s: float) -> Opened:
    """Return the source at `url`. Raises ConfigError for a URL that is neither a host's nor a bucket's."""
    return HttpSource(url, timeout_s) if url.startswith(("http://", "https://")) else BucketSource(url, timeout_s)


@dataclass(slots=True, eq=False)
class _Copy:
    """A copy of the store, and what is known of it."""

    source: Opened
    bytes_per_s: float = math.inf
    """Of the newest reads; a copy that gave nothing yet is tried first."""
    reading: int = 0
    failures: int = 0
    """In a row."""
    aside_until: float = 0.0
    num_bytes: int = 0


class WeightSources(ChunkSource):
    """Reads from the fastest of several copies of the store, and from `last` what none of them gives."""

    def __init__(
        self,
        last: ChunkSource,
        timeout_s: float = CHUNK_TIMEOUT_S,
        own: Iterable[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`last`: the gateway's link. `timeout_s`: of one read. `own`: URLs that are kept whatever the gateway names.

        Raises ConfigError for a URL of `own` that cannot be used.
        """
        self._last = last
        self._timeout_s = timeout_s
        self._clock = clock
        self._own = {url: _Copy(open_source(url, timeout_s)) for url in own}
        self._copies = dict(self._own)
        self._refused_urls: set[str] = set()
        self._givers: dict[str, list[_Copy]] = {}
        """Which copies gave bytes of a chunk so far."""
        self._patient_until: float | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def learn(self, urls: Iterable[str], gateway_host: str) -> None:
        """Take the copies that the gateway names at a new version, and let slow ones be measured again."""
        named = [url.replace("://*", f"://{gateway_host}", 1) for url in urls][:_MAX_SOURCES]
        for url in self._copies.keys() - set(named) - self._own.keys():
            closing = asyncio.ensure_future(self._copies.pop(url).source.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        for url in named:
            if url not in self._copies and url not in self._refused_urls:
                try:
                    self._copies[url] = _Copy(open_source(url, self._timeout_s))
                except ConfigError as error:
                    self._refused_urls.add(url)
                    logger.warning("weights are not pulled from there: %s", error)
        self._patient_until = None
        for copy in self._copies.values():
            copy.bytes_per_s *= 2

    async def read(self, sha256: str, offset: int) -> bytes | None:
        """Raises what `last` raises."""
        lacking: list[_Copy] = []
        while True:
            copy = self._choose(sha256, offset, lacking)
            if copy is not None:
                piece = await self._ask(copy, sha256, offset)
                if piece is not None:
                    self._note_giver(sha256, offset, copy)
                    return piece
                lacking.append(copy)
            elif self._waits(lacking):
                await asyncio.sleep(_POLL_S)
                lacking = []
            else:
                break
        return await self._last.read(sha256, offset)

    def refuse(self, sha256: str) -> bool:
        """Put the copies aside that gave a wrong chunk, or a part of it."""
        givers = self._givers.pop(sha256, [])
        for giver in givers:
            giver.aside_until = self._clock() + _WRONG_ASIDE_S
            logger.warning("%s gave a wrong weight chunk, or a part of it: %s; it is not asked for %g s",
                           giver.source.name, sha256, _WRONG_ASIDE_S)  # fmt: skip
        return bool(givers)

    def bytes_by_source(self) -> dict[str, int]:
        """Return the bytes that each copy gave, by its address; those of `last` are not counted."""
        return {copy.source.name: copy.num_bytes for copy in self._copies.values() if copy.num_bytes}

    async def close(self) -> None:
        if given := self.bytes_by_source():
            amounts = ", ".join(f"{name} ({size / 1e6:.3f} MB)" for name, size in given.items())
            logger.info("weights came from %s", amounts)
        for copy in self._copies.values():
            await copy.source.close()

    def _choose(self, sha256: str, offset: int, lacking: list[_Copy]) -> _Copy | None:
        """Return the copy to ask next. Prefer that of the chunk's beginning: then a wrong chunk has a single source."""
        now = self._clock()
        ready = [copy for copy in self._copies.values() if copy.aside_until <= now and copy not in lacking]
        begun = [copy for copy in ready if offset and copy in self._givers.get(sha256, [])]
        return max(begun or ready, key=lambda copy: copy.bytes_per_s / (1 + copy.reading) ** 2, default=None)

    async def _ask(self, copy: _Copy, sha256: str, offset: int) -> bytes | None:
        """Return a piece; None when the copy fails or lacks the chunk, b"" when the chunk ends too early there."""
        start, piece = self._clock(), None
        copy.reading += 1
        try:
            piece = await copy.source.read(sha256, offset)
        except (ComposerError, OSError) as error:
            logger.warning("weights come from elsewhere for %g s: %s", self._put_aside(copy), error)
        finally:
            copy.reading -= 1
        if piece:
            seconds = max(self._clock() - start, 1e-6)
            copy.bytes_per_s, copy.num_bytes = len(piece) / seconds, copy.num_bytes + len(piece)
            # A host without Range support sends many pieces in one read, and may take as many times the time.
            if seconds < 0.99 * self._timeout_s or len(piece) >= PIECE_BYTES:
                copy.failures = 0
            else:
                logger.warning("weights come from elsewhere for %g s: %s gave %d bytes in %.1f s",
                               self._put_aside(copy), copy.source.name, len(piece), seconds)  # fmt: skip
        return piece

    def _put_aside(self, copy: _Copy) -> float:
        """Return for how many seconds: longer after each failure in a row. Reads at a time may fail for one cause."""
        now = self._clock()
        if copy.aside_until <= now:
            copy.aside_until = now + backoff_s(copy.failures, first_s=_FIRST_ASIDE_S, longest_s=_LONGEST_ASIDE_S)
            copy.failures += 1
        return copy.aside_until - now

    def _note_giver(self, sha256: str, offset: int, giver: _Copy) -> None:
        givers = self._givers.setdefault(sha256, [])
        if not offset:
            givers.clear()
        if giver not in givers:
            givers.append(giver)
        if len(self._givers) > _MAX_GIVERS:
            del self._givers[next(iter(self._givers))]

    def _waits(self, lacking: list[_Copy]) -> bool:
        """Tell whether to give the copies without the chunk some more time: a new version may be on its way to them."""
        now = self._clock()
        if not any(copy.aside_until <= now for copy in lacking):
            return False
        if self._patient_until is None:
            self._patient_until = now + _PATIENCE_S
        return now < self._patient_until
