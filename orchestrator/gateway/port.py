"""The TCP port that a run's gateway serves."""

from __future__ import annotations

import errno
import socket
import sys

from composer_prime.errors import PortInUseError


class HeldPort:
    """A port that belongs to one run until `close`, whether or not anybody listens there yet."""

    def __init__(self, host: str, port: int, *, shared: bool = False) -> None:
        """Port 0 takes a free one. With `shared`, other processes of this user may listen there, too.

        Raises PortInUseError when another process holds it.
        """
        self.number = port
        self.socket = socket.socket()
        self._lock = socket.socket(socket.AF_UNIX)
        try:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.socket.bind((host, port))
            self.number = self.socket.getsockname()[1]
            if sys.platform == "linux":
                # One socket at a time has an abstract name. SO_REUSEADDR lets two that do not listen have one port.
                self._lock.bind(f"\0composer-prime/gateway-port/{self.number}")
        except OSError as error:
            self.close()
            if error.errno != errno.EADDRINUSE:
                raise
            raise PortInUseError(
                f"http://{host}:{self.number} is held by another process: stop it, or set orchestrator.gateway_port to "
                "another port (0 takes a free one)"
            ) from None
        self.url = f"http://{host}:{self.number}"
        if shared:  # Not before: then it would join another run's port.
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)

    def close(self) -> None:
        self.socket.close()
        self._lock.close()
