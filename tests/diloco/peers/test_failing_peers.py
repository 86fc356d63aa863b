"""Peers that die, stop, come late, lie or send nonsense: the others go on, and all global models agree again."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import threading
import time
from functools import partial

import msgspec
import pytest
import torch
from joint_run import (
    Blocks,
    Trajectory,
    adamw,
    assert_same_globals,
    inner_step,
    keep,
    record,
    settings,
    together,
    train,
    until,
)
from peer_process import PeerProcess, start_peer

from composer_prime.config.diloco import DilocoConfig
from composer_prime.errors import ConfigError, DeadlineError, RunMismatchError
from diloco.streaming import StreamingDiLoCo
from diloco.transport.connection import Connection, RefusedError
from diloco.transport.messages import PROTOCOL, Beat, DeltaOffer, JointKey, PeerHello, Piece, seal_header
from diloco.transport.peer_link import Exchange


def assert_agree(*peers: PeerProcess) -> None:
    """No outer step has two hashes, and the peers have steps in common."""
    for step in set.union(*(set(peer.seen) for peer in peers)):
        assert len({peer.seen[step] for peer in peers if step in peer.seen}) == 1, f"outer step {step}"


# A peer dies or stops before it sends its delta, while it is under way, or after the round: the other goes on without
# it within the beat timeout; brought back, it takes part again, and no outer step has two global models.
@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before prepare", "between prepare and commit", "after commit"])
@pytest.mark.parametrize("kind", ["SIGKILL", "SIGSTOP"])
def test_peer_fails(make_rendezvous, key_file, tmp_path, kind, moment):
    # interval 4, delay 2: prepared after inner step 2 of 4, completed after 4
    step = {"before prepare": 21, "between prepare and commit": 23, "after commit": 20}[moment]
    values = {"rendezvous": make_rendezvous(start_peers=2, beat_timeout_s=4).endpoint, "key_file": str(key_file)}
    values |= {"sync_every": 8, "fragments": 2, "delay": 2, "outer": {"lr": 0.7, "momentum": 0.9}}
    first = start_peer(tmp_path, "a", 0, values, until=60)
    second = start_peer(tmp_path, "b", 1, values, failure=(step, getattr(signal, kind)), until=55)
    if kind == "SIGKILL":
        assert second.end() == -signal.SIGKILL
        at = max(first.seen, default=0)
        first.wait_until(at + 3)
        again = start_peer(tmp_path, "b", 1, values, until=55)
    else:
        second.wait_stopped()
        at = max(first.seen, default=0)
        first.wait_until(at + 3)
        second.signal(signal.SIGCONT)
        again = second
    assert again.end() == 0 and first.end() == 0
    assert_agree(first, second, again)
    assert len(first.seen.keys() & again.seen.keys()) > 10


# A peer is frozen until another process has taken its place, then thaws: it ends with an error that names the cause.
# Its successor and the other peer hold the same model throughout.
@pytest.mark.slow
def test_thawed_predecessor_ends(make_rendezvous, key_file, tmp_path):
    values = {"rendezvous": make_rendezvous(start_peers=2, beat_timeout_s=4).endpoint, "key_file": str(key_file)}
    values |= {"sync_every": 8, "fragments": 2, "delay": 2, "outer": {"lr": 0.7, "momentum": 0.9}}
    first = start_peer(tmp_path, "a", 0, values, until=60)
    frozen = start_peer(tmp_path, "b", 1, values, failure=(23, signal.SIGSTOP))
    frozen.wait_stopped()
    successor = start_peer(tmp_path, "b", 1, values, until=55)
    successor.wait_until(max(first.seen, default=0) + 3)
    frozen.signal(signal.SIGCONT)
    assert [frozen.end(), successor.end(), first.end()] == [1, 0, 0]
    assert "another process has taken its place" in frozen.lines.with_name(frozen.lines.name + ".log").read_text()
    assert_agree(first, frozen, successor)
    assert len(first.seen.keys() & successor.seen.keys()) > 10


# The rendezvous is restarted and has forgotten everything: the peers find one another again.
@pytest.mark.slow
def test_rendezvous_restarts(make_rendezvous, key_file, tmp_path):
    server = make_rendezvous(start_peers=2, beat_timeout_s=4)
    values = {"rendezvous": server.endpoint, "key_file": str(key_file), "sync_every": 4, "fragments": 2, "delay": 1}
    peers = [start_peer(tmp_path, name, index, values, until=60) for index, name in enumerate("ab")]
    peers[0].wait_until(10)
    server.stop()
    time.sleep(1)
    server.start()
    assert [peer.end() for peer in peers] == [0, 0]
    assert_agree(*peers)
    assert max(peers[0].seen) == 60


# The rendezvous is restarted while peer a trains, and a newcomer reaches it first: it takes no step on its own model.
@pytest.mark.slow
def test_newcomer_at_a_restarted_rendezvous(make_rendezvous, key_file):
    server = make_rendezvous(beat_timeout_s=8)
    config = partial(settings, server.endpoint, key_file, sync_every=2)
    advanced, finished = threading.Event(), threading.Event()
    first: list[int] = []

    def pace(step, engine):
        if engine.outer_step == 4:
            advanced.set()
        finished.wait(0.02)

    def newcomer():
        assert advanced.wait(200)
        server.stop()
        server.start()
        try:
            return train(config("b"), 1, 6, seed=7, before_step=lambda step, engine: first.append(engine.outer_step))
        finally:
            finished.set()

    a, b = together(
        lambda: train(config("a"), 0, 5000, before_step=pace, stop=finished.is_set), newcomer, timeout_s=120
    )
    both = a.hashes.keys() & b.hashes.keys()
    assert first[0] >= 4 and b.metrics[max(b.metrics)]["diloco/overwritten_tokens"] == 0
    assert len(both) >= 2 and all(a.hashes[step] == b.hashes[step] for step in both)


# The source of a joining peer's state is killed while it uploads (its link is throttled): another takes over.
@pytest.mark.slow
def test_state_source_dies(make_rendezvous, key_file, tmp_path):
    server = make_rendezvous(start_peers=2, beat_timeout_s=4, keep_rounds=4)
    values = {"rendezvous": server.endpoint, "key_file": str(key_file), "sync_every": 2}
    slow = start_peer(tmp_path, "a", 0, values | {"rate_limit_mbit": 0.02})
    steady = start_peer(tmp_path, "b", 1, values, until=150)
    steady.wait_until(10)
    late = start_peer(tmp_path, "c", 2, values, until=140)
    for source in "ab":
        deadline = time.monotonic() + 200
        while (current := server.server.handler.joins.current) is None or current.source != source or not current.blobs:
            assert time.monotonic() < deadline, f"peer {source} does not send its state"
            time.sleep(0.001)
        if source == "a":
            slow.signal(signal.SIGKILL)
    assert late.end() == 0 and steady.end() == 0
    slow.end()
    assert_agree(steady, late)
    assert len(steady.seen.keys() & late.seen.keys()) > 10


# A peer that joins late, from another start, takes the others' global model and contributes from then on. Under each
# version it publishes the same as the others, also where it joins amid a sweep.
@pytest.mark.parametrize("fragments", [1, 3])
def test_late_joiner(make_rendezvous, key_file, fragments):
    address = make_rendezvous(keep_rounds=2).endpoint
    values = {"sync_every": 2 * fragments, "fragments": fragments, "codec": {"type": "int4"}}
    values["outer"] = {"lr": 0.7, "momentum": 0.9}
    seen: dict[str, Trajectory] = {}
    advanced, finished = threading.Event(), threading.Event()
    joined: dict[str, int] = {}

    def first():
        def note(step, engine):
            time.sleep(0.02)
            if step == 20:
                advanced.set()

        config = settings(address, key_file, "a", **values)
        seen["a"] = train(config, 0, 2000, before_step=note, stop=finished.is_set)

    def second():
        def note(step, engine):
            joined.setdefault("b", engine.outer_step)

        assert advanced.wait(200)
        seen["b"] = train(settings(address, key_file, "b", **values), 1, 10, seed=7, before_step=note)
        finished.set()

    together(first, second)
    assert joined["b"] >= 9
    both = seen["a"].hashes.keys() & seen["b"].hashes.keys()
    assert len(both) >= 4 and all(seen["a"].hashes[step] == seen["b"].hashes[step] for step in both)
    versions = seen["a"].versions.keys() & seen["b"].versions.keys()
    assert versions and all(seen["a"].versions[sweep] == seen["b"].versions[sweep] for sweep in versions)
    assert max(metrics.get("diloco/participants", 0) for metrics in seen["a"].metrics.values()) == 2


# One peer's deltas turn into NaN: they are rejected on all peers, the others go on with finite values.
def test_nan_of_one_peer(make_rendezvous, key_file):
    address = make_rendezvous(start_peers=3).endpoint

    def poison(step, engine):
        if step == 5:
            engine.global_model.fragments[0].write(torch.full((engine.global_model.fragments[0].numel,), math.nan))

    seen = together(
        partial(train, settings(address, key_file, "a", sync_every=2), 0, 12),
        partial(train, settings(address, key_file, "b", sync_every=2), 1, 12, before_step=poison),
        partial(train, settings(address, key_file, "c", sync_every=2), 2, 12),
    )
    assert_same_globals(*seen)
    assert all(torch.isfinite(master).all() for master in seen[0].masters)
    assert [seen[0].metrics[step]["diloco/rejected"] for step in (1, 2, 3, 6)] == [0, 0, 1, 1]
    assert [seen[peer].metrics[3]["diloco/overwritten_tokens"] for peer in range(3)] == [0, 2, 0]


# The memory of one peer is damaged: its global model has another hash from the next outer step on, so its delta for the
# round after that is not averaged; it takes over the others' state and contributes again. The others never differ.
def test_damaged_global_model(make_rendezvous, key_file):
    address = make_rendezvous(start_peers=3).endpoint
    finished = threading.Event()

    def pace(step, engine):
        finished.wait(0.02)

    def damage(step, engine):
        if step == 2:
            engine.global_model.masters[0][7] += 0.25
        finished.wait(0.02)

    def steady(name: str, peer: int) -> Trajectory:
        config = settings(address, key_file, name, sync_every=2)
        return train(config, peer, 2000, before_step=pace, stop=finished.is_set)

    def broken() -> Trajectory:
        try:
            return train(settings(address, key_file, "c", sync_every=2), 2, 40, before_step=damage)
        finally:
            finished.set()

    a, b, c = together(partial(steady, "a", 0), partial(steady, "b", 1), broken)
    assert all(a.hashes[step] == b.hashes[step] for step in a.hashes.keys() & b.hashes.keys())
    both = sorted(a.hashes.keys() & c.hashes.keys())
    assert [step for step in both if a.hashes[step] != c.hashes[step]] == [2]
    assert len([step for step in both if step > 2]) >= 5
    assert a.metrics[3]["diloco/participants"] == 2
    assert max(metrics.get("diloco/participants", 0) for step, metrics in a.metrics.items() if step > 3) == 3


# A peer reports what it ended with. From then on no round waits for it, though it is there while it writes its model.
def test_no_round_waits_for_one_that_has_ended(make_rendezvous, key_file):
    address = make_rendezvous(start_peers=2).endpoint
    config = partial(settings, address, key_file, sync_every=2, round_deadline_s=100, round_timeout_s=110)
    ended = threading.Event()

    def short():
        model = Blocks()
        optimizer = adamw(model)
        with StreamingDiLoCo(model.named_parameters(), optimizer, config("a", offline_timeout_s=120)) as engine:
            for step in range(4):
                inner_step(model, optimizer, 0, step)
            said = engine.finish()
            assert ended.wait(40)
        return said

    def long():
        try:
            return train(config("b", offline_timeout_s=120), 1, 8)
        finally:
            ended.set()

    said, seen = together(short, long)
    assert said == {"diloco/final_outer_step": 2, "diloco/final_hash": seen.hashes[2]} and max(seen.hashes) == 4


# A peer whose last round did not end in time reports that its delta was left behind, and does not wait for it again.
def test_a_delta_left_behind_is_told(make_rendezvous, key_file, caplog):
    config = settings(make_rendezvous(min_peers=2).endpoint, key_file, "a", sync_every=2, round_timeout_s=0.2)
    model = Blocks()
    optimizer = adamw(model)
    with StreamingDiLoCo(model.named_parameters(), optimizer, config) as engine:
        for step in range(2):
            inner_step(model, optimizer, 0, step)
        said = engine.finish()
    hashed = {"diloco/final_outer_step": 0, "diloco/final_hash": engine.global_model.hash}
    assert said == hashed | {"diloco/final_left_behind": 0}
    assert "a delta of outer step 0 is left behind" in caplog.text


# The same with two peers where a round needs both. Neither party can close the round, so the damaged peer must join
# anew at once. It takes over the other's state, and the round closes with both, long before any deadline.
def test_damaged_global_model_of_one_in_two(make_rendezvous, key_file, caplog):
    address = make_rendezvous(start_peers=2, min_peers=2).endpoint

    def run(name: str, peer: int) -> Trajectory:
        model, seen = Blocks(), Trajectory()
        optimizer, config = adamw(model), settings(address, key_file, name, sync_every=2, round_deadline_s=100)
        with StreamingDiLoCo(model.named_parameters(), optimizer, config) as engine:
            step = 0
            while engine.outer_step < 6:
                if name == "b" and step == 4:
                    engine.global_model.masters[0][7] += 0.25
                inner_step(model, optimizer, peer, step)
                record(seen, engine)
                step += 1
        keep(seen, engine)
        return seen

    a, b = together(partial(run, "a", 0), partial(run, "b", 1))
    assert_same_globals(a, b)
    assert "rejoining: the global model of peer b before outer step 3 is not that of a" in caplog.text
    assert [a.metrics[step]["diloco/participants"] for step in range(1, 7)] == [2] * 6


# Another layout, another setting, another run: refused with a message that names both sides.
def test_refusals_name_both(make_rendezvous, key_file):
    address = make_rendezvous().endpoint
    model = Blocks()
    with StreamingDiLoCo(model.named_parameters(), adamw(model), settings(address, key_file, "a")):
        for blocks, overrides, message in [
            (5, {}, r"layouts of peer b \(here\) and peer a \(there\) differ on rank 0: parameter layers.4.bias"),
            (4, {"outer": {"lr": 0.5}}, "peer b has diloco.outer.lr = 0.5, peer a has 1.0"),
            (4, {"run": "other"}, "joins run 'other', this rendezvous serves 'joint'"),
        ]:
            other = Blocks(blocks=blocks)
            config = settings(address, key_file, "b", **overrides)
            with pytest.raises(RunMismatchError, match=message):
                StreamingDiLoCo(other.named_parameters(), adamw(other), config).__enter__()


# Bytes that are not a message, a forged or altered header, a replayed delta: each is refused, and the joint run beside
# them goes on.
def test_garbage_and_replays_are_refused(make_rendezvous, key_file):
    server = make_rendezvous(start_peers=2)
    key = JointKey.read(key_file)

    async def attack() -> None:
        connection = Connection(server.endpoint, key.client(), "mallory/0", None)
        await connection._socket.send_multipart([b"x" * 8, b"\xc1garbage"])
        await connection._socket.send_multipart([b"one frame"])
        blob, start = server.server.rounds.closed(0).blobs["a", 0], server.server.rounds.peers["a"].instance
        altered = msgspec.structs.replace(blob.header, outer_step=5)
        replaced = partial(msgspec.structs.replace, altered)
        stranger = seal_header(altered, b"another key".ljust(32))
        for forged in (altered, stranger, replaced(run="x"), replaced(mac="\u00e9" * 64)):
            with pytest.raises(RefusedError, match=r"not made with this run's key|for run 'x'"):
                await connection.call(DeltaOffer(header=forged, instance=start), 5)
        assert "is closed" in (await connection.call(DeltaOffer(header=blob.header, instance=start), 5)).reason
        header = seal_header(msgspec.structs.replace(blob.header, outer_step=6), key.derive("headers"))
        server.server.rounds.peers["a"].reports[0].heard = time.monotonic()
        offer = DeltaOffer(header=header, instance=start)
        assert "brings a delta of outer step 6" in (await connection.call(offer, 5)).reason
        answer = await connection.call(Piece(name="delta/0/../../etc/passwd/0", offset=0, data=b"x", instance=1), 5)
        assert "is expected" in answer.reason
        await connection.close()

    def disturb(step, engine):
        if step == 4:
            asyncio.run(attack())

    seen = together(
        partial(train, settings(server.endpoint, key_file, "a", sync_every=2), 0, 8, before_step=disturb),
        partial(train, settings(server.endpoint, key_file, "b", sync_every=2), 1, 8),
    )
    assert_same_globals(*seen)
    assert max(seen[0].hashes) == 4 and seen[1].metrics[4]["diloco/participants"] == 2


# The rendezvous' log names the peers that are there, that ended in good order, and that fell silent in training.
async def test_log_of_who_is_there(make_rendezvous, key_file, caplog):
    caplog.set_level(logging.INFO, "diloco.rendezvous")
    server = make_rendezvous()
    train(settings(server.endpoint, key_file, "a", sync_every=2), 0, 2)
    until(lambda: "peer a has left" in caplog.text, "peer a is still there")
    connection = Connection(server.endpoint, JointKey.read(key_file).client(), "b/0", None)
    stands = {"peer": "b", "rank": 0, "instance": 1, "outer_step": 0, "base_hash": "", "training": True}
    facts = {"protocol": PROTOCOL, "run": "joint", "ranks": 1, "layout": [], "settings": {}, "round_deadline_s": 1}
    await connection.call(PeerHello(**facts, **stands), 5)
    assert (await connection.call(Beat(**stands), 5)).beat_s
    await connection.close()
    until(lambda: "peer b is gone, silent for 1 s" in caplog.text, "peer b is still there")
    assert "peer a is here: a" in caplog.text and "peer b is here: b" in caplog.text


# A peer with another key gets no answer at all. Its error names what to check, and a warning does so seconds later.
async def test_wrong_key_gets_no_answer(make_rendezvous, tmp_path, caplog):
    address = make_rendezvous().endpoint
    other = JointKey.create(tmp_path / "other.key")
    connection = Connection(address, other.client(), "a/0", None)
    hello = PeerHello(
        protocol=PROTOCOL, run="joint", peer="a", rank=0, ranks=1, instance=1, outer_step=0, base_hash="",
        training=False, layout=[], settings={}, round_deadline_s=1,
    )  # fmt: skip
    with pytest.raises(DeadlineError, match=r"has not answered for 0.5 s .*same key file"):
        await connection.call(hello, 0.5)
    await connection.close()
    config = DilocoConfig(rendezvous=address, run="joint", peer_id="a", key_file=tmp_path / "other.key")
    exchange = Exchange(config, other, hello, lambda: (memoryview(b""), 0, ""))
    opening = asyncio.create_task(exchange.open())
    await asyncio.to_thread(until, lambda: "diloco.key_file" in caplog.text, "nothing is said")
    opening.cancel()
    await exchange.close()


# The key file: made once, private, checked when read.
def test_key_file(tmp_path):
    path = tmp_path / "joint.key"
    assert JointKey.create(path) == JointKey.read(path) and path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="exists and a joint run keeps its key"):
        JointKey.create(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="mode 644, others may read it"):
        JointKey.read(path)
    path.chmod(0o600)
    for wrong in (b"abc", b"\xff" * 32):
        path.write_bytes(wrong)
        with pytest.raises(ConfigError, match="does not hold 32 bytes"):
            JointKey.read(path)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        JointKey.read(tmp_path)
    with pytest.raises(ConfigError, match="missing"):
        JointKey.read(tmp_path / "none")


# A peer that is five times slower does not hold the fast one up: it sends what it has, weighted by its own tokens.
def test_slow_peer_sends_what_it_has(make_rendezvous, key_file):
    address = make_rendezvous(start_peers=2).endpoint
    values = {"sync_every": 20, "round_deadline_s": 1.0}
    done: list[str] = []

    def run(name: str, peer: int, pace_s: float) -> Trajectory:
        model, seen = Blocks(), Trajectory()
        optimizer, config = adamw(model), settings(address, key_file, name, **values)
        with StreamingDiLoCo(model.named_parameters(), optimizer, config) as engine:
            step = 0
            while engine.outer_step < 2:
                time.sleep(pace_s)
                engine.count(tokens=3)
                inner_step(model, optimizer, peer, step)
                record(seen, engine)
                step += 1
            done.append(name)
        seen.masters = [master.clone() for master in engine.global_model.masters]
        return seen

    fast, slow = together(partial(run, "a", 0, 0.02), partial(run, "b", 1, 0.1))
    assert_same_globals(fast, slow)
    last = fast.metrics[2]
    assert last["diloco/participants"] == 2
    assert last["diloco/a/inner_steps"] == 20 and last["diloco/b/inner_steps"] < 20
    assert last["diloco/b/weight"] == 3 * last["diloco/b/inner_steps"]
