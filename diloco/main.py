"""The console script `diloco`: keygen and rendezvous.

Exit status: 0 done or stopped by a signal, 1 failed, 2 wrong command line or configuration, 141 output closed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from composer_prime.address import tcp_address
from composer_prime.console import EXIT_USAGE, console_main, exit_on_version_flag, start_log
from composer_prime.errors import ComposerError, ConfigError

if TYPE_CHECKING:
    from diloco.rendezvous.rounds import RendezvousSettings
    from diloco.transport.messages import JointKey


def main(argv: list[str] | None = None) -> int:
    return console_main(lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    exit_on_version_flag(sys.argv[1:] if argv is None else argv)
    words = _parser().parse_args(argv)
    try:
        return words.run(words)
    except BrokenPipeError:
        raise
    except ConfigError as error:
        print(f"diloco: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (ComposerError, OSError) as error:
        print(f"diloco: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="diloco", description="Train one model on several clusters over a slow link.")
    add = parser.add_subparsers(required=True, metavar="COMMAND")
    keygen = add.add_parser("keygen", help="make a joint run's key", description="Make the key of a joint run.")
    keygen.add_argument("file", type=Path, help="where to write it; copy it to every cluster")
    keygen.set_defaults(run=_keygen)
    rendezvous = add.add_parser(
        "rendezvous",
        help="the rendezvous of a joint run",
        description="The rendezvous of a joint run. It relays deltas and states between peers, and closes rounds. "
        "Everything is in memory, and it may be restarted at any time.",
        epilog="The log names each peer that comes or leaves, and the members of each round.",
    )
    rendezvous.add_argument("--run", required=True, dest="run_name", help="diloco.run of the peers")
    rendezvous.add_argument("--key-file", required=True, type=Path, help="made by `diloco keygen`")
    rendezvous.add_argument(
        "--bind", default="tcp://127.0.0.1:29600",
        help="address to listen on; give the overlay network's, not 0.0.0.0 (default tcp://127.0.0.1:29600)",
    )  # fmt: skip
    rendezvous.add_argument("--min-peers", type=int, default=1, help="a round needs this many deltas (default 1)")
    rendezvous.add_argument("--start-peers", type=int, default=1, help="peers needed for the first round (default 1)")
    rendezvous.add_argument("--beat-timeout-s", type=float, default=10.0, help="silence after which a peer is gone")
    rendezvous.add_argument(
        "--gather-s", type=float, default=60.0,
        help="after a restart, or when all peers were stopped: how long the first wait for --start-peers (default 60)",
    )  # fmt: skip
    rendezvous.add_argument("--keep-rounds", type=int, default=16, help="rounds that late peers can catch up with")
    rendezvous.add_argument(
        "--memory-gb", type=float, default=16.0,
        help="most GB of messages, deltas and a state in memory; older rounds go first (default 16)",
    )  # fmt: skip
    rendezvous.set_defaults(run=_rendezvous)
    return parser


def _keygen(words: argparse.Namespace) -> int:
    from diloco.transport.messages import JointKey

    JointKey.create(words.file)
    print(f"wrote {words.file} (mode 600): copy it to every cluster, and name it in diloco.key_file")
    return 0


def _rendezvous(words: argparse.Namespace) -> int:
    from composer_prime.wire.unread import MAX_UNREAD_BYTES
    from diloco.rendezvous.rounds import RendezvousSettings
    from diloco.transport.messages import JointKey

    tcp_address(words.bind, "--bind", bind=True)
    for name in ("min_peers", "start_peers", "keep_rounds"):
        if (value := getattr(words, name)) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; expected 1 or more")
    for name in ("beat_timeout_s", "gather_s", "memory_gb"):
        if not 0 < (value := getattr(words, name)) < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} is {value:g}; expected a value above 0, and a finite one")
    room = int(words.memory_gb * 1e9) - MAX_UNREAD_BYTES
    if room <= 0:
        raise ConfigError(f"--memory-gb is {words.memory_gb:g}; messages alone take up to {MAX_UNREAD_BYTES / 1e9:.2g}")
    start_log()
    settings = RendezvousSettings(
        bind=words.bind, run=words.run_name, min_peers=words.min_peers, start_peers=words.start_peers,
        beat_timeout_s=words.beat_timeout_s, gather_s=words.gather_s, keep_rounds=words.keep_rounds,
        max_bytes=room,
    )  # fmt: skip
    asyncio.run(_serve(settings, JointKey.read(words.key_file)))
    return 0


async def _serve(settings: RendezvousSettings, key: JointKey) -> None:
    from diloco.rendezvous.rendezvous import Rendezvous

    async with Rendezvous(settings, key) as server:
        serving = asyncio.create_task(server.serve())
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
        print(f"rendezvous of run {settings.run!r} at {server.endpoint}", flush=True)
        print(f"members: {server.lighthouse.url} (this machine only)", flush=True)
        with contextlib.suppress(asyncio.CancelledError):
            await serving


if __name__ == "__main__":
    raise SystemExit(main())
