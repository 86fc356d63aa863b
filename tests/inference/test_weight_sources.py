"""Weights from HTTP hosts, buckets and other nodes: bit for bit, whatever such a source does."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from aiohttp import web

from composer_prime.address import Address
from composer_prime.errors import ConfigError, CorruptWeightsError, DeadlineError
from composer_prime.run.bucket import Bucket
from composer_prime.run.weights import CHUNK_BYTES, Canary, Manifest, WeightStore
from composer_prime.wire.weight_server import WeightServer
from inference.engines.local.engine import LocalEngine
from inference.main import join_config, join_parser
from inference.node import GatewayLink, InferenceNode
from inference.receiver import Receiver
from inference.sources import BucketSource, HttpSource, RankedSources
from inference.versions import PIECE_BYTES, ChunkSource, FolderSource, VersionFolder
from tests.engines.models import MAX_CONTEXT
from tests.inference.gateway_peer import GatewayPeer
from tests.inference.test_versions import Training, size_of
from tests.inference.weight_hosts import KINDS, served

TIMEOUT_S = 30.0


class Untouchable(ChunkSource):
    """A last resort that must not be needed."""

    async def read(self, sha256: str, offset: int) -> bytes | None:
        raise AssertionError(f"the gateway was asked for {sha256}")


class Lacking(ChunkSource):
    """A last resort without the chunk."""

    async def read(self, sha256: str, offset: int) -> bytes | None:
        return None


@pytest.fixture
def training(tmp_path):
    return Training(tmp_path / "weights")


@asynccontextmanager
async def pulling(
    folder: Path, last: ChunkSource, urls: list[str], **options: object
) -> AsyncIterator[tuple[VersionFolder, RankedSources]]:
    sources = RankedSources(last, TIMEOUT_S, urls, **options)
    node = VersionFolder(sources, folder)
    try:
        yield node, sources
    finally:
        node.close()
        await sources.close()


async def check(node: VersionFolder, training: Training, version: int) -> None:
    """Bring a version to the node, compare every bit, and take it into use."""
    manifest, expected = training.written[version]
    tensors = await node.fetch(manifest)
    for name, tensor in expected.items():
        assert torch.equal(tensors[name].view(torch.int16), tensor.view(torch.int16))
    node.settle(manifest)


# Every kind of source gives a snapshot and what differs from it, bit for bit, and the gateway is not asked.
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_source_gives_versions(training, tmp_path, kind):
    async def scenario() -> None:
        training.train(range(3))
        async with (
            served(kind, training.store.root) as url,
            pulling(tmp_path, Untouchable(), [url]) as (node, sources),
        ):
            await check(node, training, 2)
            manifest = training.written[2][0]
            needed = {ref.sha256: ref.size for ref in [*manifest.chunks, *manifest.overlay]}
            assert sources.bytes_by_source() == {url: sum(needed.values())}

    asyncio.run(scenario())


# A chunk larger than a piece comes in several, also from a host without Range.
@pytest.mark.parametrize("kind", KINDS)
def test_a_large_chunk_comes_whole(tmp_path, kind):
    async def scenario() -> None:
        store = WeightStore(tmp_path / "weights")
        refs = store.put_chunks(random.Random(0).randbytes(PIECE_BYTES + 100))
        manifest = described(refs)
        async with served(kind, store.root) as url, pulling(tmp_path, Untouchable(), [url]) as (node, _):
            await node._pull_all(manifest, refs)
            assert node.chunks.has(refs[0])

    asyncio.run(scenario())


def described(refs: list) -> Manifest:
    return Manifest(
        run_id="r", version=1, parent=None, kind="anchor", dtype="bfloat16", chunks=refs, tensors={},
        canary=Canary(token_ids=[1, 2], logprobs=[-1.0]),
    )  # fmt: skip


HOSTILE = ["flipped", "cut", "endless", "older"]


def spoil(training: Training, how: str) -> None:
    """Change every chunk that version 2 needs and version 1 does not."""
    older, newest = training.written[1][0], training.written[2][0]
    known = {ref.sha256 for ref in older.refs}
    for ref in newest.refs:
        path = training.store.root / "chunks" / ref.sha256
        if ref.sha256 in known:
            continue
        data = path.read_bytes()
        if how == "flipped":
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        elif how == "cut":
            path.write_bytes(data[:-1])
        elif how == "older":
            path.write_bytes((training.store.root / "chunks" / older.overlay[0].sha256).read_bytes())
        else:
            os.truncate(path, 1 << 40)  # takes no room on the disk


# A source of any kind that alters a chunk, cuts it, never ends it or gives that of an older version is refused: little
# is kept of it, and the version before is still there, whole.
@pytest.mark.parametrize("how", HOSTILE)
@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_source_is_refused(training, tmp_path, kind, how):
    async def scenario() -> None:
        training.train(range(2))
        async with pulling(tmp_path, FolderSource(training.store), []) as (node, _):
            await check(node, training, 1)
            training.train(range(2, 3))
            spoil(training, how)
            manifest, before = training.written[1][0], node.bytes_pulled
            async with served(kind, training.store.root) as url:
                hostile = RankedSources(Lacking(), TIMEOUT_S, [url])
                node._source = hostile
                with pytest.raises(CorruptWeightsError, match="chunk"):
                    await node.fetch(training.written[2][0])
                await hostile.close()
            assert node.bytes_pulled - before <= 2 * (PIECE_BYTES + CHUNK_BYTES)
            kept = sum(path.stat().st_size for path in node.chunks.path.iterdir())
            begun = size_of(
                {ref.sha256: ref for ref in training.written[2][0].refs if ref not in manifest.refs}.values()
            )
            assert kept < size_of([*manifest.chunks, *manifest.overlay]) + begun
            pulled = node.bytes_pulled
            await check(node, training, 1)
            assert node.bytes_pulled == pulled

    asyncio.run(scenario())


# With an honest source beside it the version comes all the same. Who gave wrong chunks is named and asked no more.
@pytest.mark.parametrize("how", HOSTILE)
@pytest.mark.parametrize("kind", KINDS)
def test_a_liar_is_named_and_put_aside(training, tmp_path, kind, how, caplog):
    async def scenario() -> str:
        training.train(range(3))
        honest = WeightStore(tmp_path / "copy")
        for ref in training.written[2][0].refs:
            honest.put_chunks(training.store.read(ref))
        spoil(training, how)
        async with served(kind, training.store.root) as liar, served("server", honest.root) as other:
            async with pulling(tmp_path, Untouchable(), [liar, other]) as (node, sources):
                await check(node, training, 2)
                assert sources.bytes_by_source()[other] > 0
                assert [rated.aside_until > time.monotonic() for rated in sources._rated.values()] == [True, False]
            return liar

    with caplog.at_level(logging.WARNING):
        liar = asyncio.run(scenario())
    assert [record for record in caplog.records if liar in record.getMessage()]


# -- hosts that do not keep to HTTP ------------------------------------------------------------------------------------


@asynccontextmanager
async def scripted(handler) -> AsyncIterator[str]:
    app = web.Application()
    app.add_routes([web.get("/{path:.*}", handler)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(status=206, headers={"Content-Range": "bytes 0-9/10"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):
        while True:
            await response.write(bytes(1 << 20))


async def dripping(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b"x")
    await asyncio.sleep(TIMEOUT_S)
    return response


async def cut_off(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b"x")
    assert request.transport is not None
    request.transport.close()
    return response


def answering(status: int, **headers: str):
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status, headers={name.replace("_", "-"): text for name, text in headers.items()})

    return handler


FAULTS = [
    (dripping, DeadlineError, "1 bytes came"),
    (cut_off, OSError, "payload"),
    (answering(302, Location="http://198.51.100.7/secret"), OSError, "redirects to 198.51.100.7"),
    (answering(302, Location="/elsewhere"), OSError, "more than 3 times"),
    (answering(302), OSError, "redirects"),
    (answering(206, Content_Range="bytes 7-9/10"), OSError, "asked for bytes from 0"),
    (answering(206), OSError, "asked for bytes from 0"),
    (answering(200, Content_Encoding="gzip"), OSError, "'gzip' content"),
    (answering(403), OSError, "403"),
    (answering(503), OSError, "503"),
]


# Whatever a host answers that cannot be a chunk's bytes is an error that names it; it leads nowhere else.
@pytest.mark.parametrize(("handler", "error", "message"), FAULTS)
def test_a_wrong_answer_is_an_error(handler, error, message):
    async def scenario() -> None:
        async with scripted(handler) as url:
            source = HttpSource(url, 0.2 if handler is dripping else TIMEOUT_S)
            try:
                with pytest.raises(error, match=f"(?i){message}") as raised:
                    await source.read("a" * 64, 0)
                assert url in str(raised.value)
            finally:
                await source.close()

    asyncio.run(scenario())


# Of a body without end one piece is read; a chunk that a host lacks, and one that ends there, are no errors.
def test_an_answer_is_bounded():
    async def read(handler) -> bytes | None:
        async with scripted(handler) as url:
            source = HttpSource(url, TIMEOUT_S)
            try:
                return await source.read("a" * 64, 0)
            finally:
                await source.close()

    assert len(asyncio.run(read(endless)) or b"") == PIECE_BYTES
    assert asyncio.run(read(answering(404))) is None
    assert asyncio.run(read(answering(416))) == b""


# What is no host and no bucket is refused with the remedy.
@pytest.mark.parametrize("url", ["ftp://host/x", "http://", "https://host/x?token=1", "s3://", "simplecache::s3://b/x"])
def test_urls_are_checked(url):
    with pytest.raises(ConfigError, match="expected"):
        RankedSources(Lacking(), TIMEOUT_S, [url])


# -- the choice among several ------------------------------------------------------------------------------------------


class Clock:
    """Seconds that pass as a test says."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def slowed(store: WeightStore, clock: Clock, seconds: float):
    """A host of `store` whose answers take `seconds`."""

    async def handler(request: web.Request) -> web.Response:
        clock.now += seconds
        data = store.chunk(request.path.rpartition("/")[2], request.http_range.start or 0, PIECE_BYTES)
        return web.Response(body=data) if data is not None else web.Response(status=404)

    return handler


