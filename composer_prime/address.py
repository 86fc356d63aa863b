"""Addresses in configurations and on command lines: HOST:PORT and tcp://HOST:PORT, an IPv6 address in brackets."""

from __future__ import annotations

import ipaddress
import re
import socket
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import urlsplit

from composer_prime.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class Address(NamedTuple):
    host: str
    """A name, or an IPv4 or IPv6 address without brackets; `*` is every interface of this machine."""
    port: int

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.host

    def __str__(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"


def bracketed(host: str) -> str:
    """Return a host as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def tcp_address(text: str, key: str, *, bind: bool = False, scheme: str = "tcp://") -> Address:
    """Parse HOST:PORT after `scheme`. With `bind`, port 0 (a free one) and host `*` (every interface) are allowed.

    Raises ConfigError, which names `key`, for anything else.
    """
    place = text.removeprefix(scheme)
    with suppress(ValueError):  # Of a wrong IP address, and of the port.
        parts = urlsplit(f"//{place}")
        host, port = parts.hostname or "", parts.port
        is_whole = text == scheme + parts.netloc and place.lower().rpartition(":")[0] == bracketed(host)
        if ":" in host or re.fullmatch(r"[0-9.]+", host):
            host = str(ipaddress.ip_address(host))
        is_host = ":" in host or _NAME.fullmatch(host) or (bind and host == "*")
        if is_host and is_whole and port is not None and (port or bind):
            return Address(host, port)
    raise ConfigError(
        f"{key} is {text!r}; expected {scheme}HOST:PORT, with a port from {0 if bind else 1} to 65535 and an IPv6 "
        "address in brackets"
    )


def endpoint_url(text: str, key: str) -> str:
    """Return `text` where it is the URL of an OpenAI-compatible endpoint. Raises ConfigError, which names `key`."""
    try:
        parts = urlsplit(text)
        is_prefix = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # Of brackets without an IPv6 address, and of the port.
        is_prefix = False
    if not is_prefix or re.search(r"\s|/chat/completions", text):
        raise ConfigError(
            f"{key} is {text!r}; expected the part before /chat/completions, as in http://127.0.0.1:8000/v1"
        )
    return text


WILDCARDS = ("0.0.0.0", "::", "*")
"""Interfaces to listen at that are not addresses to connect to."""


def reachable(endpoint: str) -> str:
    """Return an address at which a process on this machine reaches `endpoint`, even one bound to all interfaces."""
    return endpoint.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches `host`, a name or an IP address."""
    address = _ip_address(host)
    return host == "localhost" or host.endswith(".localhost") if address is None else address.is_loopback


def is_no_machine(host: str) -> bool:
    """Return whether `host` is an IP address that no machine has: a wildcard, multicast, broadcast."""
    address = _ip_address(host)
    return address is not None and (address.is_unspecified or address.is_multicast or str(address) == "255.255.255.255")


def _ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def free_port() -> int:
    """Return a TCP port of loopback that is free now. Bind to port 0 instead wherever the other side asks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
