"""HOST:PORT as people write it, and the sockets bound and connected there."""

import asyncio
import re
import socket

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from composer_prime.address import Address, endpoint_url, is_loopback, reachable, tcp_address
from composer_prime.errors import ConfigError, PortInUseError
from composer_prime.run.keys import ClientKeys, CurvePair
from composer_prime.wire.sockets import bind_router, dealer


# Every possible address is parsed to its parts, IPv6 in brackets.
@given(
    host=st.ip_addresses().map(str) | st.sampled_from(["localhost", "hub.example.org", "wg0"]),
    port=st.integers(1, 65535),
)
def test_addresses(host, port):
    address = Address(host, port)
    assert tcp_address(str(address), "key", scheme="") == tcp_address(f"tcp://{address}", "key", bind=True) == address
    assert str(address).startswith("[") == address.is_ipv6 == (":" in host)


# Anything else is refused by its key. An address to listen on may have any port and interface.
@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1:29613", "tcp://29600", "tcp://:29600", "tcp://host:99999", "tcp://host:22x", "tcp://host:0",
        "tcp://host:", "tcp://host:٤", "tcp://2001:db8::1:51820", "tcp://[2001:db8::g]:1", "tcp://10.77.0.999:1",
        "tcp://a b:1", "tcp://*:1", "tcp://host/x:1", "tcp://host:1/x", "tcp://user@host:1", "tcp://[host]:1",
        "tcp://host:1?x", "tcp://[fe80::1]x:1", "tcp://[v1.x]:1", "tcp://host:1\n", "",
    ],
)  # fmt: skip
def test_wrong_addresses(text):
    with pytest.raises(ConfigError, match=r"^some\.key is "):
        tcp_address(text, "some.key")
    assert tcp_address("tcp://*:0", "some.key", bind=True) == Address("*", 0)


# A socket that cannot be bound has a reason and a remedy in its message, and leaves nothing that blocks a second try.
def test_what_cannot_be_bound():
    server, client = CurvePair(*zmq.curve_keypair()), CurvePair(*zmq.curve_keypair())
    with pytest.raises(ConfigError, match=r"tcp://192\.0\.2\.1:29600"):
        bind_router("tcp://192.0.2.1:29600", server, [client.public])
    with pytest.raises(ConfigError, match="no-such-interface"):
        bind_router("tcp://no-such-interface:29600", server, [client.public])
    with pytest.raises(ConfigError, match="99999"):
        bind_router("tcp://127.0.0.1:99999", server, [client.public])
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = f"tcp://127.0.0.1:{holder.getsockname()[1]}"
        with pytest.raises(PortInUseError, match=rf"{address}.*orchestrator\.node_address"):
            bind_router(address, server, [client.public])
    bind_router(address, server, [client.public]).close()


# Over IPv6 as over IPv4: the server reports where it listens, a client connects there and is admitted by its key.
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_message_arrives(host):
    if host == "[::1]" and not _has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    asyncio.run(_exchange(host))


async def _exchange(host: str) -> None:
    server, client = CurvePair(*zmq.curve_keypair()), CurvePair(*zmq.curve_keypair())
    bound = bind_router(f"tcp://{host}:0", server, [client.public])
    assert bound.endpoint.startswith(f"tcp://{host}:")
    with zmq.Context() as context, dealer(context, bound.endpoint, ClientKeys(server.public, client)) as connected:
        connected.send(b"hello")
        assert await bound.socket.poll(10_000), "nothing arrived in 10 s"
        assert (await bound.socket.recv_multipart())[1] == b"hello"
    bound.close()


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


# The URL of an endpoint is parsed where it is written: behind it, httpx would raise what nobody catches.
def test_endpoint_urls():
    for url in ("http://127.0.0.1:8000/v1", "https://api.example/v1beta/openai", "http://[::1]:8000/v1"):
        assert endpoint_url(url, "some.key") == url
    for url in (
        "127.0.0.1:8000/v1", "http://127.0.0.1:80000/v1", "http://127.0.0.1:x/v1", "http://127.0.0.1:0/v1",
        "http://[::1/v1", "http:///v1", "http://a b/v1", "http://h:1/v1/chat/completions", "",
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"^some.key is {re.escape(repr(url))}"):
            endpoint_url(url, "some.key")


# What is bound to every interface is reached at loopback; any other address as it is.
def test_a_bound_endpoint_is_reached_from_the_same_machine():
    assert reachable("tcp://0.0.0.0:5500") == "tcp://127.0.0.1:5500"
    assert reachable("tcp://[::]:5500") == "tcp://[::1]:5500"
    assert reachable("tcp://192.0.2.7:5500") == "tcp://192.0.2.7:5500"


def test_loopback_is_known_in_every_form():
    assert all(map(is_loopback, ["127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1", "localhost", "a.localhost"]))
    assert not any(map(is_loopback, ["192.0.2.7", "::", "box.example", "localhost.example"]))
