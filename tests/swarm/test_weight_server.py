"""The HTTP server of weight chunks: what it gives, what it refuses, and that the store knows of it."""

from __future__ import annotations

import asyncio
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
from orchestrator.swarm.weight_server import WeightServer

DATA = random.Random(0).randbytes(10_240)


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "run" / "weights")


@asynccontextmanager
async def serving(store: WeightStore, **limits: float) -> AsyncIterator[tuple[WeightServer, aiohttp.ClientSession]]:
    server = WeightServer(store, **limits)
    await server.start(Address("127.0.0.1", 0))
    async with aiohttp.ClientSession(server.url) as client:
        yield server, client
    await server.close()


RANGES = [
    (None, 200, DATA),
    ("bytes=0-9", 206, DATA[:10]),
    ("bytes=5-999999", 206, DATA[5:]),
    ("bytes=10240-", 416, None),
    ("rows=1-2", 416, None),
]


# Any one range of a chunk, with the header that a client needs to check it.
@pytest.mark.parametrize(("asked", "status", "data"), RANGES)
async def test_ranges(store, asked, status, data):
    (ref,) = store.put_chunks(DATA)
    async with (
        serving(store) as (_, client),
        client.get(f"/chunks/{ref.sha256}", headers={"Range": asked} if asked else {}) as response,
    ):
        assert response.status == status
        if data is None:
            assert response.headers["Content-Range"] == f"bytes */{len(DATA)}"
            return
        assert await response.read() == data
        if status == 206:
            first = DATA.index(data)
            assert response.headers["Content-Range"] == f"bytes {first}-{first + len(data) - 1}/{len(DATA)}"


# A connection serves one chunk after the other.
async def test_a_connection_lasts(store, caplog):
    (ref,) = store.put_chunks(DATA)
    async with serving(store) as (_, client):
        for _ in range(20):
            async with client.get(f"/chunks/{ref.sha256}") as response:
                assert await response.read() == DATA
    assert not caplog.records


# No name or link leads out of the folder, nothing is listed, nothing can be written, and keys are not there.
async def test_only_chunks_and_manifests_are_served(store):
    (ref,) = store.put_chunks(DATA)
    store.put_manifest(3, b"signed")
    (store.root.parent / "run_id").write_text("secret")
    (store.root / "chunks" / ("A" * 64)).write_text("secret")
    (store.root / "chunks" / ("b" * 64)).symlink_to(store.root.parent / "run_id")
    names = [
        "/", "/chunks", "/chunks/", "/manifests/", "/chunks/../../run_id", "/chunks/..%2f..%2frun_id", "/run_id",
        "/chunks/%2e%2e/%2e%2e/run_id", f"/chunks/{'A' * 64}", f"/chunks/{'b' * 64}", f"/chunks/{ref.sha256}%00",
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


# Clients beyond the limit are turned away at once, and the others go on.
async def test_clients_are_bounded(store):
    (ref,) = store.put_chunks(bytes(8 << 20))
    chunk = f"/chunks/{ref.sha256}"
    async with (
        serving(store, max_requests=2) as (_, client),
        client.get(chunk) as first,
        client.get(chunk) as second,
    ):
        async with client.get(chunk) as third:
            assert third.status == 503
        assert len(await first.read()) == len(await second.read()) == 8 << 20


# A client that does not read is cut off after its time, and gives back its place.
async def test_a_client_that_does_not_read_is_cut_off(store):
    refs = store.put_chunks(bytes(16 << 20))
    async with serving(store, longest_s=0.2, max_requests=1) as (server, client):
        port = int(server.url.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 10)
        writer.write(f"GET /chunks/{refs[0].sha256} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        statuses: set[int] = set()
        async with asyncio.timeout(100):
            while not {503, 404} <= statuses:
                async with client.get(f"/chunks/{'0' * 64}") as response:
                    statuses.add(response.status)
                await asyncio.sleep(0.01)
        writer.close()


# An address that is taken, or none of this machine's, is an error with the remedy.
async def test_addresses_are_checked(store):
    async with serving(store) as (server, _):
        with pytest.raises(PortInUseError):
            await WeightServer(store).start(Address("127.0.0.1", int(server.url.rpartition(":")[2])))
    with pytest.raises(ConfigError, match=r"198\.51\.100\.7"):
        await WeightServer(store).start(Address("198.51.100.7", 0))
