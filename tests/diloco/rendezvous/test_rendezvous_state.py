"""The state of the rendezvous: what makes a delta whole, what stays in memory, which process speaks for a peer."""

from __future__ import annotations

import math

import pytest
from rendezvous_state import BEAT_TIMEOUT_S, DEADLINE_S, RendezvousState, base

from composer_prime.errors import RunMismatchError, WireError
from diloco.transport.messages import (
    PROTOCOL,
    AskRound,
    Beat,
    BeatReply,
    DeltaOffer,
    Get,
    PeerHello,
    Piece,
    Received,
    RoundNotReady,
    encode,
    from_peer,
)


# Bodies in memory stay below the bound: the oldest rounds go first, the newest stays for late peers.
def test_memory_is_bounded():
    rendezvous = RendezvousState(keep_rounds=16, max_bytes=500)
    rendezvous.begin("a", "b")
    for outer_step in range(9):
        rendezvous.close(outer_step, "a", "b", body=b"x" * 50)
        assert rendezvous.handler.held_bytes <= 500
    assert rendezvous.rounds.oldest == 4 and rendezvous.rounds.closed(8) is not None


# A body that does not fit even so is refused.
def test_a_body_beyond_the_bound():
    rendezvous = RendezvousState(max_bytes=500)
    rendezvous.begin("a", "b")
    with pytest.raises(WireError, match="--memory-gb"):
        rendezvous.offer("a", 0, body=b"x" * 600)


# Three peers, room for 4.5 deltas: a delta takes the place of a state, and nothing beyond the bound is taken.
def test_deltas_before_states():
    rendezvous = RendezvousState(max_bytes=450)
    rendezvous.begin("a", "b", "c", rounds=1)
    rendezvous.hello("d")
    rendezvous.joins._request(rendezvous.rounds.training(rendezvous.now), 0, rendezvous.now)
    rendezvous.offer("a", 1, kind="state", body=b"s" * 300, serial=rendezvous.joins.requested_from("a"))
    assert rendezvous.joins.current is not None
    for peer in "abc":
        assert isinstance(rendezvous.offer(peer, 1, body=b"y" * 140), Received)
    assert rendezvous.joins.current is None and rendezvous.rounds.newest == 0
    assert isinstance(rendezvous.offer("c", 1, body=b"z" * 300), RoundNotReady)


# Three peers, room for 4.5 deltas. Who is ahead waits until all have taken the last round, whose deltas then go.
# Before, it was refused, and its process died. A peer that does not take it is waited for as long as its deadline.
@pytest.mark.parametrize("taken", [True, False])
def test_peers_wait_for_room(taken):
    rendezvous = RendezvousState(max_bytes=450)
    rendezvous.begin("a", "b", "c")
    rendezvous.close(0, "a", "b", "c", body=b"x" * 100)
    for peer in "ab":
        rendezvous.beat(peer, 1)
    assert isinstance(rendezvous.offer("a", 1, body=b"y" * 100), Received)
    told = rendezvous.offer("b", 1, body=b"y" * 100)
    assert isinstance(told, RoundNotReady)
    held = "what is under way holds 4e-07 of the rendezvous' 4.5e-07 GB (--memory-gb)"
    assert told.waiting_for == f"room for the 1e-07 GB of delta/1/b/0: {held}"
    if taken:
        rendezvous.beat("c", 1)
    else:
        rendezvous.now += DEADLINE_S
        assert isinstance(rendezvous.offer("b", 1, body=b"y" * 100), RoundNotReady)
        rendezvous.now += 1
        rendezvous.beat("c", 0)
    assert isinstance(rendezvous.offer("b", 1, body=b"y" * 100), Received)
    assert rendezvous.rounds.closed(0) is None and rendezvous.rounds.newest == 0


# Peers whose deltas do not fit at once are told so when they come, with both figures; those that are there train on.
def test_room_is_known_at_the_hello():
    rendezvous = RendezvousState(max_bytes=450)
    for peer in "abcd":
        rendezvous.hello(peer, delta_bytes=100)
    with pytest.raises(WireError, match=r"of the peers a, b, c, d, e take up to 5e-07 GB, more than .* 4.5e-07 GB: .*"):
        rendezvous.hello("e", delta_bytes=100)


