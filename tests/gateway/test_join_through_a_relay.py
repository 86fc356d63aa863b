"""A node that cannot reach the run's host joins through `orchestrator relay` or iroh: real parts over loopback."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from composer_prime.address import Address, tcp_address
from composer_prime.errors import ConfigError, DeadlineError, WireError
from composer_prime.run.keys import RunKeys
from composer_prime.wire import tunnel
from composer_prime.wire.enrollment import Invite
from composer_prime.wire.iroh_link import IrohDialer, IrohLeg, RelayLegs, check_iroh_name, iroh_name, load_iroh
from composer_prime.wire.tunnel import RelayLeg, Tunnel, dial, sign_pass, signed_text
from inference.enrolling import NodeState, enroll, tunnels
from orchestrator.relay import Relay, _run_key
from tests.gateway.test_join_by_invite import MACHINE, invite_for, until

NOBODY = "127.0.0.1:1"


def public(keys: RunKeys) -> bytes:
    return keys.verifier().public_bytes_raw()


def pass_of(keys: RunKeys, valid_s: float = 1000.0) -> bytes:
    return sign_pass(keys.signer(), int(time.time() + valid_s))


@contextlib.asynccontextmanager
async def relaying(*runs: bytes, port: int = 0, **limits) -> AsyncIterator[Relay]:
    relay = Relay(runs, **limits)
    await relay.start(Address("127.0.0.1", port))
    try:
        yield relay
    finally:
        await relay.close()


@contextlib.asynccontextmanager
async def served(relay: Relay, keys: RunKeys) -> AsyncIterator[RelayLegs]:
    """A host behind the relay whose node port sends back what comes."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    try:
        async with registered(relay, keys, f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}") as legs:
            yield legs
    finally:
        server.close()


@contextlib.asynccontextmanager
async def registered(relay: Relay, keys: RunKeys, endpoint: str) -> AsyncIterator[RelayLegs]:
    legs = RelayLegs(keys.signer)
    legs.update([str(relay.address)], endpoint)
    try:
        await until(lambda: legs.states() == {str(relay.address): "registered"}, "the host to register")
        yield legs
    finally:
        await legs.close()


def through(keys: RunKeys, relay: Address | str, address: str = NOBODY):
    """An invite whose only address is one where nobody listens."""
    invite = invite_for(keys, address)
    return msgspec.structs.replace(invite, relays=[str(relay)], relay_pass=pass_of(keys))


async def test_a_relay_that_vanished_is_dialed_again(keys):
    """By the host without being told; a node's next stream goes through as before."""
    async with relaying(public(keys)) as relay, served(relay, keys) as legs:
        await relay.close()
        await until(lambda: "registered" not in legs.states().values(), "the host to notice")
        async with relaying(public(keys), port=relay.address.port) as again:
            await until(lambda: "registered" in legs.states().values(), "the host to register again")
            assert await echo_of(again.address, keys, b"here again") == b"here again"


async def echo_of(address: Address, keys: RunKeys, data: bytes) -> bytes:
    reader, writer = await dial(address, public(keys), pass_of(keys))
    try:
        writer.write(data)
        return await asyncio.wait_for(reader.readexactly(len(data)), 100)
    finally:
        writer.close()


async def test_bytes_pass_unchanged_and_both_ends_close_together(keys):
    """More than is held anywhere on the way, both ways at once."""
    data = bytes(range(256)) * (1 << 13)
    async with relaying(public(keys)) as relay, served(relay, keys):
        reader, writer = await dial(relay.address, public(keys), pass_of(keys))
        writer.write(data)
        assert await asyncio.wait_for(reader.readexactly(len(data)), 100) == data
        writer.close()
        await until(lambda: relay._streams.total() == 0, "the stream to end")


