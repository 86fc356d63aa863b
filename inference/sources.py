"""Where weight chunks come from: HTTP hosts, buckets, other nodes, and last the gateway's own link.

    RankedSources.read --fastest per open read--> HttpSource | BucketSource
         none of them has the chunk, after a short wait, or all are far slower --> GatewayLink

No source is trusted. Each answer is bounded in bytes and time, and VersionFolder hashes every chunk. A source that
fails is put aside for a while; one whose chunk was wrong for ten minutes. Manifests never come from here: the gateway
sends them, so a source cannot offer an old version as a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import aiohttp
from yarl import URL

from composer_prime.errors import ComposerError, ConfigError, DeadlineError
from composer_prime.run.bucket import Bucket
from composer_prime.run.retry import backoff_s
from composer_prime.run.weights import CHUNK_BYTES
from inference.versions import PIECE_BYTES, ChunkSource

logger = logging.getLogger(__name__)

_LEAST_BYTES = 64 << 10
"""A read that ends early counts as progress from this many bytes on."""
_MAX_REDIRECTS = 3
_MAX_HUNG_READS = 8
_FIRST_ASIDE_S, _LONGEST_ASIDE_S = 5.0, 300.0
_WRONG_ASIDE_S, _MIXED_ASIDE_S = 600.0, 60.0
_POLL_S = 0.5
_COPY_PATIENCE_S, _RELAY_PATIENCE_S = 10.0, 3.0
"""How long a version may take to reach a copy of the store, or another node, before the gateway is asked for it."""
_MAX_SOURCES = 64
_MAX_GIVERS = 4096
"""The most chunks whose sources are remembered."""
_NEWEST_SHARE = 0.5
"""Of the last whole piece in a source's measured speed; a smaller piece counts less."""
_LONG_S = 2.0
"""A read that took this long is the measured speed, however small its piece."""
_SLOW_S = 5.0
"""After this time at less than a whole piece in the time of a read, sources that were not tried are."""
_FAR_FASTER = 4.0
"""Times as fast: then another source is asked in the middle of a chunk, and the gateway beside the sources."""


class _BusyError(OSError):
    """A host turned a read away and said when to ask again."""

    def __init__(self, message: str, retry_s: float) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class HttpSource(ChunkSource):
    """A host that serves the weight store's folder: `orchestrator weights`, a relay, nginx, a public bucket.

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
            async with asyncio.timeout(self._timeout_s) as deadline, contextlib.AsyncExitStack() as stack:
                response = await self._open(stack, sha256, offset)
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
                    f"waited {self._timeout_s:g} s (inference.chunk_timeout_s) for weight chunk {sha256} at byte "
                    f"{offset} from {self.name}, {len(received)} bytes came"
                ) from None
        except (aiohttp.ClientError, ValueError) as error:
            if len(received) - skip < _LEAST_BYTES:
                raise OSError(f"{self.name}: {type(error).__name__}: {error}") from None
        return bytes(memoryview(received)[skip:])

    async def _open(self, stack: contextlib.AsyncExitStack, sha256: str, offset: int) -> aiohttp.ClientResponse:
        """Return a checked response. Redirects lead to no other host."""
        if self._session is None:
            self._session = aiohttp.ClientSession(auto_decompress=False)
        url = self._url / "chunks" / sha256
        headers = {"Range": f"bytes={offset}-{offset + PIECE_BYTES - 1}", "Accept-Encoding": "identity"}
        for _ in range(_MAX_REDIRECTS + 1):
            response = await stack.enter_async_context(self._session.get(url, headers=headers, allow_redirects=False))
            if response.status not in (301, 302, 303, 307, 308):
                self._check(response, offset)
                return response
            target = url.join(URL(response.headers.get("Location", "")))
            if target.host is None or target.origin() != url.origin():
                raise OSError(f"{self.name} redirects to {target.host}: give that address itself, if it is to be asked")
            url = target
        raise OSError(f"{self.name} redirects more than {_MAX_REDIRECTS} times")

    def _check(self, response: aiohttp.ClientResponse, offset: int) -> None:
        """Raise OSError for an answer that cannot be bytes of a chunk."""
        retry = response.headers.get("Retry-After", "")
        if response.status == 503 and re.fullmatch("[0-9]{1,6}", retry):
            raise _BusyError(f"{self.name} is busy", min(float(retry), _LONGEST_ASIDE_S))
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
        self._reads = 0
        """Under way, those without an answer in time included."""

    async def read(self, sha256: str, offset: int) -> bytes | None:
        """Raises DeadlineError when the driver does not answer in time, or OSError."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes | None] = loop.create_future()

        def settle(piece: bytes | None, error: Exception | None) -> None:
            self._reads -= 1
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

        if self._reads < _MAX_HUNG_READS:
            self._reads += 1
            # A thread of its own: the driver may hang, and the shared threads hash and write.
            threading.Thread(target=read, name="bucket", daemon=True).start()
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(answer, self._timeout_s)
        raise DeadlineError(
            f"waited {self._timeout_s:g} s (inference.chunk_timeout_s) for weight chunk {sha256} at byte {offset} "
            f"from {self.name}"
        )

    async def close(self) -> None:
        pass


