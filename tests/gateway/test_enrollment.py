"""Joining by an invite: what the gateway admits, tells and refuses, over real CURVE connections."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from gateway_made import MACHINE, MODEL, invite_for
from node_peer import PeerNode
from zmq.utils.monitor import recv_monitor_message

from composer_prime.config.inference import VllmEngineConfig
from composer_prime.run.keys import ClientKeys, CurvePair, RunKeys
from composer_prime.run.weights import ChunkRef, ModelFile, ModelFiles, open_model_files, sign
from composer_prime.wire.enrollment import Invite, key_proof, release
from composer_prime.wire.node_messages import (
    PROTOCOL,
    ChunkRequest,
    Dismissed,
    Enroll,
    Enrolled,
    NodeHello,
    NodeWelcome,
    ToNode,
    WeightPiece,
)
from composer_prime.wire.sockets import dealer
from inference.joining import join_config, join_parser
from tests.waiting import until


@pytest.fixture
def invite(keys: RunKeys) -> Invite:
    """An invite for two nodes."""
    return invite_for(keys, uses=2)


class Joiner:
    """One connection that sends messages and reads answers."""

    def __init__(self, endpoint: str, keys: ClientKeys) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = dealer(self._context, endpoint, keys)
        self._key = keys.own.public

    async def ask(self, message) -> ToNode:
        if isinstance(message, Enroll) and message.key in OWN:
            message = msgspec.structs.replace(message, proof=key_proof(*OWN[message.key], self._key))
        await self._socket.send(msgspec.msgpack.encode(message))
        assert await self._socket.poll(100_000), f"no answer to {type(message).__name__}"
        return msgspec.msgpack.decode(await self._socket.recv(), type=ToNode)

    def until_refused(self) -> asyncio.Task[Any]:
        """Ends when a handshake fails for good."""
        events = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        return asyncio.ensure_future(recv_monitor_message(events))

    async def is_silent(self, message, timeout_s: float = 0.5) -> bool:
        await self._socket.send(msgspec.msgpack.encode(message))
        return not await self._socket.poll(timeout_s * 1000)

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def joined():
    """Opens connections, and closes them after the test."""
    opened: list[Joiner] = []

    def connect(gateway, keys: ClientKeys) -> Joiner:
        opened.append(Joiner(gateway.node_endpoint, keys))
        return opened[-1]

    yield connect
    for joiner in opened:
        joiner.close()


OWN: dict[bytes, tuple[bytes, bytes]] = {}
"""By public key: its secret, and the gateway's public key."""


def own_keys(invite: Invite) -> ClientKeys:
    keys = ClientKeys(invite.keys.server_public, CurvePair(*zmq.curve_keypair()))
    OWN[keys.own.public] = keys.own.secret, keys.server_public
    return keys


def enroll(own: ClientKeys, **changes) -> Enroll:
    usual = Enroll(
        run_id="run-1", release=release(), protocol=PROTOCOL, key=own.own.public, name="box", machine=MACHINE
    )
    return msgspec.structs.replace(usual, **changes)


def hello(name: str, **changes) -> NodeHello:
    usual = NodeHello(
        node_id=name, engine="peer", run_id=None, version=0, max_concurrent=4, instance=name, max_context=512
    )
    return msgspec.structs.replace(usual, **changes)


async def test_a_node_enrolls_pulls_the_model_files_and_attaches_under_its_own_key(open_gateway, keys, invite, joined):
    """The string alone is enough: files, context and settings come over the link, each byte checked."""
    own = own_keys(invite)
    async with open_gateway() as gateway:
        answer = await joined(gateway, invite.keys).ask(enroll(own))
        assert isinstance(answer, Enrolled) and answer.node_id == "box" and answer.max_context == 512
        assert keys.registry.find("box").key == own.own.public
        files = open_model_files(answer.model, keys.verifier(), run_id="run-1").files
        assert {"config.json", "tokenizer.json"} <= {file.name for file in files}
        assert not [file.name for file in files if file.name.endswith(".safetensors")]
        node = joined(gateway, own)
        for file in files:
            assert file.size == (MODEL / file.name).stat().st_size
            pieces = [await node.ask(ChunkRequest(sha256=ref.sha256, offset=0)) for ref in file.chunks]
            assert all(isinstance(piece, WeightPiece) and piece.last for piece in pieces)
            assert b"".join(piece.data for piece in pieces) == (MODEL / file.name).read_bytes()
        [ref] = next(file for file in files if file.name == "config.json").chunks
        rest = await node.ask(ChunkRequest(sha256=ref.sha256, offset=ref.size - 3))
        assert rest.data == (MODEL / "config.json").read_bytes()[-3:]
        assert await node.ask(ChunkRequest(sha256="0" * 64, offset=0)) == WeightPiece(sha256="0" * 64, offset=0)
        assert isinstance(await joined(gateway, own).ask(enroll(own)), Enrolled)  # to learn the newest version
        assert isinstance(await node.ask(hello("box")), NodeWelcome)
        node.close()  # It crashed: it enrolls again at its next start, at once.
        assert isinstance(await joined(gateway, own).ask(enroll(own)), Enrolled)


