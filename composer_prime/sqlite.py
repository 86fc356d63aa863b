"""What every SQLite file of the project needs."""

from __future__ import annotations

import sqlite3
import time

BUSY_S = 30.0
"""How long one process waits for another that writes the same file."""
_RETRY_S = 0.02
_PRIMARY_CODE = 0xFF
"""The part of an SQLite error code that names its kind."""


def switch_to_wal(database: sqlite3.Connection) -> None:
    """Let readers continue while another connection writes. The file keeps this setting.

    Retries for `BUSY_S` while another connection does the same: SQLite does not wait by itself here.
    Raises sqlite3.OperationalError.
    """
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            database.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & _PRIMARY_CODE != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_S)
