"""Which of several weight sources a node asks, by a clock of the test's own."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random

import pytest
from aiohttp import web

from composer_prime.run.bucket import Bucket
from composer_prime.run.weights import WeightStore
from inference.joining import join_config, join_parser
from inference.versions import PIECE_BYTES, FolderSource
from inference.weight_sources import WeightSources
from tests.inference.test_weight_sources import TIMEOUT_S, Lacking, Untouchable, scripted


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


async def pull_one_by_one(sources: WeightSources, refs: list) -> None:
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
            sources = WeightSources(Untouchable(), TIMEOUT_S, [slow, fast], clock=clock)
            await pull_one_by_one(sources, refs)
            assert sources.bytes_by_source() == {slow: 1024, fast: 9 * 1024}
            await sources.close()
            assert f"weights came from {slow} (0.001 MB), {fast} (0.009 MB)" in caplog.text

    asyncio.run(scenario())


# What a run's configuration may not name, a node's own settings file may. The run chooses no code of this machine.
def test_a_joining_nodes_settings_name_its_sources(tmp_path):
    path = tmp_path / "node.toml"
    path.write_text('[inference]\nweights_from = ["https://a.example/run"]\nengine = "own:Engine"\n')
    options = join_parser().parse_args(["tcp://127.0.0.1:5500", "--settings", str(path)])
    config = join_config(options, {})
    assert (config.weights_from, config.engine) == (["https://a.example/run"], "own:Engine")
    options = join_parser().parse_args(["tcp://127.0.0.1:5500"])
    config = join_config(options, {"engine": "os:system", "engine_settings": {"command": "true"}})
    assert (config.engine, config.engine_settings) == ("local", {})


# A copy that trickles 64 KiB through the whole time of a read gets one read, even in the middle of a chunk: the other
# one or the gateway gives the rest.
@pytest.mark.parametrize("has_copy", [True, False])
def test_a_trickling_copy_does_not_stall_a_pull(tmp_path, has_copy):
    async def scenario() -> None:
        store, clock, asked = WeightStore(tmp_path), Clock(), []
        refs = [ref for seed in range(3) for ref in store.put_chunks(random.Random(seed).randbytes(1 << 20))]
        trickle = ranged(store, clock, TIMEOUT_S, 64 << 10)

        async def handler(request: web.Request) -> web.Response:
            asked.append(clock.now)
            return await trickle(request)

        async with scripted(handler) as slow, scripted(ranged(store, clock)) as copy:
            last = Untouchable() if has_copy else FolderSource(store)
            sources = WeightSources(last, TIMEOUT_S, [slow, copy] if has_copy else [slow], clock=clock)
            await pull_one_by_one(sources, refs)
            assert len(asked) == 1
            await sources.close()

    asyncio.run(scenario())


# A chunk that several gave: all of them may have given the wrong part.
def test_who_gave_a_part_of_a_wrong_chunk_is_put_aside(caplog):
    async def scenario() -> None:
        sources = WeightSources(Lacking(), TIMEOUT_S, ["http://one", "http://two", "http://three"], clock=Clock())
        one, two, three = sources._copies.values()
        for offset, giver in enumerate([one, two]):
            sources._note_giver("a" * 64, offset, giver)
        assert sources.refuse("a" * 64) and not sources.refuse("a" * 64)
        assert [copy.aside_until for copy in (one, two, three)] == [1600.0, 1600.0, 0.0]
        await sources.close()

    asyncio.run(scenario())
    assert "http://one gave a wrong weight chunk" in caplog.text


# A source that fails is left alone for longer each time, and asked again after that.
def test_a_failing_source_is_put_aside_for_a_while(tmp_path):
    async def scenario() -> None:
        store, clock, broken, asked = WeightStore(tmp_path), Clock(), True, []
        (ref,) = store.put_chunks(b"x" * 100)

        async def handler(request: web.Request) -> web.Response:
            asked.append(clock.now)
            return web.Response(status=500) if broken else await slowed(store, clock, 1.0)(request)

        async with scripted(handler) as url:
            sources = WeightSources(FolderSource(store), TIMEOUT_S, [url], clock=clock)
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


# Reads at a time that fail for one cause are one failure.
def test_parallel_failures_count_once(tmp_path):
    async def scenario() -> None:
        store, clock, waiting, all_came = WeightStore(tmp_path), Clock(), [], asyncio.Event()
        (ref,) = store.put_chunks(b"x" * 100)

        async def handler(request: web.Request) -> web.Response:
            waiting.append(request)
            if len(waiting) == 4:
                all_came.set()
            await all_came.wait()
            return web.Response(status=503)

        async with scripted(handler) as url:
            sources = WeightSources(FolderSource(store), TIMEOUT_S, [url], clock=clock)
            await asyncio.gather(*(pull_one_by_one(sources, [ref]) for _ in range(4)))
            (copy,) = sources._copies.values()
            assert (copy.aside_until - clock.now, copy.failures) == (5.0, 1)
            await sources.close()

    asyncio.run(scenario())


# A copy that was slow once is asked again some versions later, and used as soon as it is fast.
def test_a_slow_copy_is_measured_again(tmp_path):
    async def scenario() -> None:
        store, clock, pause_s = WeightStore(tmp_path), Clock(), 20.0
        chunks = [store.put_chunks(random.Random(seed).randbytes(PIECE_BYTES)) for seed in range(16)]

        async def handler(request: web.Request) -> web.Response:
            return await slowed(store, clock, pause_s)(request)

        async with scripted(handler) as url, scripted(slowed(store, clock, 0.5)) as fast:
            sources = WeightSources(Untouchable(), TIMEOUT_S, [url, fast], clock=clock)
            await pull_one_by_one(sources, [ref for refs in chunks[:4] for ref in refs])
            slow = sources._copies[url]
            assert slow.num_bytes == PIECE_BYTES
            pause_s = 0.1
            for refs in chunks[4:]:
                sources.learn([], "127.0.0.1")
                await pull_one_by_one(sources, refs)
            assert slow.num_bytes > 4 * PIECE_BYTES
            await sources.close()

    asyncio.run(scenario())


# A version that has not reached the bucket yet is waited for there, not pulled through the gateway.
def test_a_copy_may_lag(tmp_path):
    async def scenario() -> None:
        store, bucket = WeightStore(tmp_path / "weights"), Bucket((tmp_path / "bucket").as_uri())
        (ref,) = store.put_chunks(b"x" * 100)
        sources = WeightSources(Untouchable(), TIMEOUT_S, [bucket.url], clock=Clock())
        pull = asyncio.ensure_future(pull_one_by_one(sources, [ref]))
        await asyncio.sleep(0.05)
        assert not pull.done()
        bucket.put_chunks({ref.sha256: store.read(ref)})
        await asyncio.wait_for(pull, TIMEOUT_S)

    asyncio.run(scenario())


# After its patience a node asks the gateway.
def test_the_gateway_is_asked_last(tmp_path):
    async def scenario() -> float:
        store, clock = WeightStore(tmp_path / "weights"), Clock()
        (ref,) = store.put_chunks(b"x" * 100)
        async with scripted(slowed(WeightStore(tmp_path / "empty"), clock, 4.0)) as url:
            sources = WeightSources(FolderSource(store), TIMEOUT_S, clock=clock)
            sources.learn([url], "127.0.0.1")
            await pull_one_by_one(sources, [ref])
            await sources.close()
        return clock.now - 1000.0

    assert asyncio.run(scenario()) == 16.0


# The gateway's names: `*` is its own host, a URL of no known kind is reported once, what is named no more is forgotten,
# and what this machine was given stays.
def test_sources_are_learned(caplog):
    async def scenario() -> None:
        sources = WeightSources(Lacking(), TIMEOUT_S, ["http://own"])
        for _ in range(2):
            sources.learn(["http://*:5700", "ftp://odd"], "gate.example")
        assert list(sources._copies) == ["http://own", "http://gate.example:5700"]
        sources.learn([], "gate.example")
        assert list(sources._copies) == ["http://own"]
        await asyncio.sleep(0)
        await sources.close()

    asyncio.run(scenario())
    assert [record.getMessage().count("ftp://odd") for record in caplog.records] == [1]