async def test_only_the_run_itself_takes_its_place_and_only_its_nodes_dial(keys, tmp_path):
    """Another run's key, a run that the relay does not serve, a pass of another run, and no host."""
    other = RunKeys.create(tmp_path / "other")
    impostor = keys.verifier()
    async with relaying(public(keys)) as relay:
        leg = RelayLeg(str(relay.address), other.signer(), "tcp://127.0.0.1:1")
        with pytest.raises(
            WireError, match=f"relay {relay.address} refused: it does not serve run {public(other).hex()}"
        ):
            await leg._serve()

        class Stolen:
            """Claims the run's public key and signs with another one."""

            def public_key(self):
                return impostor

            def sign(self, data: bytes) -> bytes:
                return other.signer().sign(data)

        with pytest.raises(WireError, match="not signed by run"):
            await RelayLeg(str(relay.address), Stolen(), "tcp://127.0.0.1:1")._serve()
        with pytest.raises(WireError, match=r"not signed by run .*: join with an invite of that run"):
            await dial(relay.address, public(keys), pass_of(other))
        with pytest.raises(WireError, match=r"the host of run .* is not connected to it: is the run up\?"):
            await dial(relay.address, public(keys), pass_of(keys))
        with pytest.raises(WireError, match="does not serve run"):
            await dial(relay.address, public(other), pass_of(other))


async def test_a_pass_expires_with_its_invite_and_a_node_that_joined_has_its_own(open_gateway, keys, tmp_path):
    """A pass whose time is over is refused with the time. Who enrolled before comes back through the relay."""
    async with relaying(public(keys)) as relay:
        keys.registry.use_relay(str(relay.address))
        with pytest.raises(WireError, match=r"the pass expired at .*, here it is .*: join with a fresh invite"):
            await dial(relay.address, public(keys), pass_of(keys, valid_s=-5))
        with pytest.raises(WireError, match="not signed by run"):
            await dial(relay.address, public(keys), (1 << 40).to_bytes(8) + pass_of(keys)[8:])
        async with open_gateway() as gateway:
            await until(lambda: "registered" in gateway.state()["relays"].values(), "the run at the relay")
            invite = through(keys, relay.address)
            state = NodeState(tmp_path, invite)
            async with tunnels(invite, state) as ways:
                await enroll(invite, state, 0, "box", MACHINE, 100, ways)
            expired = msgspec.structs.replace(invite, relay_pass=pass_of(keys, valid_s=-5), expires=1)
            async with tunnels(expired, state) as ways:
                assert (await enroll(expired, state, 0, "box", MACHINE, 100, ways)).address in ways
            assert NodeState(tmp_path / "stranger", expired).relay_pass(expired) == expired.relay_pass


async def test_a_proof_is_good_at_the_relay_that_was_dialed_only(keys):
    """Another relay, which passes on a nonce of this one, gets a proof that names the other one."""

    async def shown(name: str, signed: str) -> str:
        reader, writer = await asyncio.open_connection(*relay.address)
        writer.write(f"{tunnel.PROTOCOL} host {public(keys).hex()}\n".encode())
        nonce = (await reader.readline()).decode().split()[1]
        writer.write(f"{name} {keys.signer().sign(signed_text(signed, nonce)).hex()}\n".encode())
        return (await asyncio.wait_for(reader.readline(), 100)).decode()

    async with relaying(public(keys)) as relay:
        here, there = str(relay.address), "other.example:5600"
        assert (await shown(there, there)).startswith(f"no it does not know itself as '{there}': start it with --name")
        assert "not signed by run" in await shown(here, there)
        assert await shown(here, here) == "ok\n"
    async with relaying(public(keys), names=["Box.Example:5600"]) as relay:
        assert "does not know itself" in await shown(str(relay.address), str(relay.address))
        assert await shown("box.example:5600", "box.example:5600") == "ok\n"


