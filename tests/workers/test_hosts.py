"""Hosts of workers on other machines, over loopback: who is admitted, what they get to play, and how they are lost."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio
from peer import Peer

import composer_prime
from composer_prime.config import Config
from composer_prime.errors import ConfigError, DeadlineError, RunMismatchError
from composer_prime.plan.sandboxes import probe
from composer_prime.run.keys import RunKeys
from composer_prime.wire.node import Drain, Goodbye, Heard, HelloAgain, Rejected
from composer_prime.wire.sockets import dealer
from composer_prime.wire.turns import JSON, PACKED
from orchestrator.workers.hosts import HostServer, chat_files, releases
from orchestrator.workers.join import JoinedHost
from orchestrator.workers.pool import WorkerPool, check_runtimes
from orchestrator.workers.protocol import (
    CancelCall,
    CancelRollout,
    ForSource,
    FromSource,
    GatewayCall,
    GatewayReply,
    Heartbeat,
    HostHello,
    HostReady,
    HostWelcome,
    RolloutReply,
    RunRollout,
    SourceSpec,
    ToHost,
    WorkerReady,
)

MODEL = str(Path(composer_prime.__file__).parent / "assets/tiny/policy")
START_S = 280.0
"""Importing verifiers takes seconds of CPU: let a busy machine have its time."""
READY = WorkerReady(num_tasks={"train": 8}, digests={"train": "aa"})


def make_config(**orchestrator: Any) -> Config:
    source = {"name": "bench", "taskset": {"id": "bench_env"}, "workers": 0}
    return Config.model_validate(
        {
            "run": {"name": "r"},
            "model": {"path": "tiny"},
            "inference": {"heartbeat_s": 0.1, "lost_after_s": 60.0},
            "orchestrator": {
                "source": [source],
                "worker_address": "tcp://127.0.0.1:0",
                "worker_start_timeout_s": START_S,
            }
            | orchestrator,
        }
    )


def rollout(rollout_id: str, **more: Any) -> RunRollout:
    return RunRollout(rollout_id=rollout_id, task_index=0, model="policy", gateway_url="", timeout_s=100, **more)


def reply(rollout_id: str, reward: float = 1.0) -> FromSource:
    return FromSource(source="bench", reply=RolloutReply(rollout_id=rollout_id, task_id="t", reward=reward))


class Run:
    """The orchestrator's side: one source without workers of its own."""

    def __init__(self, folder: Path, gateway_url: str, model_path: str, spec: dict[str, Any]) -> None:
        self.keys = RunKeys.create(folder / "keys")
        values = {"tasksets": {"train": {"id": "bench_env"}}, "harness": {"id": "bench_env"}} | spec
        source = SourceSpec(name="bench", model_path=model_path, **values)
        self.pool = WorkerPool(source, workers=0, start_timeout_s=START_S)
        self.server = HostServer(make_config(), {"bench": self.pool}, gateway_url, self.keys, "run-1")


@asynccontextmanager
async def serving(
    folder: Path, gateway_url: str = "http://127.0.0.1:9", model_path: str = MODEL, **spec: Any
) -> AsyncIterator[Run]:
    run = Run(folder, gateway_url, model_path, spec)
    task = asyncio.create_task(run.server.serve())
    try:
        yield run
    finally:
        await run.pool.close()
        await run.server.close(finished=True)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class ScriptedHost:
    """A host that says what the test says; it sends heartbeats until `silent`."""

    def __init__(self, run: Run, name: str = "far", slots: int = 2, **hello: Any) -> None:
        self.hello = HostHello(**{"name": name, "slots": slots, "processes": 1, "releases": releases()} | hello)
        self.silent = False
        self._run = run
        self._context = zmq.asyncio.Context()
        self._received: list[ToHost] = []

    async def __aenter__(self) -> ScriptedHost:
        self._socket = dealer(self._context, self._run.server.endpoint, self._run.keys.client("worker"))
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._beat())]
        self.send(self.hello)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    def send(self, message: msgspec.Struct) -> None:
        self._socket.send(msgspec.msgpack.encode(message))

    async def expect(self, kind: type) -> Any:
        """Wait for a message of this type. Answers to heartbeats are passed over, another message is an error."""
        while True:
            async with asyncio.timeout(100):
                while not self._received:
                    await asyncio.sleep(0.01)
            message = self._received.pop(0)
            if isinstance(message, kind):
                return message
            assert isinstance(message, HelloAgain), message

    async def attach(self, ready: WorkerReady = READY) -> None:
        await self.expect(HostWelcome)
        self.send(HostReady(ready={"bench": ready}))

    async def _receive(self) -> None:
        decoder = msgspec.msgpack.Decoder(ToHost)
        while True:
            message = decoder.decode(await self._socket.recv())
            self._received += [] if isinstance(message, Heard) else [message]

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            if not self.silent:
                self.send(Heartbeat())


