"""`orchestrator invite`: one string, its lines, and what it refuses to print."""

from __future__ import annotations

import argparse
import json

import pytest

from composer_prime.config import load
from composer_prime.console import duration_s
from composer_prime.errors import ConfigError, InviteError
from composer_prime.run.keys import RunKeys
from composer_prime.run.run_dir import RunDir, create_run_id
from composer_prime.wire.enrollment import INVITE_PREFIX, Invite
from orchestrator.swarm.invite import create_invite, main, node_addresses
from tests.configs_made import config_of


@pytest.fixture
def started(tmp_path):
    """A run directory as `trainer @ file.toml` leaves it, listening on a fixed public address."""

    def make(node_address: str = "tcp://192.0.2.7:5500", bound: str | None = None) -> RunDir:
        run_dir = RunDir(tmp_path)
        config = config_of(orchestrator={"node_address": node_address})
        run_dir.config.write_text(load.dump(config))
        create_run_id(run_dir, "r")
        RunKeys.create(run_dir.keys)
        if bound is not None:
            run_dir.endpoints.write_text(json.dumps({"node": bound}))
        return run_dir

    return make


def test_it_prints_one_string_that_holds_everything(started, capsys):
    run_dir = started()
    assert main([str(run_dir.root), "--nodes", "3", "--expires", "2h", "--trust-nodes"]) == 0
    shown = capsys.readouterr()
    string = shown.out.removesuffix("\n")
    assert string.startswith(INVITE_PREFIX) and string not in shown.err
    assert "COMPOSER_INVITE=STRING inference join" in shown.err
    invite, keys = Invite.read(string), RunKeys(run_dir.keys)
    assert invite.addresses == ["192.0.2.7:5500"]
    assert invite.run_id == (run_dir.root / "run_id").read_text().strip()
    assert invite.keys.server_public == keys.curve("server").public
    assert invite.verify_key == keys.verifier().public_bytes_raw()
    assert keys.registry.is_invite(invite.keys.own.public)
    for number in range(3):
        keys.registry.enroll(invite.keys.own.public, b"node%d" % number, "n", "")
    with pytest.raises(InviteError, match="for 3 nodes"):
        keys.registry.enroll(invite.keys.own.public, b"one more", "n", "")


def test_strangers_are_not_invited_to_a_run_without_audits(started):
    """Nothing would check what their nodes answer. The refusal names the setting and the flag, and makes no invite."""
    run_dir = started()
    with pytest.raises(ConfigError) as refusal:
        main([str(run_dir.root)])
    assert "orchestrator.audit.enabled" in str(refusal.value) and "--trust-nodes" in str(refusal.value)
    assert not RunKeys(run_dir.keys).registry.open_invites()
    config = json.loads(run_dir.config.read_text())
    config["orchestrator"]["audit"]["enabled"] = True
    run_dir.config.write_text(json.dumps(config))
    assert main([str(run_dir.root)]) == 0


def test_the_secret_of_an_invite_is_in_its_string_only(started):
    """Who reads the run's registry cannot join with it."""
    run_dir = started()
    invite = create_invite(run_dir, nodes=1, expires_s=60, addresses=["192.0.2.7:5500"])
    stored = RunKeys(run_dir.keys).registry.path.read_bytes()
    assert invite.keys.own.public in stored
    assert invite.secret not in stored and invite.keys.own.secret not in stored


def test_open_invites_can_be_withdrawn(started, capsys):
    """Nobody joins by them any more; nodes that did serve on."""
    run_dir = started()
    invites = [create_invite(run_dir, nodes=2, expires_s=60, addresses=["192.0.2.7:5500"]) for _ in range(2)]
    registry = RunKeys(run_dir.keys).registry
    registry.enroll(invites[0].keys.own.public, b"first", "box", "")
    for count in ("2 invites", "0 invites"):
        assert main([str(run_dir.root), "--withdraw"]) == 0
        assert capsys.readouterr().out.startswith(f"withdrawn: {count} of run r-")
    assert registry.is_known(b"first")
    for invite in invites:
        with pytest.raises(InviteError, match="withdrawn"):
            registry.enroll(invite.keys.own.public, b"second", "box", "")


