"""`orchestrator invite RUN_DIR`: a string with which other machines join."""

from __future__ import annotations

import argparse
import ipaddress
import json
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import zmq
from zmq.utils import z85

from composer_prime.address import WILDCARDS, Address, is_loopback, is_no_machine, tcp_address
from composer_prime.config import load
from composer_prime.console import duration_s, pluralize
from composer_prime.errors import ConfigError
from composer_prime.run.keys import RunKeys
from composer_prime.run.node_registry import utc_text
from composer_prime.run.run_dir import RunDir, read_run_id
from composer_prime.wire.enrollment import INVITE_VARIABLE, Invite, release
from composer_prime.wire.node_messages import PROTOCOL

MAX_NODES = 4096
MAX_EXPIRES_S = 365 * 86400


def main(words: list[str]) -> int:
    options = _parser().parse_args(words)
    run_dir = RunDir(options.run_dir.absolute())
    run_id = read_run_id(run_dir)
    if options.withdraw:
        withdrawn = RunKeys(run_dir.keys).registry.withdraw()
        print(f"withdrawn: {pluralize(withdrawn, 'invite')} of run {run_id}. Nodes that have joined serve on")
        return 0
    config = load.read_config(run_dir.config).orchestrator
    if not options.trust_nodes and not config.audit.enabled:
        raise ConfigError(
            "orchestrator.audit.enabled is false: nothing would check what these nodes say they sampled, and one that "
            "answers fast and wrong takes the work of all others. Start the run with --orchestrator.audit.enabled "
            "(also with --resume), or pass --trust-nodes if every machine that gets the invite is your own"
        )
    addresses = node_addresses(run_dir, options.address, allow_loopback=options.allow_loopback)
    invite = create_invite(run_dir, nodes=options.nodes, expires_s=options.expires, addresses=addresses)
    print(invite.text())
    # In the environment: every user of a machine sees its processes' arguments.
    notes = [
        f"for {options.nodes} nodes of run {run_id} at {', '.join(addresses)}, until {utc_text(invite.expires)}: "
        f"{INVITE_VARIABLE}=STRING inference join. Who has the string can join: hand it over as a password"
    ]
    if not options.address and tcp_address(config.node_address, "its key", bind=True).port == 0:
        notes.append(
            f"the port of {addresses[0]} changes when the run is started again, and its nodes are lost then: give it a "
            "fixed one with --orchestrator.node_address tcp://0.0.0.0:5500"
        )
    for host in (tcp_address(address, "the address", scheme="").host for address in addresses):
        with suppress(ValueError):  # A name, and no number.
            if ipaddress.ip_address(host).is_private and not is_loopback(host):
                notes.append(f"{host} is reached from its own network only: pass --address PUBLIC_HOST:PORT for others")
    for note in notes:
        print(f"orchestrator invite: {note}", file=sys.stderr)
    return 0


def create_invite(run_dir: RunDir, *, nodes: int, expires_s: float, addresses: list[str]) -> Invite:
    """Make an invite and let the run's gateway know it. Raises ConfigError without the run's keys.

    `addresses`: HOST:PORT of the gateway, tried in turn.
    """
    if not 1 <= nodes <= MAX_NODES:
        raise ConfigError(f"--nodes is {nodes}: an invite is for 1 to {MAX_NODES} nodes")
    if not 1 <= expires_s <= MAX_EXPIRES_S:
        raise ConfigError(f"--expires is {expires_s:g} s: an invite is good for 1s to {MAX_EXPIRES_S // 86400}d")
    run_id, keys = read_run_id(run_dir), RunKeys(run_dir.keys)
    server = keys.curve("server").public
    public, secret = zmq.curve_keypair()
    expires = int(time.time() + expires_s)
    keys.registry.invite(public, uses=nodes, expires=expires)
    return Invite(
        addresses=addresses,
        server=z85.decode(server),
        secret=z85.decode(secret),
        verify_key=keys.verifier().public_bytes_raw(),
        run_id=run_id,
        release=release(),
        protocol=PROTOCOL,
        expires=expires,
    )


def node_addresses(run_dir: RunDir, given: list[str], *, allow_loopback: bool = False) -> list[str]:
    """Return HOST:PORT of the run's gateway: `given`, or where it listens.

    Raises ConfigError for loopback unless that is allowed, for no machine's address, and without a port.
    """
    if given:
        addresses = [tcp_address(text.removeprefix("tcp://"), "--address", scheme="") for text in given]
    else:
        addresses = [_listening(run_dir)]
    for address in addresses:
        if is_no_machine(address.host):
            raise ConfigError(
                f"--address is {address}, which is not the address of one machine: give the one at which nodes reach "
                f"it, such as --address PUBLIC_IP:{address.port}"
            )
        if is_loopback(address.host) and not allow_loopback:
            source = "--address is" if given else "the run listens for nodes at"
            raise ConfigError(
                f"{source} {address}, which no other machine reaches: start the run with "
                "--orchestrator.node_address tcp://0.0.0.0:5500 (also with --resume), or pass --address HOST:PORT of a "
                "port that is forwarded there; --allow-loopback is for nodes on this machine"
            )
    return [str(address) for address in addresses]


def _listening(run_dir: RunDir) -> Address:
    """A wildcard becomes this machine's address."""
    configured = load.read_config(run_dir.config).orchestrator.node_address
    address = tcp_address(configured, "orchestrator.node_address", bind=True)
    if not address.port:
        with suppress(OSError, KeyError, ValueError):
            bound = json.loads(run_dir.endpoints.read_text())["node"]
            address = Address(address.host, tcp_address(bound, "endpoints.json", bind=True).port)
    if not address.port:
        raise ConfigError(
            "orchestrator.node_address is port 0, a free one that changes with each start, and the run is not up: "
            "start it first, or with --orchestrator.node_address tcp://0.0.0.0:5500"
        )
    return Address(_own_address() if address.host in WILDCARDS else address.host, address.port)


def _own_address() -> str:
    """Return 127.0.0.1 without a network. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="orchestrator invite",
        allow_abbrev=False,
        description="Print a string that lets other machines join a run as inference nodes. The run need not be up.",
    )
    parser.add_argument("run_dir", type=Path, help="the run's folder, such as outputs/a1")
    parser.add_argument("--nodes", type=int, default=1, help="number of nodes to admit (one per GPU); default 1")
    parser.add_argument("--expires", type=duration_s, default="24h", help="validity: 45m, 24h, 7d; default 24h")
    parser.add_argument("--address", action="append", default=[], metavar="HOST:PORT",
                        help="address of the run for nodes; default: where it listens. Repeat for several")  # fmt: skip
    parser.add_argument("--allow-loopback", action="store_true", help="for nodes on this machine")
    parser.add_argument("--trust-nodes", action="store_true", help="invite nodes to a run without orchestrator.audit: "
                        "what they answer is trained unchecked")  # fmt: skip
    parser.add_argument("--withdraw", action="store_true", help="cancel all invites of the run and create none")
    return parser
