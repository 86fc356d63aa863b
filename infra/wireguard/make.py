"""WireGuard configurations of a hub and its clusters: python infra/wireguard/make.py --help"""

from __future__ import annotations

import argparse
import base64
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from composer_prime.address import tcp_address
from composer_prime.errors import ConfigError

NETWORK = "10.77.0"
MAX_HOSTS = 254


@dataclass(frozen=True, slots=True)
class Host:
    name: str
    address: str
    private: str
    """Base64, as WireGuard writes keys."""
    public: str

    @classmethod
    def make(cls, name: str, number: int) -> Host:
        key = X25519PrivateKey.generate()
        public = base64.b64encode(key.public_key().public_bytes_raw()).decode()
        return cls(name, f"{NETWORK}.{number}", base64.b64encode(key.private_bytes_raw()).decode(), public)


def configurations(names: list[str], endpoint: str) -> dict[str, str]:
    """Return each host's configuration. The first is the hub; `endpoint`: its HOST:PORT as the others reach it.

    Raises ConfigError when `endpoint` is not HOST:PORT.
    """
    hub_address = tcp_address(endpoint, "--endpoint", scheme="")
    hub, *spokes = [Host.make(name, number) for number, name in enumerate(names, start=1)]
    peers = "".join(
        f"\n# {spoke.name}\n[Peer]\nPublicKey = {spoke.public}\nAllowedIPs = {spoke.address}/32\n" for spoke in spokes
    )
    texts = {hub.name: f"{_interface(hub)}ListenPort = {hub_address.port}\n{peers}"}
    for spoke in spokes:
        texts[spoke.name] = (
            f"{_interface(spoke)}\n# {hub.name}\n[Peer]\nPublicKey = {hub.public}\nAllowedIPs = {hub.address}/32\n"
            f"Endpoint = {hub_address}\nPersistentKeepalive = 25\n"
        )
    return texts


def _interface(host: Host) -> str:
    return f"[Interface]\nAddress = {host.address}/24\nPrivateKey = {host.private}\n"


def write(folder: Path, texts: dict[str, str]) -> list[Path]:
    """Write new HOST.conf files of mode 600. Raises FileExistsError, with none written, when one exists."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    try:
        for name, text in texts.items():
            path = folder / f"{name}.conf"
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            written.append(path)
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
    except OSError:
        for path in written:
            path.unlink()
        raise
    return written


def main() -> int:
    parser = argparse.ArgumentParser(description="WireGuard configurations of a hub and the clusters that join it.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write HOST.conf files to, mode 600")
    parser.add_argument("--endpoint", required=True, help="HOST:PORT of the hub from outside; IPv6: [ADDRESS]:PORT")
    parser.add_argument("hosts", nargs="+", help="names; the first is the hub")
    words = parser.parse_args()
    if len(set(words.hosts)) < len(words.hosts) or not 2 <= len(words.hosts) <= MAX_HOSTS:
        parser.error(f"{len(words.hosts)} hosts were given; expected 2 to {MAX_HOSTS} different names")
    if not all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) for name in words.hosts):
        parser.error(f"{words.hosts} become file names; use letters, digits, '.', '-' and '_'")
    try:
        for path in write(words.out, configurations(words.hosts, words.endpoint)):
            print(f"wrote {path}")
    except ConfigError as error:
        parser.error(str(error))
    except FileExistsError as error:
        parser.error(
            f"{error.filename} exists, and new keys do not work with the old ones: nothing was written. Use another "
            "--out, or remove the old files to give every host new keys"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
