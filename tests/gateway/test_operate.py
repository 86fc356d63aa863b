"""The operator's commands against a live gateway, and two real nodes."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
from gateway_made import MODEL, config_with, generate_body, get, post
from node_peer import PeerNode

from composer_prime.config import load
from composer_prime.config.inference import InferenceConfig
from composer_prime.errors import NotLiveError, RequestError, RunMismatchError
from composer_prime.run.keys import ClientKeys, CurvePair, RunKeys
from composer_prime.run.run_dir import RunDir, create_run_id
from composer_prime.run.weights import WeightStore
from composer_prime.wire.node_messages import ComputeDevice, NodeWelcome
from inference.engines.base import build_engine
from orchestrator.gateway import Gateway
from orchestrator.swarm import node_commands as commands
from orchestrator.swarm.node_commands import live_rows
from tests.inference.live_node import live_node
from tests.waiting import until

WAIT_S = 150.0
PATIENT = {"heartbeat_s": 0.5, "lost_after_s": 100.0}
# A busy machine may need more than the default for what its node holds.
SLOW = {"source": [{"name": "s", "taskset": {"id": "orchestrator.environments.toolsmith"}, "timeout_s": WAIT_S}]}


@asynccontextmanager
async def live_run(root: Path):
    """A gateway and the files by which commands find it."""
    run_dir, config = RunDir(root), config_with(inference=PATIENT, orchestrator=SLOW)
    run_dir.config.write_text(load.dump(config))
    run_id = create_run_id(run_dir, "r")
    gateway = Gateway(config, RunKeys.create(run_dir.keys), run_id, WeightStore(run_dir.weights), model_dir=MODEL)
    await gateway.start()
    run_dir.endpoints.write_text(json.dumps({"http": gateway.http_url}))
    try:
        yield gateway, run_dir
    finally:
        await gateway.close()


async def command(*words: str) -> int:
    """Run a command as its console script would, in a thread: the gateway is in this event loop."""
    return await asyncio.to_thread(getattr(commands, words[0]), list(words[1:]))


def local_node(name: str, address: str, keys: ClientKeys):
    """A node with the local engine, as `inference join` makes it."""
    config = InferenceConfig(
        device="cpu", usd_per_hour=2.5, heartbeat_s=0.5, lost_after_s=100.0, connect_timeout_s=100.0
    )
    more = {"max_context": 512, "device": ComputeDevice(name="cpu", count=1)}
    return live_node(name, build_engine(config, MODEL, 512), MODEL, config, lambda: address, keys, **more)


# Two nodes with real engines serve. One is banned, and its requests are answered by the other. It cannot come back, not
# even to a new gateway. The table has it all.
@pytest.mark.process
def test_ban_real_nodes(tmp_path, capsys):
    async def first_start() -> None:
        async with live_run(tmp_path) as (gateway, run_dir):
            keys, address = RunKeys(run_dir.keys), gateway.node_endpoint
            keys.registry.admit(own.own.public, "b")
            async with local_node("a", address, keys.client("node")), local_node("b", address, own) as (_, b):
                await until(lambda: len(gateway.router.serving()) == 2, "two nodes serve")
                body = generate_body(5, 6, 7, max_tokens=200, ignore_eos=True)
                calls = [asyncio.create_task(post(gateway.http_url, body)) for _ in range(4)]
                await until(lambda: all(node.leases for node in gateway.router.nodes.values()), "both hold requests")
                assert await command("ban", str(tmp_path), "b") == 0
                with pytest.raises(RunMismatchError, match="banned by the operator"):
                    await asyncio.wait_for(b, WAIT_S)
                answers = await asyncio.gather(*calls)
                lengths = [(status, len(reply["choices"][0]["token_ids"])) for status, reply in answers]
                assert lengths == [(200, 200)] * 4
            first, second = sorted(await asyncio.to_thread(live_rows, run_dir), key=lambda row: row.name)
            assert (first.state, first.device, first.usd_per_hour, second.state) == ("serving", "cpu", 2.5, "banned")
            assert first.totals.tokens > 0

    async def second_start() -> None:
        async with live_run(tmp_path) as (gateway, run_dir):
            keys = RunKeys(run_dir.keys).client("node")
            assert not gateway.link.admission.is_admitted(own.own.public)
            async with PeerNode(gateway.node_endpoint, keys, "c") as other:
                assert isinstance(other.welcome, NodeWelcome)

    own = ClientKeys(RunKeys.create(tmp_path / "keys").curve("server").public, CurvePair(*zmq.curve_keypair()))
    asyncio.run(first_start())
    asyncio.run(second_start())
    told = capsys.readouterr().out
    assert "node b was banned" in told
    assert asyncio.run(command("nodes", str(tmp_path))) == 0
    table = capsys.readouterr().out
    assert all(f"\n{name} " in table for name in "abc") and "2.50" in table


# Only who has the operator's token may look or act: not the gateway's clients, and not with a wrong one.
async def test_control_needs_the_operators_token(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPOSER_GATEWAY_TOKEN", "of-a-worker")
    async with live_run(tmp_path) as (gateway, _):
        url = gateway.http_url
        assert (await get(f"{url}/control/nodes"))[0] == 401
        status, _ = await post(url, {}, "/control/nodes/ban?node=a", Authorization="Bearer of-a-worker")
        assert status == 401
        assert (tmp_path / "keys" / "operator.token").stat().st_mode & 0o777 == 0o600


# An unknown node is named, and a run that is over says so; `nodes` then shows what was recorded.
async def test_errors_of_commands(tmp_path, capsys):
    keys = RunKeys.create(tmp_path / "keys").client("node")
    async with live_run(tmp_path) as (gateway, _), PeerNode(gateway.node_endpoint, keys, "peer-1"):
        with pytest.raises(RequestError, match="no node 'x', see `orchestrator nodes`"):
            await command("ban", str(tmp_path), "x")
        await command("nodes", str(tmp_path), "--json")
        (row,) = json.loads(capsys.readouterr().out)
        assert (row["name"], row["state"], row["usd_per_million"]) == ("peer-1", "serving", None)
    with pytest.raises(NotLiveError, match="is not live on this machine: nothing of it answers at http://127"):
        commands.ban([str(tmp_path), "peer-1"])
    assert commands.nodes([str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "this is what it recorded" in told and "price unknown for peer-1: pass --price" in told