async def until(condition: Any, timeout_s: float = 150) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def test_slots_bound_what_a_host_plays(tmp_path: Path) -> None:
    """Rollouts beyond the slots of all hosts wait, without their deadline running, until one of them ends."""
    async with serving(tmp_path) as run, ScriptedHost(run, "a") as a, ScriptedHost(run, "b", slots=1) as b:
        await a.attach()
        await b.attach()
        await until(lambda: len(run.pool.players) == 2)
        begun: list[str] = []
        calls = [
            asyncio.create_task(run.pool.run(rollout(name), on_begin=lambda name=name: begun.append(name)))
            for name in ("r0", "r1", "r2", "r3")
        ]
        played = [await a.expect(ForSource), await a.expect(ForSource), await b.expect(ForSource)]
        assert sorted(order.message.rollout_id for order in played) == sorted(begun) == ["r0", "r1", "r2"]
        b.send(reply(played[2].message.rollout_id, 0.25))
        last = await b.expect(ForSource)
        assert (last.message.rollout_id, begun[-1]) == ("r3", "r3")
        for host, order in ((a, played[0]), (a, played[1]), (b, last)):
            host.send(reply(order.message.rollout_id))
        assert sorted(result.reward for result in await asyncio.gather(*calls)) == [0.25, 1.0, 1.0, 1.0]


async def test_a_repeated_hello_gets_one_welcome(tmp_path: Path) -> None:
    """The welcome has the whole tokenizer. A host that has waited for a minute gets another one."""
    async with serving(tmp_path) as run, ScriptedHost(run) as host:
        await host.expect(HostWelcome)
        for _ in range(3):
            host.send(host.hello)
        host.send(HostReady(ready={"bench": READY}))
        call = asyncio.create_task(run.pool.run(rollout("r")))
        await host.expect(ForSource)  # Another welcome would be before it.
        call.cancel()
        async with ScriptedHost(run, "late") as late:
            await late.expect(HostWelcome)
            for waiting in run.server.hosts.values():
                waiting.welcomed_at -= 100
            late.send(late.hello)
            await late.expect(HostWelcome)


async def test_a_silent_host_loses_its_rollouts_and_late_replies_count_for_nothing(tmp_path: Path) -> None:
    """They fail with a retryable error and no reward; the host is told to say hello, and plays again."""
    async with serving(tmp_path) as run, ScriptedHost(run) as host:
        await host.attach()
        await run.pool.start()
        call = asyncio.create_task(run.pool.run(rollout("r")))
        await host.expect(ForSource)
        host.silent = True
        while not call.done():
            for silent in run.server.hosts.values():
                silent.last_heard -= 100
            await asyncio.sleep(0.01)
        lost = await call
        assert (lost.reward, lost.failure.kind, lost.failure.retryable) == (None, "worker", True)
        assert "worker host far is gone: silent" in lost.failure.message and "= 60)" in lost.failure.message
        again = asyncio.create_task(run.pool.run(rollout("again")))
        host.send(reply("again"))  # Nobody gave it to this connection.
        await host.expect(HelloAgain)
        host.send(host.hello)
        host.silent = False
        await host.attach()
        assert (await host.expect(ForSource)).message.rollout_id == "again"
        assert not again.done()
        host.send(reply("again", 0.5))
        assert (await again).reward == 0.5


