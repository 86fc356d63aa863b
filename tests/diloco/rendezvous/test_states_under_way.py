"""States that take long to bring over: the rounds since stay meanwhile, as far as the memory allows."""

import pytest
from rendezvous_state import BEAT_TIMEOUT_S, RendezvousState

from composer_prime.errors import WireError
from diloco.transport.messages import Piece, StartingState

STATE = b"state"


def begun(**settings):
    """Peers a and b have closed 3 rounds; c asks for a state, of which a has brought the first byte."""
    rendezvous = RendezvousState(**settings)
    rendezvous.begin("a", "b", rounds=3)
    rendezvous.hello("c")
    assert "the state of peer a: 0.0 of 0.0 MB" in ask(rendezvous)
    rendezvous.offer("a", 3, kind="state", body=STATE, brought=1, serial=rendezvous.joins.requested_from("a"))
    return rendezvous


def ask(rendezvous, joiner="c", rank=0, attempt=1):
    """What it waits for, or the outer step of the state that it gets."""
    for peer in "ab":
        rendezvous.beat(peer, max(rendezvous.rounds.newest, 0) + 1)
    answer = rendezvous.ask(joiner, 0, rank=rank, attempt=attempt, base_hash=f"other{rank}")
    return answer.header.outer_step if isinstance(answer, StartingState) else answer.waiting_for


def go_on(rendezvous, rounds, body=b"delta"):
    for _ in range(rounds):
        rendezvous.now += 1
        for joiner in rendezvous.rounds.peers.keys() - {"a", "b"}:
            rendezvous.beat(joiner, 0, training=False)
        rendezvous.close(rendezvous.rounds.newest + 1, "a", "b", body=body)


def bring_the_rest(rendezvous):
    current = rendezvous.joins.current
    rendezvous.handler.answer(Piece(name=current.blobs[0].header.name, offset=1, data=STATE[1:], instance=1))


# A state takes longer to bring, and to fetch, than --keep-rounds rounds. The rounds since stay until the joining peer
# trains, and the answer to it gives the progress. Then they go, with the state.
def test_rounds_stay_for_a_joiner():
    rendezvous = begun(keep_rounds=2)
    go_on(rendezvous, 10)
    assert "the state of peer a" in ask(rendezvous)
    bring_the_rest(rendezvous)
    assert ask(rendezvous) == 3
    go_on(rendezvous, 10)
    assert rendezvous.rounds.oldest == 1 and ask(rendezvous) == 3
    rendezvous.beat("c", 23)
    rendezvous.close(23, "a", "b", "c")
    assert rendezvous.rounds.oldest == 22 and rendezvous.joins.current is None


# The ranks of a source serve on their own, so a round may end in between: the part of the earlier step is dropped,
# and its rank, and no other, is asked again.
def test_parts_of_one_outer_step():
    rendezvous = RendezvousState()
    rendezvous.begin("a", "b", ranks=2, rounds=3)
    rendezvous.hello("c", ranks=2)
    for rank in (0, 1):
        ask(rendezvous, rank=rank)
    joins, serial = rendezvous.joins, rendezvous.joins.requested_from("a")
    rendezvous.offer("a", 3, kind="state", rank=0, body=STATE, serial=serial)
    assert [joins.requested_from("a", rank) for rank in (0, 1)] == [0, serial]
    rendezvous.close(3, "a", "b")
    rendezvous.offer("a", 4, kind="state", rank=1, body=STATE, serial=serial)
    assert [joins.requested_from("a", rank) for rank in (0, 1)] == [serial, 0]
    rendezvous.offer("a", 3, kind="state", rank=0, body=STATE, serial=serial)
    assert joins.requested_from("a", 0) == serial
    rendezvous.offer("a", 4, kind="state", rank=0, body=STATE, serial=serial)
    assert [ask(rendezvous, rank=rank) for rank in (0, 1)] == [4, 4]


# Rounds do not stay for a joining peer that died: the source stops uploading, and the next peer finds a free way.
def test_a_joiner_that_died():
    rendezvous = begun(keep_rounds=2)
    name = rendezvous.joins.current.blobs[0].header.name
    rendezvous.now += BEAT_TIMEOUT_S + 1
    for outer_step in (3, 4, 5):
        rendezvous.close(outer_step, "a", "b")
    assert rendezvous.rounds.oldest == 4 and rendezvous.joins.current is None
    gone = rendezvous.handler.answer(Piece(name=name, offset=1, data=STATE[1:], instance=1))
    assert gone.reason == f"nothing called {name} is expected"
    rendezvous.hello("c", instance=2)
    assert "the state of peer" in ask(rendezvous)


# Rounds that outgrow the memory go all the same, and the state with them: the log says which setting to change, and the
# next attempt takes another source.
def test_rounds_that_outgrow_the_memory(caplog):
    rendezvous = begun(keep_rounds=2, max_bytes=500)
    go_on(rendezvous, 6, body=b"x" * 50)
    assert rendezvous.joins.current is None and rendezvous.handler.held_bytes <= 500
    (said,) = caplog.messages
    assert "peer a" in said and "--memory-gb" in said
    assert "the state of peer b" in ask(rendezvous)


# A state has no room beside the deltas of a round: the joining peer is told so. Before, the state was sent for good.
def test_a_state_that_does_not_fit():
    rendezvous = RendezvousState(max_bytes=500)
    rendezvous.begin("a", "b", rounds=1)
    rendezvous.hello("c")
    for outer_step in (1, 2, 3):
        assert "the state of peer a" in ask(rendezvous)
        serial = rendezvous.joins.requested_from("a")
        rendezvous.offer("a", outer_step, kind="state", body=b"s" * 200, serial=serial)
        rendezvous.close(outer_step, "a", "b", body=b"x" * 180)
    with pytest.raises(WireError, match=r"made room for deltas 3 times, .* larger --memory-gb"):
        ask(rendezvous)
