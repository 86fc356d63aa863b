"""Ban and unban, on a router by itself."""

import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from fleet import Fleet

from composer_prime.errors import ConfigError, InviteError, RequestError
from composer_prime.run.keys import RunKeys
from orchestrator.gateway.node_control import NodeControl


def keys_in(folder: Path) -> RunKeys:
    (folder / "keys").mkdir(exist_ok=True)
    return RunKeys(folder / "keys")


@pytest.fixture
async def fleet() -> Fleet:
    return Fleet(a={}, b={})


@pytest.fixture
def control(fleet: Fleet, tmp_path: Path) -> NodeControl:
    return NodeControl(fleet.router, keys_in(tmp_path))


# The key of a node is revoked, for every later start too, and admitted again by unban; the table shows it meanwhile.
async def test_a_ban_revokes_the_nodes_key(control, tmp_path):
    key, registry = b"k" * 40, keys_in(tmp_path).registry
    registry.admit(key, "rented")
    assert "its key is refused" in control.ban("rented")
    assert not registry.is_known(key)
    later = NodeControl(Fleet().router, keys_in(tmp_path))
    assert [(row.name, row.state) for row in later.rows()] == [("rented", "banned")]
    for act, name in ((later.ban, "rented"), (later.unban, "x")):
        with pytest.raises(RequestError, match=f"node {name} is "):
            act(name)
    later.unban("rented")
    assert registry.is_known(key)


# The run's own nodes share a key, which a ban would take from all of them.
async def test_a_node_of_the_runs_own_is_not_banned(fleet, control):
    with pytest.raises(RequestError, match="SIGTERM"):
        control.ban("a")
    assert fleet.node("a").attached


# So is the invite by which it came: its machine could draw another key. Nothing is said of one that is used up.
async def test_a_ban_withdraws_the_nodes_invite(control, tmp_path):
    registry, expires = keys_in(tmp_path).registry, time.time() + 1000
    for invite, uses in ((b"open", 2), (b"full", 1)):
        registry.invite(invite, uses=uses, expires=expires)
        registry.enroll(invite, invite * 10, f"by-{invite.decode()}", "")
    assert "the invite by which it came admits no further node" in control.ban("by-open")
    assert "invite by which" not in control.ban("by-full")
    with pytest.raises(InviteError, match="withdrawn"):
        registry.enroll(b"open", b"another", "again", "")


# A ban that was cut short between the invite and the key is ended by repeating it, in either order.
@pytest.mark.parametrize("cut", ["revoke", "withdraw"])
async def test_a_ban_that_was_cut_short(control, tmp_path, monkeypatch, cut):
    registry = keys_in(tmp_path).registry
    registry.invite(b"open", uses=2, expires=time.time() + 1000)
    registry.enroll(b"open", b"key", "rented", "")
    with monkeypatch.context() as patch:
        patch.setattr(type(registry), cut, Mock(side_effect=ConfigError("locked")))
        with pytest.raises(ConfigError):
            control.ban("rented")
    control.ban("rented")
    assert not registry.open_invites() and not registry.is_known(b"key")
    with pytest.raises(RequestError, match="banned already"):
        control.ban("rented")


# While the registry cannot be read the table shows the nodes all the same.
async def test_the_table_without_the_registry(control, tmp_path, monkeypatch):
    monkeypatch.setattr(type(keys_in(tmp_path).registry), "list", Mock(side_effect=ConfigError("locked")))
    assert [row.name for row in control.rows()] == ["a", "b"]


# An unknown name is answered with the nearest.
async def test_unknown_names(tmp_path):
    control = NodeControl(Fleet(**{"node-1": {}, "other": {}}).router, keys_in(tmp_path))
    with pytest.raises(RequestError, match=r"no node .node-l., .* did you mean node-1"):
        control.ban("node-l")