async def test_what_does_not_fit_is_refused_with_both_values(tmp_path: Path) -> None:
    """Other releases, other tasks, too few slots; the run goes on without that host."""
    ours = importlib.metadata.version("verifiers")
    async with serving(tmp_path) as run:
        for hello, words in (
            ({"releases": {**releases(), "verifiers": "0.0.1"}}, ["0.0.1", ours, "same releases"]),
            ({"slots": 1, "processes": 3}, ["1 slots", "3 processes", "--slots", "--workers"]),
            ({"name": "a\nb"}, ["printable", "--name"]),
        ):
            async with ScriptedHost(run, **hello) as host:
                reason = (await host.expect(Rejected)).reason
                assert all(word in reason for word in words), reason
        async with ScriptedHost(run) as first, ScriptedHost(run, "other") as other:
            await first.attach()
            await run.pool.start()
            for ready, words in (
                (WorkerReady(num_tasks={"train": 7}, digests=READY.digests), ["'bench'", "7", "8", "install"]),
                (WorkerReady(num_tasks=READY.num_tasks, digests={"train": "bb"}), ["prompts", "aa", "bb"]),
            ):
                await other.attach(ready)
                reason = (await other.expect(Rejected)).reason
                assert all(word in reason for word in words), reason
                other.send(other.hello)
            assert run.pool.num_tasks() == 8 and len(run.pool.players) == 1


@asynccontextmanager
async def playing(folder: Path, gateway: Peer) -> AsyncIterator[tuple[ScriptedHost, asyncio.Task[RolloutReply]]]:
    """A host that plays rollout "r", which asks the gateway."""
    async with serving(folder, gateway.url.removesuffix("/v1")) as run, ScriptedHost(run) as host:
        await host.attach()
        await run.pool.start()
        call = asyncio.create_task(run.pool.run(rollout("r")))
        await host.expect(ForSource)
        yield host, call


async def test_a_host_reaches_the_policy_for_its_own_rollouts_only(tmp_path: Path) -> None:
    """Its requests go to the gateway while the rollout runs there. A cancelled rollout is cancelled on the host."""
    async with Peer() as peer, playing(tmp_path, peer) as (host, call):
        body = msgspec.json.encode({"model": "policy", "token_ids": [5, 6], "sampling_params": {"max_tokens": 4}})
        for number, session, path in (
            (1, "r", "/inference/v1/generate"),
            (2, "r#1", "/inference/v1/generate"),
            (3, "another", "/inference/v1/generate"),
            (4, "r", "/metrics"),
        ):
            headers = {"Content-Type": JSON, "Accept": PACKED, "Authorization": "mine"} if session == "r#1" else {}
            host.send(GatewayCall(call=number, path=path, session=session, body=body, headers=headers))
        replies = {reply.call: reply for reply in [await host.expect(GatewayReply) for _ in range(4)]}
        assert {number: reply.status for number, reply in replies.items()} == {1: 200, 2: 200, 3: 403, 4: 403}
        assert set(peer.sessions) == {"r", "r#1"}
        # The forms of body and answer pass both ways, no other header does.
        assert (peer.headers["r#1"]["Accept"], peer.headers["r"]["Accept"]) == (PACKED, "*/*")
        assert "Authorization" not in peer.headers["r#1"]
        assert replies[2].content_type == JSON
        call.cancel()
        assert (await host.expect(ForSource)).message == CancelRollout(rollout_id="r")


async def test_a_hosts_request_outlives_the_gateway_process_that_took_it(tmp_path: Path) -> None:
    """Its connection is lost, and another process answers: the rollout does not notice."""
    async with Peer(lost_first=2) as peer, playing(tmp_path, peer) as (host, call):
        body = msgspec.json.encode({"model": "policy", "token_ids": [5], "sampling_params": {"max_tokens": 4}})
        host.send(GatewayCall(call=1, path="/inference/v1/generate", session="r", body=body))
        assert (await host.expect(GatewayReply)).status == 200 and peer.lost_first == 0
        call.cancel()


async def test_an_open_request_ends_with_its_rollouts_host(tmp_path: Path) -> None:
    """CancelCall and Goodbye close the requests at the gateway: nobody would read the answers."""
    async with Peer(delay_s=100) as peer, playing(tmp_path, peer) as (host, call):
        body = msgspec.json.encode({"model": "policy", "token_ids": [5], "sampling_params": {"max_tokens": 4}})
        for number in (1, 2):
            host.send(GatewayCall(call=number, path="/inference/v1/generate", session="r", body=body))
        await until(lambda: peer.running == 2)
        host.send(CancelCall(call=1))
        await until(lambda: peer.cancelled == 1)
        host.send(Goodbye(reason="power"))
        assert "goodbye: power" in (await call).failure.message
        await until(lambda: peer.cancelled == 2)


