"""The vLLM child process: started with one end of a socket pair, logging to a file, gone when the node is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from composer_prime.errors import WireError
from inference.engines.vllm import messages

_LOG_LINES = 25
_EXIT_GRACE_S = 5.0


class VllmProcess:
    """A running child. Read with `receive`, write with `send`, end with `stop`."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, log: Path
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self.log = log

    @classmethod
    async def spawn(cls, environment: dict[str, str], log: Path) -> VllmProcess:
        """Start the child; it ends itself when our end of the pair closes, however this process ends."""
        ours, theirs = socket.socketpair()
        with theirs, log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "inference.engines.vllm.server", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return cls(process, reader, writer, log)

    def send(self, message: messages.ToChild) -> None:
        self._writer.write(messages.frame(message))

    async def receive(self) -> messages.FromChild:
        """The next message. Raises EOFError when the child has ended or closed its end, WireError for anything else."""
        (length,) = messages.LENGTH.unpack(await self._reader.readexactly(messages.LENGTH.size))
        if length > messages.MAX_BYTES:
            raise WireError(f"vLLM's process announces a message of {length} bytes, at most {messages.MAX_BYTES}")
        body = await self._reader.readexactly(length)
        try:
            return messages.from_child(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"vLLM's process sent {length} bytes that are no message ({error})") from None

    async def end_report(self) -> str:
        """How the child ended and the last lines of its log."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _EXIT_GRACE_S)
        status = self._process.returncode
        how = "closed its link" if status is None else f"ended with status {status}"
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 16384))
            lines = file.read().decode(errors="replace").splitlines()[-_LOG_LINES:]
        return f"vLLM {how}; the last lines of {self.log}:\n" + "\n".join(lines)

    async def stop(self) -> None:
        """Close the link, wait a little for an orderly end, then kill whatever is left of the child's session."""
        self._writer.close()
        try:
            await asyncio.wait_for(self._process.wait(), _EXIT_GRACE_S)
        except TimeoutError:
            pass
        finally:
            # The session outlives its leader where vLLM has worker processes (tensor parallelism).
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