def ranged(store: WeightStore, clock: Clock, seconds: float = 0.1, limit: int = 128 << 10):
    """A host of `store` whose answers take `seconds` and have at most `limit` bytes."""

    async def handler(request: web.Request) -> web.Response:
        clock.now += seconds
        first = request.http_range.start or 0
        data = store.chunk(request.path.rpartition("/")[2], first, limit)
        return web.Response(body=data, status=206, headers={"Content-Range": f"bytes {first}-"})

    return handler


async def pull_one_by_one(sources: RankedSources, refs: list) -> None:
    for ref in refs:
        data = b""
        while len(data) < ref.size and (piece := await sources.read(ref.sha256, len(data))):
            data += piece
        assert hashlib.sha256(data).hexdigest() == ref.sha256


# Each source is tried once; from then on the fastest gives all. The log says at the end who gave how much.
def test_the_fastest_source_is_asked(tmp_path, caplog):
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        store, clock = WeightStore(tmp_path, chunk_bytes=1024), Clock()
        refs = store.put_chunks(random.Random(0).randbytes(10 * 1024))
        async with scripted(slowed(store, clock, 9.0)) as slow, scripted(slowed(store, clock, 0.1)) as fast:
            sources = RankedSources(Untouchable(), TIMEOUT_S, [slow, fast], clock=clock)
            await pull_one_by_one(sources, refs)
            assert sources.bytes_by_source() == {slow: 1024, fast: 9 * 1024}
            await sources.close()
            assert f"weights came from {slow} (0.001 MB), {fast} (0.009 MB)" in caplog.text

    asyncio.run(scenario())


