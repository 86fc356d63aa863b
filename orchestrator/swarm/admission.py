"""Admit keys to the node port, and answer nodes that join by an invite.

    handshake --key--> is_admitted: the run's shared node key, an invite's, that of a node that enrolled, an auditor's
    Enroll --> registry: count the use, record key, name and machine --> Enrolled: model files, newest version, settings
    ChunkRequest of a model file --> ServedFiles.chunk(): read where the model folder lies, nothing is copied

The list of model files is hashed and signed at the first Enroll. It has weights only where versions are adapters: every
other version is whole in the weight store.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import struct
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from composer_prime.config import Config
from composer_prime.errors import ComposerError, ConfigError, InviteError
from composer_prime.model_source import present_model, weight_files
from composer_prime.run.keys import RunKeys
from composer_prime.run.node_registry import RegisteredNode
from composer_prime.run.weights import CHUNK_BYTES, ChunkRef, ModelFile, ModelFiles, sign
from composer_prime.wire.enrollment import NAME_RULE, NODE_NAME, key_proof, other_release, release
from composer_prime.wire.node_messages import PROTOCOL, Dismissed, Enroll, Enrolled

logger = logging.getLogger(__name__)

_SMALL_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(?<!\.index)\.(json|jinja|txt|model)")
_SETTINGS = {
    "engine", "dtype", "max_concurrent", "local", "vllm", "heartbeat_s", "lost_after_s", "connect_timeout_s",
}  # fmt: skip
"""Of [inference]; the others are of the run's own machines."""
_OWN_SETTINGS = {"engine": {"settings"}, "vllm": {"tensor_parallel", "extra_args"}}
"""A node counts its own GPUs, and takes no command line or code from elsewhere."""
_TURNED_AWAY_S = 60.0
"""For a key whose message delayed those of all others."""


class ServedFiles:
    """The model folder's files, signed and read for nodes that enroll."""

    def __init__(self, config: Config, keys: RunKeys, run_id: str, model_dir: Path) -> None:
        self._config = config
        self._keys = keys
        self._run_id = run_id
        self._model_dir = model_dir
        self._hashing = asyncio.Lock()
        self._signed = b""
        self._places: dict[str, tuple[Path, int, int]] = {}
        """File, offset and bytes of each chunk."""

    async def signed(self) -> bytes:
        """Return the signed list of files. Raises ComposerError or OSError."""
        async with self._hashing:  # Nodes wait here without a thread.
            self._signed = self._signed or await asyncio.to_thread(self._sign)
        return self._signed

    def chunk(self, sha256: str, offset: int, size: int) -> bytes | None:
        """Return up to `size` bytes; None for an unknown chunk. Raises OSError."""
        place = self._places.get(sha256)
        if place is None:
            return None
        path, start, length = place
        with path.open("rb") as file:
            file.seek(start + offset)
            return file.read(max(0, min(size, length - offset)))

    @property
    def num_bytes(self) -> int:
        """Bytes of all chunks; 0 before the first node enrolled."""
        return sum(size for _, _, size in self._places.values())

    def _sign(self) -> bytes:
        paths = [path for path in sorted(self._model_dir.iterdir()) if _SMALL_FILE.fullmatch(path.name)]
        if self._config.trainer.lora is not None and (base := present_model(self._config.model.path)):
            index = base / "model.safetensors.index.json"
            paths += [*weight_files(base), *([index] if index.is_file() else [])]
        files = [ModelFile(path.name, self._chunks(path)) for path in paths if path.is_file()]
        return sign(ModelFiles(run_id=self._run_id, files=files), self._keys.signer())

    def _chunks(self, path: Path) -> list[ChunkRef]:
        refs, offset = [], 0
        with path.open("rb") as file:
            while piece := file.read(CHUNK_BYTES):
                ref = ChunkRef(hashlib.sha256(piece).hexdigest(), len(piece))
                self._places[ref.sha256] = path, offset, ref.size
                refs.append(ref)
                offset += ref.size
        return refs


