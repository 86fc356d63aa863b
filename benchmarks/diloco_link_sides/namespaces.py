"""Linux network namespaces in a star, each end behind a token bucket, gone when the processes are gone.

    peer a ──┐
             ├── switch (forwards) ── rendezvous          every arrow is a veth pair, tbf on both of its ends
    peer b ──┘

The namespaces have no names and no files. Each is held by a process whose standard input is a pipe from this one, and
the kernel takes it down with its links when that process ends. Processes in them are killed with this process
(PR_SET_PDEATHSIG). So nothing is left behind, whichever way the benchmark ends, SIGKILL included.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

TOOLS = ("unshare", "nsenter", "setpriv", "ip", "tc")
BURST_S = 0.004
"""A bucket holds what its rate passes in this time: a kernel tick at 250 Hz."""
MIN_BURST_BYTES = 32_768
QUEUE_S = 0.05
"""Longest that a packet waits in a bucket's queue before it is dropped."""


class StarError(RuntimeError):
    """The namespaces cannot be made here; the message has the reason and the remedy."""


class Star:
    """`with Star(("a", "b", "r")) as star: star.shape(100); star.start("a", [...])`."""

    def __init__(self, ends: Sequence[str]) -> None:
        """Raises StarError without root or the tools."""
        if os.geteuid() != 0:
            raise StarError("network namespaces and tc need root, and this is not: run it with sudo")
        if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
            raise StarError(f"{', '.join(missing)} not found: install util-linux and iproute2")
        self.ends = tuple(ends)
        self._stack = ExitStack()
        self._holders: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Star:
        with ExitStack() as stack:
            for name in ("switch", *self.ends):
                self._holders[name] = stack.enter_context(make_holder())
                self._in(name, "ip", "link", "set", "lo", "up")
            self._in("switch", "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
            for name in self.ends:
                self._connect(name)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def address(self, end: str) -> str:
        return f"10.77.{self.ends.index(end)}.2"

    def shape(self, mbit: float | None) -> None:
        """Let every link carry `mbit` megabits a second each way; None takes the buckets away."""
        for name in self.ends:
            for inside, link in (("switch", f"to-{name}"), (name, "eth0")):
                if mbit is None:
                    self._in(inside, "tc", "qdisc", "delete", "dev", link, "root")
                    continue
                burst = max(MIN_BURST_BYTES, int(mbit * 1e6 / 8 * BURST_S))
                bucket = ["tbf", "rate", f"{mbit:g}mbit", "burst", str(burst), "latency", f"{QUEUE_S * 1e3:g}ms"]
                self._in(inside, "tc", "qdisc", "replace", "dev", link, "root", *bucket)

    def start(self, end: str, argv: Sequence[str], log: Path, env: dict[str, str]) -> subprocess.Popen[str]:
        """Run `argv` at `end`, with pipes to its standard input and output; it dies with this process at the latest."""
        with log.open("ab") as file:
            return subprocess.Popen(
                [*self._enter(end), "setpriv", "--pdeathsig", "KILL", *argv],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True, env=env,
            )  # fmt: skip

    def _connect(self, name: str) -> None:
        index, link = self.ends.index(name), f"to-{name}"
        pid = str(self._holders[name].pid)
        self._in("switch", "ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", pid)
        self._in("switch", "ip", "address", "add", f"10.77.{index}.1/24", "dev", link)
        self._in("switch", "ip", "link", "set", link, "up")
        self._in(name, "ip", "address", "add", f"10.77.{index}.2/24", "dev", "eth0")
        self._in(name, "ip", "link", "set", "eth0", "up")
        self._in(name, "ip", "route", "add", "default", "via", f"10.77.{index}.1")

    def _in(self, name: str, *argv: str) -> None:
        done = subprocess.run([*self._enter(name), *argv], capture_output=True, text=True, timeout=20)
        if done.returncode:
            raise StarError(
                f"{' '.join(argv)}: {done.stderr.strip()}; the kernel must have CONFIG_NET_NS, CONFIG_VETH and "
                "CONFIG_NET_SCH_TBF"
            )

    def _enter(self, name: str) -> list[str]:
        return ["nsenter", f"--net=/proc/{self._holders[name].pid}/ns/net", "--"]


class _Holder(subprocess.Popen):
    def __exit__(self, *_: object) -> None:
        self.kill()
        super().__exit__(None, None, None)


def make_holder() -> subprocess.Popen[str]:
    """A process in a new network namespace that ends when its standard input does."""
    holder = _Holder(
        ["unshare", "--net", "--", "sh", "-c", "echo held; exec cat"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    if holder.stdout.readline() != "held\n":
        raise StarError(f"no network namespace can be made here: {holder.stderr.read().strip()}")
    return holder