async def test_a_node_gets_the_runs_engine_settings(open_gateway, invite, joined, tmp_path):
    """Its own settings file changes single ones. No command line comes over the link, and no number of GPUs."""
    vllm = {"gpu_memory_utilization": 0.5, "max_num_seqs": 8, "tensor_parallel": 4, "extra_args": ["--seed", "1"]}
    async with open_gateway(inference={"engine": "vllm", "vllm": vllm}) as gateway:
        answer = await joined(gateway, invite.keys).ask(enroll(own_keys(invite)))
    assert isinstance(answer, Enrolled)
    settings = tmp_path / "settings.toml"
    settings.write_text("[inference.vllm]\nmax_num_seqs = 4\n")
    options = join_parser().parse_args(["--settings", str(settings), "--tensor-parallel", "2"])
    changes = {"max_num_seqs": 4, "tensor_parallel": 2, "extra_args": []}
    config = join_config(options, json.loads(answer.inference))
    assert config.engine.name == "vllm" and config.vllm == VllmEngineConfig(**{**vllm, **changes})


async def test_an_invite_opens_nothing_but_the_enrollment(open_gateway, invite, joined, store):
    """Its holder can neither sample, nor pull weights, nor attach."""
    [ref] = store.put_chunks(b"weights")
    async with open_gateway() as gateway:
        stranger = joined(gateway, invite.keys)
        assert await stranger.is_silent(ChunkRequest(sha256=ref.sha256, offset=0))
        assert await stranger.is_silent(hello("box"))
        await until(lambda: gateway.link.conduct.garbage == 2)
        assert await stranger.is_silent(hello("box"), 0.1) and not gateway.router.nodes


async def test_enrollments_are_refused_with_the_reason(open_gateway, keys, invite, joined):
    """Another run, another release, used up, revoked; the run's shared key enrolls nobody."""
    first, second, third = (own_keys(invite) for _ in range(3))
    older = msgspec.msgpack.decode(msgspec.msgpack.encode(enroll(first, protocol=5)))
    async with open_gateway() as gateway:
        link = joined(gateway, invite.keys)
        for message, part in (
            (older | {"machine": {"gpus": [], "cores": 2}}, "(protocol 5)"),
            (enroll(first, run_id="run-2"), "the invite is of run 'run-2', here is run 'run-1'"),
            (enroll(first, release="0.0.1"), f"composer-prime {release()} (protocol {PROTOCOL}), this node 0.0.1 ("),
            (enroll(first, protocol=PROTOCOL + 1), "protocol"),
            *((enroll(first, name=name), "--name") for name in ("-rf", "a b", "../x", "<b>", "n" * 65)),
        ):
            answer = await link.ask(message)
            assert isinstance(answer, Dismissed) and part in answer.reason
        assert isinstance(await link.ask(enroll(first)), Enrolled)
        assert (await link.ask(enroll(second))).node_id == "box-2"
        assert "for 2 nodes and 2 have used it" in (await link.ask(enroll(third))).reason
        shared = joined(gateway, keys.client("node"))
        assert "shared node key cannot enroll" in (await shared.ask(enroll(third))).reason
        assert "only itself" in (await joined(gateway, first).ask(enroll(third))).reason
        keys.registry.revoke(first.own.public, "lied")
        assert "turned away for good: lied" in (await link.ask(enroll(first))).reason