# A cluster that stands still while its link beats costs the others three deadlines, not one each round. From its
# next inner step on it is waited for again.
def test_a_standing_peer_is_waited_for_three_times():
    rendezvous = RendezvousState(start_peers=1)
    rendezvous.begin("a", "b", rounds=1)

    def closable(outer_step: int) -> set[str] | None:
        rendezvous.beat("a", outer_step)
        rendezvous.offer("a", outer_step)
        members = rendezvous.rounds.closable(rendezvous.now, 1)
        if members is not None:
            rendezvous.handler.close(members)
        return members and set(members)

    for outer_step in (1, 2, 3):
        rendezvous.beat("b", 1, inner_steps=3)
        assert closable(outer_step) is None
        rendezvous.now += DEADLINE_S + 1
        rendezvous.beat("b", 1, inner_steps=3)
        assert closable(outer_step) == {"a"}
    rendezvous.beat("b", 1, inner_steps=3)
    assert closable(4) == {"a"} and closable(5) == {"a"}
    rendezvous.beat("b", 1, inner_steps=4)
    assert closable(6) is None


# A body of more bytes than its layout can have is refused, whatever room there is, and nothing is dropped for it; so is
# a peer of more ranks than can be.
@pytest.mark.parametrize("kind", ["delta", "state"])
def test_sizes_that_cannot_be(kind):
    rendezvous = RendezvousState(max_bytes=10**8)
    rendezvous.begin("a", "b", rounds=3)
    with pytest.raises(WireError, match=rf"has 10000000 bytes, a {kind} of its layout at most 2097152"):
        rendezvous.offer("a", 3, kind=kind, body=bytes(10**7))
    assert rendezvous.rounds.oldest == 0 and rendezvous.rounds.open_round() is None
    with pytest.raises(WireError, match="rank 0 of 4097, expected 1 to 4096 ranks"):
        rendezvous.hello("c", ranks=4097)


# No size, step or number is below 0: a peer of minus 1e15 bytes would make room for one of 5e14.
def test_negative_counts_do_not_decode():
    rank = {"peer": "a", "rank": 0, "instance": 1, "base_hash": ""}
    hello = {"run": "joint", "ranks": 1, "training": False, "layout": [], "settings": {}, "protocol": PROTOCOL}
    facts = rank | hello | {"outer_step": 0, "delta_bytes": 0, "round_deadline_s": 1.0}
    assert from_peer(encode(PeerHello(**facts))) == PeerHello(**facts)
    wrong = {"outer_step": -1, "rank": -1, "delta_bytes": -(10**15), "round_deadline_s": math.nan}
    messages = [PeerHello(**facts | {name: value}) for name, value in wrong.items()]
    for message in [*messages, Get(name="", offset=-1, length=1), Piece(name="", offset=-1, data=b"")]:
        with pytest.raises(WireError):
            from_peer(encode(message))


# Ranks whose parts are not of one delta (another weight: trained on since) do not make a contribution.
def test_parts_of_two_deltas():
    rendezvous = RendezvousState()
    rendezvous.begin("a", "b", ranks=2)
    for rank, weight in enumerate([3.0, 5.0]):
        rendezvous.offer("a", 0, rank=rank, weight=weight)
    assert rendezvous.rounds.open_round().contributors(rendezvous.rounds.peers) == {}
    rendezvous.offer("a", 0, rank=0, body=b"newer", weight=5.0)
    assert list(rendezvous.rounds.open_round().contributors(rendezvous.rounds.peers)) == ["a"]


# Both peers need longer than the deadline to bring their deltas: it runs from the first that is whole, so neither is
# left out. What is not there when it ends does not count.
@pytest.mark.parametrize(("late_s", "members"), [(DEADLINE_S - 1, {"a", "b"}), (DEADLINE_S + 1, {"a"})])
def test_uploads_longer_than_the_deadline(late_s, members):
    rendezvous, half = RendezvousState(), DEADLINE_S + 1
    rendezvous.begin("a", "b")

    def closable_after(seconds):
        rendezvous.now += seconds
        rendezvous.beat("a", 0)
        rendezvous.beat("b", 0)
        closable = rendezvous.rounds.closable(rendezvous.now, 1)
        return closable if closable is None else set(closable)

    def bring(peer, offset):
        name = rendezvous.rounds.open_round().blobs[peer, 0].header.name
        rendezvous.handler.answer(Piece(name=name, offset=offset, data=b"x" * 5, instance=1))

    for peer in "ab":
        rendezvous.offer(peer, 0, body=b"x" * 10, brought=5)
    assert closable_after(half) is None
    bring("a", 5)
    assert rendezvous.rounds.left_s(rendezvous.rounds.open_round(), rendezvous.now) == DEADLINE_S
    if late_s < DEADLINE_S:
        assert closable_after(late_s) is None
        bring("b", 5)
        assert closable_after(0) == members
    else:
        assert closable_after(late_s) == members


