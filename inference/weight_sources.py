"""Where weight chunks come from: copies of the store over HTTP or in buckets, and last the gateway's own link.

    WeightSources.read --a copy, by the chunk's name--> HttpSource | BucketSource
         none of them gives the chunk, after a short wait --> GatewayLink

No source is trusted. Each answer is bounded in bytes and time, and VersionFolder hashes every chunk. A source that
fails is put aside for a minute; one whose chunk was wrong for ten. Manifests never come from here: the gateway sends
them, so a source cannot offer an old version as a new one.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager

import aiohttp
from yarl import URL

from composer_prime.errors import ComposerError, ConfigError, DeadlineError
from composer_prime.run.bucket import Bucket
from inference.versions import CHUNK_TIMEOUT_S, PIECE_BYTES, ChunkSource

logger = logging.getLogger(__name__)

_ASIDE_S, _WRONG_ASIDE_S = 60.0, 600.0
_POLL_S = 0.5
_PATIENCE_S = 10.0
"""How long a version may take to reach a copy of the store before the gateway is asked for it."""
_MAX_SOURCES = 64


class HttpSource(ChunkSource):
    """A host that serves a copy of the weight store's folder with Range: nginx, Caddy, a public bucket."""

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
        """Raises DeadlineError when a piece does not come in time, OSError for anything but bytes of the chunk."""
        received = bytearray()
        try:
            async with asyncio.timeout(self._timeout_s), self._asking(sha256, offset) as response:
                if response.status in (404, 410):
                    return None
                self._check(response, offset)
                while len(received) < PIECE_BYTES and (
                    part := await response.content.read(PIECE_BYTES - len(received))
                ):
                    received += part
        except TimeoutError:
            raise DeadlineError(
                f"waited {self._timeout_s:g} s for weight chunk {sha256} at byte {offset} from {self.name}, "
                f"{len(received)} bytes came"
            ) from None
        except (aiohttp.ClientError, ValueError) as error:
            raise OSError(f"{self.name}: {type(error).__name__}: {error}") from None
        return bytes(received)

    def _asking(self, sha256: str, offset: int) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        if self._session is None:
            self._session = aiohttp.ClientSession(auto_decompress=False)
        headers = {"Range": f"bytes={offset}-{offset + PIECE_BYTES - 1}", "Accept-Encoding": "identity"}
        return self._session.get(self._url / "chunks" / sha256, headers=headers, allow_redirects=False)

    def _check(self, response: aiohttp.ClientResponse, offset: int) -> None:
        """Raise OSError for an answer that cannot be bytes of a chunk from `offset` on."""
        if target := response.headers.get("Location"):
            host = response.url.join(URL(target)).host or "elsewhere"
            raise OSError(f"{self.name} redirects to {host}: give that address itself, if it is to be asked")
        if response.status != 206:
            raise OSError(f"{self.name} answers {response.status} {response.reason}, expected 206: it must know Range")
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise OSError(f"{self.name} sends {response.headers['Content-Encoding']!r} content, asked for as it is")
        sent = response.headers.get("Content-Range", "")
        first = re.match(r"bytes ([0-9]+)-", sent)
        if first is None or int(first[1]) != offset:
            raise OSError(f"{self.name} sends {sent!r}, asked for bytes from {offset}")

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
        answer: concurrent.futures.Future[bytes | None] = concurrent.futures.Future()
        answer.set_running_or_notify_cancel()

        def read() -> None:
            try:
                answer.set_result(self._bucket.chunk(sha256, offset, PIECE_BYTES))
            except Exception as error:
                answer.set_exception(error)

        # A thread of its own: the driver may hang, and the shared threads hash and write.
        threading.Thread(target=read, name="bucket", daemon=True).start()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(answer), self._timeout_s)
        except TimeoutError:
            raise DeadlineError(
                f"waited {self._timeout_s:g} s for weight chunk {sha256} at byte {offset} from {self.name}"
            ) from None

    async def close(self) -> None:
        pass


Opened = HttpSource | BucketSource


class WeightSources(ChunkSource):
    """Reads from copies of the store, each chunk from another one, and from `last` what none of them gives."""

    def __init__(
        self,
        last: ChunkSource,
        timeout_s: float = CHUNK_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`last`: the gateway's link. `timeout_s`: of one read."""
        self._last = last
        self._timeout_s = timeout_s
        self._clock = clock
        self._copies: dict[str, Opened] = {}
        self._refused_urls: set[str] = set()
        self._aside_until: dict[str, float] = {}
        """By URL."""
        self._givers: dict[str, set[str]] = {}
        """Which copies gave bytes of a chunk, since the last version."""
        self._patient_until = clock() + _PATIENCE_S
        self._closing: set[asyncio.Task[None]] = set()

    def _open(self, url: str) -> Opened:
        is_host = url.startswith(("http://", "https://"))
        return HttpSource(url, self._timeout_s) if is_host else BucketSource(url, self._timeout_s)

    def learn(self, urls: Iterable[str], gateway_host: str) -> None:
        """Take the copies that the gateway names at a new version."""
        named = [url.replace("://*", f"://{gateway_host}", 1) for url in urls][:_MAX_SOURCES]
        for url in self._copies.keys() - set(named):
            closing = asyncio.ensure_future(self._copies.pop(url).close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        for url in named:
            if url not in self._copies and url not in self._refused_urls:
                try:
                    self._copies[url] = self._open(url)
                except ConfigError as error:
                    self._refused_urls.add(url)
                    logger.warning("weights are not pulled from there: %s", error)
        self._patient_until = self._clock() + _PATIENCE_S
        self._givers.clear()

    async def read(self, sha256: str, offset: int) -> bytes | None:
        """Raises what `last` raises."""
        while True:
            lacking = False
            for url, copy in self._in_order(sha256):
                try:
                    piece = await copy.read(sha256, offset)
                except (ComposerError, OSError) as error:
                    self._put_aside(url, _ASIDE_S, str(error))
                    continue
                if piece is not None:
                    self._givers.setdefault(sha256, set()).add(url)
                    return piece
                lacking = True
            if not lacking or self._clock() >= self._patient_until:
                return await self._last.read(sha256, offset)
            await asyncio.sleep(_POLL_S)  # The new version may be on its way to the copies.

    def _in_order(self, sha256: str) -> list[tuple[str, Opened]]:
        """Return the copies to ask, one after the other.

        The chunk's name says where to begin: chunks come from several copies at once, the pieces of one from one copy.
        """
        copies, now = list(self._copies.items()), self._clock()
        first = int(sha256[:8], 16) % max(1, len(copies))
        return [copy for copy in copies[first:] + copies[:first] if self._aside_until.get(copy[0], 0.0) <= now]

    def refuse(self, sha256: str) -> bool:
        """Put the copies aside that gave a wrong chunk, or a part of it."""
        givers = self._givers.pop(sha256, set())
        for url in givers:
            self._put_aside(url, _WRONG_ASIDE_S, f"it gave a wrong weight chunk, or a part of it: {sha256}")
        return bool(givers)

    def _put_aside(self, url: str, seconds: float, why: str) -> None:
        self._aside_until[url] = self._clock() + seconds
        if url in self._copies:
            logger.warning("%s is not asked for weights for %g s: %s", self._copies[url].name, seconds, why)

    async def close(self) -> None:
        for copy in self._copies.values():
            await copy.close()
