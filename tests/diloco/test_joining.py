"""Which global model a peer joins with: who decides the outer step, and that all ranks of a peer are told the same."""

from __future__ import annotations

import pytest
from books import BEAT_TIMEOUT_S, GATHER_S, Books
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_prime.errors import RunMismatchError
from diloco.transport.messages import Current, RoundNotReady, StateReady


# A rendezvous that was restarted knows nothing: whoever comes first waits for the others, and the highest outer step
# wins whichever peer has it.
@pytest.mark.parametrize("first", ["a", "b"])
def test_highest_step_wins_after_a_restart(first):
    books, steps = Books(), {"a": 10, "b": 12}
    second = "b" if first == "a" else "a"
    books.hello(first, steps[first])
    assert "1 more peer(s) to come" in books.ask(first, steps[first]).waiting_for
    books.now += 5
    books.hello(second, steps[second])
    answers = {name: books.ask(name, steps[name]) for name in (second, first)}
    assert answers["b"] == Current(newest=-1) and "peer b, at outer step 12" in answers["a"].waiting_for
    books.beat("b", 12)
    assert "the state of peer b" in books.ask("a", 10).waiting_for
    books.serve("b", 12)
    assert books.ask("a", 10).header.outer_step == 12


# The wait has an end: without the others, those that are there go on.
def test_the_wait_for_others_ends():
    books = Books()
    books.hello("a", 10)
    assert isinstance(books.ask("a", 10), RoundNotReady)
    books.now += GATHER_S
    books.hello("a", 10)
    assert books.ask("a", 10) == Current(newest=-1)


# At the start of a run nobody waits to train; the first round waits for the others.
def test_a_new_run_does_not_wait():
    books = Books()
    books.hello("a")
    assert books.ask("a", 0) == Current(newest=-1)


# All peers were killed and resume from checkpoints, against a rendezvous that kept running: rounds beyond the highest
# checkpoint are void, those up to it are replayed, also when the killed processes are not yet known to be dead.
@pytest.mark.parametrize("farewell", [True, False])
def test_resume_of_all(farewell):
    books = Books()
    books.begin("a", "b", rounds=6)
    for name in "ab" if farewell else "":
        books.beat(name, 6, training=False)
    books.now += BEAT_TIMEOUT_S * 0.6  # the old processes count as alive for a while longer
    books.hello("a", 2, instance=2)
    assert isinstance(books.ask("a", 2), RoundNotReady)
    books.now += BEAT_TIMEOUT_S * 0.6
    books.hello("b", 4, instance=2)
    assert books.ask("b", 4) == Current(newest=3)
    books.beat("b", 4)
    assert books.ask("a", 2) == Current(newest=3)
    assert books.rounds.closed(2) is not None and books.rounds.closed(4) is None
    books.beat("a", 4)
    assert books.close(4, "a", "b").members == ("a", "b")


# A peer that has ended stays for a while, to write its model. One that comes back meanwhile waits, as anybody does
# where nobody trains; then it takes the rounds since its checkpoint, for the other's model holds them. Where nobody is
# left that ended with them, they are void.
@pytest.mark.parametrize("there", [True, False])
def test_a_joiner_after_the_end(there):
    books = Books()
    books.begin("a", "b", rounds=3)
    books.beat("a", 3, training=False)
    books.now += BEAT_TIMEOUT_S + 1
    books.hello("b", 1, instance=2)
    for second in range(int(GATHER_S) + 1):
        if there:
            books.beat("a", 3, training=False)
        answer = books.ask("b", 1)
        if second < GATHER_S:
            assert "1 more peer(s) to come" in answer.waiting_for
        books.now += 1
    assert answer == Current(newest=2 if there else 0)
    assert (books.rounds.closed(2) is not None) is there


# A process that said hello and nothing else does not make the rendezvous forget the rounds of the others.
def test_a_silent_newcomer_voids_nothing():
    books = Books()
    books.begin("a", "b", rounds=3)
    books.now += 2 * BEAT_TIMEOUT_S
    books.hello("c")
    assert books.rounds.closed(2) is not None
    books.beat("a", 3)
    books.beat("b", 3)
    assert isinstance(books.ask("c", 0, base_hash="other"), RoundNotReady) and books.rounds.newest == 2