# What a run's configuration may not name, a node's own settings file may; an option wins over it.
def test_a_joining_nodes_settings_name_its_sources_and_its_relay(tmp_path):
    path = tmp_path / "node.toml"
    path.write_text('[inference]\nweights_from = ["https://a.example/run"]\nrelay = "0.0.0.0:5701"\n')
    words = ["tcp://127.0.0.1:5500", "--settings", str(path)]
    config = join_config(join_parser().parse_args(words), {})
    assert (config.weights_from, config.relay) == (["https://a.example/run"], "0.0.0.0:5701")
    assert join_config(join_parser().parse_args([*words, "--relay", "[::]:5702"]), {}).relay == "[::]:5702"


# A relay that trickles 64 KiB through the whole time of each read gets one read, even in the middle of a chunk: the
# others give the rest. Where the gateway alone is left it is measured, and preferred from then on.
@pytest.mark.parametrize("has_copy", [True, False])
def test_a_trickling_relay_does_not_stall_a_pull(tmp_path, has_copy):
    async def scenario() -> None:
        store, clock, asked = WeightStore(tmp_path), Clock(), []
        refs = [ref for seed in range(3) for ref in store.put_chunks(random.Random(seed).randbytes(1 << 20))]

        trickle = ranged(store, clock, TIMEOUT_S, 64 << 10)

        async def handler(request: web.Request) -> web.Response:
            asked.append(clock.now)
            return await trickle(request)

        async with scripted(handler) as relay, scripted(ranged(store, clock)) as copy:
            last = Untouchable() if has_copy else FolderSource(store)
            sources = RankedSources(last, TIMEOUT_S, [copy] if has_copy else [], clock=clock)
            sources.learn([], [relay], "127.0.0.1")
            sources._rated[relay].bytes_per_s = 1e12  # It was fast until now.
            await pull_one_by_one(sources, refs)
            clock.now += 60
            await pull_one_by_one(sources, refs)
            assert len(asked) == 1
            assert sources._rated[relay].failures == 1
            await sources.close()

    asyncio.run(scenario())


