"""A machine with nothing but an invite becomes a node that serves: the command, a real gateway, loopback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from operator import attrgetter
from pathlib import Path

import pytest
import zmq
from gateway_made import MACHINE, MODEL, generate_body, invite_for, post

from composer_prime.errors import ConfigError, InviteError, LostRunError
from composer_prime.run.keys import CurvePair
from composer_prime.wire.enrollment import Invite
from inference.enrolling import NodeState, enroll
from inference.joining import _Machine, join_parser
from tests.engines.reference import Reference
from tests.inference.publisher import Publisher
from tests.waiting import until

PATIENT = {"heartbeat_s": 0.2, "lost_after_s": 5.0}


@pytest.fixture
def publisher(keys, store) -> Publisher:
    return Publisher(store.root, keys, Reference(MODEL, scale=0.01))


@contextlib.asynccontextmanager
async def joining(invite: Invite, state: Path, *words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`inference join` on a CPU, with its standard error in a pipe; killed at the end."""
    command = ["-m", "inference.main", "join", invite.text(), "--state-dir", str(state), "--threads", "1", *words]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, "--device", "cpu", stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


def machine_of(keys, folder: Path, *words: str) -> _Machine:
    invite = invite_for(keys)
    return _Machine(join_parser().parse_args(words), list(words), NodeState(folder, invite))


@pytest.mark.process
async def test_a_string_is_enough(open_gateway, keys, publisher, tmp_path):
    """The node proves the newest weights before it attaches, answers a request, and leaves when it is asked to."""
    async with open_gateway(inference=PATIENT) as gateway:
        gateway.publish(publisher.publish(3))
        async with joining(invite_for(keys, gateway.node_endpoint), tmp_path, "--name", "box") as process:
            await until(gateway.versions, "the node to attach")
            assert gateway.versions() == {"box": 3}
            status, _ = await post(gateway.http_url, generate_body(5))
            assert status == 200
            assert [node.name for node in keys.registry.list()] == ["box"]
            process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(process.communicate(), 100)
            assert process.returncode == 0


@pytest.mark.process
@pytest.mark.parametrize(
    ("part", "method", "refusal", "words", "told"),
    [
        ("link", "_refusal", "this node is slow", (), "turned this node away: this node is slow"),
        ("link.chunks", "refusal", "it pulled 9 MB", ("--wait", "10s"), "within 10 s (--wait): it pulled 9 MB"),
    ],
)
async def test_a_node_that_is_turned_away_is_not_started_again(
    open_gateway, keys, publisher, tmp_path, part, method, refusal, words, told
):
    """The command ends with the gateway's reason: another start would load the model to be refused again.

    So it does where the run gives no weights for as long as it waits.
    """
    async with open_gateway(inference=PATIENT) as gateway:
        gateway.publish(publisher.publish(3))
        setattr(attrgetter(part)(gateway), method, lambda _: refusal)
        async with joining(invite_for(keys, gateway.node_endpoint), tmp_path, *words) as process:
            _, said = await asyncio.wait_for(process.communicate(), 250)
        assert process.returncode == 2
        assert told.encode() in said and b"restarting it" not in said


@pytest.mark.process
async def test_a_machine_that_may_pull_no_more_waits_for_the_next_version(open_gateway, keys, publisher, tmp_path):
    """One that lost its disk again and again is refused for now. It asks again, and starts with the newest version."""
    asked = []
    async with open_gateway(inference=PATIENT) as gateway:
        gateway.publish(publisher.publish(3))
        chunks = gateway.link.chunks
        usual, chunks.refusal = chunks.refusal, lambda account: asked.append(account) or "it pulled 9 MB"
        async with joining(invite_for(keys, gateway.node_endpoint), tmp_path) as process:
            said = asyncio.create_task(process.communicate())
            await until(lambda: len(asked) >= 3, "the node to ask again")
            chunks.refusal = usual
            gateway.publish(publisher.publish(4))
            await until(lambda: list(gateway.versions().values()) == [4], "the node to attach")
            process.send_signal(signal.SIGTERM)
            _, text = await asyncio.wait_for(said, 100)
            assert b"it pulled 9 MB" in text and b"restarting it" not in text and process.returncode == 0


