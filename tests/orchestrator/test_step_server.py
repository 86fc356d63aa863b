"""The step server: which peers it admits, what it refuses or drops, and that each batch is packed once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import zmq.asyncio
from orch_groups import ready
from orch_peers import RUN_ID, PeerTrainer, make_config

from composer_prime.errors import CheckpointError, RunMismatchError
from composer_prime.event_loop import Notifier
from composer_prime.run.keys import ClientKeys, RunKeys
from composer_prime.wire.sockets import SecureServer, bind_router, dealer
from composer_prime.wire.types import (
    BatchNotReady,
    CheckpointRequest,
    RunFinished,
    StepDone,
    StepRefused,
    StepReply,
    StepRequest,
)
from orchestrator.batching.batches import PART_BYTES, POLL_S, Batch, Batches, StepServer, Versions
from tests.waiting import until
from trainer.data import StepClient


def bound(address: str, keys: RunKeys) -> SecureServer:
    return bind_router(address, keys.curve("server"), [keys.curve("trainer").public])


class Served:
    """A step server around two formed batches, and what it was told."""

    def __init__(self, keys: RunKeys) -> None:
        self.batches, self.changed = Batches(RUN_ID, make_config(Path(), max_steps=9)), Notifier()
        self.orders: list[str] = []
        fail = lambda error: self.orders.append(repr(error))
        self.server = StepServer(
            SimpleNamespace(batches=self.batches, changed=self.changed, fail=fail),
            bound("tcp://127.0.0.1:0", keys),
            on_step_done=self._step_done,
            on_checkpoint=self._checkpoint,
            waiting_for=lambda step: f"batch {step}: 1 of 2 groups",
        )
        self.endpoint = self.server.endpoint

    def form(self, step: int) -> None:
        groups = [ready(2 * step, step - 1), ready(2 * step + 1, step - 1)]
        self.batches.add(Batch(step=step, groups=groups, metrics={"reward/mean": 0.5}))
        self.changed.notify()

    async def _step_done(self, message: StepDone) -> None:
        if message.step == 8:
            raise RunMismatchError("no such step")
        self.orders.append(f"done {message.step}")
        self.batches.done(message.step, message.version)

    async def _checkpoint(self, step: int) -> None:
        await asyncio.sleep(0.05)
        if step == 7:
            raise CheckpointError("the disk is full")
        self.orders.append(f"checkpoint {step}")


@pytest.fixture
def serve(run_dir, monkeypatch):
    @asynccontextmanager
    async def opened(world_size: int = 1, poll_s: float = 0.3) -> AsyncIterator[tuple[Served, PeerTrainer]]:
        monkeypatch.setattr("orchestrator.batching.batches.POLL_S", poll_s)
        served = Served(RunKeys(run_dir.keys))
        async with PeerTrainer(run_dir, served.endpoint, world_size=world_size) as trainer:
            yield served, trainer
        await served.server.close()
        served.batches.close()

    return opened


def request(step: int = 1, rank: int = 0, **changes) -> StepRequest:
    return StepRequest(**({"run_id": RUN_ID, "step": step, "rank": rank, "world_size": 2, "max_tokens": 64} | changes))


async def test_every_rank_gets_its_share_once_it_is_there(serve):
    """A request that came before its batch is answered as soon as the batch is formed; ranks share the samples."""
    async with serve(world_size=2) as (served, trainer):
        await trainer.send(request(rank=0), 0)
        await asyncio.sleep(0.1)
        served.form(1)
        await trainer.send(request(rank=1), 1)
        replies = [await trainer.receive(0), await trainer.receive(1)]
        assert all(isinstance(reply, StepReply) for reply in replies)
        assert [reply.rank for reply in replies] == [0, 1]
        assert len(replies[0].micro_batches) == len(replies[1].micro_batches)
        assert replies[0].totals == replies[1].totals
        assert replies[0].totals.samples == 4
        assert replies[0].metrics == {"reward/mean": 0.5}


async def test_a_waiting_rank_hears_every_two_seconds_what_for(serve):
    """BatchNotReady comes within two seconds and says what the batch lacks."""
    async with serve(poll_s=POLL_S) as (_, trainer):
        await trainer.send(request())
        assert await trainer.receive(0) == BatchNotReady(step=1, waiting_for="batch 1: 1 of 2 groups")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"run_id": "other"}, "the message is for run 'other'"),
        ({"rank": 2}, "rank 2 of 2 ranks"),
        ({"rank": 1, "world_size": 4}, "one of 4 ranks"),
        ({"rank": 1, "max_tokens": 32}, "32 tokens a row, another rank of this step said 2 ranks and 64"),
    ],
)
async def test_what_does_not_belong_is_refused_with_its_reason(serve, changes, said):
    """Another run, an impossible rank, another layout within a step: each is named, and the others are still served."""
    async with serve(world_size=2) as (served, trainer):
        served.form(1)
        await trainer.send(request(), 0)
        assert isinstance(await trainer.receive(0), StepReply)
        await trainer.send(request(**changes), 1)
        refused = await trainer.receive(1)
        assert isinstance(refused, StepRefused)
        assert said in refused.error
        await trainer.send(request(rank=1), 1)
        assert isinstance(await trainer.receive(1), StepReply)


async def test_a_sample_that_fits_no_row_is_refused(serve):
    """A row length below a sample's length can't be served; the reason names both numbers."""
    async with serve() as (served, trainer):
        served.form(1)
        await trainer.send(request(max_tokens=2))
        refused = await trainer.receive()
        assert isinstance(refused, StepRefused)
        assert "3 tokens" in refused.error


async def test_garbage_is_dropped(serve, caplog):
    """Random bytes, empty frames and msgpack of something else leave the server working."""
    async with serve() as (served, trainer):
        served.form(1)
        half = msgspec.msgpack.encode({"type": "step_request"})
        for garbage in (b"", b"\x00" * 100, b"\xff" * 1000, half, b"\x93" * 9):
            await trainer.sockets[0].send(garbage)
        await trainer.sockets[0].send_multipart([b"a", b"b", b"c"])
        await trainer.send(request(world_size=1))
        assert isinstance(await trainer.receive(), StepReply)
        assert caplog.text.count("bytes that are not a message") == 6
        assert served.orders == []


async def test_a_stranger_gets_no_word_in(serve, run_dir):
    """A peer without the trainer's key (here a node's) is never heard."""
    async with serve() as (served, _):
        served.form(1)
        context = zmq.asyncio.Context()
        keys = RunKeys(run_dir.keys)
        stranger = dealer(context, served.endpoint, ClientKeys(keys.curve("server").public, keys.curve("node")))
        await stranger.send(msgspec.msgpack.encode(request(world_size=1)))
        assert await stranger.poll(500) == 0
        assert served.server.last_heard is None
        context.destroy(linger=0)


async def test_orders_are_taken_in_turn_and_answered(serve):
    """StepDone then CheckpointRequest: the checkpoint sees the step, and a failure is answered."""
    async with serve() as (served, trainer):
        served.form(1)
        await trainer.done(1, ["a"])
        await trainer.send(CheckpointRequest(run_id=RUN_ID, step=1))
        assert (await trainer.receive()).error is None
        await trainer.send(CheckpointRequest(run_id=RUN_ID, step=7))
        assert (await trainer.receive()).error == "the disk is full"
        await trainer.done(8, ["a"])
        assert (await trainer.receive()).error == "no such step"
        assert served.orders == ["done 1", "checkpoint 1"]


async def test_a_step_said_twice_counts_once(serve):
    """The answer to StepDone was lost and it comes again, even after a later step: noted again, acted on once."""
    async with serve() as (served, trainer):
        for step, ids in ((0, []), (1, ["a"]), (1, ["a"]), (2, ["b"]), (0, []), (1, ["a"]), (2, ["b"])):
            await trainer.done(step, ids)
        await trainer.send(CheckpointRequest(run_id=RUN_ID, step=2))
        assert (await trainer.receive()).error is None
        assert trainer.noted == [0, 1, 1, 2, 0, 1, 2]
        trainer.session = "after a restart"
        await trainer.done(1, [])
        await trainer.send(CheckpointRequest(run_id=RUN_ID, step=1))
        assert (await trainer.receive()).error is None
        assert served.orders == ["done 0", "done 1", "done 2", "checkpoint 2", "done 1", "checkpoint 1"]


async def test_closing_answers_the_checkpoint_at_hand(serve):
    """The run may end right after the last checkpoint was asked for: the trainer still gets its answer."""
    async with serve() as (served, trainer):
        await trainer.send(CheckpointRequest(run_id=RUN_ID, step=3))
        await until(lambda: served.server.last_heard)
        await served.server.close()
        assert (await trainer.receive()).step == 3


async def test_a_trained_step_is_not_served_again_unasked(serve):
    """A rank that asks for a trained step gets BatchNotReady until rank 0 announces the restart."""
    async with serve() as (served, trainer):
        served.form(1)
        served.batches.done(1, 1)
        await trainer.send(request())
        answer = await trainer.receive(0)
        assert isinstance(answer, BatchNotReady)
        assert "rank 0 has not said that it restarts before 1" in answer.waiting_for


async def test_the_end_of_the_run_is_an_answer(serve):
    """Steps beyond the last, and any step after a failure, get RunFinished, also those already waiting."""
    async with serve() as (served, trainer):
        served.batches.restore(versions=Versions(trained=9, newest=9, since=9), formed=9, batches=[])
        await trainer.send(request(step=10))
        finished = await trainer.receive(0)
        assert finished == RunFinished(reason="all 9 steps are done", failed=False)
        served.batches.restore(versions=Versions(), formed=0, batches=[])
        await trainer.send(request(step=1))
        await asyncio.sleep(0.1)
        served.server.finish("no nodes", failed=True)
        assert await trainer.receive(0) == RunFinished(reason="no nodes", failed=True)


async def test_the_end_waits_for_the_step_before_it(serve):
    """StepDone may be behind the next request and move the end of a joint run: until then it is no end."""
    async with serve() as (served, trainer):
        served.batches.restore(versions=Versions(trained=7, newest=7, since=7), formed=8, batches=[], last_step=8)
        await trainer.send(request(step=9))
        assert isinstance(await trainer.receive(0), BatchNotReady)
        served.batches.done(8, 8, last_step=9)
        served.form(9)
        await trainer.send(request(step=9))
        assert isinstance(await trainer.receive(0), StepReply)


async def test_a_reply_comes_in_parts(serve, run_dir, monkeypatch):
    """However large a reply is, no message is; a rank puts the parts together, and keeps none."""
    monkeypatch.setattr("orchestrator.batching.batches.PART_BYTES", 100)
    async with serve() as (served, _):
        served.form(1)
        keys = RunKeys(run_dir.keys).client("trainer")
        client = StepClient(served.endpoint, keys, request(world_size=1), lambda: False, silence_timeout_s=100)
        for _ in range(2):
            reply = await asyncio.to_thread(lambda: next(filter(None, client.asking(1, (0, 1)))))
            assert reply.totals.samples == 4 and len(msgspec.msgpack.encode(reply)) > 300
            assert not client._parts
        client.close()


SIZE = 32 << 20


async def large(*_) -> bytes:
    return bytes(SIZE)


def unread(context: zmq.asyncio.Context, endpoint: str, keys: ClientKeys, name: bytes = b"slow") -> zmq.asyncio.Socket:
    """A rank that reads nothing: but for the buffers of TCP, what it is sent stays with the server."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVHWM, 1)
    socket.setsockopt(zmq.IDENTITY, name)
    socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = keys.server_public, *astuple(keys.own)
    socket.connect(endpoint)
    return socket


