"""A run's model files and newest version, pulled into a folder that an engine can start from.

Both come through a VersionFolder. What is there already stays: whole files and chunks.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from composer_prime.console import GIB
from composer_prime.errors import ComposerError, CorruptWeightsError, DeadlineError, WireError
from composer_prime.event_loop import end
from composer_prime.host import free_bytes
from composer_prime.run.run_dir import write_atomic
from composer_prime.run.weights import ChunkRef, Manifest, ModelFile, open_model_files, open_signed
from composer_prime.wire.node_messages import Enrolled
from inference.enrolling import NodeState
from inference.node import GatewayLink
from inference.receiver import ChunkSource, VersionFolder
from inference.snapshot import Snapshot, save_snapshot
from inference.weight_sources import WeightSources

logger = logging.getLogger(__name__)

Pulled = TypeVar("Pulled")
_WEIGHTS = "model.safetensors"
_TRIES = 10
_RETRY_S = 1.0
_TOUCH_S = 30.0


async def pull_from_run(state: NodeState, address: str, answer: Enrolled) -> None:
    link = GatewayLink(lambda: f"tcp://{address}", state.keys())
    link.reopen()
    sources = WeightSources(link)
    sources.learn(answer.sources, address.rpartition(":")[0])
    listener = asyncio.create_task(_listen(link))
    try:
        await pull_model(sources, state, answer, link)
    finally:
        listener.cancel()
        await asyncio.gather(listener, sources.close(), return_exceptions=True)
        await asyncio.to_thread(link.close)


async def _listen(link: GatewayLink) -> None:
    while True:
        await link.receive(1.0)


async def pull_model(source: ChunkSource, state: NodeState, answer: Enrolled, link: ChunkSource | None = None) -> None:
    """Bring the newest version and the files of the model to the folder `state.model`.

    `link`: the gateway, which alone has the model's own files; None where `source` has them.
    Raises CorruptWeightsError, DeadlineError, OSError (the disk is full), WireError or SignatureError.
    """
    start, run_id = time.monotonic(), state.invite.run_id
    key = Ed25519PublicKey.from_public_bytes(state.invite.verify_key)
    manifest = open_signed(answer.manifest, key, run_id=run_id)
    wanted = _files_to_pull(open_model_files(answer.model, key, run_id=run_id).files, manifest)
    await asyncio.to_thread(state.model.mkdir, parents=True, exist_ok=True)
    await pull_files(link or source, wanted, state)
    _link_chunks(state, manifest)
    versions = await asyncio.to_thread(VersionFolder, source, state.model, kept=state.chunks)
    touching = asyncio.create_task(_keep_in_run(manifest, link))
    try:
        snapshot = await _persistently(versions, manifest.files, partial(versions.fetch, manifest))
    finally:
        await end([touching])
    logger.info(
        "weights v%d are here: %.3f MB pulled and verified in %.2f s, %.1f GiB free on that disk",
        manifest.version, versions.bytes_pulled / 1e6, time.monotonic() - start, free_bytes(state.path) / GIB,
    )  # fmt: skip
    if manifest.kind != "adapters":
        await asyncio.to_thread(_make_weight_file, snapshot, manifest, state.model)


def _files_to_pull(files: list[ModelFile], manifest: Manifest) -> list[ModelFile]:
    if manifest.kind != "adapters":
        return [file for file in files if not file.name.endswith((".safetensors", ".safetensors.index.json"))]
    if files and not any(file.name.endswith(".safetensors") for file in files):
        raise WireError(
            f"versions of run {manifest.run_id} are adapters, and its gateway has no copy of the model that they are "
            "added to: put model.path on the orchestrator's machine"
        )
    return files


async def pull_files(source: ChunkSource, files: list[ModelFile], state: NodeState) -> None:
    """Pull the model files that are not whole in the folder `state.model`.

    Raises CorruptWeightsError, OSError, or what the source raises.
    """
    held = state.path / "model-files"
    pulled = await asyncio.to_thread(VersionFolder, source, state.model, kept=held)
    for file in files:
        target = state.model / file.name
        if not await asyncio.to_thread(_is_whole, target, file):
            what = f"model file {file.name}"
            await _persistently(pulled, file.chunks, partial(pulled.pull, what, file.chunks))
            await asyncio.to_thread(_join_chunks, target, (pulled.read(ref, what) for ref in file.chunks))
            pulled.keep_only([])
    await asyncio.to_thread(shutil.rmtree, held)


def _is_whole(path: Path, file: ModelFile) -> bool:
    if not path.exists() or path.stat().st_size != file.size:
        return False
    with path.open("rb") as opened:
        return all(hashlib.sha256(opened.read(ref.size)).hexdigest() == ref.sha256 for ref in file.chunks)


def _join_chunks(target: Path, chunks: Iterable[bytes]) -> None:
    part = target.with_name(f"{target.name}.part")
    with part.open("wb") as output:
        output.writelines(chunks)
    part.replace(target)


async def _keep_in_run(manifest: Manifest, link: ChunkSource | None) -> None:
    """Ask for bytes now and then, so that the run keeps a version that comes from elsewhere."""
    while link is not None:
        for ref in [*manifest.patch[:1], *manifest.chunks[:1], *manifest.chunks[-1:]]:
            with suppress(ComposerError, OSError):
                await link.read(ref.sha256, ref.size - 1)
        await asyncio.sleep(_TOUCH_S)


async def _persistently(
    versions: VersionFolder, refs: Sequence[ChunkRef], pull: Callable[[], Awaitable[Pulled]]
) -> Pulled:
    failures, before = 0, versions.missing_bytes(refs)
    while True:
        try:
            return await pull()
        except (DeadlineError, CorruptWeightsError) as error:
            missing = versions.missing_bytes(refs)
            failures, before = 1 if missing < before else failures + 1, missing
            if failures >= _TRIES:
                raise
            logger.warning("pulling again (%d of %d without progress): %s", failures, _TRIES, error)
            await asyncio.sleep(_RETRY_S)


def _link_chunks(state: NodeState, manifest: Manifest) -> None:
    state.chunks.mkdir(parents=True, exist_ok=True)
    for ref in manifest.refs:
        for other in state.path.glob(f"node-*/{ref.sha256}"):
            with suppress(OSError):
                os.link(other, state.chunks / ref.sha256)


def _make_weight_file(snapshot: Snapshot, manifest: Manifest, folder: Path) -> None:
    """Write what an engine starts from: any version, but version 0 where that is the newest.

    The mark holds the version's state and the file's size.
    """
    mark, target = folder / ".state", folder / _WEIGHTS
    if target.exists() and mark.exists():
        state, _, size = mark.read_text().partition(" ")
        if size == str(target.stat().st_size) and (manifest.version > 0 or state == manifest.state):
            return
    partial = folder / f".{_WEIGHTS}.partial"
    mark.unlink(missing_ok=True)
    save_snapshot(snapshot, partial)
    with partial.open("rb") as file:
        os.fsync(file.fileno())  # Else the mark may outlast a power cut that the file does not.
    partial.replace(target)
    write_atomic(mark, f"{manifest.state} {target.stat().st_size}".encode())