# A peer that differs on one of its ranks only takes over the state on all of them.
def test_one_differing_rank():
    books = Books()
    books.begin("a", "b", ranks=2, rounds=3)
    books.now += 2 * BEAT_TIMEOUT_S
    books.hello("b", 2, ranks=2, instance=2)
    books.beat("a", 3)
    assert "rank 1 of peer b" in books.ask("b", 2, rank=0).waiting_for
    assert isinstance(books.ask("b", 2, rank=1, base_hash="other"), RoundNotReady)
    books.now += 1
    books.beat("a", 3)
    assert isinstance(books.ask("b", 2, rank=0), RoundNotReady)
    books.serve("a", 3)
    answers = [books.ask("b", 2, rank=0), books.ask("b", 2, rank=1, base_hash="other")]
    assert [answer.header.rank for answer in answers] == [0, 1]
    assert len({(answer.header.serial, answer.newest) for answer in answers}) == 1


# Rounds that close between the questions of two ranks do not make their answers differ.
@pytest.mark.parametrize("own", [True, False])
def test_all_ranks_are_told_the_same(own):
    books, other = Books(), None if own else "other"
    books.begin("a", "b", ranks=2, rounds=3)
    books.now += 2 * BEAT_TIMEOUT_S
    books.hello("b", 2, ranks=2, instance=2)
    for rank in range(2):
        books.ask("b", 2, rank=rank, base_hash=other)
    books.beat("a", 3)
    if not own:
        assert isinstance(books.ask("b", 2, rank=0, base_hash=other), RoundNotReady)
        books.serve("a", 3)
    first = books.ask("b", 2, rank=0, base_hash=other)
    books.close(3, "a")
    second = books.ask("b", 2, rank=1, base_hash=other)
    assert isinstance(first, Current if own else StateReady) and first.newest == second.newest == 2


# Ranks that stand at different outer steps are no peer.
def test_ranks_at_different_steps():
    books = Books()
    books.hello("a", 4, ranks=2)
    books.ask("a", 4, rank=0)
    with pytest.raises(RunMismatchError, match=r"ranks of peer a stand at outer steps \[4, 5\].*without --resume"):
        books.ask("a", 5, rank=1)


# A peer ahead of a run that went on without it is never taken back: it waits until the others have passed it.
def test_never_back():
    books = Books(start_peers=1)
    books.begin("a", rounds=3)
    books.hello("c", 5)
    books.now += 1
    books.beat("a", 3)
    text = books.ask("c", 5).waiting_for
    assert "at outer step 3, to pass outer step 5 of peer c" in text and "without --resume" in text
    for outer_step in range(3, 6):
        books.close(outer_step, "a")
    books.now += 1
    books.beat("a", 6)
    assert books.ask("c", 5) == Current(newest=5)  # its model is the others': it replays round 5


# A rank of a joining peer that falls silent leaves the other without an answer, not with an error.
def test_a_silent_rank_of_a_joiner():
    books = Books()
    books.hello("a", 4, ranks=2)
    assert [type(books.ask("a", 4, rank=rank)) for rank in range(2)] == [RoundNotReady, RoundNotReady]
    books.now += 2 * BEAT_TIMEOUT_S
    assert "a sign of life of every rank of peer a" in books.ask("a", 4, rank=0).waiting_for


# A source whose memory was damaged before it sent its state: the rounds since go on from another model, so the joiner
# is given the state of another peer.
def test_a_state_of_another_model():
    books = Books()
    books.begin("a", "b", "c", rounds=2)
    books.hello("d")
    assert "the state of peer a" in books.ask("d", 0, base_hash="other").waiting_for
    books.offer("a", 2, kind="state", base_hash="damaged", body=b"state", serial=books.transfers.wanted("a"))
    books.beat("a", 2, training=False)
    books.close(2, "b", "c")
    books.beat("b", 3)
    books.beat("c", 3)
    assert "rounds since" in books.ask("d", 0, base_hash="other").waiting_for
    assert "the state of peer b" in books.ask("d", 0, base_hash="other").waiting_for
    books.serve("b", 3)
    assert books.ask("d", 0, base_hash="other").header.peer == "b"


