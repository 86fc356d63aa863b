"""What the gateway tells nodes about where weights can be had besides it."""

from __future__ import annotations

import pytest
from node_peer import PeerNode
from test_nodes import signed_manifest

from composer_prime.config.orchestrator import WeightServiceConfig
from composer_prime.wire.node_messages import NewVersion, NodeWelcome


# The configured copies go to every node, at its Hello and with each version.
async def test_nodes_learn_of_copies(open_gateway, node_keys, keys):
    weights = {"address": "0.0.0.0:5700", "sources": ["https://cdn.example/run"]}
    copies = ["http://*:5700", "https://cdn.example/run"]
    async with (
        open_gateway(orchestrator={"weights": weights}) as gateway,
        PeerNode(gateway.node_endpoint, node_keys, "node") as node,
    ):
        assert isinstance(node.welcome, NodeWelcome) and node.welcome.sources == copies
        gateway.publish(signed_manifest(keys, 3))
        await node.until(lambda: any(isinstance(m, NewVersion) for m in node.received))
        assert next(m for m in node.received if isinstance(m, NewVersion)).sources == copies


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