Opened = HttpSource | BucketSource


def open_source(url: str, timeout_s: float) -> Opened:
    """Return the source at `url`. Raises ConfigError for a URL that is neither a host's nor a bucket's."""
    return HttpSource(url, timeout_s) if url.startswith(("http://", "https://")) else BucketSource(url, timeout_s)


@dataclass(slots=True, eq=False)
class _Rated:
    source: ChunkSource
    name: str
    is_relay: bool
    bytes_per_s: float | None = None
    """None before the first read that gave something."""
    reading: int = 0
    failures: int = 0
    """In a row."""
    aside_until: float = 0.0
    num_bytes: int = 0
    read_s: float = 0.0
    """Time of all reads that gave something."""
    slow_s: float = 0.0
    """Time of the newest reads, as far back as each was too slow for a whole piece."""

    @property
    def expected_bytes_per_s(self) -> float:
        """Return what one more read would get; one that was never asked is tried with one read."""
        if self.bytes_per_s is None:
            return 0.0 if self.reading else float("inf")
        return self.bytes_per_s / (1 + self.reading)

    async def close(self) -> None:
        if isinstance(self.source, Opened):
            await self.source.close()


@dataclass(slots=True)
class RankedSources(ChunkSource):
    """Reads from the fastest of several sources, and from `last` what none of them has."""

    last: ChunkSource
    """The gateway's link."""
    timeout_s: float
    """Of one read."""
    own: list[str] = field(default_factory=list)
    """URLs given on this machine: kept whatever the gateway names."""
    relays_itself: bool = False
    """Then it waits for no other relay."""
    clock: Callable[[], float] = time.monotonic
    _rated: dict[str, _Rated] = field(default_factory=dict)
    _rated_last: _Rated = field(init=False)
    _refused_urls: set[str] = field(default_factory=set)
    _givers: dict[str, list[_Rated]] = field(default_factory=dict)
    """Who gave the bytes of a chunk so far."""
    _patient_until: float | None = None
    _closing: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Raise ConfigError for a URL of `own` that cannot be used."""
        self._rated_last = _Rated(self.last, "the gateway", is_relay=False)
        for url in self.own:
            self._rate(url, is_relay=False)

    def learn(self, sources: Iterable[str], relays: Iterable[str], gateway_host: str) -> None:
        """Take what the gateway names at a new version: copies of the store, and nodes that relay."""
        named = {url.replace("://*", f"://{gateway_host}", 1): False for url in sources} | dict.fromkeys(relays, True)
        for url in [url for url in self._rated if url not in named and url not in self.own]:
            if not self._rated[url].reading:
                closing = asyncio.ensure_future(self._rated.pop(url).close())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
        for url, is_relay in list(named.items())[:_MAX_SOURCES]:
            if url in self._rated or url in self._refused_urls:
                continue
            try:
                if is_relay and not url.startswith("http"):
                    raise ConfigError(f"{url!r} is not a relay; expected http://HOST:PORT")
                self._rate(url, is_relay)
            except ConfigError as error:
                self._refused_urls.add(url)
                logger.warning("weights are not pulled from there: %s", error)
        self._patient_until = None
        self._doubt_speeds()

    def _doubt_speeds(self) -> None:
        """Let slow sources come nearer to the fastest, so that each is measured again some versions later."""
        measured = [each for each in [*self._rated.values(), self._rated_last] if each.bytes_per_s is not None]
        best = max((each.bytes_per_s or 0.0 for each in measured), default=0.0)
        for each in measured:
            each.bytes_per_s = min(2 * max(each.bytes_per_s or 0.0, 1.0), best)

    def _rate(self, url: str, is_relay: bool) -> None:
        source = open_source(url, self.timeout_s)
        self._rated[url] = _Rated(source, source.name, is_relay)

    async def read(self, sha256: str, offset: int) -> bytes | None:
        """Raises what `last` raises."""
        lacking: list[_Rated] = []
        while True:
            rated = self._choose(sha256, offset, lacking)
            if rated is not None:
                piece = await self._ask(rated, sha256, offset)
                if piece is not None:
                    return piece
                lacking.append(rated)
            elif self._waits(lacking):
                await asyncio.sleep(_POLL_S)
                lacking = []
            else:
                break
        return await self._timed(self._rated_last, sha256, offset)

    def refuse(self, sha256: str) -> bool:
        """Put the sources of a wrong chunk aside: its relays, or without relays all sources but the last one.

        With several sources it is unknown which part was wrong, so the time is shorter. A relay's wrong part does not
        put a copy of the store aside.
        """
        givers = self._givers.pop(sha256, [])
        suspects = [giver for giver in givers if giver.is_relay]
        suspects = suspects or [giver for giver in givers if giver is not self._rated_last]
        for giver in suspects:
            aside_s = _WRONG_ASIDE_S if len(givers) == 1 else _MIXED_ASIDE_S
            giver.aside_until = self.clock() + aside_s
            logger.warning(
                "%s gave %s weight chunk %s: it is not asked for %g s", giver.name,
                "a wrong" if len(givers) == 1 else "a part of a wrong", sha256, aside_s,
            )  # fmt: skip
        return bool(suspects)

    def bytes_by_source(self) -> dict[str, int]:
        """Return the bytes that each source gave, by its address; those of `last` are not counted."""
        return {rated.name: rated.num_bytes for rated in self._rated.values() if rated.num_bytes}

    async def close(self) -> None:
        if given := self.bytes_by_source():
            amounts = ", ".join(f"{name} ({size / 1e6:.3f} MB)" for name, size in given.items())
            logger.info("weights came from %s", amounts)
        for rated in self._rated.values():
            await rated.close()

    def _choose(self, sha256: str, offset: int, lacking: list[_Rated]) -> _Rated | None:
        """Return the source to ask next; None when no source is left.

        Prefer the source of the chunk's beginning unless it is slow: then a wrong chunk has a single source.
        """
        now = self.clock()
        ready = [each for each in self._rated.values() if each.aside_until <= now and each not in lacking]
        if not ready:
            return None
        givers = self._givers.get(sha256, []) if offset else []
        last = [each for each in [self._rated_last] if each.aside_until <= now and each not in lacking]
        begun = [each for each in [*ready, *last] if each in givers and not self._is_outdone(each, ready)]
        chosen = max(begun or ready, key=lambda each: each.expected_bytes_per_s)
        return self._rated_last if self._is_outdone(chosen, last) else chosen

    def _is_outdone(self, rated: _Rated, others: list[_Rated]) -> bool:
        """Whether one of `others` is far faster, or was not tried yet while `rated` has been slow for long."""
        speed = rated.bytes_per_s
        if speed is None or rated.read_s < _LONG_S:  # A few small pieces say little of speeds.
            return False
        return any(
            rated.slow_s >= _SLOW_S if other.bytes_per_s is None else other.bytes_per_s > _FAR_FASTER * speed
            for other in others
            if other is not rated
        )

    async def _ask(self, rated: _Rated, sha256: str, offset: int) -> bytes | None:
        """Return a piece; None when the source fails or lacks the chunk, b"" when the chunk ends too early there."""
        try:
            return await self._timed(rated, sha256, offset)
        except (ComposerError, OSError) as error:
            logger.warning("weights come from elsewhere for %g s: %s", self._put_aside(rated, error), error)
            return None

    async def _timed(self, rated: _Rated, sha256: str, offset: int) -> bytes | None:
        """Return what `rated` gives, and note how fast and for which chunk. Raises what it raises."""
        start, piece = self.clock(), None
        rated.reading += 1
        try:
            piece = await rated.source.read(sha256, offset)
        except DeadlineError:
            if rated is self._rated_last:
                rated.bytes_per_s = 0.0  # So that slow sources are not given up for it.
            raise
        finally:
            rated.reading -= 1
        if piece:
            self._note_speed(rated, len(piece), max(self.clock() - start, 1e-6))
        if piece is not None:
            self._note_giver(sha256, offset, rated)
        return piece

    def _note_speed(self, rated: _Rated, num_bytes: int, seconds: float) -> None:
        """Record a piece. Put its source aside if it took the whole time limit and another one may be faster."""
        speed = num_bytes / seconds
        before = speed if rated.bytes_per_s is None else rated.bytes_per_s
        share = min(max(_NEWEST_SHARE * num_bytes / PIECE_BYTES, seconds / _LONG_S), 1.0)
        rated.bytes_per_s = before + share * (speed - before)
        rated.num_bytes += num_bytes
        rated.read_s += seconds
        is_slow = speed < PIECE_BYTES / self.timeout_s
        rated.slow_s = rated.slow_s + seconds if is_slow else 0.0
        now = self.clock()
        others = [each for each in [*self._rated.values(), self._rated_last] if each.aside_until <= now]
        # A host without Range support sends many pieces in one read, and may take as many times the time.
        is_timed_out = is_slow and seconds >= 0.99 * self.timeout_s
        if rated is self._rated_last or not is_timed_out or not self._is_outdone(rated, others):
            rated.failures = 0
            return
        logger.warning("weights come from elsewhere for %g s: %s gave %d bytes in %.1f s",
                       self._put_aside(rated), rated.name, num_bytes, seconds)  # fmt: skip

    def _put_aside(self, rated: _Rated, error: Exception | None = None) -> float:
        """Return for how many seconds: longer after each failure in a row. Reads at a time may fail for one cause."""
        now, aside_s = self.clock(), 0.0
        if isinstance(error, _BusyError):
            aside_s = error.retry_s
        elif rated.aside_until <= now:
            aside_s = backoff_s(rated.failures, first_s=_FIRST_ASIDE_S, longest_s=_LONGEST_ASIDE_S)
            rated.failures += 1
        rated.aside_until = max(rated.aside_until, now + aside_s)
        return rated.aside_until - now

    def _note_giver(self, sha256: str, offset: int, giver: _Rated) -> None:
        givers = self._givers.setdefault(sha256, []) if offset else []
        if giver not in givers:
            givers.append(giver)
        self._givers[sha256] = givers
        if len(self._givers) > _MAX_GIVERS:
            del self._givers[next(iter(self._givers))]

    def _waits(self, lacking: list[_Rated]) -> bool:
        """Whether to give the sources without the chunk some more time: a new version may be on its way to them."""
        now = self.clock()
        alive = [rated for rated in lacking if rated.aside_until <= now and rated is not self._rated_last]
        if not alive or (self.relays_itself and all(rated.is_relay for rated in alive)):
            return False
        if self._patient_until is None:
            relays_only = all(rated.is_relay for rated in alive)
            self._patient_until = now + (_RELAY_PATIENCE_S if relays_only else _COPY_PATIENCE_S)
        return now < self._patient_until
