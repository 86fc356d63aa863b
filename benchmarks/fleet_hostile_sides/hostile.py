"""One hostile node: python -m benchmarks.fleet_hostile_sides.hostile STATE_FOLDER CHUNK_SHA256, in $COMPOSER_INVITE.

Four threads misbehave at once, each over connections of its own under the node's one key, until the process is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import sys
import threading
import time
from collections import deque
from pathlib import Path

import msgspec
import zmq

from composer_prime.run.keys import ClientKeys
from composer_prime.wire.enrollment import INVITE_VARIABLE, Invite
from composer_prime.wire.node_messages import (
    MAX_PLACES,
    ChunkRequest,
    Dismissed,
    Generate,
    Goodbye,
    Heard,
    NodeHello,
    Sampled,
    Status,
    ToNode,
)
from composer_prime.wire.sockets import dealer
from composer_prime.wire.types import VersionSpan, ints, pack_floats, pack_ints
from inference.enrolling import NodeState, enroll

END_TOKEN = 2
"""Of the tiny model."""
HEARTBEAT_S, LIFE_S, HALVES, LIES = 0.5, 6.0, 3, 0.6
"""LIES: share of its requests that it answers."""
FRAME = bytes((1 << 20) - 64)
ENDLESS_FRAMES, MANY_FRAMES, HOARD_S, PAUSE_S = 600, 100_000, 30.0, 8.0
PULLERS, OPEN_S = 4, 2.0
MACHINE = "no GPU, 2 cores"
encode = msgspec.msgpack.Encoder().encode


class Hostile:
    def __init__(self, address: str, keys: ClientKeys, name: str, chunk: str) -> None:
        self.context = zmq.Context()
        self.address, self.keys, self.name, self.chunk = address, keys, name, chunk
        self.leases: deque[Generate] = deque(maxlen=64)
        """The last requests that it was given."""

    def connect(self) -> zmq.Socket[bytes]:
        return dealer(self.context, self.address, self.keys)

    def hello(self, name: str) -> bytes:
        return encode(NodeHello(
            node_id=name, engine="local", run_id=None, version=0, max_concurrent=MAX_PLACES, max_context=1 << 40,
            instance=name,
        ))  # fmt: skip

    # -- answers -------------------------------------------------------------------------------------------------------

    def lie(self) -> None:
        """Attach, lie, and come back on a new connection, in turn in two ways. Some requests never get a word.

        Once it streams half an answer to a few requests and leaves, so that other nodes continue them. Then it answers
        whole.
        """
        decoder, draw = msgspec.msgpack.Decoder(ToNode), random.Random(0)
        for life in itertools.count():
            own, beat, end, halves = self.connect(), 0.0, time.monotonic() + LIFE_S, 0
            own.send(self.hello(self.name))
            while time.monotonic() < end and halves < HALVES:
                if time.monotonic() > beat:
                    beat = time.monotonic() + HEARTBEAT_S
                    own.send(report())
                if not own.poll(50):
                    continue
                match decoder.decode(own.recv()):
                    case Generate() as request:
                        self.leases.append(request)
                        if draw.random() < LIES:
                            own.send(false_answer(request, draw, whole=life % 2 == 1))
                            halves += life % 2 == 0
                    case Heard(known=False):
                        own.send(self.hello(self.name))
                    case Dismissed():  # Cut off: try again.
                        break
            own.send(encode(Goodbye(reason="gone")))
            time.sleep(1.0)
            own.close(linger=0)

    # -- messages ------------------------------------------------------------------------------------------------------

    def flood(self) -> None:
        """Send what nobody asked for, over a new connection every OPEN_S."""
        while True:
            socket, end, number = self.connect(), time.monotonic() + OPEN_S, 0
            while time.monotonic() < end:
                number += 1
                with contextlib.suppress(zmq.Again):
                    for junk in (b"\xc1junk", b"", report(), self.stolen(number)):
                        socket.send(junk, zmq.NOBLOCK)
                    if number % 50 == 0:
                        socket.send(self.hello(f"honest-{number // 50 % 7}"), zmq.NOBLOCK)
                while socket.poll(0):
                    socket.recv()
                time.sleep(0.0002)
            socket.close(linger=0)

    def stolen(self, number: int) -> bytes:
        """An answer, or a part of one, to a request near those that it was given: another node holds it."""
        if not self.leases:
            return b""
        mine, step = self.leases[-1], number % 16 - 8
        request_id = f"g{int(mine.request_id[1:]) + step}"
        other = msgspec.structs.replace(mine, lease=mine.lease + step, request_id=request_id)
        return false_answer(other, random.Random(number), whole=number % 2 == 0)

    # -- memory --------------------------------------------------------------------------------------------------------

    def pull(self) -> None:
        """Ask for weights over several connections, and read none."""
        pullers, offset = [self.puller() for _ in range(PULLERS)], 0
        while True:
            for puller in pullers:
                offset += 1
                with contextlib.suppress(zmq.Again):
                    puller.send(encode(ChunkRequest(sha256=self.chunk, offset=offset % (1 << 20))), zmq.NOBLOCK)
            time.sleep(0.01)

    def hoard(self) -> None:
        """Send a message that does not end until its connection is closed, then one of many frames, over and over.

        After the second one this node may not connect for a minute.
        """
        while True:
            sender = self.connect()
            for _ in range(ENDLESS_FRAMES):
                sender.send(FRAME, zmq.SNDMORE, copy=False)
            sent = sender.send(FRAME, copy=False, track=True)  # Nothing leaves before the last frame is there.
            with contextlib.suppress(zmq.NotDone):
                sent.wait(HOARD_S)
            for _ in range(MANY_FRAMES):
                sender.send(b"", zmq.SNDMORE)
            sender.send(b"")
            time.sleep(PAUSE_S)
            sender.close(linger=0)

    def puller(self) -> zmq.Socket[bytes]:
        """A connection that reads nothing, neither here nor in ZMQ's own thread."""
        socket = self.context.socket(zmq.DEALER)
        socket.set(zmq.RCVHWM, 1)
        socket.set(zmq.RCVBUF, 1 << 16)
        socket.curve_serverkey = self.keys.server_public
        socket.curve_publickey, socket.curve_secretkey = self.keys.own.public, self.keys.own.secret
        socket.connect(self.address)
        return socket