async def test_a_reply_that_leaves_is_not_sent_again(serve, run_dir, monkeypatch):
    """A rank behind a slow link asks again while the reply is under way: it gets it once."""
    keys = RunKeys(run_dir.keys).client("trainer")
    monkeypatch.setattr(Batches, "of_rank", large)
    async with serve() as (served, _):
        served.form(1)
        context = zmq.asyncio.Context()
        slow = unread(context, served.endpoint, keys)
        async with asyncio.timeout(100):
            await slow.send(msgspec.msgpack.encode(request(world_size=1)))
            await until(lambda: any(rank.reply for rank in served.server._ranks.values()))
            for message in (request(world_size=1), request(world_size=1), CheckpointRequest(run_id=RUN_ID, step=1)):
                await slow.send(msgspec.msgpack.encode(message))
            await until(lambda: served.orders)
        received = 0
        while await slow.poll(2000):
            _, *data = await slow.recv_multipart()
            assert max(map(len, data), default=0) <= PART_BYTES
            received += len(b"".join(data))
        context.destroy(linger=0)
        assert received == SIZE


async def test_the_next_batch_is_packed_before_it_is_asked_for(serve):
    """Once the layout is known, packing happens while the trainer computes; each batch is packed once."""
    async with serve(world_size=2) as (served, trainer):
        served.form(1)
        for rank in (0, 1):
            await trainer.send(request(rank=rank), rank)
            await trainer.receive(rank)
        packed = served.batches._packed
        first = packed[1][1]
        served.form(2)
        async with asyncio.timeout(60):
            await packed[2][1]
        await trainer.send(request(rank=0), 0)
        await trainer.receive(0)
        assert packed[1][1] is first


async def test_a_trainer_that_starts_again_gets_what_its_dead_host_did_not_take(serve, run_dir, monkeypatch):
    """The reply to a rank that vanished stays on its way for minutes; the rank of the same name is answered at once."""
    keys = RunKeys(run_dir.keys).client("trainer")
    context = zmq.asyncio.Context()
    async with serve() as (served, _):
        served.form(1)
        with monkeypatch.context() as patch:
            patch.setattr(Batches, "of_rank", large)
            gone = unread(context, served.endpoint, keys, b"trainer-0")
            await gone.send(msgspec.msgpack.encode(request(world_size=1)))
            await until(lambda: any(rank.reply for rank in served.server._ranks.values()))
        client = StepClient(served.endpoint, keys, request(world_size=1), lambda: False, silence_timeout_s=20)
        await asyncio.to_thread(client.announce, 0, 0, [], {}, None, lambda: False)
        reply = await asyncio.to_thread(lambda: next(filter(None, client.asking(1, (0, 1)))))
        assert reply.totals.samples == 4
        client.close()
    context.destroy(linger=0)