def test_a_string_that_was_cut_or_altered_is_refused_as_such(started):
    text = create_invite(started(), nodes=1, expires_s=60, addresses=["192.0.2.7:5500"]).text()
    assert Invite.read(f"  {text[:40]}\n{text[40:]} ").text() == text  # a terminal's line breaks do no harm
    for bad in (text[:-1], text[: len(text) // 2], INVITE_PREFIX, text[:-6] + "AAAAAA"):
        with pytest.raises(InviteError, match=r"of \d+ characters was cut or altered .*copy the line whole"):
            Invite.read(bad)
    with pytest.raises(InviteError, match="is not an invite"):
        Invite.read(text[1:])


def test_a_string_of_another_release_names_both(started):
    import msgspec

    invite = create_invite(started(), nodes=1, expires_s=60, addresses=["192.0.2.7:5500"])
    with pytest.raises(InviteError, match=r"the run has composer-prime 9\.9\.9 .*install the run's release$"):
        Invite.read(msgspec.structs.replace(invite, release="9.9.9").text())


def test_loopback_is_refused_with_the_remedy(started):
    """No other machine reaches it: the string would be worth nothing there."""
    for listens, given in (
        ("tcp://127.0.0.1:5500", []),
        ("tcp://[::1]:5500", []),
        ("tcp://192.0.2.7:5500", ["localhost:5500"]),
        ("tcp://192.0.2.7:5500", ["192.0.2.7:5500", "127.0.0.1:1"]),
    ):
        run_dir = started(listens)
        with pytest.raises(ConfigError, match=r"no other machine reaches.*node_address tcp://0\.0\.0\.0:5500"):
            node_addresses(run_dir, given)
        assert node_addresses(run_dir, given, allow_loopback=True)


def test_the_address_is_where_the_run_listens(started, capsys):
    """A wildcard becomes this machine's own address; a free port is known while the run is up."""
    assert node_addresses(started(), []) == ["192.0.2.7:5500"]
    assert node_addresses(started(), ["tcp://gpu.example:7000", "[2001:db8::1]:7000"]) == [
        "gpu.example:7000",
        "[2001:db8::1]:7000",
    ]
    [address] = node_addresses(started("tcp://0.0.0.0:5500"), [], allow_loopback=True)
    assert address.endswith(":5500") and not address.startswith("0.0.0.0")
    with pytest.raises(ConfigError, match=r"port 0.*the run is not up"):
        node_addresses(started("tcp://192.0.2.7:0"), [])
    assert node_addresses(started("tcp://192.0.2.7:0", bound="tcp://192.0.2.7:41000"), []) == ["192.0.2.7:41000"]
    # Nodes keep the address for as long as they live, so a port that changes with each start is worth a note.
    assert main([str(started("tcp://192.0.2.7:0", bound="tcp://192.0.2.7:41000").root), "--trust-nodes"]) == 0
    assert "the port of 192.0.2.7:41000 changes when the run is started again" in capsys.readouterr().err


def test_wrong_words_name_the_value(started, tmp_path):
    with pytest.raises(argparse.ArgumentTypeError, match="'24': give a number and a unit"):
        duration_s("24")
    assert [duration_s(text) for text in ("90s", "45m", "24h", "7d", "1.5h")] == [90, 2700, 86400, 604800, 5400]
    for nodes, expires_s, part in ((0, 60, "--nodes is 0"), (5000, 60, "1 to 4096"), (1, 0, "--expires is 0")):
        with pytest.raises(ConfigError, match=part):
            create_invite(started(), nodes=nodes, expires_s=expires_s, addresses=["192.0.2.7:5500"])
    with pytest.raises(ConfigError, match="is not a run directory"):
        main([str(tmp_path / "none")])
