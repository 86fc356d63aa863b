"""The node's handle on the vLLM child process: start it, exchange messages, end it."""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from composer_prime.config.inference import InferenceConfig
from composer_prime.errors import WireError
from composer_prime.run.process import child_options, exit_text, last_words, stop
from inference.engines.vllm import messages

_EXIT_GRACE_S = 5.0


class VllmProcess:
    """A running child. Read with `receive`, write with `send`, end with `stop`."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, log: Path
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self.log = log

    @classmethod
    async def spawn(cls, config: InferenceConfig, log: Path) -> VllmProcess:
        """Start the child. It ends itself when our end of the socket pair closes, also when this process is killed."""
        ours, theirs = socket.socketpair()
        with theirs, log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "inference.engines.vllm.server", str(theirs.fileno())),
                stdout=output,
                stderr=output,
                **child_options(_environment(config), pass_fds=[theirs.fileno()]),
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return cls(process, reader, writer, log)

    def send(self, message: messages.ToChild) -> None:
        self._writer.write(messages.frame(message))

    async def receive(self) -> messages.FromChild:
        """Return the next message. Raises EOFError when the child has closed its end, WireError for a bad message."""
        (length,) = messages.LENGTH.unpack(await self._reader.readexactly(messages.LENGTH.size))
        if length > messages.MAX_BYTES:
            raise WireError(f"vLLM's process announces a message of {length} bytes, at most {messages.MAX_BYTES}")
        body = await self._reader.readexactly(length)
        try:
            return messages.from_child(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"vLLM's process sent {length} bytes that are no message ({error})") from None

    async def end_report(self) -> str:
        """Describe how the child ended, with the last lines of its log."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _EXIT_GRACE_S)
        status = self._process.returncode
        how = "closed its link" if status is None else exit_text(status)
        return f"vLLM {how}; the last lines of {self.log}:\n{last_words(self.log)}"

    async def stop(self) -> None:
        """Close the link, wait a little for an orderly end, then kill what is left of the child's session.

        The session outlives its leader where vLLM has worker processes (tensor parallelism).
        """
        self._writer.close()
        await stop(self._process, _EXIT_GRACE_S, request=False)


def _environment(config: InferenceConfig) -> dict[str, str]:
    """Keep vLLM in one process, offline and unbound from cores."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(config.threads),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