async def test_an_enrollment_proves_its_key(open_gateway, keys, invite, joined):
    """Who knows the public key of a node, and its invite, learns nothing of the run by it, and takes no use."""
    own = own_keys(invite)
    secret, server = OWN.pop(own.own.public)
    async with open_gateway() as gateway:
        link = joined(gateway, invite.keys)
        proofs = b"", key_proof(secret, server, own.own.public), key_proof(invite.keys.own.secret, server, link._key)
        for proof in proofs:  # None, that for another connection, and that of another secret.
            assert "does not hold the key" in (await link.ask(enroll(own, proof=proof))).reason
        for key in (b"~" * 40, b"#" * 40, b"0" * 40):
            assert "does not hold" in (await link.ask(enroll(own, key=key))).reason
        assert not keys.registry.list()
        proof = key_proof(secret, server, link._key)
        assert isinstance(await link.ask(enroll(own, proof=proof)), Enrolled)


async def test_a_spent_invite_is_a_strangers_key(open_gateway, keys, joined):
    """Used up, expired or withdrawn: the handshake fails, so nothing that its holders send is read."""
    now, secrets = time.time(), []
    for uses, expires in ((1, now + 1000), (1, now - 1), (1, now + 1000)):
        public, secret = zmq.curve_keypair()
        keys.registry.invite(public, uses=uses, expires=expires)
        secrets.append(ClientKeys(keys.curve("server").public, CurvePair(public, secret)))
    used, _, withdrawn = secrets
    keys.registry.enroll(used.own.public, b"k" * 40, "box", "")
    keys.registry.withdraw(withdrawn.own.public)
    async with open_gateway() as gateway:
        for spent in secrets:
            link = joined(gateway, spent)
            async with asyncio.timeout(100):
                await link.until_refused()
        assert gateway.link.conduct.garbage == 0


async def test_no_invite_stops_the_enrollment_of_another(open_gateway, keys, invite, joined):
    """Neither many connections that ask at once nor one that asks without end."""
    public, secret = zmq.curve_keypair()
    keys.registry.invite(public, uses=1, expires=time.time() + 1000)
    hostile = ClientKeys(keys.curve("server").public, CurvePair(public, secret))
    refused = enroll(own_keys(invite), run_id="run-2")
    async with open_gateway() as gateway:
        links = [joined(gateway, hostile) for _ in range(40)]
        for link in links:
            assert isinstance(await link.ask(refused), Dismissed)
        for _ in range(50):
            for link in links:
                await link._socket.send(msgspec.msgpack.encode(refused))
        assert isinstance(await joined(gateway, invite.keys).ask(enroll(own_keys(invite))), Enrolled)
        async with asyncio.timeout(100):
            while not gateway.link.conduct.ignored:
                for _ in range(500):
                    await links[0]._socket.send(msgspec.msgpack.encode(refused))
                await asyncio.sleep(0.02)
        assert isinstance(await joined(gateway, invite.keys).ask(enroll(own_keys(invite))), Enrolled)


async def test_keys_that_are_not_a_nodes_own_are_not_enrolled(open_gateway, keys, invite, joined):
    """The shared key would get a name that locks out all who hold it, an invite's key the rights of a node."""
    public, _ = zmq.curve_keypair()
    keys.registry.invite(public, uses=1, expires=time.time() + 1000)
    async with open_gateway() as gateway:
        link = joined(gateway, invite.keys)
        for key in (keys.curve("node").public, invite.keys.own.public, public):
            answer = await link.ask(enroll(own_keys(invite), key=key))
            assert isinstance(answer, Dismissed) and "not a node's own: remove its state folder" in answer.reason
        assert not keys.registry.list()


async def test_a_node_gets_no_name_of_one_with_the_shared_key(open_gateway, node_keys, invite, joined):
    """Else the next hello of that one would be refused. The launcher's names are nobody's, attached or not."""
    async with open_gateway() as gateway, PeerNode(gateway.node_endpoint, node_keys, "box"):
        link = joined(gateway, invite.keys)
        assert (await link.ask(enroll(own_keys(invite)))).node_id == "box-2"
        assert (await link.ask(enroll(own_keys(invite), name="node-0"))).node_id == "node-0-joined"
        assert isinstance(await joined(gateway, node_keys).ask(hello("node-0")), NodeWelcome)