# A node whose own line is slow puts nobody aside for that: the gateway, once measured, is no faster.
def test_a_slow_node_keeps_its_sources(tmp_path):
    async def scenario() -> None:
        store, clock = WeightStore(tmp_path), Clock()
        refs = store.put_chunks(random.Random(0).randbytes(1 << 20))

        class Silent(ChunkSource):
            async def read(self, sha256: str, offset: int) -> bytes | None:
                clock.now += TIMEOUT_S
                raise DeadlineError("nothing came")

        async with scripted(ranged(store, clock, TIMEOUT_S, 256 << 10)) as url:
            sources = RankedSources(Silent(), TIMEOUT_S, [url], clock=clock)
            with pytest.raises(DeadlineError):  # It was put aside once, for the gateway to be tried.
                await pull_one_by_one(sources, refs)
            await pull_one_by_one(sources, refs)
            assert sources._rated[url].aside_until < clock.now
            await sources.close()

    asyncio.run(scenario())


# One bad part of a chunk that several gave: the relay is left alone, the copies of the store are not.
def test_a_part_of_a_wrong_chunk_puts_relays_aside_only(caplog):
    async def scenario() -> None:
        sources = RankedSources(Lacking(), TIMEOUT_S, ["http://copy"], clock=Clock())
        sources.learn([], ["http://10.0.0.1:5701"], "gate.example")
        copy, relay = sources._rated.values()
        for offset, giver in enumerate([relay, copy, sources._rated_last]):
            sources._note_giver("a" * 64, offset, giver)
        assert sources.refuse("a" * 64)
        assert (copy.aside_until, relay.aside_until) == (0.0, 1060.0)
        sources._note_giver("b" * 64, 0, copy)
        assert sources.refuse("b" * 64)
        assert copy.aside_until == 1600.0
        await sources.close()

    asyncio.run(scenario())
    assert "http://10.0.0.1:5701 gave a part of a wrong weight chunk" in caplog.text


# The end of a chunk, a few bytes, says little about a source's speed.
def test_small_pieces_count_little():
    async def scenario() -> None:
        clock = Clock()
        sources = RankedSources(Lacking(), TIMEOUT_S, ["http://copy"], clock=clock)
        (copy,) = sources._rated.values()
        sources._note_speed(copy, PIECE_BYTES, 0.1)
        whole = copy.bytes_per_s
        for _ in range(3):
            sources._note_speed(copy, 100, 0.01)
        assert copy.bytes_per_s > 0.9 * whole
        sources._note_speed(copy, 100, 5.0)
        assert copy.bytes_per_s == 20.0
        await sources.close()

    asyncio.run(scenario())


# A source that fails is left alone for longer each time, and asked again after that.
def test_a_failing_source_is_put_aside_for_a_while(tmp_path):
    async def scenario() -> None:
        store, clock, broken, asked = WeightStore(tmp_path), Clock(), True, []
        (ref,) = store.put_chunks(b"x" * 100)

        async def handler(request: web.Request) -> web.Response:
            asked.append(clock.now)
            return web.Response(status=500) if broken else await slowed(store, clock, 1.0)(request)

        async with scripted(handler) as url:
            sources = RankedSources(FolderSource(store), TIMEOUT_S, [url], clock=clock)
            for pause_s in (0, 4, 2, 9, 2):
                clock.now += pause_s
                await pull_one_by_one(sources, [ref])
            assert asked == [1000, 1006, 1017]
            broken = False
            clock.now += 20
            await pull_one_by_one(sources, [ref])
            assert sources.bytes_by_source() == {url: 100}
            await sources.close()

    asyncio.run(scenario())


# A version that has not reached the bucket yet is waited for there, not pulled through the gateway.
def test_a_copy_may_lag(tmp_path):
    async def scenario() -> None:
        store, bucket = WeightStore(tmp_path / "weights"), Bucket((tmp_path / "bucket").as_uri())
        (ref,) = store.put_chunks(b"x" * 100)
        sources = RankedSources(Untouchable(), TIMEOUT_S, [bucket.url], clock=Clock())
        pull = asyncio.ensure_future(pull_one_by_one(sources, [ref]))
        await asyncio.sleep(0.05)
        assert not pull.done()
        bucket.put_chunk(ref.sha256, store.read(ref))
        await asyncio.wait_for(pull, TIMEOUT_S)

    asyncio.run(scenario())


