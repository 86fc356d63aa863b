"""The gateway's side of the node wire, spoken by hand: a real CURVE ROUTER that tests script."""

import asyncio

import msgspec

from composer_prime.run.keys import RunKeys
from composer_prime.run.weights import WeightStore
from composer_prime.wire.node_messages import (
    ChunkRequest,
    FromNode,
    Generate,
    Heard,
    NodeHello,
    NodeWelcome,
    Sampled,
    Sampling,
    Status,
    WeightPiece,
)
from composer_prime.wire.sockets import bind_router
from composer_prime.wire.types import pack_ints
from tests.inference.publisher import RUN_ID
from tests.waiting import until

DEADLINE_S = 20.0


class GatewayPeer:
    """Answers Hello, Status and ChunkRequest by itself; everything else waits in `inbox` for the test."""

    def __init__(self, keys: RunKeys, store: WeightStore, address: str = "tcp://127.0.0.1:0") -> None:
        self._server = bind_router(address, keys.curve("server"), [keys.curve("node").public])
        self._store, self._verify_key = store, keys.verifier().public_bytes_raw()
        self.endpoint = self._server.endpoint
        self.manifest = b""
        self.sources: list[str] = []
        self.known: set[bytes] = set()
        self.node = b""
        self.hellos: list[NodeHello] = []
        self.statuses: list[Status] = []
        self.parts: list[Sampled] = []
        self.chunk_requests: list[ChunkRequest] = []
        self.silent = False
        self.refusal: str | None = None
        """Why chunks are refused."""
        self.versions_at: dict[str, list[int]] = {}
        """Versions that were reported when an answer came, by request."""
        self.inbox: asyncio.Queue[FromNode] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            identity, raw = await self._server.socket.recv_multipart()
            if not self.silent:
                self._handle(identity, msgspec.msgpack.decode(raw, type=FromNode))

    def _handle(self, identity: bytes, message: FromNode) -> None:
        if isinstance(message, NodeHello):
            self.hellos.append(message)
            self.known.add(identity)
            self.node = identity
            self.announce(self.manifest, is_news=False)
        elif isinstance(message, ChunkRequest):
            self.chunk_requests.append(message)
            self.send(self._chunk(message))
        elif isinstance(message, Sampled) and not message.is_part and identity in self.known:
            self.versions_at[message.request_id] = [status.version for status in self.statuses]
            self.inbox.put_nowait(message)
        elif identity not in self.known:
            self._server.socket.send_multipart([identity, msgspec.msgpack.encode(Heard(known=False))])
        elif isinstance(message, Status):
            self.statuses.append(message)
            self.send(Heard())
        elif isinstance(message, Sampled):
            self.parts.append(message)
        else:
            self.inbox.put_nowait(message)

    def _chunk(self, request: ChunkRequest) -> WeightPiece:
        if self.refusal is not None:
            return WeightPiece(sha256=request.sha256, offset=request.offset, refusal=self.refusal)
        piece = self._store.chunk(request.sha256, request.offset, 100_000)
        last = piece is not None and len(piece) < 100_000
        return WeightPiece(sha256=request.sha256, offset=request.offset, data=piece, last=last)

    def announce(self, manifest: bytes, *, is_news: bool = True) -> None:
        """Welcome the node with a version."""
        welcome = NodeWelcome(
            run_id=RUN_ID,
            manifest=manifest,
            verify_key=self._verify_key,
            heartbeat_s=0.1,
            sources=self.sources,
            is_news=is_news,
        )
        self.send(welcome)

    def send(self, message) -> None:
        self.send_raw(msgspec.msgpack.encode(message))

    def send_raw(self, *frames: bytes) -> None:
        self._server.socket.send_multipart([self.node, *frames])

    def generate(self, name: str, prompt: list[int], *, lease: int = 1, session: str = "s", **options) -> None:
        sampling = Sampling(**{"max_tokens": 8, "ignore_eos": True, **options})
        self.send(
            Generate(request_id=name, lease=lease, prompt_ids=pack_ints(prompt), sampling=sampling, session=session)
        )

    async def next(self) -> FromNode:
        """The next message that is no heartbeat."""
        return await asyncio.wait_for(self.inbox.get(), DEADLINE_S)

    async def until(self, condition, what: str) -> None:
        await until(condition, what, DEADLINE_S)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self._server.close)