def report() -> bytes:
    return encode(Status(version=0, running=1, waiting=0, kv_used=0.1, tokens_per_s=1e12, canary_error=None))


def false_answer(request: Generate, draw: random.Random, *, whole: bool) -> bytes:
    """An answer of words of the prompt that ends with a stop, or the first half of one."""
    most = request.sampling.max_tokens
    count = draw.randint(min(4, most), most) if whole else max(1, most // 2)
    tokens = draw.choices(ints(request.prompt_ids).tolist(), k=count)
    lease = {
        "request_id": request.request_id,
        "lease": request.lease,
        "logprobs": pack_floats([-draw.expovariate(1.0) for _ in tokens]),
        "version_spans": [VersionSpan(0, count, 0)],
    }
    if not whole:
        return encode(Sampled(start=0, token_ids=pack_ints(tokens), **lease))
    return encode(Sampled(token_ids=pack_ints([*tokens[:-1], END_TOKEN]), finish_reason="stop", **lease))


def main() -> None:
    invite = Invite.read(os.environ[INVITE_VARIABLE])
    state = NodeState(Path(sys.argv[1]), invite)
    address, answer = asyncio.run(enroll(state, "hostile", MACHINE, 60.0))
    hostile = Hostile(f"tcp://{address}", state.keys(), answer.node_id, sys.argv[2])
    for attack in (hostile.lie, hostile.flood, hostile.pull, hostile.hoard):
        threading.Thread(target=attack, daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
