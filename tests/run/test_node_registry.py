"""Invites and identities: each change is whole, counted once, and seen by every process."""

import pytest
from waiting import Clock

from composer_prime.errors import InviteError
from composer_prime.run.keys import RunKeys
from composer_prime.run.node_registry import NodeRegistry


@pytest.fixture
def clock():
    clock = Clock()
    clock.now = 1_700_000_000.0
    return clock


@pytest.fixture
def registry(tmp_path, clock):
    registry = NodeRegistry(tmp_path, clock)
    registry.invite(b"invite", uses=2, expires=clock.now + 100)
    return registry


def test_an_invite_admits_as_many_nodes_as_it_says(registry):
    """A node that asks again, as after a crash in the middle, is not counted again."""
    first = registry.enroll(b"invite", b"a", "box", "1 GPU")
    assert registry.enroll(b"invite", b"a", "box", "1 GPU") == first
    assert registry.enroll(b"invite", b"b", "other", "").name == "other"
    assert not registry.open_invites()
    with pytest.raises(InviteError, match="for 2 nodes and 2 have used it"):
        registry.enroll(b"invite", b"c", "late", "")
    assert [node.name for node in registry.list()] == ["box", "other"]
    assert not registry.is_known(b"c")


def test_an_expired_invite_is_refused_with_both_times_and_not_counted(registry, clock):
    clock.now += 100
    with pytest.raises(InviteError, match=r"expired at 2023-11-14 22:15 UTC, it is 2023-11-14 22:15"):
        registry.enroll(b"invite", b"a", "box", "")
    assert registry.is_invite(b"invite") and not registry.open_invites() and not registry.list()
    clock.now += 31 * 86400  # no invite stays in the file for ever
    registry.invite(b"another", uses=1, expires=clock.now + 1)
    assert not registry.is_invite(b"invite")


def test_names_belong_to_keys(registry):
    """Two boxes with one host name get two names; a node that comes back keeps its own."""
    assert registry.enroll(b"invite", b"a", "box", "").name == "box"
    assert registry.enroll(b"invite", b"b", "box", "").name == "box-2"
    assert registry.find("box-2").key == b"b" and registry.find(b"a").name == "box"
    assert registry.find("nobody") is None


def test_no_node_takes_a_name_of_the_runs_own_nodes(registry):
    """The launcher's are node-0, node-1, ...; neither a wish, a slot nor a number for a namesake makes one of them."""
    registry.invite(b"many", uses=9, expires=registry._clock() + 100)
    wishes = ["node-0", "node-0", "node", "node", "node-17", "node-0-joined", "nodes"]
    names = [registry.enroll(b"many", b"%d" % number, wish, "").name for number, wish in enumerate(wishes)]
    assert names == [
        "node-0-joined", "node-0-joined-2", "node-joined", "node-joined-2", "node-17-joined",
        "node-0-joined-3", "nodes",
    ]  # fmt: skip
    assert registry.enroll(b"many", b"last", "box", "", {"box", "box-2"}).name == "box-3"


def test_a_withdrawn_invite_admits_no_further_node(registry, clock):
    """Nodes that came by it stay, and are known to have. Without a key all that are open end."""
    registry.invite(b"second", uses=1, expires=clock.now + 100)
    registry.invite(b"third", uses=1, expires=clock.now + 100)
    assert registry.enroll(b"invite", b"a", "box", "").invite == b"invite"
    assert registry.admit(b"b", "other").invite == b""
    assert registry.withdraw(b"invite") == 1 and registry.withdraw(b"invite") == 0
    with pytest.raises(InviteError, match="the invite was withdrawn: make another"):
        registry.enroll(b"invite", b"c", "late", "")
    assert registry.enroll(b"invite", b"a", "box", "").name == "box" and registry.is_known(b"a")
    registry.enroll(b"second", b"d", "second", "")
    assert registry.open_invites() == [b"third"]
    assert registry.withdraw() == 1 and registry.open_invites() == [] and registry.is_invite(b"third")
    with pytest.raises(InviteError, match="withdrawn"):
        registry.enroll(b"third", b"e", "third", "")


def test_readers_do_not_wait_for_a_change_of_another_thread(tmp_path):
    """The gateway's event loop asks while a thread has a change under way, as the clock does here."""
    seen = []
    registry = NodeRegistry(tmp_path, lambda: seen.append(registry.is_known(b"a")) or 0.0)
    registry.admit(b"a", "box")
    assert registry.revoke(b"a", "lied")
    assert seen == [False, True] and not registry.is_known(b"a")


def test_a_revoked_node_is_unknown_until_it_is_admitted_again(registry):
    """Also its invite does not let it in again."""
    registry.enroll(b"invite", b"a", "box", "")
    assert registry.revoke(b"a", "lied") and not registry.revoke(b"a", "lied")
    assert not registry.is_known(b"a") and registry.find(b"a").reason == "lied"
    with pytest.raises(InviteError, match="box was turned away for good: lied"):
        registry.enroll(b"invite", b"a", "box", "")
    registry.admit(b"a", "box")
    assert registry.is_known(b"a") and registry.find(b"a").revoked is None


def test_another_process_sees_every_change_and_the_file_is_private(tmp_path):
    """The command line and the gateway open the file on their own; nobody else reads it."""
    keys = RunKeys.create(tmp_path / "keys")
    assert not keys.registry.list() and not keys.registry.is_known(b"a")
    keys.registry.admit(b"a", "box")
    assert keys.registry.is_known(b"a")
    assert keys.registry.path.stat().st_mode & 0o077 == 0


def test_a_node_enrolls_again_by_its_own_key_or_its_own_invite(registry, clock):
    """The holder of another invite who knows the node's public key gets nothing."""
    registry.invite(b"other", uses=1, expires=clock.now + 100)
    node = registry.enroll(b"invite", b"a", "box", "")
    assert registry.enroll(b"a", b"a", "box", "") == node
    with pytest.raises(InviteError):
        registry.enroll(b"other", b"a", "box", "")
    assert b"other" in registry.open_invites()


def test_an_unknown_invite_is_refused(registry):
    with pytest.raises(InviteError, match="no such invite"):
        registry.enroll(b"other", b"a", "box", "")
