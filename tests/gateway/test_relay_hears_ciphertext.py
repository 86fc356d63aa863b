"""A node that serves through `orchestrator relay`, with an ear at the relay's sockets: real processes over loopback."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys

import pytest
from gateway_config import MODEL
from http_calls import generate_body, post
from zmq.utils import z85

from composer_prime.address import Address, tcp_address
from composer_prime.wire import tunnel
from composer_prime.wire.enrollment import Invite
from composer_prime.wire.types import pack_ints
from tests.engines.reference import Reference
from tests.gateway.test_join_by_invite import until
from tests.gateway.test_join_through_a_relay import public, through
from tests.inference.publisher import Publisher


class Tap:
    """A port in front of a relay's, which keeps what passes in both directions."""

    def __init__(self) -> None:
        self.heard: list[bytearray] = []
        """What came and what went back, of each connection."""
        self.behind: Address | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Tap:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = str(Address("127.0.0.1", self._server.sockets[0].getsockname()[1]))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await tunnel.cancel_all(self._tasks)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tunnel.spawn(self._pass(reader, writer), self._tasks)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self.behind is not None
        other_reader, other_writer = await asyncio.open_connection(*self.behind)
        with contextlib.suppress(OSError):
            await asyncio.gather(self._copy(reader, other_writer), self._copy(other_reader, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard = bytearray()
        self.heard.append(heard)
        while data := await reader.read(1 << 16):
            heard += data
            writer.write(data)
            await writer.drain()
        writer.close()

    def passed(self, data: bytes) -> bool:
        assert len(data) >= 16
        return any(data in heard for heard in self.heard)


@pytest.mark.process
async def test_a_node_serves_through_a_relay(open_gateway, keys, store, tmp_path):
    """The address in its invite is dead. The relay is a process of its own with nothing but the run's public key.

    Neither the prompt nor the weights pass the relay's sockets in plain, nor does the invite's secret.
    """
    prompt = random.Random(0).choices(range(3, 300), k=64)
    async with Tap() as tap:
        invite = await serve_through(tap, prompt, open_gateway, keys, store, tmp_path)
    assert tap.passed(public(keys).hex().encode()) and tap.passed(invite.relay_pass.hex().encode())
    weights = [path.read_bytes() for path in (store.root / "chunks").iterdir()]
    assert sum(map(len, tap.heard)) > sum(map(len, weights)) > 0
    parts = [data[start : start + 64] for data in weights for start in range(0, len(data) - 64, len(data) // 8)]
    private = [invite.secret, z85.encode(invite.secret), invite.text().encode(), pack_ints(prompt)[:64]]
    assert not any(map(tap.passed, [*parts, *private]))


async def serve_through(tap: Tap, prompt: list[int], open_gateway, keys, store, tmp_path) -> Invite:
    """Start a relay behind `tap` and a node, have it answer `prompt`, and end both."""
    publisher = Publisher(store.root, keys, Reference(MODEL, scale=0.01))
    command = ["-m", "orchestrator.main", "relay", "--listen", "127.0.0.1:0", "--run", public(keys).hex()]
    command += ["--name", tap.address]
    pipe = asyncio.subprocess.PIPE
    box = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=pipe)
    processes = [box]
    try:
        assert box.stdout is not None
        line = (await asyncio.wait_for(box.stdout.readline(), 100)).decode()
        assert line.startswith("relaying at 127.0.0.1:") and line.endswith(" for 1 run\n")
        tap.behind = tcp_address(line.split()[2], "the relay", scheme="")
        async with open_gateway(inference={"heartbeat_s": 0.2, "lost_after_s": 5.0}) as gateway:
            gateway.publish(publisher.publish(3))
            invite = through(keys, tap.address)
            keys.registry.use_relay(tap.address)
            words = ["join", invite.text(), "--state-dir", str(tmp_path), "--name", "box", "--relay", "127.0.0.1:0"]
            node = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "inference.main", *words, "--threads", "1", "--device", "cpu"
            )
            processes.append(node)
            nodes = lambda: [node for node in gateway.state()["nodes"] if node["attached"]]
            await until(nodes, "the node to attach")
            assert [(node["node_id"], node["version"]) for node in nodes()] == [("box", 3)]
            status, _ = await post(gateway.http_url, generate_body(*prompt))
            assert status == 200 and gateway.state()["relays"] == {tap.address: "registered"}
            assert gateway._link.weight_places(b"another")["relays"] == []
            node.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(node.wait(), 100) == 0
        box.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(box.wait(), 100) == 128 + signal.SIGTERM
        return invite
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
