"""`orchestrator weights RUN_DIR`: give out a run's weights, beside training and not through the gateway.

    RUN_DIR/weights --HTTP, Range--> nodes                 --listen HOST:PORT
                    --chunks, then manifest--> bucket      --push URL

It reads the weight store only, in a process of its own, so a fleet that pulls gigabytes delays no token. A bucket gets
each version's chunks before its manifest; chunks that are there are not sent again. What the run's store no longer
names is removed from the bucket after `_SPARED_S`, so that a slow node can end its pull.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import logging
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from composer_prime.address import Address, tcp_address
from composer_prime.errors import ComposerError, ConfigError, CorruptWeightsError
from composer_prime.monitor.metrics_file import MetricsFile
from composer_prime.run.bucket import Bucket
from composer_prime.run.keys import RunKeys
from composer_prime.run.process import end_with_parent
from composer_prime.run.retry import backoff_s
from composer_prime.run.run_dir import RunDir, read_run_id
from composer_prime.run.weights import CHUNK_BYTES, ChunkRef, Manifest, WeightStore, open_signed
from orchestrator.event_loop import until_signal
from orchestrator.swarm.weight_server import WeightServer

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_UPLOADS_AT_ONCE = 4
_SPARED_S = 600.0
_FIRST_RETRY_S, _LONGEST_RETRY_S = 1.0, 60.0


class BucketPush:
    """Brings the newest version of a store to a bucket. Blocks: call it in a thread, one call at a time."""

    def __init__(
        self,
        store: WeightStore,
        bucket: Bucket,
        decode: Callable[[bytes], Manifest],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.bytes_pushed = 0
        self.version: int | None = None
        """The version pushed last."""
        self.stopped = threading.Event()
        """Set to begin no further chunk."""
        self._store = store
        self._bucket = bucket
        self._decode = decode
        self._clock = clock
        self._pushed = b""
        """The manifest pushed last."""
        self._unnamed_since: dict[str, float] = {}
        """By chunk in the bucket, of `clock`."""

    def push_newest(self) -> bool:
        """Push the store's newest version, unless that is done. Return whether there was something to push.

        Raises CorruptWeightsError when a chunk is gone from the store (a newer version is there by then) or altered,
        OSError when the bucket fails. What was sent stays, and the next call continues from there.
        """
        versions = self._store.versions()
        signed = self._store.manifest(versions[-1]) if versions else b""
        if not versions or signed == self._pushed:
            return False
        manifest = self._decode(signed)
        held = self._bucket.chunk_sizes()
        missing = [ref for ref in manifest.refs if held.get(ref.sha256) != ref.size]
        for start in range(0, len(missing), _UPLOADS_AT_ONCE):
            if self.stopped.is_set():
                return False
            chunks = {ref.sha256: self._chunk(ref) for ref in missing[start : start + _UPLOADS_AT_ONCE]}
            self._bucket.put_chunks(chunks)
            self.bytes_pushed += sum(map(len, chunks.values()))
        self._bucket.put_manifest(manifest.version, signed)
        self._pushed, self.version = signed, manifest.version
        try:
            self._prune(set(held))
        except (ComposerError, OSError) as error:
            logger.warning("old weights stay in the bucket: %s", error)
        return True

    def _chunk(self, ref: ChunkRef) -> bytes:
        data = self._store.chunk(ref.sha256, 0, CHUNK_BYTES)
        if data is None or hashlib.sha256(data).hexdigest() != ref.sha256:
            raise CorruptWeightsError(
                f"chunk {ref.sha256} of {self._store.root} is {'gone' if data is None else 'altered'}: it is not pushed"
            )
        return data

    def _prune(self, held: set[str]) -> None:
        """Remove manifests that the store no longer has, and chunks that it has not named for `_SPARED_S`."""
        versions, named = self._store.versions(), set[str]()
        for version in versions:
            try:
                named |= {ref.sha256 for ref in self._decode(self._store.manifest(version)).refs}
            except FileNotFoundError:  # Pruned since it was listed.
                continue
        for version in self._bucket.versions():
            if version not in versions:
                self._bucket.remove_manifest(version)
        now = self._clock()
        self._unnamed_since = {sha256: self._unnamed_since.get(sha256, now) for sha256 in held - named}
        for sha256, since in self._unnamed_since.items():
            if now - since >= _SPARED_S:
                self._bucket.remove_chunk(sha256)


def main(words: list[str]) -> int:
    """Run until SIGINT or SIGTERM; with --once until the newest version is pushed. Raises ConfigError."""
    options = _parser().parse_args(words)
    run_dir = RunDir(options.run_dir.absolute())
    run_id = read_run_id(run_dir)
    address = tcp_address(options.listen, "--listen", bind=True, scheme="") if options.listen else None
    if address is None and options.push is None:
        raise ConfigError("nothing to do: give --listen HOST:PORT to serve the weights, --push URL to copy them")
    if options.once and (options.push is None or address is not None):
        raise ConfigError("--once ends after one push: give it with --push URL and without --listen")
    end_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    push = None
    if options.push is not None:
        bucket = Bucket(options.push)
        bucket.claim(run_id)
        verifier = RunKeys(run_dir.keys).verifier()
        decode = lambda raw: open_signed(raw, verifier, run_id=run_id)
        push = BucketPush(WeightStore(run_dir.weights), bucket, decode)
    return asyncio.run(until_signal(_serve(run_dir, address, push, once=options.once)))


async def _serve(run_dir: RunDir, address: Address | None, push: BucketPush | None, *, once: bool) -> None:
    server = None
    try:
        if address is not None:
            server = WeightServer(WeightStore(run_dir.weights))
            await server.start(address)
            print(f"serving {run_dir.weights} at {server.url}", flush=True)
        if push is not None:
            await _keep_pushing(push, MetricsFile(run_dir.metrics, "weights"), once=once)
        else:
            await asyncio.Event().wait()
    finally:
        if push is not None:
            push.stopped.set()
        if server is not None:
            await server.close()


async def _keep_pushing(push: BucketPush, metrics: MetricsFile, *, once: bool) -> None:
    """Push each new version. A bucket that fails is tried again, later each time; with `once` the error is raised."""
    failures = 0
    while True:
        pause_s = _LOOK_EVERY_S
        before, start = push.bytes_pushed, time.monotonic()
        try:
            if await _in_daemon_thread(push.push_newest) and push.version is not None:
                logger.info("weights v%s pushed: %.3f MB in %.2f s", push.version,
                            (push.bytes_pushed - before) / 1e6, time.monotonic() - start)  # fmt: skip
                metrics.log(push.version, {"weights/pushed_bytes": push.bytes_pushed})
            failures = 0
        except (ComposerError, OSError) as error:
            if once:
                raise
            pause_s = backoff_s(failures, first_s=_FIRST_RETRY_S, longest_s=_LONGEST_RETRY_S)
            failures += 1
            logger.error("weights are not pushed, again in %g s: %s", pause_s, error)
        if once:
            return
        await asyncio.sleep(pause_s)


async def _in_daemon_thread(call: Callable[[], bool]) -> bool:
    """Return what `call` returns. The process ends without it: a driver may hang."""
    answer: Future[bool] = Future()
    answer.set_running_or_notify_cancel()

    def run() -> None:
        try:
            answer.set_result(call())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="push", daemon=True).start()
    return await asyncio.wrap_future(answer)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="orchestrator weights",
        allow_abbrev=False,
        description="Serve the weights of a run on this machine over HTTP, copy them to a bucket, or both.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's directory; it may still be training")
    parser.add_argument("--listen", metavar="HOST:PORT", help="serve over HTTP, read-only; port 0 chooses a free one")
    parser.add_argument("--push", metavar="URL", help="copy to a bucket or folder: s3://, gs://, az://, file://")
    parser.add_argument("--once", action="store_true", help="push the newest version and stop")
    return parser
