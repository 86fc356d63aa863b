"""The overlay's configurations: every spoke knows the hub, the hub every spoke, keys belong together."""

from __future__ import annotations

import base64
import importlib.util
import re
import sys
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

PATH = Path(__file__).parents[2] / "infra/wireguard/make.py"
spec = importlib.util.spec_from_file_location("make_wireguard", PATH)
make = importlib.util.module_from_spec(spec)
sys.modules["make_wireguard"] = make  # dataclasses look their module up
spec.loader.exec_module(make)


def public_of(text: str) -> str:
    private = base64.b64decode(re.search(r"PrivateKey = (\S+)", text)[1])
    return base64.b64encode(X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()).decode()


# Three hosts: addresses, keys and the endpoint match.
def test_configurations():
    found = make.configurations(["hub", "a", "b"], "hub.example.org:51820")
    hub = found.pop("hub")
    assert "ListenPort = 51820" in hub and hub.count("[Peer]") == 2
    for number, (name, text) in enumerate(found.items(), start=2):
        assert f"# {name}\n[Peer]\nPublicKey = {public_of(text)}\nAllowedIPs = 10.77.0.{number}/32" in hub
        assert f"PublicKey = {public_of(hub)}\nAllowedIPs = 10.77.0.1/32\nEndpoint = hub.example.org:51820" in text
