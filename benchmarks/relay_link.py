"""Measure what a node link through `orchestrator relay` or iroh carries, against the direct link, over loopback.

    node (this process) --direct--> run's host (own process)
    node --Tunnel--> relay (own process) --> RelayLeg in the run's host
    node --Tunnel--QUIC--> IrohLeg in the run's host

    python benchmarks/relay_link.py [--mib 256] [--rounds 3]

The node asks for pieces of 2 MiB, eight at a time, as a pull of weights does, and for empty ones, one after another.
The links take turns in one run; medians are printed. The relay's and the host's CPU is that of the cores they share.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

import zmq.asyncio

from composer_prime.address import Address
from composer_prime.run.keys import RunKeys
from composer_prime.wire.iroh_link import IrohDialer, RelayLegs, iroh_name
from composer_prime.wire.sockets import bind_router, dealer
from composer_prime.wire.tunnel import Tunnel, dial, sign_pass
from orchestrator.relay import Relay

PIECE = b"w" * (2 << 20)
AT_ONCE, TRIPS = 8, 200


async def host(folder: Path) -> None:
    keys = RunKeys(folder)
    server = bind_router("tcp://127.0.0.1:0", keys.curve("server"), [keys.curve("node").public])
    legs = RelayLegs(keys.signer)
    print(server.endpoint, flush=True)
    relay, iroh = (await asyncio.to_thread(sys.stdin.readline)).split()
    legs.update([relay, iroh], server.endpoint)
    while set(legs.states().values()) != {"registered"}:
        await asyncio.sleep(0.01)
    print("registered", flush=True)
    while True:
        identity, request = await server.socket.recv_multipart()
        await server.socket.send_multipart([identity, PIECE if request == b"piece" else b""], copy=False)


async def relay(folder: Path) -> None:
    box = Relay([RunKeys(folder).verifier().public_bytes_raw()])
    await box.start(Address("127.0.0.1", 0))
    print(box.address, flush=True)
    await asyncio.Event().wait()


async def pull(address: str, keys: RunKeys, pieces: int) -> tuple[float, float]:
    """Return MB/s of `pieces`, and the milliseconds of an empty round trip."""
    context = zmq.asyncio.Context()
    socket = dealer(context, address, keys.client("node"))
    try:
        await socket.send(b"")  # The handshake is not measured.
        await socket.recv()
        start = time.perf_counter()
        for _ in range(TRIPS):
            await socket.send(b"")
            await socket.recv()
        trip_ms = (time.perf_counter() - start) / TRIPS * 1e3
        start = time.perf_counter()
        for _ in range(AT_ONCE):
            await socket.send(b"piece")
        for number in range(pieces):
            assert len(await socket.recv()) == len(PIECE)
            if number + AT_ONCE < pieces:
                await socket.send(b"piece")
        return pieces * len(PIECE) / (time.perf_counter() - start) / 1e6, trip_ms
    finally:
        context.destroy(linger=0)


def free_udp_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def started(role: str, folder: str) -> tuple[asyncio.subprocess.Process, str]:
    pipe = asyncio.subprocess.PIPE
    words = [sys.executable, __file__, "--role", role, "--folder", folder]
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    return process, (await process.stdout.readline()).decode().strip()


async def measure(pieces: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        keys = RunKeys.create(Path(folder))
        box, relay_address = await started("relay", folder)
        run, endpoint = await started("host", folder)
        assert run.stdin is not None and run.stdout is not None
        where = f"iroh@127.0.0.1:{free_udp_port()}"
        run.stdin.write(f"{relay_address} {where}\n".encode())
        await run.stdout.readline()
        place, public = relay_address.rpartition(":"), keys.verifier().public_bytes_raw()
        shown = sign_pass(keys.signer(), int(time.time()) + 86400)
        tunnel = Tunnel("relay", lambda: dial(Address(place[0], int(place[2])), public, shown))
        dialer = IrohDialer(iroh_name(where, keys.signer()), lambda: shown)
        iroh = Tunnel("iroh", dialer.dial)
        await tunnel.start()
        await iroh.start()
        seen: dict[str, list[tuple[float, float]]] = {"direct": [], "relay": [], "iroh": []}
        try:
            for _ in range(rounds):
                seen["direct"].append(await pull(endpoint, keys, pieces))
                seen["relay"].append(await pull(f"tcp://{tunnel.address}", keys, pieces))
                seen["iroh"].append(await pull(f"tcp://{iroh.address}", keys, pieces))
        finally:
            await tunnel.close()
            await iroh.close()
            await dialer.close()
            for process in (box, run):
                process.kill()
            for process in (box, run):  # Its pipes close with this event loop, not after it.
                await process.wait()
    rates = {link: statistics.median(rate for rate, _ in figures) for link, figures in seen.items()}
    for link, figures in seen.items():
        print(f"{link:<8} {rates[link]:8.1f} MB/s {statistics.median(trip for _, trip in figures):8.2f} ms a trip")
    for link in ("relay", "iroh"):
        print(f"{link} carries {rates[link] / rates['direct']:.2f} of the direct link")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="pulled in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--role", choices=["host", "relay"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role is not None:
        asyncio.run({"host": host, "relay": relay}[options.role](options.folder))
    else:
        asyncio.run(measure(max(AT_ONCE, options.mib // 2), options.rounds))


if __name__ == "__main__":
    main()