@pytest.mark.process
async def test_a_process_that_crashes_is_started_again_a_few_times_and_no_more(keys, tmp_path):
    """It ends for good with status 0, 2 or 3, when it crashes too often, or when asked to."""
    script = f"""
import pathlib, sys, time
starts = pathlib.Path({str(tmp_path / "starts")!r})
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
plan = sys.argv[1].split(",")
status = plan[min(len(starts.read_text()), len(plan)) - 1]
time.sleep(600) if status == "stay" else sys.exit(int(status))
"""
    starts = tmp_path / "starts"

    async def run(plan: str, limit: int, machine: _Machine) -> tuple[int, int]:
        status = await machine.keep_running("node 0", [sys.executable, "-c", script, plan], {}, limit)
        count = len(starts.read_text())
        starts.unlink()
        return status, count

    machine = machine_of(keys, tmp_path)
    assert await run("7,0", 5, machine) == (0, 2)
    assert await run("2", 5, machine) == (2, 1)
    assert await run("7", 1, machine) == (1, 2)
    assert await run("4,4,7,0", 1, machine) == (0, 4)
    assert await run("3", 5, machine) == (3, 1)
    staying = asyncio.create_task(run("stay", 5, machine))
    await until(lambda: starts.exists() and starts.read_text(), "the process to start")
    machine._stopping.set()
    status, count = await asyncio.wait_for(staying, 100)
    assert status == 0 and count == 1


@pytest.mark.process
async def test_the_second_signal_reaches_the_nodes(keys, tmp_path):
    """`inference join` has its nodes drain at the first signal and passes on the next, at which they drop what runs."""
    seen = tmp_path / "seen"
    node = f"""
import pathlib, signal, sys, time
from composer_prime.run.process import end_with_parent
end_with_parent(signal.SIGKILL)
seen = pathlib.Path({str(seen)!r}).open("a", buffering=1)
def caught(number, frame):
    print(int(number), file=seen)
    if number == {signal.SIGINT:d}:
        sys.exit(3)
for number in ({signal.SIGTERM:d}, {signal.SIGINT:d}):
    signal.signal(number, caught)
print("ready", file=seen)
while True:
    time.sleep(600)
"""
    invite = invite_for(keys, "tcp://127.0.0.1:1")
    machine = f"""
import asyncio, pathlib, sys
from composer_prime.wire.enrollment import Invite
from inference import joining
from inference.enrolling import NodeState
from inference.joining import _Machine
joining.DRAIN_S = 300
joining.plan_nodes = lambda *_: ("local", 1, [()])
class Machine(_Machine):
    def _child(self, *_):
        return [sys.executable, "-c", {node!r}], {{}}
words = joining.join_parser().parse_args([])
invite = Invite.read({invite.text()!r})
made = Machine(words, [], NodeState(pathlib.Path({str(tmp_path)!r}), invite))
raise SystemExit(asyncio.run(made.run()))
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", machine)
    shown = lambda: seen.read_text().split() if seen.exists() else []
    try:
        await until(lambda: "ready" in shown(), "the node to start")
        process.send_signal(signal.SIGTERM)
        await until(lambda: str(int(signal.SIGTERM)) in shown(), "the first signal")
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 100) == 3
        assert shown() == ["ready", str(int(signal.SIGTERM)), str(int(signal.SIGINT))]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


@pytest.mark.process
async def test_a_node_that_does_not_end_is_killed(keys, tmp_path, monkeypatch):
    """Each signal reaches it, and SIGKILL after the time that it has to drain."""
    ready, seen = tmp_path / "ready", tmp_path / "seen"
    script = f"""
import pathlib, signal, time
seen = pathlib.Path({str(seen)!r})
signal.signal(signal.SIGTERM, lambda *_: seen.open("a").write("x"))
pathlib.Path({str(ready)!r}).touch()
while True:
    time.sleep(600)