# After its patience a node asks the gateway; a node that relays does not wait for other relays at all.
@pytest.mark.parametrize("relays_itself", [True, False])
def test_the_gateway_is_asked_last(tmp_path, relays_itself):
    async def scenario() -> float:
        store, clock = WeightStore(tmp_path / "weights"), Clock()
        (ref,) = store.put_chunks(b"x" * 100)
        async with scripted(slowed(WeightStore(tmp_path / "empty"), clock, 1.0)) as url:
            sources = RankedSources(FolderSource(store), TIMEOUT_S, relays_itself=relays_itself, clock=clock)
            sources.learn([], [url], "127.0.0.1")
            await pull_one_by_one(sources, [ref])
            await sources.close()
        return clock.now - 1000.0

    assert asyncio.run(scenario()) == (1.0 if relays_itself else 4.0)


# The gateway's names: `*` is its own host, a URL of no known kind is reported once, what is named no more is forgotten,
# and what this machine was given stays.
def test_sources_are_learned(caplog):
    async def scenario() -> None:
        sources = RankedSources(Lacking(), TIMEOUT_S, ["http://own"])
        for _ in range(2):
            sources.learn(["http://*:5700", "ftp://odd"], ["http://10.0.0.1:5701", "s3://no-relay/x"], "gate.example")
        assert list(sources._rated) == ["http://own", "http://gate.example:5700", "http://10.0.0.1:5701"]
        assert [rated.is_relay for rated in sources._rated.values()] == [False, False, True]
        sources.learn([], [], "gate.example")
        assert list(sources._rated) == ["http://own"]
        await asyncio.sleep(0)
        await sources.close()

    asyncio.run(scenario())
    assert [record.getMessage().count("ftp://odd") for record in caplog.records] == [1, 0]


# A bucket whose driver hangs is given up after the deadline, also when all its threads hang.
def test_a_hanging_bucket_is_given_up():
    async def scenario() -> None:
        source, release = BucketSource("memory://hanging/run", 0.05), asyncio.Event()
        loop = asyncio.get_running_loop()
        source._bucket.chunk = lambda *_: asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
        for _ in range(10):
            with pytest.raises(DeadlineError, match="memory://hanging/run"):
                await source.read("a" * 64, 0)
        assert source._reads == 8
        release.set()
        while source._reads:
            await asyncio.sleep(0.01)

    asyncio.run(scenario())


# -- nodes -------------------------------------------------------------------------------------------------------------


# A node that relays serves the chunks that it holds whole, deltas included, and no others.
def test_a_node_relays_to_another(training, tmp_path):
    async def scenario() -> None:
        first = VersionFolder(FolderSource(training.store), tmp_path, relays=True)
        server = WeightServer(first.chunks)
        await server.start(Address("127.0.0.1", 0))
        training.train(range(2))
        manifest, _ = training.written[1]
        first.chunks.append(manifest, manifest.chunks[0], 0, training.store.read(manifest.chunks[0])[:-1])
        assert first.chunks.chunk_size(manifest.chunks[0].sha256) is None
        await check(first, training, 1)
        async with pulling(tmp_path, Untouchable(), [server.url]) as (second, _):
            await check(second, training, 1)
            training.train(range(2, 3))
            await check(first, training, 2)
            await check(second, training, 2)
            assert server.bytes_sent == second.bytes_pulled > 0
        await server.close()
        first.close()

    asyncio.run(scenario())


# The whole node: it learns from the welcome where the weights are, and pulls none through the gateway.
def test_a_node_pulls_beside_the_gateway(loop, folder, config, keys, publisher):
    async def scenario() -> list:
        gateway = GatewayPeer(keys, publisher.store)
        gateway.manifest = publisher.publish(1)
        engine = LocalEngine(folder, config, MAX_CONTEXT)
        await engine.start()
        link = GatewayLink(lambda: gateway.endpoint, keys.client("node"), config.chunk_timeout_s)
        sources = RankedSources(link, TIMEOUT_S)
        receiver = Receiver(engine, sources, folder, config.canary_tolerance)
        node = InferenceNode("node-a", engine, link, receiver, config, sources=sources, relay_port=5701)
        async with served("server", publisher.store.root) as url:
            gateway.sources = [url.replace("127.0.0.1", "*")]
            ended = asyncio.ensure_future(node.run())
            await gateway.until(lambda: any(status.version == 1 for status in gateway.statuses), "version 1")
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)
        await engine.close()
        await sources.close()
        await asyncio.to_thread(link.close)
        receiver.close()
        await gateway.close()
        assert gateway.hellos[0].relay_port == 5701
        return gateway.chunk_requests

    assert loop.run(scenario()) == []