class Admission:
    """Used by several threads."""

    def __init__(self, config: Config, keys: RunKeys, run_id: str, model_dir: Path) -> None:
        """`model_dir`: has config.json, tokenizer and chat template."""
        self.revoked: dict[bytes, str] = {}
        """Reasons by key, as last read."""
        self._turned_away: dict[bytes, float] = {}
        """Until when keys may not connect, monotonic seconds."""
        self._config = config
        self._keys = keys
        self._run_id = run_id
        self.model = ServedFiles(config, keys, run_id, model_dir)
        self._shared_key = b""
        self._auditor_key: bytes | None = None
        self._nodes: dict[bytes, RegisteredNode] = {}
        """By key, revoked ones too, for when the registry cannot be read."""
        self._invites: Collection[bytes] = ()
        """Keys of the open ones, as last read."""
        self._reading = threading.Lock()

    # -- keys ----------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Raise ConfigError when the run's keys are missing."""
        self._shared_key = self._keys.curve("node").public
        if self._config.orchestrator.audit.enabled:
            self._auditor_key = self._keys.curve("trainer").public
        self.refresh()

    def refresh(self) -> None:
        """Learn what other processes changed, if the registry can be read."""
        try:
            self._read()
        except ConfigError as error:
            logger.error("nodes are those known before: %s", error)

    def _read(self) -> None:
        """Raise ConfigError when the registry cannot be read."""
        with self._reading:  # Else an older reading might replace a newer one.
            nodes, self._invites = self._keys.registry.list(), self._keys.registry.open_invites()
            self._nodes = {node.key: node for node in nodes}
            self.revoked = {node.key: node.reason for node in nodes if node.revoked is not None}

    def is_admitted(self, key: bytes) -> bool:
        """Return whether a connection may send anything.

        Raises ConfigError for a key that is turned away, or not known while the registry cannot be read.
        """
        if time.monotonic() < self._turned_away.get(key, 0.0):
            raise ConfigError(f"{self.name_of(key) or 'an invite'} is turned away for {_TURNED_AWAY_S:g} s")
        if self.is_auditor(key) or self.is_node(key) or key in self._invites:
            return True
        self._read()
        return self.is_node(key) or key in self._invites

    def turn_away(self, key: bytes) -> None:
        """Let a key make no connection for a while, unless it is the shared one."""
        if self.is_own(key):
            who = self.name_of(key) or "an invite"
            logger.warning("%s is turned away for %g s: its messages delay those of others", who, _TURNED_AWAY_S)
            self._turned_away[key] = time.monotonic() + _TURNED_AWAY_S

    def is_node(self, key: bytes) -> bool:
        """Return whether `key` may do more than enroll."""
        return key == self._shared_key or (key in self._nodes and key not in self.revoked)

    def is_auditor(self, key: bytes) -> bool:
        """Return whether `key` is the trainer's, in a run with audits: it may judge nodes, and is none."""
        return key == self._auditor_key

    def name_of(self, key: bytes) -> str | None:
        node = self._nodes.get(key)
        return None if node is None else node.name

    def is_own(self, key: bytes) -> bool:
        """Return whether `key` is not the run's shared one."""
        return key != self._shared_key

    def name_refusal(self, key: bytes, node_id: str) -> str | None:
        """Return why `key` may not speak for `node_id`: a name belongs to who enrolled with it."""
        own = self.name_of(key)
        if own is not None:
            if own == node_id:
                return None
            return f"the key of node {own!r} says that it is {node_id!r}: start it as `inference join` does"
        if node_id not in {node.name for node in self._nodes.values()}:
            return None
        return f"the name {node_id!r} belongs to a node with a key of its own: give this one another (--name)"

    # -- answers to nodes ----------------------------------------------------------------------------------------------

    async def answer(
        self, key: bytes, message: Enroll, manifest: bytes, taken_names: Collection[str] = ()
    ) -> Enrolled | Dismissed | None:
        """Enroll the sender, whose connection has proven `key`: an invite's, or its own.

        `manifest`: the newest, signed. `taken_names`: besides those in the registry. Returns None for a fault of this
        machine: a node without an answer asks again.
        """
        try:
            node = await asyncio.to_thread(self._enroll, key, message, taken_names)
            model = await self.model.signed()
        except InviteError as error:
            return Dismissed(reason=str(error), may_return=False)
        except (ComposerError, OSError) as error:
            logger.error("node %s cannot be enrolled now, it will ask again: %s", message.name, error)
            return None
        logger.info("node %s enrolled: %s", node.name, message.machine)
        inference = self._config.inference.model_dump_json(include=_SETTINGS, exclude=_OWN_SETTINGS)
        return Enrolled(
            node_id=node.name,
            model=model,
            manifest=manifest,
            max_context=self._config.model.max_context,
            inference=inference.encode(),
        )

    def _enroll(self, key: bytes, message: Enroll, taken_names: Collection[str]) -> RegisteredNode:
        """Raise InviteError when the sender is refused."""
        run, node = (release(), PROTOCOL), (message.release, message.protocol)
        if run != node:
            raise InviteError(other_release(run, node))
        if not NODE_NAME.fullmatch(message.name):
            raise InviteError(f"the name {message.name!r} is not {NAME_RULE}: choose another with --name")
        if message.run_id != self._run_id:
            raise InviteError(
                f"the invite is of run {message.run_id!r}, here is run {self._run_id!r}: make one with "
                "`orchestrator invite RUN_DIR` for this run"
            )
        if key == self._shared_key:
            raise InviteError("the run's shared node key cannot enroll a node: join with an invite")
        if key != message.key and self._keys.registry.is_known(key):
            raise InviteError("a node may enroll only itself: join with an invite")
        if message.key == self._shared_key or self._keys.registry.is_invite(message.key):
            raise InviteError("that key is not a node's own: remove its state folder and join again")
        if not self._is_proven(key, message):
            raise InviteError(
                f"node {message.name} does not hold the key that it names: join with a fresh state folder"
            )
        node = self._keys.registry.enroll(key, message.key, message.name, message.machine, taken_names)
        self.refresh()
        return node

    def _is_proven(self, key: bytes, message: Enroll) -> bool:
        with suppress(ValueError, KeyError, struct.error):  # What is no key does not decode.
            return hmac.compare_digest(message.proof, key_proof(self._keys.curve("server").secret, message.key, key))
        return False
