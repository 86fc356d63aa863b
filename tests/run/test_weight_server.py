"""The HTTP server of weight chunks: what it gives, what it refuses, and that the store knows of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest

from composer_prime.address import Address
from composer_prime.errors import ConfigError, PortInUseError
from composer_prime.run.weights import Canary, Manifest, WeightStore
from composer_prime.wire.weight_server import WeightServer

DATA = random.Random(0).randbytes(10_240)


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "run" / "weights")


@asynccontextmanager
async def serving(store: WeightStore, **limits: float) -> AsyncIterator[tuple[WeightServer, aiohttp.ClientSession]]:
    server = WeightServer(store, store.manifest, **limits)
    await server.start(Address("127.0.0.1", 0))
    async with aiohttp.ClientSession(server.url) as client:
        yield server, client
    await server.close()


RANGES = [
    (None, 200, DATA),
    ("bytes=0-9", 206, DATA[:10]),
    ("bytes=10230-", 206, DATA[10230:]),
    ("bytes=5-999999", 206, DATA[5:]),
    ("bytes=-7", 206, DATA[-7:]),
    ("bytes=10240-", 416, None),
    ("bytes=9-3", 416, None),
    ("bytes=0-1,5-6", 416, None),
    ("rows=1-2", 416, None),
]


# Any one range of a chunk, with the header that a client needs to check it.
@pytest.mark.parametrize(("asked", "status", "data"), RANGES)
async def test_ranges(store, asked, status, data):
    (ref,) = store.put_chunks(DATA)
    async with (
        serving(store) as (server, client),
        client.get(f"/chunks/{ref.sha256}", headers={"Range": asked} if asked else {}) as response,
    ):
        assert response.status == status
        if data is None:
            assert response.headers["Content-Range"] == f"bytes */{len(DATA)}"
            return
        assert await response.read() == data and server.bytes_sent == len(data)
        if status == 206:
            first = DATA.index(data)
            assert response.headers["Content-Range"] == f"bytes {first}-{first + len(data) - 1}/{len(DATA)}"


# No name leads out of the folder, nothing is listed, nothing can be written, and keys are not there.
async def test_only_chunks_and_manifests_are_served(store):
    (ref,) = store.put_chunks(DATA)
    store.put_manifest(3, b"signed")
    (store.root.parent / "run_id").write_text("secret")
    (store.root / "chunks" / ("A" * 64)).write_text("secret")
    names = [
        "/", "/chunks", "/chunks/", "/manifests/", "/chunks/../../run_id", "/chunks/..%2f..%2frun_id", "/run_id",
        "/chunks/%2e%2e/%2e%2e/run_id", f"/chunks/{'A' * 64}", f"/chunks/{'0' * 64}", f"/chunks/{ref.sha256}%00",
        "/manifests/v000004.manifest", "/manifests/../run_id", "/manifests/v3.manifest",
    ]  # fmt: skip
    async with serving(store) as (_, client):
        for name in names:
            async with client.get(name) as response:
                assert response.status == 404 and b"secret" not in await response.read(), name
        async with client.get("/manifests/v000003.manifest") as response:
            assert await response.read() == b"signed"
        async with client.head(f"/chunks/{ref.sha256}") as response:
            assert response.headers["Content-Length"] == str(len(DATA))
        for method in ("PUT", "POST", "DELETE"):
            async with client.request(method, f"/chunks/{ref.sha256}", data=b"x") as response:
                assert response.status == 405


# A chunk that is read over HTTP counts as being pulled: `prune` spares its version.
async def test_prune_spares_what_is_served(store):
    manifests = {}
    for version in range(1, 6):
        (ref,) = store.put_chunks(bytes([version]) * 100)
        manifests[version] = Manifest(
            run_id="r", version=version, kind="anchor", dtype="float32", chunks=[ref], tensors={},
            canary=Canary(token_ids=[1, 2], logprobs=[-1.0]),
        )  # fmt: skip
        store.put_manifest(version, msgspec.msgpack.encode(manifests[version]))
    async with serving(store) as (_, client), client.get(f"/chunks/{manifests[2].chunks[0].sha256}") as response:
        assert await response.read() == bytes([2]) * 100
    store.prune(2, lambda raw: msgspec.msgpack.decode(raw, type=Manifest))
    assert store.versions() == [2, 4, 5]


class Slow(WeightStore):
    """A store whose reads wait, and that loses its chunk on the way."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads, self.lost = 0, False

    def chunk(self, sha256: str, offset: int, size: int) -> bytes | None:
        self.reads += 1
        return None if self.lost else super().chunk(sha256, offset, size)


