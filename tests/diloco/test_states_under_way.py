"""States that take long to bring over: the rounds since stay meanwhile, as far as the memory allows."""

from __future__ import annotations

import threading
from functools import partial

import pytest
from books import BEAT_TIMEOUT_S, Books
from joint_run import settings, together, train, until

from diloco.transport import connection
from diloco.transport.connection import Flow
from diloco.transport.messages import BodyChunk, StateReady, Unusable

STATE = b"state"


def begun(**settings):
    """Peers a and b have closed 3 rounds; c asks for a state, of which a has brought the first byte."""
    books = Books(**settings)
    books.begin("a", "b", rounds=3)
    books.hello("c")
    assert "the state of peer a: none of it is here" in ask(books)
    books.offer("a", 3, kind="state", body=STATE, brought=1, serial=books.transfers.wanted("a"))
    return books


def ask(books, joiner="c", rank=0, attempt=1):
    """What it waits for, or the outer step of the state that it gets."""
    for peer in "ab":
        books.beat(peer, (books.rounds.newest or 0) + 1)
    answer = books.ask(joiner, 0, rank=rank, attempt=attempt, base_hash=f"other{rank}")
    return answer.header.outer_step if isinstance(answer, StateReady) else answer.waiting_for


def go_on(books, rounds, body=b"delta"):
    for _ in range(rounds):
        books.now += 1
        for joiner in books.rounds.peers.keys() - {"a", "b"}:
            books.beat(joiner, 0, training=False)
        books.close(books.rounds.newest + 1, "a", "b", body=body)


def bring_the_rest(books):
    current = books.transfers.current
    books.answers.to(BodyChunk(name=current.blobs[0].header.name, offset=1, data=STATE[1:], instance=1))


# A state takes longer to bring, and to fetch, than --keep-rounds rounds: those since stay until the joiner trains, and
# who waits is told how long it takes. Then they go, with the state.
def test_rounds_stay_for_a_joiner():
    books = begun(keep_rounds=2)
    go_on(books, 10)
    said = "0.0 of 0.0 MB of rank(s) [0] are here after 10 s, in which 10 round(s) were closed, one in 1 s"
    assert ask(books) == f"the state of peer a: {said}"
    bring_the_rest(books)
    assert ask(books) == 3
    go_on(books, 10)
    assert books.rounds.oldest == 3 and ask(books) == 3
    books.beat("c", 23)
    books.close(23, "a", "b", "c")
    assert books.rounds.oldest == 22 and books.transfers.current is None


# They stay for who replays them also when another joiner refuses the state meanwhile, and asks for another.
def test_rounds_stay_when_another_refuses():
    books = begun(keep_rounds=2)
    books.hello("d")
    bring_the_rest(books)
    assert ask(books) == ask(books, "d") == 3
    serial = books.transfers.current.serial
    books.answers.to(Unusable(peer="d", instance=1, serial=serial, reason="it is of another start"))
    go_on(books, 3)
    assert "none of it is here" in ask(books, "d", attempt=2) and books.rounds.oldest == 3
    books.offer("b", 6, kind="state", body=STATE, serial=books.transfers.wanted("b"))
    go_on(books, 3)
    assert ask(books, "d", attempt=2) == 6 and books.rounds.oldest == 3
    books.beat("c", 9)
    books.close(9, "a", "b", "c")
    assert books.rounds.oldest == 6


# And while a joiner's ranks ask anew one after the other, also where they were not told of it yet.
@pytest.mark.parametrize("told", [False, True])
def test_rounds_stay_between_ranks(told):
    books = Books(keep_rounds=2)
    books.begin("a", "b", ranks=2, rounds=3)
    books.hello("c", ranks=2)
    for rank in (0, 1):
        ask(books, rank=rank)
    serial = books.transfers.wanted("a")
    for rank in (0, 1):
        books.offer("a", 3, kind="state", rank=rank, body=STATE, brought=None if told else 1, serial=serial)
    assert not told or [ask(books, rank=rank) for rank in (0, 1)] == [3, 3]
    go_on(books, 4)
    assert "rank 1 of peer c" in ask(books, rank=0, attempt=2)
    go_on(books, 4)
    assert books.rounds.oldest == 3 and books.transfers.current.serial == serial