async def test_strangers_do_not_fill_the_places_of_a_greeting(keys, monkeypatch):
    """Silent connections and such as claim a run without a proof stay counted, and get half of the places."""
    monkeypatch.setattr("orchestrator.relay._MAX_GREETING", 4)
    async with relaying(public(keys)) as relay, served(relay, keys):
        strangers = []
        for line, answer in (
            ("host nobody", b"no it does not serve"),
            ("", b""),
            (f"host {public(keys).hex()}", b"nonce "),
            ("host nobody", b""),  # Closed at once.
        ):
            strangers.append(await asyncio.open_connection(*relay.address, local_addr=("127.0.0.2", 0)))
            reader, writer = strangers[-1]
            if line:
                writer.write(f"{tunnel.PROTOCOL} {line}\n".encode())
                with contextlib.suppress(ConnectionError):
                    assert (await asyncio.wait_for(reader.readline(), 100)).startswith(answer)
        assert relay._greeting == {"127.0.0.2": 2}
        assert await echo_of(relay.address, keys, b"room") == b"room"


async def test_a_host_that_is_gone_at_its_proof_is_not_kept(keys):
    """Else nodes would wait for it instead of being told that the host is not there."""
    async with relaying(public(keys)) as relay:
        reader, writer = await asyncio.open_connection(*relay.address)
        writer.transport.abort()
        await writer.wait_closed()
        with pytest.raises(OSError):
            await relay._keep_host(public(keys).hex(), reader, writer)
        assert not relay._hosts


async def test_a_relay_that_opens_streams_without_end_leaves_room_for_others(keys, monkeypatch, caplog):
    """Of four streams it gets two, and the host tells once that more were not joined."""
    monkeypatch.setattr(tunnel, "MAX_STREAMS", 4)
    taken, controls = [], []

    async def greedy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b" host " not in await reader.readline():
            taken.append(writer)
            return
        controls.append(writer)
        writer.write(b"nonce 1\n")
        await reader.readline()
        writer.write(b"ok\n" + b"open 1\n" * 9)

    server = await asyncio.start_server(greedy, "127.0.0.1", 0)
    bad = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with relaying(public(keys)) as relay, served(relay, keys) as legs:
        target = next(leg for leg, _ in legs._legs.values())._target
        legs.update([str(relay.address), bad], f"tcp://{target}")
        lost = lambda: legs._legs[bad][0]._lost
        await until(lambda: lost() == 6, "the host to have heard all")
        assert len(taken) == 2 and legs._open[bad] == 2
        assert await echo_of(relay.address, keys, b"room") == b"room"
        [told] = [record.getMessage() for record in caplog.records if "not joined" in record.getMessage()]
        assert told == (
            f"1 stream of nodes through {bad} not joined; the last one: it has 2 of 2 streams; of 4, each relay has "
            "half of what others leave"
        )
        for writer in [*taken, *controls]:
            writer.close()
        await until(lambda: not legs._open.total(), "the streams to end")
    server.close()


async def test_a_host_that_another_one_displaces_is_told(keys):
    async with relaying(public(keys)) as relay, served(relay, keys) as first, served(relay, keys):
        await until(lambda: "another host of this run came" in str(first.states()), "the first host to be told")


