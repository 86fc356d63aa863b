"""Invites, and the command that uses them."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import zmq
from zmq.utils import z85

from composer_prime.run.keys import RunKeys
from composer_prime.wire.enrollment import Invite, release
from composer_prime.wire.node_messages import PROTOCOL

MACHINE = "no GPU, 2 cores"


def invite_for(keys: RunKeys, address: str = "127.0.0.1:1", *, uses: int = 1, valid_s: float = 1000.0) -> Invite:
    """An invite that the run has noted."""
    public, secret = zmq.curve_keypair()
    keys.registry.invite(public, uses=uses, expires=time.time() + valid_s)
    return Invite(
        addresses=[address.removeprefix("tcp://")],
        server=z85.decode(keys.curve("server").public),
        secret=z85.decode(secret),
        verify_key=keys.verifier().public_bytes_raw(),
        run_id="run-1",
        release=release(),
        protocol=PROTOCOL,
        expires=int(time.time() + valid_s),
    )


@contextlib.asynccontextmanager
async def joining(invite: Invite, state: Path, *words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`inference join` on a CPU, with its standard error in a pipe; killed at the end."""
    command = ["-m", "inference.main", "join", invite.text(), "--state-dir", str(state), "--threads", "1", *words]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, "--device", "cpu", stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
