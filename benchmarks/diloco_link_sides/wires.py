"""Network namespaces behind wires that lose packets, for kernels without netem.

    run 10.79.0.1 ── tun ═ a process that drops packets ═ tun ── node-0 10.78.0.2
                  └─ tun ═ ...                                   node-1 10.78.1.2

Both ends of a wire have a token bucket. The namespaces, as in namespaces.py, end with this process, and so do the
wires: each reads its standard input, which is a pipe from here.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from benchmarks.diloco_link_sides.namespaces import StarError, make_holder

RUN_ADDRESS = "10.79.0.1"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
_LARGEST_PACKET = 65_535


class LossyStar:
    """`with LossyStar(["node-0"], mbit=200, loss=0.05) as star: Popen([*star.enter("node-0"), ...])`."""

    def __init__(self, nodes: Sequence[str], mbit: float, loss: float) -> None:
        if os.geteuid() != 0:
            raise StarError("network namespaces need root, and this is not: run it with sudo")
        self._nodes, self._mbit, self._loss = list(nodes), mbit, loss
        self._stack = ExitStack()
        self._pids: dict[str, int] = {}

    def __enter__(self) -> LossyStar:
        with ExitStack() as stack:
            for name in ("run", *self._nodes):
                self._pids[name] = stack.enter_context(make_holder()).pid
                _run(*self.enter(name), "ip", "link", "set", "lo", "up")
            _run(*self.enter("run"), "ip", "address", "add", f"{RUN_ADDRESS}/32", "dev", "lo")
            for index, name in enumerate(self._nodes):
                words = [self._pids["run"], self._pids[name], index, self._mbit, self._loss]
                wire = subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.diloco_link_sides.wires", *map(str, words)],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                )  # fmt: skip
                stack.callback(wire.wait)
                stack.callback(wire.kill)
                if wire.stdout is None or wire.stdout.readline() != "up\n":
                    raise StarError(f"the wire to {name} cannot be made: this needs root, /dev/net/tun, ip and tc")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def address(self, name: str) -> str:
        return RUN_ADDRESS if name == "run" else f"10.78.{self._nodes.index(name)}.2"

    def enter(self, name: str) -> list[str]:
        """Return the words before a command that run it at an end; it dies with this process at the latest."""
        return ["nsenter", f"--net=/proc/{self._pids[name]}/ns/net", "--", "setpriv", "--pdeathsig", "KILL"]


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise StarError(f"{' '.join(argv)}: {done.stderr.strip()}")


def _tun(pid: int, name: str, own: str, peer: str, mbit: float) -> int:
    """Enter the network namespace of process `pid`, and return a tun device there."""
    with open(f"/proc/{pid}/ns/net", "rb") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise StarError(f"setns: {os.strerror(ctypes.get_errno())}")
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN_WITHOUT_HEADER))
    _run("ip", "address", "add", own, "peer", peer, "dev", name)
    _run("ip", "link", "set", name, "up")
    bucket = ["tbf", "rate", f"{mbit:g}mbit", "burst", "128kb", "latency", "50ms"]
    _run("tc", "qdisc", "add", "dev", name, "root", *bucket)
    return device


def wire(run_pid: int, node_pid: int, index: int, mbit: float, loss: float) -> None:
    """Carry packets between two namespaces until standard input ends; drop each with probability `loss`."""
    here, there = f"10.78.{index}.1", f"10.78.{index}.2"
    at_run = _tun(run_pid, f"to-node-{index}", here, there, mbit)
    at_node = _tun(node_pid, "eth0", there, here, mbit)
    _run("ip", "route", "add", "default", "via", here)
    print("up", flush=True)
    drawn, other = random.Random(index), {at_run: at_node, at_node: at_run}
    while True:
        ready, _, _ = select.select([at_run, at_node, 0], [], [])
        if 0 in ready:
            return
        for device in ready:
            packet = os.read(device, _LARGEST_PACKET)
            if drawn.random() >= loss:
                os.write(other[device], packet)


if __name__ == "__main__":
    run_pid, node_pid, index, mbit, loss = sys.argv[1:]
    wire(int(run_pid), int(node_pid), int(index), float(mbit), float(loss))
