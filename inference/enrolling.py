"""From an invite to a model folder on this disk: enroll, pull model files and the newest version.

    STATE/<run>/node-0.curve      this node's own pair, drawn once; node-0.enrolled: the run knows it
    STATE/<run>/node-0/<sha256>   chunks of versions; those that a killed process pulled are used on
    STATE/<run>/model/            config.json, tokenizer, model.safetensors: what an engine starts from

Every byte is checked against what the run signed. The invite is used once, then the own pair.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from composer_prime.errors import ConfigError, DeadlineError, InviteError, LostRunError, WireError
from composer_prime.run.keys import ClientKeys, CurvePair, write_secret
from composer_prime.run.node_registry import utc_text
from composer_prime.wire.enrollment import Invite, key_proof, release
from composer_prime.wire.node_messages import PROTOCOL, Dismissed, Enroll, Enrolled, ToNode
from composer_prime.wire.sockets import dealer, frames_of

logger = logging.getLogger(__name__)

_ADDRESS_S = 10.0
_RETRY_S = 1.0
_FIRST_S = 60.0
_LOG_S = 60.0


class NodeState:
    """The folder of one run on this machine, and the files of one of its nodes."""

    def __init__(self, root: Path, invite: Invite, slot: int = 0) -> None:
        """`slot`: which node of the machine."""
        name = re.sub(r"[^A-Za-z0-9_-]", "_", invite.run_id)[:100]
        self.path = root / f"{name}-{hashlib.sha256(invite.server).hexdigest()[:8]}"
        self.invite = invite
        self.model = self.path / "model"
        self.chunks = self.path / f"node-{slot}"
        self.enrolled = self.path / f"node-{slot}.enrolled"

    def keys(self) -> ClientKeys:
        """Return the gateway's key and this node's own pair, drawn at the first call. Raises OSError."""
        path = self.chunks.with_suffix(".curve")
        write_secret(path, b"".join(zmq.curve_keypair()))
        return ClientKeys(self.invite.keys.server_public, CurvePair.read(path))

    @contextmanager
    def locked(self, name: str, refusal: str | None = None) -> Iterator[None]:
        """Hold a lock of this folder. Raises ConfigError with `refusal`; None waits."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = (self.path / f"{name}.lock").open("w")
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be written ({error.strerror}): pass --state-dir with a folder that can"
            ) from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if refusal is not None else 0))
            except BlockingIOError:
                raise ConfigError(refusal) from None
            yield


async def enroll(state: NodeState, name: str, machine: str, wait_s: float) -> tuple[str, Enrolled]:
    """Make this node known to the run, or ask again under its own key. Tries all addresses.

    Return the address that answered, HOST:PORT, and the answer.
    A known machine tries for `wait_s`, any other for a minute. Raises InviteError or LostRunError.
    """
    invite, keys, enrolled = state.invite, state.keys(), state.enrolled.exists()
    if not enrolled and time.time() > invite.expires:
        raise InviteError(
            f"the invite expired at {utc_text(invite.expires)}, here it is {utc_text(time.time())}: make another with "
            "`orchestrator invite RUN_DIR`"
        )
    message = Enroll(
        run_id=invite.run_id, release=release(), protocol=PROTOCOL, key=keys.own.public, name=name, machine=machine
    )
    patience_s = wait_s if enrolled else min(wait_s, _FIRST_S)
    deadline, log_at = time.monotonic() + patience_s, time.monotonic() + _LOG_S
    faults: dict[str, str] = {}
    while True:
        address, answer = await _first_answer(state, message, deadline, faults, is_known=enrolled)
        if answer is not None:
            state.enrolled.touch()
            return address, answer
        if address and enrolled:
            raise InviteError(
                f"the run at {address} knows neither this invite nor this node (used up, expired, withdrawn or turned "
                "away): make another with `orchestrator invite RUN_DIR --nodes N` "
                "(and pass another --state-dir, if this machine joined before)"
            )
        if address:  # The invite is spent, perhaps by this node itself, whose answer was lost.
            enrolled = True
            continue
        said = "; ".join(faults.values())
        if time.monotonic() >= deadline:
            raise LostRunError(
                f"tried for {patience_s:g} s to reach run {invite.run_id}: {said}. Is the run up, and is that port "
                "open to this machine?"
            )
        if time.monotonic() > log_at:
            log_at = time.monotonic() + _LOG_S
            logger.warning("trying to reach run %s for %g s in all (--wait): %s", invite.run_id, patience_s, said)
        await asyncio.sleep(_RETRY_S)


async def _first_answer(
    state: NodeState, message: Enroll, deadline: float, faults: dict[str, str], *, is_known: bool
) -> tuple[str, Enrolled | None]:
    """Return the first address that answers as `_ask` does, and the answer; no address when none does.

    `faults` gets why others did not. `is_known`: ask under the node's own key, not the invite's.
    """
    own = state.keys()
    keys = own if is_known else state.invite.keys
    proof = key_proof(own.own.secret, own.server_public, keys.own.public)
    message = msgspec.structs.replace(message, proof=proof)
    for address in state.invite.addresses:
        try:
            return address, await _ask(address, keys, message, max(0.1, min(_ADDRESS_S, deadline - time.monotonic())))
        except (WireError, DeadlineError) as error:
            faults[address] = str(error)
    return "", None


async def _ask(address: str, keys: ClientKeys, message: Enroll, limit_s: float) -> Enrolled | None:
    """Send `message` to one address. Return None where the run admits no connection with these keys.

    Raises InviteError, WireError (refused for now), or DeadlineError.
    """
    context = zmq.asyncio.Context()
    socket = dealer(context, f"tcp://{address}", keys)
    events = socket.get_monitor_socket(zmq.EVENT_ALL)
    seen: set[int] = set()
    try:
        await socket.send_multipart(frames_of(msgspec.msgpack.encode(message)))
        poller = zmq.asyncio.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(events, zmq.POLLIN)
        until = time.monotonic() + limit_s
        while (left_s := until - time.monotonic()) > 0:
            ready = dict(await poller.poll(math.ceil(left_s * 1000)))
            if socket in ready:
                return _read(await socket.recv(), address)
            if events in ready:
                event = (await recv_monitor_message(events))["event"]
                seen.add(event)
                if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    return None
    finally:
        socket.disable_monitor()
        context.destroy(linger=0)
    if zmq.EVENT_HANDSHAKE_SUCCEEDED in seen:
        raise DeadlineError(f"{address} took the connection and did not answer within {limit_s:.0f} s")
    if seen & {zmq.EVENT_CONNECTED, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL}:
        raise DeadlineError(f"what listens at {address} does not hold the run's key: another run, or another program")
    raise DeadlineError(f"{address} took no connection within {limit_s:.2g} s")


def _read(raw: bytes, address: str) -> Enrolled:
    try:
        answer = msgspec.msgpack.decode(raw, type=ToNode)
    except msgspec.DecodeError as error:
        raise InviteError(
            f"{address} answered {len(raw)} bytes that are not a message ({error}): use the run's release"
        ) from None
    if isinstance(answer, Dismissed):
        raise (WireError if answer.may_return else InviteError)(f"the run at {address} refused: {answer.reason}")
    if not isinstance(answer, Enrolled):
        raise InviteError(f"{address} answered with a {type(answer).__name__}: use the run's release")
    return answer
