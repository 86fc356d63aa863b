"""What the gateway tells nodes about where weights can be had besides it."""

from __future__ import annotations

import pytest
import zmq
from node_peer import PeerNode
from test_nodes import signed_manifest

from composer_prime.config.orchestrator import WeightServiceConfig
from composer_prime.run.keys import ClientKeys, CurvePair
from composer_prime.wire.node import NewVersion, NodeWelcome


# The configured copies go to every node. A relay is announced to others at the address that it connects from, whatever
# it says, and no more once it has left.
async def test_nodes_learn_of_copies_and_relays(open_gateway, node_keys, keys):
    weights = {"address": "0.0.0.0:5700", "sources": ["https://cdn.example/run"]}
    copies = ["http://*:5700", "https://cdn.example/run"]
    async with (
        open_gateway(orchestrator={"weights": weights}) as gateway,
        PeerNode(gateway.node_endpoint, node_keys, "relay") as relay,
    ):
        relay.say_hello(relay_port=5701)
        await relay.until(lambda: len([m for m in relay.received if isinstance(m, NodeWelcome)]) > 1)
        async with PeerNode(gateway.node_endpoint, node_keys, "other") as other:
            assert isinstance(other.welcome, NodeWelcome)
            assert (other.welcome.sources, other.welcome.relays) == (copies, ["http://127.0.0.1:5701"])
            gateway.publish(signed_manifest(keys, 3))
            for node, relays in ((other, ["http://127.0.0.1:5701"]), (relay, [])):
                await node.until(lambda node=node: any(isinstance(m, NewVersion) for m in node.received))
                message = next(m for m in node.received if isinstance(m, NewVersion))
                assert (message.sources, message.relays) == (copies, relays)
            relay.goodbye()
            await relay.until(lambda: len(gateway.versions()) == 1)
            gateway.publish(signed_manifest(keys, 4))
            await other.until(lambda: sum(isinstance(m, NewVersion) for m in other.received) == 2)
            assert [m for m in other.received if isinstance(m, NewVersion)][-1].relays == []


# A relay that connects over loopback is told to connections of that machine only: elsewhere its address is another one.
async def test_a_loopback_relay_is_not_told_to_other_machines(open_gateway, node_keys):
    async with (
        open_gateway() as gateway,
        PeerNode(gateway.node_endpoint, node_keys, "relay") as relay,
    ):
        relay.say_hello(relay_port=5701)
        await relay.until(lambda: sum(isinstance(m, NodeWelcome) for m in relay.received) > 1)
        assert gateway._link.weight_places(b"a connection from elsewhere")["relays"] == []


# One that comes through a relay of the link seems to be on this machine, too: its own key tells it apart.
async def test_a_node_behind_a_tunnel_cannot_announce_a_port_of_this_machine(open_gateway, keys, node_keys):
    own = CurvePair(*zmq.curve_keypair())
    keys.registry.admit(own.public, "tunneled")
    async with (
        open_gateway() as gateway,
        PeerNode(gateway.node_endpoint, ClientKeys(node_keys.server_public, own), "tunneled") as node,
    ):
        node.say_hello(relay_port=5701)
        await node.until(lambda: sum(isinstance(m, NodeWelcome) for m in node.received) > 1)
        async with PeerNode(gateway.node_endpoint, node_keys, "other") as other:
            assert isinstance(other.welcome, NodeWelcome) and other.welcome.relays == []


# A run may have its nodes ask no other node.
async def test_relays_can_be_left_out(open_gateway, node_keys):
    async with (
        open_gateway(orchestrator={"weights": {"relays": False}}) as gateway,
        PeerNode(gateway.node_endpoint, node_keys, "relay") as relay,
    ):
        relay.say_hello(relay_port=5701)
        await relay.until(lambda: sum(isinstance(m, NodeWelcome) for m in relay.received) > 1)
        async with PeerNode(gateway.node_endpoint, node_keys, "other") as other:
            assert isinstance(other.welcome, NodeWelcome) and other.welcome.relays == []


WRONG = [
    ({"address": "somewhere"}, "expected HOST:PORT"),
    ({"address": "0.0.0.0:0"}, "nodes need a fixed port"),
    ({"push": "bucket/run"}, "is not a URL"),
    ({"sources": ["cdn.example"]}, "is not a URL"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_wrong_settings_are_errors(settings, message):
    with pytest.raises(ValueError, match=message):
        WeightServiceConfig(**settings)


# A bucket is told to nodes, a folder of this machine is not.
def test_what_nodes_are_told():
    assert WeightServiceConfig(push="s3://bucket/run").urls == ["s3://bucket/run"]
    assert WeightServiceConfig(push="file:///srv/run").urls == []