async def test_a_control_line_that_is_none_ends_the_connection(keys):
    async def odd(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in (b"nonce 1\n", b"ok\nhello\n"):
            await reader.readline()
            writer.write(answer)

    server = await asyncio.start_server(odd, "127.0.0.1", 0)
    leg = RelayLeg(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", keys.signer(), "tcp://127.0.0.1:1")
    with pytest.raises(WireError, match="sent 'hello': is that `orchestrator relay` of this release"):
        await leg._serve()
    server.close()


async def test_a_full_relay_says_so_and_has_room_when_a_stream_ends(keys):
    async with relaying(public(keys), max_streams=1) as relay, served(relay, keys):
        _, writer = await dial(relay.address, public(keys), pass_of(keys))
        with pytest.raises(WireError, match=r"it is full: 127\.0\.0\.1 has 1 of 1 streams, --streams is 1"):
            await dial(relay.address, public(keys), pass_of(keys))
        writer.close()
        await until(lambda: relay._streams.total() == 0, "the stream to end")
        assert await echo_of(relay.address, keys, b"room") == b"room"


async def test_a_silent_stream_is_ended(keys):
    async with relaying(public(keys), idle_s=0.2) as relay, served(relay, keys):
        reader, _ = await dial(relay.address, public(keys), pass_of(keys))
        assert await asyncio.wait_for(reader.read(), 100) == b""


async def test_lines_that_are_none_are_turned_away(keys):
    """Another protocol, too long a line, bytes that are no text, a stream that was never opened."""
    async with relaying(public(keys)) as relay:
        for line, answer in (
            (b"GET / HTTP/1.1\n", b"no it speaks composer-relay-2: install one release on relay, run and nodes\n"),
            (b"x" * 600 + b"\n", b""),
            (b"\xff\xfe\n", b""),
            (b"x" * 300_000, b""),
            (f"{tunnel.PROTOCOL} take {'0' * 32}\n".encode(), b""),
        ):
            reader, writer = await asyncio.open_connection(*relay.address)
            writer.write(line)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 100) == answer
            writer.close()
    with pytest.raises(ConfigError, match="--run is 'abc', expected the 64 hexadecimal digits"):
        _run_key("abc")


async def test_what_cannot_be_reached_is_named_with_the_relay(keys, tmp_path):
    """A relay where nobody listens, and one that refuses: with its reason, beside the dead address."""
    state = lambda invite: NodeState(tmp_path, invite)
    invite = through(keys, Address("127.0.0.1", 1))
    async with tunnels(invite, state(invite)) as ways:
        with pytest.raises(
            DeadlineError, match=r"tried for 2 s .*127\.0\.0\.1:1 took no .*relay 127\.0\.0\.1:1 took no"
        ):
            await enroll(invite, state(invite), 0, "box", MACHINE, 2.0, ways)
    async with relaying(public(keys)) as relay:
        invite = through(keys, relay.address)
        async with tunnels(invite, state(invite)) as ways:
            with pytest.raises(DeadlineError, match=f"relay {relay.address} refused: the host of run"):
                await enroll(invite, state(invite), 0, "box", MACHINE, 2.0, ways)


async def test_an_address_that_connects_is_preferred(open_gateway, keys, tmp_path):
    """The relay is there, and is not used."""
    async with open_gateway() as gateway, relaying(public(keys)) as relay:
        invite = through(keys, relay.address, gateway.node_endpoint)
        state = NodeState(tmp_path, invite)
        async with registered(relay, keys, gateway.node_endpoint), tunnels(invite, state) as ways:
            first = await enroll(invite, state, 0, "box", MACHINE, 100, ways)
            assert first.address == invite.addresses[0] and first.address not in ways


def free_udp_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_a_node_enrolls_over_iroh_and_before_any_relay(open_gateway, keys, tmp_path):
    """Its invite has no address, iroh and a relay are there. Nobody else is asked where the host is."""
    where = f"iroh@127.0.0.1:{free_udp_port()}"
    async with open_gateway() as gateway, relaying(public(keys)) as relay:
        legs = RelayLegs(keys.signer)
        legs.update([where, str(relay.address)], gateway.node_endpoint)
        await until(lambda: set(legs.states().values()) == {"registered"}, "iroh and the relay")
        invite = through(keys, relay.address)
        relays = [iroh_name(where, keys.signer()), *invite.relays]
        invite = msgspec.structs.replace(invite, addresses=[], relays=relays)
        try:
            state = NodeState(tmp_path, invite)
            async with tunnels(Invite.read(invite.text()), state) as ways:
                node = await enroll(invite, state, 0, "box", MACHINE, 100, ways)
                assert ways[node.address].name == invite.relays[0]
        finally:
            await legs.close()


async def test_a_connection_whose_tunnel_closes_while_it_dials_is_ended():
    way = Tunnel("nowhere", asyncio.Event().wait)  # type: ignore[arg-type]
    await way.start()
    reader, writer = await asyncio.open_connection(*tcp_address(way.address, "it", scheme=""))
    await until(lambda: way._tasks, "the connection")
    await way.close()
    assert await asyncio.wait_for(reader.read(), 100) == b""
    writer.close()


async def test_iroh_carries_for_holders_of_the_pass_and_to_the_run_only(keys, tmp_path, monkeypatch):
    """Bytes come back unchanged; a wrong pass ends the stream; a host with another key is not taken for the run.

    Whoever comes while all places for a greeting are taken is refused.
    """
    where, other = f"iroh@127.0.0.1:{free_udp_port()}", RunKeys.create(tmp_path / "other")
    data = bytes(range(256)) * (1 << 11)
    async with relaying(public(keys)) as relay, served(relay, keys) as legs:
        target = next(leg for leg, _ in legs._legs.values())._target
        serving = asyncio.create_task((leg := IrohLeg(where, keys.signer(), f"tcp://{target}")).run())
        await until(lambda: leg.state == "registered", "the endpoint")
        right = IrohDialer(iroh_name(where, keys.signer()), lambda: pass_of(keys))
        wrong = IrohDialer(iroh_name(where, keys.signer()), lambda: pass_of(other))
        stranger = IrohDialer(iroh_name(where, other.signer()), lambda: pass_of(other))
        try:
            reader, sender = await right.dial()
            await sender.send(data)
            received = b""
            while len(received) < len(data):
                received += await asyncio.wait_for(reader.read(1 << 16), 100)
            assert received == data
            sender.close()
            reader, _ = await wrong.dial()
            with pytest.raises(ConnectionError):
                await asyncio.wait_for(reader.read(1), 100)
            with pytest.raises((DeadlineError, ConnectionError), match="iroh:"):
                await stranger.dial()
            monkeypatch.setattr("composer_prime.wire.iroh_link._MAX_GREETING", 0)
            with pytest.raises(ConnectionError, match="iroh:"):
                await right.dial()
        finally:
            for dialer in (right, wrong, stranger):
                await dialer.close()
            await tunnel.cancel_all([serving])


async def test_strangers_do_not_fill_the_places_of_a_greeting_over_iroh(keys, monkeypatch, caplog):
    """Connections of one address without a pass get half of the places; a forged address gets none."""
    monkeypatch.setattr("composer_prime.wire.iroh_link._MAX_GREETING", 4)
    iroh, name = load_iroh(), f"iroh@127.0.0.1:{free_udp_port()}"
    async with relaying(public(keys)) as relay, served(relay, keys) as legs:
        target = next(leg for leg, _ in legs._legs.values())._target
        serving = asyncio.create_task((leg := IrohLeg(name, keys.signer(), f"tcp://{target}")).run())
        await until(lambda: leg.state == "registered", "the endpoint")
        right = IrohDialer(iroh_name(name, keys.signer()), lambda: pass_of(keys))
        silent = IrohDialer(iroh_name(name, keys.signer()), lambda: b"")
        options = iroh.EndpointOptions(preset=iroh.preset_minimal(), bind_addr=f"127.0.0.2:{free_udp_port()}")
        silent._endpoint = await iroh.Endpoint.bind(options)
        try:
            held = [await silent.dial() for _ in range(2)]
            for _ in range(2):
                with pytest.raises(ConnectionError, match="iroh:"):
                    await silent.dial()
            assert leg._greeting == {"127.0.0.2": len(held)}
            reader, sender = await right.dial()
            await sender.send(b"room")
            assert await asyncio.wait_for(reader.read(4), 100) == b"room"
            [told] = [record.getMessage() for record in caplog.records if "not joined" in record.getMessage()]
            assert "the last one: 2 connections of 127.0.0.2 have not shown a pass yet" in told
        finally:
            for dialer in (right, silent):
                await dialer.close()
            await tunnel.cancel_all([serving])
    assert not leg._greeting


def test_addresses_of_iroh_are_checked():
    for name in ("iroh:abc", "iroh", f"iroh:{'0' * 64}@box.example:5601", f"iroh:{'0' * 64}@127.0.0.1"):
        with pytest.raises(ConfigError, match="iroh address"):
            check_iroh_name(name)
    assert check_iroh_name(f"iroh:{'0' * 64}") == ("0" * 64, None)