"""
    monkeypatch.setattr("inference.joining.END_S", 2.0)
    machine = machine_of(keys, tmp_path)
    staying = asyncio.create_task(machine.keep_running("node 0", [sys.executable, "-c", script], {}, 5))
    await until(ready.exists, "the process to start")
    (pid,) = machine._running
    machine._stopping.set()
    assert await asyncio.wait_for(staying, 100) == 0 and not machine._running
    assert seen.read_text() == "x"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--price", "-1"], "inference.usd_per_hour = -1.0 .*the command line"),
        (["--device", "cuda"], "--device is cuda, but no GPU is visible here"),
    ],
)
async def test_a_machine_that_cannot_serve_leaves_the_invite_unused(keys, tmp_path, words, message):
    """It is refused before it asks the run for anything."""
    with pytest.raises(ConfigError, match=message):
        await machine_of(keys, tmp_path, *words).run()
    assert not list(tmp_path.glob("run-1-*"))


def test_a_state_folder_that_cannot_be_written_is_named(keys):
    state = NodeState(Path("/proc/x"), invite_for(keys))
    with pytest.raises(ConfigError, match=r"/proc/x/run-1-.* cannot be written .*--state-dir"), state.locked("join"):
        pass


def test_the_price_of_a_node_is_that_of_its_gpus(keys, tmp_path):
    """--price is that of one GPU; of the machine where it has none. Unknown stays unknown."""
    prices = []
    for words, gpus in ((["--price", "2.5"], (2, 3)), (["--price", "2.5"], (1,)), (["--price", "2.5"], ()), ([], (1,))):
        command, _ = machine_of(keys, tmp_path, *words)._child(0, "local", 1, gpus)
        prices.append(join_parser().parse_args(command[command.index("join") + 1 :]).usd_per_hour)
    assert prices == [5.0, 2.5, 2.5, None]


async def test_what_cannot_be_reached_is_named_with_the_time(keys, tmp_path):
    """A port that nobody listens on, and one that belongs to something else."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        other.curve_server = True
        other.curve_publickey, other.curve_secretkey = zmq.curve_keypair()
        port = other.bind_to_random_port("tcp://127.0.0.1")
        invite = invite_for(keys)
        with pytest.raises(LostRunError, match=r"tried for 0\.5 s .* 127\.0\.0\.1:1 took no connection"):
            await enroll(NodeState(tmp_path, invite), "box", MACHINE, 0.5)
        invite = invite_for(keys, f"127.0.0.1:{port}")
        with pytest.raises(LostRunError, match=f"listens at 127.0.0.1:{port} does not hold the run's key"):
            await enroll(NodeState(tmp_path, invite), "box", MACHINE, 3.0)


async def test_refusals_of_the_run_reach_the_machine(open_gateway, keys, tmp_path):
    """Used up, which the handshake itself refuses, with the remedy; revoked, also behind it; expired by the clock."""
    async with open_gateway() as gateway:
        invite = invite_for(keys, gateway.node_endpoint)
        states = [NodeState(tmp_path / name, invite) for name in "ab"]
        await enroll(states[0], "box", MACHINE, 100)
        with pytest.raises(InviteError, match="orchestrator invite RUN_DIR"):
            await enroll(states[1], "box", MACHINE, 100)
        keys.registry.revoke(states[0].keys().own.public, "too slow")
        with pytest.raises(InviteError, match=r"too slow|orchestrator invite RUN_DIR"):
            await enroll(states[0], "box", MACHINE, 100)
        expired = invite_for(keys, gateway.node_endpoint, valid_s=-5)
        with pytest.raises(InviteError, match="expired at"):
            await enroll(NodeState(tmp_path / "b", expired), "box", MACHINE, 100)


async def test_a_node_keeps_its_key_in_a_private_file(keys, tmp_path):
    """The same after a restart, another one for each node of the machine and for each run."""
    invite = invite_for(keys)
    state = NodeState(tmp_path, invite)
    pair = state.keys().own
    assert NodeState(tmp_path, invite).keys().own == pair != NodeState(tmp_path, invite, 1).keys().own
    assert isinstance(pair, CurvePair) and state.keys().token()
    assert [path.stat().st_mode & 0o077 for path in Path(state.path).glob("*.curve")] == [0, 0]
    with state.locked("join", "busy"), pytest.raises(Exception, match="busy"), state.locked("join", "busy"):
        pass
