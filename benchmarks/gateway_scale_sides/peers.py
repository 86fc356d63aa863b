"""The two ends of gateway_scale.py, as processes: a node with a fixed delay, HTTP clients.

COMPOSER_NODE_TOKEN=cp1... python peers.py node --endpoint tcp://... --delay-s 2 --reply 5 6 7
COMPOSER_NODE_TOKEN=cp1... python peers.py flood --endpoint tcp://...
python peers.py clients --url http://..., and the fields of load.Load
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import os
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import numpy as np
import zmq

from composer_prime.run.keys import ClientKeys
from composer_prime.wire.node_messages import (
    MAX_PLACES,
    CancelGenerate,
    Dismissed,
    Generate,
    Heard,
    NodeHello,
    Sampled,
    Status,
    ToNode,
)
from composer_prime.wire.sockets import dealer
from composer_prime.wire.types import VersionSpan, pack_floats, pack_ints

HEARTBEAT_S = 1.0


def run_node(endpoint: str, token: str, delay_s: float, reply: list[int]) -> None:
    """Answer every Generate with the token ids `reply`, `delay_s` after it came, until Drain."""
    socket = dealer(zmq.Context(), endpoint, ClientKeys.from_token(token))
    decoder, encode = msgspec.msgpack.Decoder(ToNode), msgspec.msgpack.Encoder().encode
    ids, logprobs = pack_ints(reply), pack_floats(np.full(len(reply), -0.5))
    spans = [VersionSpan(0, len(reply), 0)]
    hello = NodeHello(node_id="fixed-delay", engine="fixed-delay", run_id=None, version=0, max_concurrent=MAX_PLACES)
    socket.send(encode(hello))
    due: list[tuple[float, int, str]] = []
    cancelled: set[int] = set()
    beat = time.monotonic() + HEARTBEAT_S
    while True:
        now = time.monotonic()
        while due and due[0][0] <= now:
            _, lease, request_id = heapq.heappop(due)
            if lease in cancelled:
                cancelled.discard(lease)
                continue
            answer = Sampled(request_id=request_id, lease=lease, token_ids=ids, logprobs=logprobs,
                             version_spans=spans, finish_reason="stop")  # fmt: skip
            socket.send(encode(answer))
        if now >= beat:
            beat = now + HEARTBEAT_S
            socket.send(encode(Status(version=0, running=len(due), waiting=0, kv_used=0.0, tokens_per_s=0.0,
                                      canary_error=None)))  # fmt: skip
        next_due = min(beat, due[0][0] if due else beat)
        if not socket.poll(max(0, int(1000 * (next_due - time.monotonic())) + 1)):
            continue
        message = decoder.decode(socket.recv())
        match message:
            case Generate():
                heapq.heappush(due, (time.monotonic() + delay_s, message.lease, message.request_id))
            case CancelGenerate():
                cancelled.add(message.lease)
            case Heard(known=False):
                socket.send(encode(hello))
            case Dismissed():
                return


def run_flood(endpoint: str, token: str) -> None:
    """Say hello as a node, then send heartbeats as fast as they are taken, whatever the gateway answers."""
    keys = ClientKeys.from_token(token)
    socket = zmq.Context().socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 1000)  # What the gateway does not read waits here, and then sending waits.
    socket.curve_serverkey = keys.server_public
    socket.curve_publickey, socket.curve_secretkey = keys.own.public, keys.own.secret
    socket.connect(endpoint)
    encode = msgspec.msgpack.Encoder().encode
    socket.send(encode(NodeHello(node_id="flood", engine="none", run_id=None, version=0, max_concurrent=1)))
    status = encode(Status(version=0, running=0, waiting=0, kv_used=1.0, tokens_per_s=0.0, canary_error=None))
    while True:
        socket.send(status)


async def run_clients(url: str, slots: int, rollouts: int, spread_s: float, talk: Conversation) -> None:
    """Play `slots` rollouts at a time; each slot plays `rollouts` of them."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=15)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def slot(index: int) -> None:
            await asyncio.sleep(spread_s * index / slots)
            for number in range(rollouts):
                await talk.play(session, url, f"c-{index}-{number}")

        await asyncio.gather(*(slot(index) for index in range(slots)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What each rollout says: each turn's prompt is the conversation so far and a tool's reply."""

    prompt: int
    """Tokens of the first prompt."""
    tool: int
    """Tokens that each turn adds after the policy's answer."""
    tool_s: float
    """Between an answer and the next turn."""
    turns: int

    async def play(self, session: aiohttp.ClientSession, url: str, rollout: str) -> None:
        ids = [5 + i % 20_000 for i in range(self.prompt)]
        for _ in range(self.turns):
            body = {"model": "policy", "token_ids": ids, "sampling_params": {"max_tokens": 256, "temperature": 1.0}}
            answer_ids = await self._ask(session, f"{url}/inference/v1/generate", rollout, body)
            ids = ids + answer_ids + list(range(30, 30 + self.tool))
            await asyncio.sleep(self.tool_s)

    async def _ask(self, session: aiohttp.ClientSession, url: str, rollout: str, body: dict[str, Any]) -> list[int]:
        headers = {"X-Session-ID": rollout, "Content-Type": "application/json"}
        async with session.post(url, data=msgspec.json.encode(body), headers=headers) as reply:
            content = await reply.read()
            if reply.status != 200:
                raise RuntimeError(f"{reply.status}: {content}")
        return msgspec.json.decode(content)["choices"][0]["token_ids"]


def main() -> None:
    parser = argparse.ArgumentParser()
    roles = parser.add_subparsers(dest="role", required=True)
    node = roles.add_parser("node")
    node.add_argument("--endpoint", required=True)
    node.add_argument("--delay-s", type=float, required=True)
    node.add_argument("--reply", type=int, nargs="+", required=True, help="token ids of every answer")
    roles.add_parser("flood").add_argument("--endpoint", required=True)
    clients = roles.add_parser("clients")
    clients.add_argument("--url", required=True)
    for number in ("concurrent", "rollouts-per-slot", "turns", "prompt", "tool"):
        clients.add_argument(f"--{number}", type=int, required=True)
    for seconds in ("tool-s", "spread-s"):
        clients.add_argument(f"--{seconds}", type=float, required=True)
    args = parser.parse_args()
    if args.role == "node":
        run_node(args.endpoint, os.environ["COMPOSER_NODE_TOKEN"], args.delay_s, args.reply)
    elif args.role == "flood":
        run_flood(args.endpoint, os.environ["COMPOSER_NODE_TOKEN"])
    else:
        talk = Conversation(prompt=args.prompt, tool=args.tool, tool_s=args.tool_s, turns=args.turns)
        asyncio.run(run_clients(args.url, args.concurrent, args.rollouts_per_slot, args.spread_s, talk))


if __name__ == "__main__":
    main()
