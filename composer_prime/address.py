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
    """A name, or an IP address without brackets; `*` is every interface."""
    port: int

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.host

    def __str__(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"


def bracketed(host: str) -> str:
    """Return a host as it stands before a port."""
    return f"[{host}]" if ":" in host else host


def tcp_address(text: str, key: str, *, bind: bool = False, scheme: str = "tcp://") -> Address:
    """Parse HOST:PORT after `scheme`. Raises ConfigError, which names `key`.

    With `bind`, port 0 (a free one) and host `*` (every interface) are allowed.
    """
    place = text.removeprefix(scheme)
    with suppress(ValueError):  # of a wrong IP address or port
        parts = urlsplit(f"//{place}")
        host, port = parts.hostname or "", parts.port
        is_whole = text == scheme + parts.netloc and place.lower().rpartition(":")[0] == bracketed(host)
        if ":" in host or re.fullmatch(r"[0-9.]+", host):
            host = str(ipaddress.ip_address(host))
        is_host = ":" in host or _NAME.fullmatch(host) or (bind and host == "*")
        if is_host and is_whole and port is not None and (port or bind):
            return Address(host, port)
    raise ConfigError(
        f"{key} is {text!r}; expected {scheme}HOST:PORT, with a port from {0 if bind else 1} to 65535 and an "
        "IPv6 address in brackets"
    )


def endpoint_url(text: str, key: str) -> str:
    """Return the URL of an OpenAI-compatible endpoint. Raises ConfigError, which names `key`."""
    try:
        parts = urlsplit(text)
        is_prefix = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of wrong brackets or port
        is_prefix = False
    if not is_prefix or re.search(r"\s|/chat/completions", text):
        form = "the part before /chat/completions, as in http://127.0.0.1:8000/v1"
        raise ConfigError(f"{key} is {text!r}; expected {form}")
    return text


WILDCARDS = ("0.0.0.0", "::", "*")
"""Interfaces to listen at, not to connect to."""


def reachable(endpoint: str) -> str:
    """Return an address at which this machine reaches `endpoint`."""
    return endpoint.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches `host`."""
    address = _ip_address(host)
    if address is not None:
        return address.is_loopback
    return host == "localhost" or host.endswith(".localhost")


def is_no_machine(host: str) -> bool:
    """Return whether no machine has this IP address: a wildcard, multicast, broadcast."""
    address = _ip_address(host)
    if address is None:
        return False
    return address.is_unspecified or address.is_multicast or str(address) == "255.255.255.255"


def _ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def free_port() -> int:
    """Return a TCP port of loopback that is free now; prefer to bind to port 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
