"""A copy of a run's weight store in a bucket or folder that fsspec reaches: s3://, gs://, az://, file://.

    URL/chunks/<sha256>

The layout is the store's own, so any tool that copies the folder makes one. Drivers of the clouds are extras. Each
reads the credentials where its own command line does.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from composer_prime.errors import ConfigError
from composer_prime.run.weights import is_chunk_name

DRIVERS = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "file": "", "memory": ""}
"""The extra of each scheme; empty where fsspec itself has the driver."""


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

    def chunk(self, sha256: str, offset: int, size: int) -> bytes | None:
        """Return up to `size` bytes of a chunk from `offset`; None when there is no such chunk. Raises OSError."""
        if not is_chunk_name(sha256):
            return None
        try:
            with self._as_os_error():
                return self._fs.cat_file(f"{self._root}/chunks/{sha256}", start=offset, end=offset + size)
        except FileNotFoundError:
            return None
        except OSError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EINVAL:
                return b""  # S3: no byte there, the chunk ends before
            raise

    @contextmanager
    def _as_os_error(self) -> Iterator[None]:
        """Give a driver's error the form of the standard library's, with the bucket's name."""
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:  # Each driver has a tree of its own.
            raise OSError(f"{self.url}: cannot read: {type(error).__name__}: {error}") from error