# Rounds do not stay for a joiner that died: the source is told to stop, and nothing is in the way of the next.
def test_a_joiner_that_died():
    books = begun(keep_rounds=2)
    name = books.transfers.current.blobs[0].header.name
    books.now += BEAT_TIMEOUT_S + 1
    for outer_step in (3, 4, 5):
        books.close(outer_step, "a", "b")
    assert books.rounds.oldest == 4 and books.transfers.current is None
    gone = books.answers.to(BodyChunk(name=name, offset=1, data=STATE[1:], instance=1))
    assert gone.reason == f"nothing called {name} is expected"
    books.hello("c", instance=2)
    assert "the state of peer a" in ask(books)


# Rounds that outgrow the memory go all the same. The next try is another source's; of one that is alone, after as long
# a pause as the first took, in which the joiner is told what to change.
def test_rounds_that_outgrow_the_memory():
    books = begun(keep_rounds=2, max_bytes=500)
    go_on(books, 6, body=b"x" * 50)
    assert books.transfers.current is None and books.rounds.held <= 500
    assert "the state of peer b" in ask(books)
    for outer_step in range(9, 11):
        books.now += 1
        books.beat("b", outer_step, training=False)
        books.beat("c", 0, training=False)
        books.close(outer_step, "a", body=b"x" * 50)
    books.beat("a", 11)
    said = books.ask("c", 0, base_hash="other").waiting_for
    assert "another try to bring a state over, for that of peer a was given up: 0.0 of 0.0 MB" in said
    assert "after 5 s, in which 4 round(s) were closed, one in 1.2 s" in said
    assert "stay for a joiner beyond --keep-rounds, outgrew the memory: start `diloco lighthouse` with a larger" in said
    books.now += 4
    books.beat("a", 11)
    assert "the state of peer a" in books.ask("c", 0, base_hash="other").waiting_for


# The state counts in what memory holds, as the rounds do.
def test_a_state_counts_in_memory():
    books = Books(keep_rounds=16, max_bytes=500)
    books.begin("a", "b", rounds=3)
    books.hello("c")
    ask(books)
    books.offer("a", 3, kind="state", body=b"s" * 300, serial=books.transfers.wanted("a"))
    for outer_step in range(3, 5):
        books.close(outer_step, "a", "b", body=b"x" * 50)
        assert books.rounds.held + books.transfers.held <= 500
    assert books.rounds.oldest > 0 and ask(books) == 3


# Over a source's link that needs seconds for the state, in which more rounds end than are kept: the joiner joins with
# the first state that is brought, and ends with the others' model.
def test_a_slow_source(make_rendezvous, key_file, caplog, monkeypatch):
    monkeypatch.setattr(connection, "Flow", partial(Flow, 256, 256))  # so small a model's state is less than one piece
    caplog.set_level("INFO", "diloco.outcomes")
    server = make_rendezvous(start_peers=2, keep_rounds=2)
    joined = threading.Event()
    config = partial(settings, server.endpoint, key_file, sync_every=1, codec={"type": "sparse"}, heal_timeout_s=20)

    def newest():
        return server.server.rounds.newest or 0

    def late():
        until(lambda: newest() >= 3, "no rounds")
        try:
            return train(config("c"), 2, 2, seed=5)
        finally:
            joined.set()

    slow = {"rate_limit_mbit": 0.008}
    *_, seen = together(
        partial(train, config("a", **slow), 0, 10_000, stop=joined.is_set),
        partial(train, config("b", **slow), 1, 10_000, stop=joined.is_set),
        late,
    )
    served = [text for text in caplog.messages if text.startswith("serving the global state")]
    assert len(served) == 1 and min(seen.hashes) > 3 + 2
