"""A copy of a run's weight store in a bucket or folder that fsspec reaches: s3://, gs://, az://, file://.

    URL/run_id, URL/chunks/<sha256>, URL/manifests/v000012.manifest

The layout is the store's own. A URL belongs to one run: what no version of that run names any more is removed there.
Drivers of the clouds are extras; each reads the credentials where its own command line does.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

from composer_prime.errors import ConfigError, UnwritableError
from composer_prime.run.weights import is_chunk_name

DRIVERS = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "file": "", "memory": ""}
"""The extra of each scheme; empty where fsspec itself has the driver."""
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile of ~/.aws (AWS_PROFILE if not the default one)",
    "gcs": "GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`",
    "azure": "AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""Where the driver of each extra looks for them."""
_NO_CREDENTIALS = {
    "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError",
    "CredentialUnavailableError",
}  # fmt: skip
"""What botocore, google.auth and azure.identity raise without any."""
_TIMES = ("LastModified", "last_modified", "mtime", "created")
"""Where drivers say when an object was written."""
_MANIFEST = re.compile(r"v([0-9]{6,12})\.manifest")


class Bucket:
    """Blocks: call it in threads."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError if `url` does not name a bucket, or its driver is not installed or set up."""
        scheme, colon, path = url.partition("://")
        if not colon or not path.strip("/") or scheme not in DRIVERS or "::" in url:
            known = ", ".join(f"{name}://" for name in DRIVERS if name != "memory")
            raise ConfigError(f"{url!r} is not a bucket for weights; expected one of {known} and a path")
        import fsspec

        try:
            self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except ImportError as error:
            raise ConfigError(
                f"{url} needs the extra {DRIVERS[scheme]!r} ({error}): pip install 'composer-prime[{DRIVERS[scheme]}]'"
            ) from None
        except Exception as error:  # Each driver has a tree of its own.
            where = _CREDENTIALS.get(DRIVERS[scheme])
            remedy = f"set {where}, or give another URL" if where else "give another URL"
            raise ConfigError(f"{url} cannot be opened ({type(error).__name__}: {error}): {remedy}") from error
        self.url = url.rstrip("/")
        self._root = root.rstrip("/")
        self._renames = scheme == "file"
        self._credentials = _CREDENTIALS.get(DRIVERS[scheme], "")

    def chunk(self, sha256: str, offset: int, size: int) -> bytes | None:
        """Return up to `size` bytes of a chunk from `offset`; None when there is no such chunk. Raises OSError."""
        if not is_chunk_name(sha256):
            return None
        try:
            with self._as_os_error("read"):
                return self._fs.cat_file(f"{self._root}/chunks/{sha256}", start=offset, end=offset + size)
        except FileNotFoundError:
            return None
        except OSError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EINVAL:
                return b""  # S3: no byte there, the chunk ends before
            raise

    def claim(self, run_id: str) -> None:
        """Note that the URL is this run's, after trying each right with an object that is removed again.

        On a disk what a killed push left unfinished is removed: one push at a time writes there.

        Raises ConfigError when it is another run's, UnwritableError without the rights, OSError when it is not reached.
        """
        self._try_rights(f"{self._root}/probe-{run_id}")
        path = f"{self._root}/run_id"
        with self._as_os_error("read"):
            held = self._fs.cat_file(path).decode().strip() if self._fs.exists(path) else None
        if held not in (None, run_id):
            raise ConfigError(
                f"{self.url} holds the weights of run {held!r}, this is run {run_id!r}: give each run a URL"
            )
        self._write(path, run_id.encode())
        if self._renames:
            for folder in ("chunks", "manifests"):
                for name, _ in self._listed(folder):
                    if name.endswith(".partial"):
                        self._remove(f"{self._root}/{folder}/{name}")

    def _try_rights(self, path: str) -> None:
        """Raise UnwritableError with the first missing right.

        What is absent is not asked for: S3 answers as without the right to read where that to list is missing.
        """
        self._write(path, b"probe")
        try:
            with self._as_os_error("list"):
                self._fs.ls(self._root, detail=False)
            with self._as_os_error("read"):
                self._fs.cat_file(path)
        except OSError:
            with suppress(OSError):
                self._remove(path)
            raise
        self._remove(path)

    def chunk_sizes(self) -> dict[str, int]:
        """Return the bytes of every chunk, by sha256. Raises OSError."""
        return {name: int(entry["size"] or 0) for name, entry in self._listed("chunks") if is_chunk_name(name)}

    def chunk_times(self) -> dict[str, float]:
        """Return when each chunk was written, Unix seconds, where the driver says that. Raises OSError."""
        times = {}
        for name, entry in self._listed("chunks"):
            written = next((entry[key] for key in _TIMES if entry.get(key) is not None), None)
            if is_chunk_name(name) and isinstance(written, int | float | datetime):
                times[name] = written.timestamp() if isinstance(written, datetime) else float(written)
        return times

    def versions(self) -> list[int]:
        """Return the versions whose manifest is there, ascending. Raises OSError."""
        matches = (_MANIFEST.fullmatch(name) for name, _ in self._listed("manifests"))
        return sorted(int(match[1]) for match in matches if match)

    def manifest(self, version: int) -> bytes:
        """Return a version's signed manifest. Raises OSError."""
        with self._as_os_error("read"):
            return self._fs.cat_file(f"{self._root}/manifests/v{version:06d}.manifest")

    def put_chunk(self, sha256: str, data: bytes) -> None:
        self._write(f"{self._root}/chunks/{sha256}", data)

    def put_manifest(self, version: int, signed: bytes) -> None:
        self._write(f"{self._root}/manifests/v{version:06d}.manifest", signed)

    def remove_chunk(self, sha256: str) -> None:
        self._remove(f"{self._root}/chunks/{sha256}")

    def remove_manifest(self, version: int) -> None:
        self._remove(f"{self._root}/manifests/v{version:06d}.manifest")

    def _listed(self, folder: str) -> list[tuple[str, dict[str, Any]]]:
        with suppress(FileNotFoundError), self._as_os_error("list"):
            entries = self._fs.ls(f"{self._root}/{folder}", detail=True)
            return [(entry["name"].rpartition("/")[2], entry) for entry in entries]
        return []

    def _write(self, path: str, data: bytes) -> None:
        """Write an object whole. A bucket shows no part of it; on a disk it comes by a rename."""
        try:
            with self._as_os_error("write"):
                if not self._renames:
                    self._fs.pipe_file(path, data)
                    return
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
                self._fs.pipe_file(f"{path}.partial", data)
                self._fs.mv(f"{path}.partial", path)
        except FileNotFoundError as error:
            raise OSError(f"{self.url}: cannot write: there is no such bucket or disk ({error})") from error

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError), self._as_os_error("delete"):
            self._fs.rm_file(path)

    @contextmanager
    def _as_os_error(self, right: str) -> Iterator[None]:
        """Give a driver's error the form of the standard library's, with the bucket's name."""
        try:
            yield
        except FileNotFoundError:
            raise
        except PermissionError as error:
            raise UnwritableError(
                f"{self.url}: no right to {right} ({error}); give these credentials the rights to list, read, write "
                "and delete there, or another URL"
            ) from error
        except Exception as error:  # Each driver has a tree of its own.
            if type(error).__name__ in _NO_CREDENTIALS and self._credentials:
                raise UnwritableError(f"{self.url}: no credentials ({error}): set {self._credentials}") from error
            raise OSError(f"{self.url}: cannot {right}: {type(error).__name__}: {error}") from error
