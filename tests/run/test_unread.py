"""Connections that pile up bytes which nobody can read are closed, others are not."""

import errno
import fcntl
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer_prime.wire.unread import UnreadBytes
from tests.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counts are read as on Linux")
MIB = 1 << 20


def connected(server: socket.socket) -> tuple[socket.socket, socket.socket]:
    client = socket.create_connection(server.getsockname())
    return client, server.accept()[0]


# Of three connections that sent 3, 2 and 4 MiB, of which the last was read: at most 4 MiB may be unread, so the first
# one goes. A later look leaves the rest alone, and a new connection under the same descriptor starts from nothing.
def test_the_worst_goes_first():
    with socket.create_server(("127.0.0.1", 0)) as server:
        unread = UnreadBytes(server.getsockname()[1], max_bytes=4 * MIB)
        pairs = []
        for size in (3, 2, 4):
            client, accepted = connected(server)
            received = threading.Thread(target=_receive, args=(accepted, size * MIB))
            received.start()
            client.sendall(bytes(size * MIB))
            received.join()
            pairs.append((client, accepted))
        unread.read[pairs[2][1].fileno()] = 4 * MIB
        assert unread.end_worst() == 1
        assert pairs[0][0].recv(1) == b"", "its connection is closed"
        pairs[0][1].close()
        assert unread.end_worst() == 0
        again, accepted = connected(server)
        assert unread.end_worst() == 0
        for one in (again, accepted, *(end for pair in pairs[1:] for end in pair), pairs[0][0]):
            one.close()


# A look leaves the locks that this process holds on files, such as SQLite's: closing any descriptor of one ends them.
def test_locks_of_files_stay(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server, (tmp_path / "file").open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        UnreadBytes(server.getsockname()[1]).end_worst()
        inode = os.fstat(file.fileno()).st_ino
        assert f":{inode} " in Path("/proc/locks").read_text()


# What was read before a look that failed is not counted as unread by the next one.
def test_a_look_that_failed_changes_no_count():
    with socket.create_server(("127.0.0.1", 0)) as server:
        unread = UnreadBytes(server.getsockname()[1], max_bytes=MIB)
        client, accepted = connected(server)
        assert unread.end_worst() == 0
        client.sendall(bytes(2 * MIB))
        _receive(accepted, 2 * MIB)
        unread.read[accepted.fileno()] = 2 * MIB
        assert unread.end_worst() == 0
        look, unread._accepted = unread._accepted, _out_of_descriptors
        with pytest.raises(OSError, match="Too many open files"):
            unread.end_worst()
        unread._accepted = look
        assert unread.end_worst() == 0
        client.close()
        accepted.close()


# Under the descriptor of a connection there may be another one by now: that one has sent too little, or is another's.
def test_one_connection_is_ended_and_no_other():
    with socket.create_server(("127.0.0.1", 0)) as server:
        unread = UnreadBytes(server.getsockname()[1])
        client, accepted = connected(server)
        client.sendall(bytes(1000))
        _receive(accepted, 1000)
        fd = accepted.fileno()
        for other in (
            (fd, "127.0.0.2", 1000),
            (fd, "127.0.0.1", 1001),
            (server.fileno(), "127.0.0.1", 0),
            (1 << 20, "", 0),
        ):
            unread.end(*other)
        UnreadBytes(1).end(fd, "127.0.0.1", 1000)
        client.sendall(b"x")
        assert accepted.recv(1) == b"x", "it is open"
        unread.end(fd, "127.0.0.1", 1000)
        assert client.recv(1) == b"", "it is closed"
        client.close()
        accepted.close()


def _out_of_descriptors() -> Iterator[tuple[int, str, int]]:
    raise OSError(errno.EMFILE, "Too many open files")
    yield


class OutOfDescriptors(UnreadBytes):
    looks = 0

    def is_due(self) -> bool:
        return True

    def end_worst(self) -> int:
        self.looks += 1
        if self.looks == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return 0


# A flood of connections may use up the descriptors that a look needs. The watch survives that and looks again.
async def test_a_look_that_fails_is_not_the_last(caplog):
    unread = OutOfDescriptors(0)
    unread.start()
    await until(lambda: unread.looks == 2)
    unread.stop()
    assert "could not be counted: [Errno 24] Too many open files" in caplog.text


def _receive(connection: socket.socket, size: int) -> None:
    while size:
        size -= len(connection.recv(min(size, MIB)))