async def test_a_draining_host_gets_nothing_more_and_an_ended_run_sends_hosts_away(tmp_path: Path) -> None:
    """Its own rollouts end well, new ones wait for another host. A finished run tells hosts to leave."""
    async with serving(tmp_path) as run, ScriptedHost(run) as host:
        await host.attach()
        await run.pool.start()
        first = asyncio.create_task(run.pool.run(rollout("first")))
        await host.expect(ForSource)
        host.send(Drain(reason="SIGTERM"))
        await until(lambda: not run.pool.players[0].has_room)
        second = asyncio.create_task(run.pool.run(rollout("second")))
        host.send(reply("first"))
        assert (await first).reward == 1.0
        async with ScriptedHost(run, "other") as other:
            await other.attach()
            assert (await other.expect(ForSource)).message.rollout_id == "second"
            other.send(reply("second"))
            assert (await second).failure is None
            await run.server.close(finished=True)
            assert (await other.expect(Drain)).reason == "the run is finished"


def test_a_source_without_anybody_to_play_it_is_refused() -> None:
    """workers = 0 needs an address at which hosts join."""
    with pytest.raises(ValueError, match=r"workers is 0 for \['bench'\].*worker_address is None.*set workers to 1"):
        make_config(worker_address=None)


def test_an_address_for_hosts_without_anything_to_play_is_refused() -> None:
    """A run on demonstrations alone has no environments; hosts lack the tasks that a run makes."""
    with pytest.raises(ValueError, match=r"worker_address is 'tcp://.*source is empty.*remove worker_address"):
        make_config(source=[], groups_per_step=0)
    source = {"name": "code", "taskset": {"id": "orchestrator.coding.code"}, "making": {}}
    with pytest.raises(ValueError, match=r"\['code'\] have making.*worker_address is 'tcp://.*remove making"):
        make_config(source=[source])


async def test_a_run_without_a_host_says_what_to_start() -> None:
    """The wait for the first host has an end, and names the command."""
    pool = WorkerPool(SourceSpec(name="s", tasksets={}, harness={}, model_path="m"), workers=0, start_timeout_s=0.05)
    with pytest.raises(DeadlineError, match=r"'s' has workers = 0.*0.05 s.*orchestrator join"):
        await pool.start()


