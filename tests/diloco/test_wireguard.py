"""The overlay's configurations: every spoke knows the hub, the hub every spoke, keys belong together."""

from __future__ import annotations

import base64
import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest
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


# An endpoint that WireGuard could not use is refused with what is expected, and nothing is written; IPv6 has brackets.
@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("51820", "expected HOST:PORT"), (":51820", "expected HOST:PORT"), ("hub:99999", "from 1 to 65535"),
        ("hub:0", "from 1 to 65535"), ("2001:db8::1:51820", "an IPv6 address in brackets"),
    ],
)  # fmt: skip
def test_wrong_endpoints(endpoint, why, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "overlay"
    monkeypatch.setattr(sys, "argv", ["make.py", "--out", str(folder), "--endpoint", endpoint, "hub", "a"])
    with pytest.raises(SystemExit):
        make.main()
    assert f"--endpoint is {endpoint!r}" in (said := capsys.readouterr().err) and why in said
    assert not folder.exists()
    hub, spoke = make.configurations(["hub", "a"], "[2001:db8::1]:51820").values()
    assert "ListenPort = 51820" in hub and "Endpoint = [2001:db8::1]:51820\n" in spoke


# The files are private whatever the umask; a second run into the same folder writes nothing and says what to do, even
# where only one of its files is there, and readable by all.
def test_files_are_private_and_never_replaced(tmp_path, monkeypatch, capsys):
    def run(*hosts: str) -> None:
        words = ["make.py", "--out", str(tmp_path / "overlay"), "--endpoint", "hub.example.org:51820", *hosts]
        monkeypatch.setattr(sys, "argv", words)
        assert make.main() == 0

    before = os.umask(0)
    try:
        run("hub", "a")
    finally:
        os.umask(before)
    first = {path.name: path.read_text() for path in (tmp_path / "overlay").iterdir()}
    assert first.keys() == {"hub.conf", "a.conf"}
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (tmp_path / "overlay").iterdir())
    (tmp_path / "overlay/a.conf").chmod(0o644)
    (tmp_path / "overlay/hub.conf").unlink()
    with pytest.raises(SystemExit):
        run("hub", "a", "b")
    assert "a.conf exists" in (told := capsys.readouterr().err) and "Use another --out" in told
    assert {path.name: path.read_text() for path in (tmp_path / "overlay").iterdir()} == {"a.conf": first["a.conf"]}
    with pytest.raises(SystemExit):
        run("hub", "../a")
    assert "become file names" in capsys.readouterr().err
