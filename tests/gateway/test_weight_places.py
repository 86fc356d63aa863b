"""What the gateway tells nodes about where weights can be had besides it."""

from __future__ import annotations

from node_peer import PeerNode
from test_nodes import signed_manifest

from composer_prime.wire.node_messages import NodeWelcome


# The configured copies go to every node, at its Hello and with each version.
async def test_nodes_learn_of_copies(open_gateway, node_keys, keys):
    copies = ["http://*:5700", "https://cdn.example/run"]
    async with (
        open_gateway(orchestrator={"weights": {"sources": copies}}) as gateway,
        PeerNode(gateway.node_endpoint, node_keys, "node") as node,
    ):
        assert isinstance(node.welcome, NodeWelcome) and node.welcome.sources == copies
        gateway.publish(signed_manifest(keys, 3))
        await node.until(lambda: bool(node.welcome.manifest))
        assert node.welcome.sources == copies