def test_a_runtime_that_does_not_work_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without a runtime of the source does not join."""
    monkeypatch.setenv("PATH", "")
    probe.cache_clear()
    with pytest.raises(ConfigError, match=r"'s'.*'podman'.*not installed"):
        check_runtimes("s", ["subprocess", "podman"])
    probe.cache_clear()


def test_weights_are_not_sent_to_hosts(tmp_path: Path) -> None:
    """A host gets tokenizer, template and configuration."""
    for name in ("tokenizer.json", "chat_template.jinja", "model.safetensors", "merges.txt"):
        (tmp_path / name).write_text(name)
    assert set(chat_files(tmp_path)) == {"tokenizer.json", "chat_template.jinja", "merges.txt"}


# -- real hosts ----------------------------------------------------------------------------------------------------


def join(run: Run, name: str, **more: Any) -> JoinedHost:
    options = {"slots": 4, "workers": 1, "connect_timeout_s": START_S, "drain_timeout_s": 100.0} | more
    return JoinedHost(run.server.endpoint, run.keys.client("worker"), name=name, **options)


@pytest.mark.process
@pytest.mark.timeout(550)
async def test_a_joined_host_plays_with_the_runs_tokenizer_and_policy(tmp_path: Path, model_path: str) -> None:
    """It needs the address and the token only. Asked to stop, it ends what runs; nothing of it is left."""
    async with (
        Peer(delay_s=0.05) as peer,
        serving(tmp_path, peer.url.removesuffix("/v1"), model_path, harness={"id": "bench_env", "turns": 3}) as run,
    ):
        host = join(run, "far")
        running = asyncio.create_task(host.run())
        await until(lambda: run.server.hosts and host._pools)
        loading = host._pools["bench"]
        for lost in list(run.server.hosts.values()):
            run.server._lose(lost, "a slow network")  # It says hello again, and goes on loading.
        await run.pool.start()
        assert run.pool.num_tasks() == 8 and host._pools["bench"] is loading
        calls = [asyncio.create_task(run.pool.run(rollout(f"r{i}", seed=i))) for i in range(6)]
        await until(lambda: peer.running > 0)
        host.stop("SIGTERM")
        ended = [await call for call in calls[:4]]
        assert [(result.reward, result.failure) for result in ended] == [(2.0, None)] * 4
        assert {len(peer.sessions[f"r{i}"]) for i in range(4)} == {3}
        await running
        assert not run.pool.players and not run.server.hosts
        for call in calls[4:]:
            call.cancel()


@pytest.mark.process
@pytest.mark.timeout(550)
async def test_a_host_without_the_task_set_says_what_to_install(tmp_path: Path, model_path: str) -> None:
    """The error names the host, the source and the remedy; the run waits for another host."""
    tasksets = {"train": {"id": "no_such_env"}}
    async with serving(tmp_path, model_path=model_path, tasksets=tasksets) as run:
        with pytest.raises(ConfigError, match=r"(?s)host .*'bench'.*no_such_env.*Install.*PYTHONPATH"):
            await join(run, "far").run()
        await until(lambda: not run.server.hosts)


async def test_a_host_that_is_turned_away_or_alone_ends_with_the_reason(tmp_path: Path) -> None:
    """A refusal and a missing orchestrator are errors of the host, not silence."""
    async with serving(tmp_path) as run:
        with pytest.raises(RunMismatchError, match=r"turned this host away.*2 slots.*3 processes"):
            await join(run, "far", slots=2, workers=3).run()
        gone = run.server.endpoint
    with pytest.raises(DeadlineError, match=r"--connect-timeout.*worker_address"):
        alone = JoinedHost(
            gone, run.keys.client("worker"), name="n", slots=1, workers=1, connect_timeout_s=0.1, drain_timeout_s=0
        )
        assert alone._send(alone._hello) is False  # It does not wait with others for a connection.
        await alone.run()


def descendants(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(550)
async def test_rollouts_of_a_killed_host_are_played_by_another(tmp_path: Path, model_path: str) -> None:
    """kill -9 of a host in mid-run: no rollout gets a reward for it, all are played elsewhere, its workers end."""
    killed = asyncio.Event()
    async with (
        Peer(held_until=killed) as peer,
        serving(tmp_path, peer.url.removesuffix("/v1"), model_path, harness={"id": "bench_env", "turns": 4}) as run,
    ):
        words = ["join", run.server.endpoint, "--workers", "1", "--slots", "4", "--connect-timeout", "250"]
        hosts = [
            subprocess.Popen(
                [sys.executable, "-m", "orchestrator.main", *words, "--name", name],
                env={**os.environ, "COMPOSER_JOIN_TOKEN": run.keys.client("worker").token()},
            )
            for name in ("doomed", "steady")
        ]
        try:
            await until(lambda: len(run.pool.players) == 2, START_S)
            players = {player.label: player for player in run.pool.players}
            workers = descendants(hosts[0].pid)
            calls = [asyncio.create_task(run.pool.run(rollout(f"r{i}", seed=i))) for i in range(8)]
            await until(lambda: peer.running == 8)
            assert [player.running for player in players.values()] == [4, 4]
            hosts[0].kill()
            killed.set()
            first = await asyncio.gather(*calls)
            lost = [result for result in first if result.failure is not None]
            assert len(lost) == 4
            assert {(result.reward, result.failure.kind, result.failure.retryable) for result in lost} == {
                (None, "worker", True)
            }
            again = await asyncio.gather(*(run.pool.run(rollout(f"{result.rollout_id}r1")) for result in lost))
            assert [result.reward for result in again] == [2.0] * 4
            await until(lambda: not any(psutil.pid_exists(pid) for pid in workers))
            hosts[1].send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(hosts[1].wait, 100) == 0
        finally:
            for host in hosts:
                host.kill()
                host.wait()