# A peer that waits for the outcome offers its whole delta again each second; the deadline runs from the first time. A
# newer delta in its place is another delta, which starts it anew.
@pytest.mark.parametrize("replaced_s", [None, 2])
def test_the_deadline_ends_while_a_delta_is_offered_again(replaced_s):
    rendezvous = RendezvousState()
    rendezvous.begin("a", "b")
    ends = int(DEADLINE_S) + (replaced_s or 0)
    for second in range(ends + 1):
        body = b"newer" if replaced_s is not None and second >= replaced_s else b"delta"
        rendezvous.offer("a", 0, body=body)
        rendezvous.beat("a", 0)
        rendezvous.beat("b", 0)
        closable = rendezvous.rounds.closable(rendezvous.now, 1)
        assert closable is None if second < ends else set(closable) == {"a"}
        rendezvous.now += 1


# What a process brought to an open round goes when another takes its place, and with it the deadline that it started.
def test_a_successor_brings_its_own():
    rendezvous = RendezvousState()
    rendezvous.begin("a", "b")
    rendezvous.offer("b", 0)
    rendezvous.now += BEAT_TIMEOUT_S
    rendezvous.hello("b", instance=2)
    current = rendezvous.rounds.open_round()
    assert current.contributors(rendezvous.rounds.peers) == {}
    rendezvous.beat("a", 0)
    rendezvous.beat("b", 0)
    rendezvous.offer("b", 0)
    assert rendezvous.rounds.left_s(current, rendezvous.now) == DEADLINE_S


# Of two processes with one peer id the first stays; when it is silent the second takes its place on all ranks, and the
# first is refused from then on, also when the second is silent.
def test_two_processes_with_one_name():
    rendezvous = RendezvousState()
    rendezvous.begin("a", ranks=2)
    assert isinstance(rendezvous.hello("a", ranks=2, instance=2)[0], RoundNotReady)
    rendezvous.now += BEAT_TIMEOUT_S
    assert [type(answer) for answer in rendezvous.hello("a", ranks=2, instance=2)] == [BeatReply, BeatReply]
    late = Beat(peer="a", rank=0, instance=1, outer_step=0, base_hash="", training=True)
    for request in (late, AskRound(peer="a", rank=1, instance=1, outer_step=0, base_hash="")):
        with pytest.raises(RunMismatchError, match="peer a was silent, and another process has taken its place"):
            rendezvous.handler.answer(request)
    rendezvous.now += 2 * BEAT_TIMEOUT_S
    with pytest.raises(RunMismatchError, match="another process has taken its place"):
        rendezvous.hello("a", ranks=2, instance=1)


# Until the whole of its time to be heard is over, nobody takes the place of a silent peer.
def test_a_silent_peers_place():
    rendezvous = RendezvousState()
    rendezvous.begin("a")
    rendezvous.now += 0.9 * BEAT_TIMEOUT_S
    assert isinstance(rendezvous.hello("a", instance=2)[0], RoundNotReady)
    rendezvous.beat("a", 0)


# A process that thaws after another has taken its place cannot bring its delta, nor go on with one that it had begun:
# the round holds its successor's.
def test_a_thawed_predecessor_brings_nothing():
    rendezvous = RendezvousState()
    rendezvous.begin("a", "b")
    rendezvous.now += BEAT_TIMEOUT_S
    rendezvous.hello("b", instance=2)
    rendezvous.offer("b", 0, body=b"successor")
    blob = rendezvous.rounds.open_round().blobs["b", 0]
    for request in (
        DeltaOffer(header=blob.header, instance=1),
        Piece(name=blob.header.name, offset=0, data=b"predecess", instance=1),
    ):
        with pytest.raises(RunMismatchError, match="another process has taken its place"):
            rendezvous.handler.answer(request)
    assert blob.complete and bytes(blob.data) == b"successor"


# Of peers with different global models the smaller party must join anew once the run has begun, but not while peers
# that may outvote the larger one are expected. A waiting peer learns how many are expected.
def test_nobody_is_outvoted_before_the_run_has_begun():
    rendezvous = RendezvousState(start_peers=3)
    rendezvous.begin("a", "b")

    def ask(peer, run=""):
        return rendezvous.handler.answer(
            AskRound(peer=peer, rank=0, instance=1, outer_step=0, base_hash=base(0, run=run))
        )

    rendezvous.offer("a", 0)
    assert ask("a").waiting_for == "the deltas of b and 1 more peer(s) to train (--start-peers)"
    rendezvous.offer("b", 0, base_hash=base(0, run="other"))
    assert ask("b", "other").waiting_for == "1 more peer(s) to train (--start-peers)"
    rendezvous.hello("c", run="other")
    rendezvous.beat("c", 0, run="other")
    rendezvous.offer("c", 0, base_hash=base(0, run="other"))
    assert "global model of peer a before outer step 0 is not that of b, c" in ask("a").reason