# A chunk that is gone before its last byte was sent ends the connection: the client must not take it for whole.
async def test_a_chunk_that_vanishes_is_cut_off(tmp_path):
    store = Slow(tmp_path)
    (ref,) = store.put_chunks(DATA)
    store.lost = True
    async with serving(store) as (_, client):
        with pytest.raises(aiohttp.ClientError):
            async with client.get(f"/chunks/{ref.sha256}") as response:
                await response.read()


# Clients beyond a limit are turned away at once, and the others go on.
async def test_clients_are_bounded(store):
    (ref,) = store.put_chunks(bytes(8 << 20))
    chunk = f"/chunks/{ref.sha256}"
    async with (
        serving(store, max_requests=4, max_connections=6) as (server, client),
        client.get(chunk) as first,
        client.get(chunk) as second,
    ):
        async with client.get(chunk) as third:
            assert (third.status, third.headers["Retry-After"], server.refused) == (503, "5", 1)
        with contextlib.suppress(ConnectionError):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            assert await reader.read() == b""
            writer.close()
        assert server.refused == 2
        assert len(await first.read()) == len(await second.read()) == 8 << 20


# An address gets half of the requests that others leave, so a stalled one or two leave room for the next.
async def test_no_address_holds_all_requests(store):
    (ref,) = store.put_chunks(bytes(8 << 20))
    request = f"GET /chunks/{ref.sha256} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    async with contextlib.AsyncExitStack() as stack:
        server, _ = await stack.enter_async_context(serving(store, max_requests=8))

        async def stall(address: str) -> asyncio.StreamReader:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", server.port, limit=1 << 10, local_addr=(address, 0)
            )
            stack.callback(writer.close)
            writer.write(request)
            return reader

        held = {}
        for address in ("127.0.0.2", "127.0.0.3", "127.0.0.4"):
            readers = [await stall(address) for _ in range(5)]
            lines = [await asyncio.wait_for(reader.readline(), 100) for reader in readers]
            held[address] = sum(b"200" in line for line in lines)
        assert held == {"127.0.0.2": 4, "127.0.0.3": 2, "127.0.0.4": 1}


# Requests one after the other whose answers nobody reads end the connection: also what no chunk is has its time.
async def test_answers_that_are_not_read_end_the_connection(store):
    store.put_manifest(3, bytes(1 << 16))
    async with serving(store, piece_timeout_s=0.2) as (server, _):
        for path in ("/manifests/v000003.manifest", "/nothing"):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 10)
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(100):
                    while not writer.is_closing():
                        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode() * 1000)
                        await asyncio.sleep(0.01)
            assert writer.is_closing()


# A network gets half of the connections that others leave, and what it gave up is free again.
async def test_no_address_holds_all_connections(store):
    async with serving(store, max_connections=4) as (server, client):
        held = [await asyncio.open_connection("127.0.0.1", server.port, local_addr=("127.0.0.2", 0)) for _ in range(3)]
        with contextlib.suppress(ConnectionError):
            assert await held[2][0].read() == b""
        assert server.refused == 1
        async with client.get("/nothing") as response:
            assert response.status == 404
        for _, writer in held:
            writer.close()


# A client that takes a byte now and then holds its place no longer than the least rate allows.
async def test_a_client_that_reads_too_slowly_is_cut_off(store):
    refs = store.put_chunks(bytes(16 << 20))
    async with serving(store, piece_timeout_s=0.5, least_bytes_per_s=1 << 30) as (server, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 10)
        writer.write(f"GET /chunks/{refs[0].sha256} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        async with asyncio.timeout(100):
            with contextlib.suppress(ConnectionError):
                while await reader.read(200_000):  # About 2 MB/s: each piece comes in time.
                    await asyncio.sleep(0.1)
            while server._requests:
                await asyncio.sleep(0.02)
        assert 0 < server.bytes_sent < 16 << 20
        writer.close()


# A client that does not read is cut off after its time, and costs no more than two pieces.
async def test_a_client_that_does_not_read_is_cut_off(store):
    refs = store.put_chunks(bytes(16 << 20))
    async with serving(store, piece_timeout_s=0.2) as (server, _):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 10)
        writer.write(f"GET /chunks/{refs[0].sha256} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        async with asyncio.timeout(100):
            while server._requests or not server.bytes_sent:
                await asyncio.sleep(0.02)
        assert server.bytes_sent < 16 << 20
        writer.close()


# An address that is taken, or none of this machine's, is an error with the remedy.
async def test_addresses_are_checked(store):
    async with serving(store) as (server, _):
        with pytest.raises(PortInUseError, match=str(server.port)):
            await WeightServer(store).start(Address("127.0.0.1", server.port))
    with pytest.raises(ConfigError, match=r"198\.51\.100\.7"):
        await WeightServer(store).start(Address("198.51.100.7", 0))
