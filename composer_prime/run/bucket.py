"""A copy of a run's weight store in a bucket or folder that fsspec reaches: s3://, gs://, az://, file://.

    URL/run_id, URL/chunks/<sha256>, URL/manifests/v000012.manifest

The layout is the store's own. A URL belongs to one run: what no version of that run names any more is removed there.
Drivers of the clouds are extras; each reads the credentials where its own command line does.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from composer_prime.errors import ConfigError, UnwritableError
from composer_prime.run.weights import is_chunk_name

DRIVERS = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "file": "", "memory": ""}
"""The extra of each scheme; empty where fsspec itself has the driver."""
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
            raise ConfigError(
                f"{url} cannot be opened ({type(error).__name__}: {error}): set the account and credentials that this "
                "cloud's own command line reads, or give another URL"
            ) from error
        self.url = url.rstrip("/")
        self._root = root.rstrip("/")
        self._renames = scheme == "file"

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
        """Note that the URL is this run's.

        Raises ConfigError when it is another run's, UnwritableError without the rights, OSError when it is not reached.
        """
        path = f"{self._root}/run_id"
        with self._as_os_error("read"):
            held = self._fs.cat_file(path).decode().strip() if self._fs.exists(path) else None
        if held not in (None, run_id):
            raise ConfigError(
                f"{self.url} holds the weights of run {held!r}, this is run {run_id!r}: give each run a URL"
            )
        self._write({"run_id": run_id.encode()})

    def chunk_sizes(self) -> dict[str, int]:
        """Return the bytes of every chunk, by sha256. Raises OSError."""
        return {name: size for name, size in self._listed("chunks") if is_chunk_name(name)}

    def versions(self) -> list[int]:
        """Return the versions whose manifest is there, ascending. Raises OSError."""
        matches = (_MANIFEST.fullmatch(name) for name, _ in self._listed("manifests"))
        return sorted(int(match[1]) for match in matches if match)

    def manifest(self, version: int) -> bytes:
        """Return a version's signed manifest. Raises OSError."""
        with self._as_os_error("read"):
            return self._fs.cat_file(f"{self._root}/manifests/v{version:06d}.manifest")

    def put_chunks(self, chunks: Mapping[str, bytes]) -> None:
        """Write chunks by their names, at once where the driver can."""
        self._write({f"chunks/{sha256}": data for sha256, data in chunks.items()})

    def put_manifest(self, version: int, signed: bytes) -> None:
        self._write({f"manifests/v{version:06d}.manifest": signed})

    def remove_chunk(self, sha256: str) -> None:
        self._remove(f"chunks/{sha256}")

    def remove_manifest(self, version: int) -> None:
        self._remove(f"manifests/v{version:06d}.manifest")

    def _listed(self, folder: str) -> list[tuple[str, int]]:
        """Return the names and bytes of the files in a folder."""
        with suppress(FileNotFoundError), self._as_os_error("list"):
            entries = self._fs.ls(f"{self._root}/{folder}", detail=True)
            return [(entry["name"].rpartition("/")[2], int(entry["size"] or 0)) for entry in entries]
        return []

    def _write(self, objects: Mapping[str, bytes]) -> None:
        """Write objects whole, by their paths below the URL. A bucket shows no part of one; a disk renames it."""
        ending = ".partial" if self._renames else ""
        try:
            with self._as_os_error("write"):
                for path in objects if self._renames else ():
                    self._fs.makedirs(f"{self._root}/{path}".rpartition("/")[0], exist_ok=True)
                self._fs.pipe({f"{self._root}/{path}{ending}": data for path, data in objects.items()})
                for path in objects if self._renames else ():
                    self._fs.mv(f"{self._root}/{path}{ending}", f"{self._root}/{path}")
        except FileNotFoundError as error:
            raise OSError(f"{self.url}: cannot write: there is no such bucket or disk ({error})") from error

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError), self._as_os_error("delete"):
            self._fs.rm_file(f"{self._root}/{path}")

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
            if "Credential" in type(error).__name__ or type(error).__name__ == "ProfileNotFound":
                raise UnwritableError(
                    f"{self.url}: no credentials ({error}): set those that this cloud's own command line reads"
                ) from error
            raise OSError(f"{self.url}: cannot {right}: {type(error).__name__}: {error}") from error