async def test_a_fault_of_this_machine_is_no_refusal(open_gateway, keys, invite, joined):
    """While the registry cannot be read, nodes that are known connect, others try again, and nobody is turned away."""
    first, second = own_keys(invite), own_keys(invite)
    path, aside = keys.registry.path, keys.folder / "aside"
    async with open_gateway() as gateway:
        link = joined(gateway, invite.keys)
        assert isinstance(await link.ask(enroll(first)), Enrolled)
        gateway.link.end_revoked()  # learns of it, as every second
        path.rename(aside)
        path.mkdir()
        assert await link.is_silent(enroll(second))
        assert isinstance(await joined(gateway, first).ask(hello("box")), NodeWelcome)
        stranger = joined(gateway, second)
        refused = stranger.until_refused()
        assert await stranger.is_silent(enroll(second)) and not refused.done()
        refused.cancel()
        path.rmdir()
        aside.rename(path)
        assert isinstance(await link.ask(enroll(second)), Enrolled)
        assert isinstance(await joined(gateway, second).ask(enroll(second)), Enrolled)


async def test_a_revoked_node_is_sent_away_and_stays_out_while_others_serve_on(
    open_gateway, keys, node_keys, invite, joined
):
    """Each node has its own identity, so one can be revoked; the shared key and its nodes are untouched."""
    own = own_keys(invite)
    async with open_gateway() as gateway, PeerNode(gateway.node_endpoint, node_keys, "other") as other:
        await joined(gateway, invite.keys).ask(enroll(own))
        revoked = PeerNode(gateway.node_endpoint, own, "box")
        async with revoked:
            assert isinstance(revoked.welcome, NodeWelcome)
            RunKeys(keys.folder).registry.revoke(own.own.public, "too slow")
            await revoked.until(lambda: isinstance(revoked.welcome, Dismissed))
            assert "turned away for good: too slow" in revoked.welcome.reason
        again = joined(gateway, own)
        assert await again.is_silent(hello("box"))
        assert list(gateway.versions()) == ["other"]
        assert isinstance(other.welcome, NodeWelcome)


async def test_two_processes_with_one_key_and_stolen_names_are_refused(open_gateway, node_keys, invite, joined):
    """A copied state folder, a node that takes another's name, and one without a key of its own that does."""
    own, second = own_keys(invite), own_keys(invite)
    async with open_gateway(inference={"heartbeat_s": 0.1, "lost_after_s": 60.0}) as gateway:
        link = joined(gateway, invite.keys)
        await link.ask(enroll(own))
        await link.ask(enroll(second))
        assert isinstance(await joined(gateway, own).ask(hello("box")), NodeWelcome)
        copied = await joined(gateway, own).ask(hello("box", instance="another process"))
        assert "two processes hold the key of node 'box'" in copied.reason
        # It is told so before it pulls and loads a model.
        copied = await joined(gateway, own).ask(enroll(own))
        assert "two processes hold the key of node 'box'" in copied.reason and copied.may_return
        assert "key of node 'box-2' says that it is 'box'" in (await joined(gateway, second).ask(hello("box"))).reason
        assert "belongs to a node with a key of its own" in (await joined(gateway, node_keys).ask(hello("box"))).reason


def test_a_list_of_model_files_is_checked_before_it_is_believed(keys):
    """Another signer, another run, cut bytes, and names that leave the folder."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from composer_prime.errors import SignatureError, WireError

    ref, key = ChunkRef(hashlib.sha256(b"x").hexdigest(), 1), keys.verifier()
    good = ModelFiles(run_id="run-1", files=[ModelFile("config.json", [ref])])
    signed = sign(good, keys.signer())
    assert open_model_files(signed, key, run_id="run-1") == good
    with pytest.raises(SignatureError, match="run-1"):
        open_model_files(sign(good, Ed25519PrivateKey.generate()), key, run_id="run-1")
    with pytest.raises(SignatureError, match="run 'run-1', this is run 'run-2'"):
        open_model_files(signed, key, run_id="run-2")
    with pytest.raises(WireError, match="model_files"):
        open_model_files(signed[:-5], key, run_id="run-1")
    named = [ModelFile(name, [ref]) for name in ("../config.json", "/etc/passwd", ".hidden", "", "a/b.json")]
    chunks = [ModelFile("config.json", [chunk]) for chunk in (ChunkRef("../x", 1), ChunkRef(ref.sha256, 1 << 40))]
    for file in [*named, *chunks]:
        with pytest.raises(WireError, match=r"plain name|expected a sha256"):
            open_model_files(sign(ModelFiles(run_id="run-1", files=[file]), keys.signer()), key, run_id="run-1")
