"""Weight chunks from copies of the run's store on web servers, and last from the gateway's own link.

    WeightSources.read --a copy, by the chunk's name--> HttpSource
         none of them gives the chunk, after a short wait --> GatewayLink

No source is trusted: VersionFolder hashes every chunk. A source that fails is put aside for a minute, one
whose chunk was wrong for ten. Manifests come from the gateway, so a source cannot offer an old version as new.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable

import aiohttp

from composer_prime.errors import ComposerError, DeadlineError
from inference.receiver import CHUNK_TIMEOUT_S, PIECE_BYTES, ChunkSource

logger = logging.getLogger(__name__)

_ASIDE_S, _WRONG_ASIDE_S = 60.0, 600.0
_POLL_S = 0.5
_PATIENCE_S = 10.0
"""How long a chunk may take to reach a copy."""
_MAX_SOURCES = 64
_MAX_CHUNKS = 4096


class HttpSource(ChunkSource):
    """A host that serves a copy of the weight store's folder with Range: nginx, Caddy, a public bucket."""

    def __init__(self, url: str, session: aiohttp.ClientSession, timeout_s: float) -> None:
        self._url = url.rstrip("/")
        self.name = re.sub("//[^/]*@", "//", self._url)  # without a password
        self._session = session
        self._timeout_s = timeout_s

    async def read(self, sha256: str, offset: int) -> bytes | None:
        received = bytearray()
        try:
            headers = {"Range": f"bytes={offset}-{offset + PIECE_BYTES - 1}", "Accept-Encoding": "identity"}
            asking = self._session.get(f"{self._url}/chunks/{sha256}", headers=headers, allow_redirects=False)
            async with asyncio.timeout(self._timeout_s), asking as response:
                if response.status in (404, 410):
                    return None
                size = self._check(response, offset)
                while len(received) < size and (part := await response.content.read(size - len(received))):
                    received += part
        except TimeoutError:
            raise DeadlineError(
                f"waited {self._timeout_s:g} s for weight chunk {sha256} at byte {offset} from {self.name}, "
                f"{len(received)} bytes came"
            ) from None
        except (aiohttp.ClientError, ValueError) as error:
            raise OSError(f"{self.name}: {type(error).__name__}: {error}") from None
        if len(received) < size:
            raise OSError(f"{self.name} sends {len(received)} bytes of {sha256} from {offset}, expected {size}")
        return bytes(received)

    def _check(self, response: aiohttp.ClientResponse, offset: int) -> int:
        if response.status != 206:  # A redirection leads nowhere.
            raise OSError(f"{self.name} answers {response.status} {response.reason}, expected 206: it must know Range")
        sent = response.headers.get("Content-Range", "")
        match = re.fullmatch(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})", sent)
        first, last, total = map(int, match.groups()) if match else (-1, -1, -1)
        if first != offset or last + 1 != min(offset + PIECE_BYTES, total) or last < first:
            raise OSError(f"{self.name} sends {sent!r}, asked for {PIECE_BYTES} bytes from {offset}")
        return last + 1 - first


class WeightSources(ChunkSource):
    """Reads each chunk from one of the copies, and from `last` what none of them gives."""

    def __init__(
        self, last: ChunkSource, timeout_s: float = CHUNK_TIMEOUT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`last`: the gateway's link. `timeout_s`: of one read."""
        self._last = last
        self._timeout_s = timeout_s
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None
        self._copies: dict[str, HttpSource] = {}
        self._aside_until: dict[str, float] = {}
        """By URL."""
        self._givers: dict[str, dict[str, int | None]] = {}
        """By chunk and URL of a copy that gave bytes of it: where it ended, after a short piece."""
        self._hurried_until = 0.0

    def learn(self, urls: Iterable[str], gateway_host: str) -> None:
        named = [url.replace("://*", f"://{gateway_host}", 1) for url in urls][:_MAX_SOURCES]
        session = self._session = self._session or aiohttp.ClientSession(auto_decompress=False)
        self._copies = {url: self._copies.get(url) or HttpSource(url, session, self._timeout_s) for url in named}

    async def read(self, sha256: str, offset: int) -> bytes | None:
        """Raises what `last` raises."""
        givers = self._givers.setdefault(sha256, {})
        if len(self._givers) > _MAX_CHUNKS:
            del self._givers[next(iter(self._givers))]
        patient_until = self._clock() + _PATIENCE_S
        while True:
            lacking = False
            for url, copy in self._in_order(sha256):
                piece = await self._ask(url, copy, givers, sha256, offset)
                if piece:
                    return piece
                lacking |= piece is None
            now = self._clock()
            if lacking and now >= patient_until:
                self._hurried_until = now + _ASIDE_S
            if not lacking or now < self._hurried_until:
                return await self._last.read(sha256, offset)
            await asyncio.sleep(_POLL_S)  # The new version may be on its way to the copies.

    async def _ask(
        self, url: str, copy: HttpSource, givers: dict[str, int | None], sha256: str, offset: int
    ) -> bytes | None:
        """Return a piece; None where the copy lacks the chunk, b"" where it is put aside."""
        try:
            if givers.get(url) == offset:
                raise OSError(f"its weight chunk {sha256} ends too early, at byte {offset}")
            piece = await copy.read(sha256, offset)
        except (ComposerError, OSError) as error:
            self._put_aside(url, _ASIDE_S, str(error))
            return b""
        if piece:
            givers[url] = offset + len(piece) if len(piece) < PIECE_BYTES else None
        return piece

    def _in_order(self, sha256: str) -> list[tuple[str, HttpSource]]:
        copies, now = list(self._copies.items()), self._clock()
        first = int(sha256[:8], 16) % max(1, len(copies))
        return [copy for copy in copies[first:] + copies[:first] if self._aside_until.get(copy[0], 0.0) <= now]

    def refuse(self, sha256: str) -> bool:
        givers = self._givers.pop(sha256, {})
        for url in givers:
            self._put_aside(url, _WRONG_ASIDE_S, f"it gave a wrong weight chunk, or a part of it: {sha256}")
        return bool(givers)

    def _put_aside(self, url: str, seconds: float, why: str) -> None:
        self._aside_until[url] = self._clock() + seconds
        if url in self._copies:
            logger.warning("%s is not asked for weights for %g s: %s", self._copies[url].name, seconds, why)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
