"""Weights from web servers: bit for bit, whatever such a source does."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from waiting import Clock

from composer_prime.errors import CorruptWeightsError, DeadlineError
from composer_prime.import_path import PartConfig
from composer_prime.run.weights import CHUNK_BYTES, WeightStore
from inference.engines.local.local_engine import LocalEngine
from inference.joining import join_config, join_parser
from inference.receiver import PIECE_BYTES, ChunkSource, FolderSource, VersionFolder
from inference.weight_sources import HttpSource, WeightSources
from tests.chat_server import http_server
from tests.engines.models import MAX_CONTEXT
from tests.inference.gateway_peer import GatewayPeer
from tests.inference.live_node import live_node
from tests.inference.test_versions import Training, size_of

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


def sources_of(last: ChunkSource, urls: list[str], **options: object) -> WeightSources:
    sources = WeightSources(last, TIMEOUT_S, **options)
    sources.learn(urls, "127.0.0.1")
    return sources


@asynccontextmanager
async def served(root: Path) -> AsyncIterator[str]:
    """Serve the weight store in `root`; yield its URL."""
    app = web.Application()
    app.router.add_static("/", root)
    async with TestServer(app) as server:
        yield f"http://127.0.0.1:{server.port}"


@asynccontextmanager
async def pulling(
    folder: Path, last: ChunkSource, urls: list[str], **options: object
) -> AsyncIterator[tuple[VersionFolder, WeightSources]]:
    sources = sources_of(last, urls, **options)
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


# A copy gives a snapshot and what differs from it, bit for bit, and the gateway is not asked.
async def test_a_copy_gives_versions(training, tmp_path):
    training.train(range(3))
    async with served(training.store.root) as url, pulling(tmp_path, Untouchable(), [url]) as (node, _):
        await check(node, training, 2)


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
            path.write_bytes((training.store.root / "chunks" / older.patch[0].sha256).read_bytes())
        else:
            os.truncate(path, 1 << 40)  # takes no room on the disk


# A source that alters a chunk, cuts it, never ends it or gives that of an older version is refused: little
# is kept of it, and the version before is still there, whole.
@pytest.mark.parametrize("how", HOSTILE)
async def test_a_hostile_source_is_refused(training, tmp_path, how):
    training.train(range(2))
    async with pulling(tmp_path, FolderSource(training.store), []) as (node, _):
        await check(node, training, 1)
        training.train(range(2, 3))
        spoil(training, how)
        manifest, before = training.written[1][0], node.bytes_pulled
        async with served(training.store.root) as url:
            hostile = sources_of(Lacking(), [url])
            node.source = hostile
            with pytest.raises(CorruptWeightsError, match="chunk"):
                await node.fetch(training.written[2][0])
            await hostile.close()
        assert node.bytes_pulled - before <= 2 * (PIECE_BYTES + CHUNK_BYTES)
        kept = sum(path.stat().st_size for path in node.path.iterdir())
        begun = size_of({ref.sha256: ref for ref in training.written[2][0].refs if ref not in manifest.refs}.values())
        assert kept < size_of(manifest.refs) + begun
        pulled = node.bytes_pulled
        await check(node, training, 1)
        assert node.bytes_pulled == pulled


# With an honest gateway behind it the version comes all the same. Who gave wrong chunks is named and asked no more.
@pytest.mark.parametrize("how", HOSTILE)
async def test_a_liar_is_named_and_put_aside(training, tmp_path, how, caplog):
    training.train(range(3))
    honest = WeightStore(tmp_path / "copy")
    for ref in training.written[2][0].refs:
        honest.put_chunks(training.store.read(ref))
    spoil(training, how)
    async with served(training.store.root) as liar, pulling(tmp_path, FolderSource(honest), [liar]) as (node, sources):
        await check(node, training, 2)
        assert list(sources._aside_until) == [liar]
    assert [record for record in caplog.records if liar in record.getMessage()]


# -- hosts that do not keep to HTTP ------------------------------------------------------------------------------------


def scripted(handler) -> AbstractAsyncContextManager[str]:
    return http_server(web.get("/{path:.*}", handler))


async def endless(request: web.Request) -> web.StreamResponse:
    headers = {"Content-Range": f"bytes 0-{PIECE_BYTES - 1}/{1 << 40}"}
    response = web.StreamResponse(status=206, headers=headers)
    response.enable_chunked_encoding()
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):
        while True:
            await response.write(bytes(1 << 20))


async def dripping(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(status=206, headers={"Content-Length": "1000", "Content-Range": "bytes 0-999/1000"})
    await response.prepare(request)
    await response.write(b"x")
    await asyncio.sleep(TIMEOUT_S)
    return response


async def cut_off(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(status=206, headers={"Content-Length": "1000", "Content-Range": "bytes 0-999/1000"})
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
    (answering(302, Location="http://198.51.100.7/secret"), OSError, "302"),
    (answering(206, Content_Range="bytes 7-9/10"), OSError, "bytes from 0"),
    (answering(206, Content_Range="bytes 0-0/10"), OSError, "bytes from 0"),
    (answering(206, Content_Range="bytes 0-9/10"), OSError, "sends 0 bytes"),
    (answering(206), OSError, "bytes from 0"),
    (answering(200), OSError, "Range"),
    (answering(503), OSError, "503"),
]


async def read_one(url: str, timeout_s: float) -> bytes | None:
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        return await HttpSource(url, session, timeout_s).read("a" * 64, 0)


# Whatever a host answers that cannot be a chunk's bytes is an error that names it; it leads nowhere else.
@pytest.mark.parametrize(("handler", "error", "message"), FAULTS)
async def test_a_wrong_answer_is_an_error(handler, error, message):
    async with scripted(handler) as url:
        with pytest.raises(error, match=f"(?i){message}") as raised:
            await read_one(url, 0.2 if handler is dripping else TIMEOUT_S)
        assert url in str(raised.value)


# Messages name a host without its password, whatever is in that.
def test_no_message_has_a_password():
    assert HttpSource("http://user:p@ss@host:8/a@b/", None, 1.0).name == "http://host:8/a@b"  # type: ignore[arg-type]


# Of a body without end one piece is read; a chunk that a host lacks is no error.
@pytest.mark.parametrize(("handler", "size"), [(endless, PIECE_BYTES), (answering(404), 0)])
async def test_an_answer_is_bounded(handler, size):
    async with scripted(handler) as url:
        assert len(await read_one(url, TIMEOUT_S) or b"") == size


# -- which of several is asked -----------------------------------------------------------------------------------------


def hosting(store: WeightStore, asked: list[str]):
    """A host of `store` that notes which chunks it gave."""

    async def handler(request: web.Request) -> web.Response:
        name, first = request.path.rpartition("/")[2], request.http_range.start or 0
        data = store.chunk(name, first, PIECE_BYTES)
        if data is None:
            return web.Response(status=404)
        asked.append(name)
        last, total = first + len(data) - 1, (store.root / "chunks" / name).stat().st_size
        return web.Response(body=data, status=206, headers={"Content-Range": f"bytes {first}-{last}/{total}"})

    return handler


async def pull_one_by_one(sources: WeightSources, refs: list) -> None:
    for ref in refs:
        data = b""
        while len(data) < ref.size and (piece := await sources.read(ref.sha256, len(data))):
            data += piece
        assert hashlib.sha256(data).hexdigest() == ref.sha256


# Chunks come from all copies, the pieces of one from one copy.
async def test_copies_share_the_chunks(tmp_path):
    store, given = WeightStore(tmp_path), ([], [])
    refs = [ref for seed in range(16) for ref in store.put_chunks(random.Random(seed).randbytes(PIECE_BYTES + 1))]
    async with scripted(hosting(store, given[0])) as one, scripted(hosting(store, given[1])) as two:
        sources = sources_of(Untouchable(), [one, two], clock=Clock())
        await pull_one_by_one(sources, refs)
        assert all(given) and not set(given[0]) & set(given[1])
        await sources.close()


# A source that fails is left alone for a minute; one that was wrong for ten.
async def test_a_failing_source_is_put_aside_for_a_while(tmp_path):
    store, clock, asked = WeightStore(tmp_path), Clock(), []
    (ref,) = store.put_chunks(b"x" * 100)

    async def handler(request: web.Request) -> web.Response:
        asked.append(clock.now)
        return web.Response(status=500)

    async with scripted(handler) as url:
        sources = sources_of(FolderSource(store), [url], clock=clock)
        for pause_s in (0, 59, 2, 59):
            clock.now += pause_s
            await pull_one_by_one(sources, [ref])
        assert asked == [1000, 1061]
        sources._givers[ref.sha256][url] = None
        assert sources.refuse(ref.sha256) and not sources.refuse(ref.sha256)
        assert sources._aside_until[url] == clock.now + 600
        await sources.close()


# Whoever gives a byte at a time, each as the chunk's last, is left alone after the first.
async def test_a_source_cannot_hold_a_node(tmp_path):
    store, asked = WeightStore(tmp_path), []
    (ref,) = store.put_chunks(b"x" * (PIECE_BYTES + 100))

    async def handler(request: web.Request) -> web.Response:
        first = request.http_range.start or 0
        asked.append(first)
        span = f"bytes {first}-{first}/{first + 1}"
        return web.Response(body=b"x", status=206, headers={"Content-Range": span})

    async with scripted(handler) as url:
        sources = sources_of(FolderSource(store), [url], clock=Clock())
        await pull_one_by_one(sources, [ref])
        assert asked == [0] and url in sources._aside_until
        await sources.close()


# A version that has not reached the copy yet is waited for there, not pulled through the gateway.
async def test_a_copy_may_lag(tmp_path):
    store, copy = WeightStore(tmp_path / "weights"), tmp_path / "copy"
    (ref,) = store.put_chunks(b"x" * 100)
    copy.mkdir()
    async with served(copy) as url:
        sources = sources_of(Untouchable(), [url], clock=Clock())
        pull = asyncio.ensure_future(pull_one_by_one(sources, [ref]))
        await asyncio.sleep(0.05)
        assert not pull.done()
        shutil.copytree(store.root, copy, dirs_exist_ok=True)
        await asyncio.wait_for(pull, TIMEOUT_S)
        await sources.close()


# After its patience a node asks the gateway, also when newer versions come all the time; then it waits no more.
async def test_the_gateway_is_asked_last(tmp_path):
    store, clock = WeightStore(tmp_path / "weights"), Clock()
    (ref,), (other,) = store.put_chunks(b"x" * 100), store.put_chunks(b"y" * 100)
    async with scripted(hosting(WeightStore(tmp_path / "empty"), [])) as url:
        sources = sources_of(FolderSource(store), [url], clock=clock)
        pull = asyncio.ensure_future(pull_one_by_one(sources, [ref]))
        await asyncio.sleep(0.05)
        assert not pull.done()
        clock.now += 10
        sources.learn([url], "127.0.0.1")
        await pull
        await pull_one_by_one(sources, [other])
        await sources.close()


# The gateway names: `*` is its own host, and what is named no more is dropped.
async def test_sources_are_learned():
    sources = WeightSources(Lacking(), TIMEOUT_S)
    sources.learn(["http://*:5700"], "gate.example")
    assert list(sources._copies) == ["http://gate.example:5700"]
    sources.learn([], "gate.example")
    assert not sources._copies
    await sources.close()


# The run chooses no code of this machine; its operator may.
def test_a_joining_nodes_settings_name_its_engine(tmp_path):
    path = tmp_path / "node.toml"
    path.write_text('[inference]\nengine = "own:Engine"\n')
    options = join_parser().parse_args(["--settings", str(path)])
    assert join_config(options, {}).engine.name == "own:Engine"
    options = join_parser().parse_args([])
    for engine in ({"name": "os:system", "settings": {"command": "true"}}, "os:system"):
        assert join_config(options, {"engine": engine}).engine == PartConfig(name="local")


# -- nodes -------------------------------------------------------------------------------------------------------------


# The whole node: it learns from the welcome where the weights are, and pulls none through the gateway.
async def test_a_node_pulls_beside_the_gateway(folder, config, keys, publisher):
    gateway = GatewayPeer(keys, publisher.store)
    gateway.manifest = publisher.publish(1)
    engine, address = LocalEngine(folder, config, MAX_CONTEXT), lambda: gateway.endpoint
    async with served(publisher.store.root) as url:
        gateway.sources = [url.replace("127.0.0.1", "*")]
        source = lambda link: WeightSources(link, TIMEOUT_S)
        async with live_node("node-a", engine, folder, config, address, keys.client("node"), source=source):
            await gateway.until(lambda: any(status.version == 1 for status in gateway.statuses), "version 1")
    await gateway.close()
    assert gateway.chunk_requests == []