# A source may be behind the front, as long as the rounds since are kept: of two it is not always the quick one.
def test_source_behind_the_front():
    books = Books()
    books.begin("a", "b", rounds=3)
    books.beat("a", 2)  # has not fetched the last outcome yet
    books.hello("c")
    books.ask("c", 0, base_hash="other")
    assert books.transfers.wanted("a")
    books.serve("a", 2)
    answer = books.ask("c", 0, base_hash="other")
    assert answer.header.outer_step == 2 and answer.newest == 2


# A rendezvous was restarted under peer a, which trains on, and whoever joins is heard first: a newcomer, or one that
# was stopped further back. It gets a's state all the same, also where a single peer is enough to start.
@pytest.mark.parametrize("step", [0, 10])
def test_a_restarted_rendezvous_listens_first(step):
    books = Books(just_started=True, start_peers=1)
    books.hello("b", step)
    assert books.ask("b", step, base_hash="other").waiting_for == "clusters that train already to be heard, 6 s at most"
    books.now += 5
    books.hello("a", 12)
    books.beat("a", 12)
    assert "the state of peer a" in books.ask("b", step, base_hash="other").waiting_for
    books.serve("a", 12)
    assert books.ask("b", step, base_hash="other").header.outer_step == 12


# It does not listen for longer than that.
def test_listening_ends():
    books = Books(just_started=True, start_peers=1)
    books.hello("b")
    assert isinstance(books.ask("b", 0), RoundNotReady)
    books.now += 6
    assert books.ask("b", 0) == Current(newest=-1)


# A request that was sent again and comes late does not make a training peer a joining one.
def test_a_late_question():
    books = Books()
    books.hello("a")
    books.ask("a", 0)
    books.beat("a", 0)
    books.ask("a", 0)
    assert books.rounds.peers["a"].training


STEPS = st.integers(0, 8)


# Whatever checkpoints a fleet comes back with, in whatever order, on however many ranks, whether the rendezvous kept
# running or not: it goes on from the highest step, and nobody is taken back.
@settings(max_examples=60, deadline=None)
@given(
    came=st.permutations(["a", "b", "c"]),
    steps=st.tuples(STEPS, STEPS, STEPS),
    ranks=st.integers(1, 3),
    closed=st.integers(0, 8),
    keep=st.integers(1, 9),
)
def test_any_fleet_agrees(came, steps, ranks, closed, keep):
    books, at = Books(start_peers=3, keep_rounds=keep), dict(zip("abc", steps, strict=True))
    if closed:
        books.begin("a", "b", "c", ranks=ranks, rounds=closed)
        books.now += 2 * BEAT_TIMEOUT_S
    for name in came:
        books.hello(name, at[name], ranks=ranks, instance=2)
    joined: dict[str, int] = {}
    for _ in range(20):
        books.now += 1
        for name in came:
            if name in joined:
                books.beat(name, joined[name])
                if books.transfers.wanted(name):
                    books.serve(name, joined[name])
                continue
            answers = [books.ask(name, at[name], rank=rank) for rank in range(ranks)]
            answers = [books.ask(name, at[name], rank=rank) for rank in range(ranks)]
            if any(isinstance(answer, RoundNotReady) for answer in answers):
                continue
            assert len({(type(answer), answer.newest) for answer in answers}) == 1
            state = answers[0].header.outer_step if isinstance(answers[0], StateReady) else at[name]
            joined[name] = max(state, answers[0].newest + 1)
            books.beat(name, joined[name])
    assert set(joined.values()) == {max(steps)} and joined.keys() == at.keys()
    books.close(max(steps), *"abc")
