"""Which global model a peer joins with: what decides the outer step, and that all ranks of a peer get one answer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rendezvous_state import BEAT_TIMEOUT_S, GATHER_S, RendezvousState

from composer_prime.errors import RunMismatchError
from diloco.transport.messages import RoundNotReady, StartingState


# A rendezvous that was restarted knows nothing: the first peer waits for the others, and the highest outer step wins,
# whichever peer has it.
@pytest.mark.parametrize("first", ["a", "b"])
def test_highest_step_wins_after_a_restart(first):
    rendezvous, steps = RendezvousState(), {"a": 10, "b": 12}
    second = "b" if first == "a" else "a"
    rendezvous.hello(first, steps[first])
    assert "1 more peer(s) to come" in rendezvous.ask(first, steps[first]).waiting_for
    rendezvous.now += 5
    rendezvous.hello(second, steps[second])
    answers = {name: rendezvous.ask(name, steps[name]) for name in (second, first)}
    assert answers["b"] == StartingState(newest=-1) and "peer b, at outer step 12" in answers["a"].waiting_for
    rendezvous.beat("b", 12)
    assert "the state of peer b" in rendezvous.ask("a", 10).waiting_for
    rendezvous.serve("b", 12)
    assert rendezvous.ask("a", 10).header.outer_step == 12


# The wait has an end: without the others, those that are there go on.
def test_the_wait_for_others_ends():
    rendezvous = RendezvousState()
    rendezvous.hello("a", 10)
    assert isinstance(rendezvous.ask("a", 10), RoundNotReady)
    rendezvous.now += GATHER_S
    rendezvous.hello("a", 10)
    assert rendezvous.ask("a", 10) == StartingState(newest=-1)


# At the start of a run no peer waits to train; the first round waits for the others.
def test_a_new_run_does_not_wait():
    rendezvous = RendezvousState()
    rendezvous.hello("a")
    assert rendezvous.ask("a", 0) == StartingState(newest=-1)


# All peers were killed and resume from checkpoints, against a rendezvous that kept running: rounds beyond the highest
# checkpoint are void, those up to it are replayed, also when the killed processes are not yet known to be dead.
@pytest.mark.parametrize("farewell", [True, False])
def test_resume_of_all(farewell):
    rendezvous = RendezvousState()
    rendezvous.begin("a", "b", rounds=6)
    for name in "ab" if farewell else "":
        rendezvous.beat(name, 6, training=False)
    rendezvous.now += BEAT_TIMEOUT_S * 0.6  # the old processes count as alive for a while longer
    rendezvous.hello("a", 2, instance=2)
    assert isinstance(rendezvous.ask("a", 2), RoundNotReady)
    rendezvous.now += BEAT_TIMEOUT_S * 0.6
    rendezvous.hello("b", 4, instance=2)
    assert rendezvous.ask("b", 4) == StartingState(newest=3)
    rendezvous.beat("b", 4)
    assert rendezvous.ask("a", 2) == StartingState(newest=3)
    assert rendezvous.rounds.closed(2) is not None and rendezvous.rounds.closed(4) is None
    rendezvous.beat("a", 4)
    assert rendezvous.close(4, "a", "b").members == ("a", "b")


# A peer that has ended stays for a while, to write its model. One that comes back meanwhile waits, as every peer does
# when no other trains. Then it takes the rounds since its checkpoint, because the other's model holds them. Where no
# peer is left that ended with them, they are void.
@pytest.mark.parametrize("there", [True, False])
def test_a_joiner_after_the_end(there):
    rendezvous = RendezvousState()
    rendezvous.begin("a", "b", rounds=3)
    rendezvous.beat("a", 3, training=False)
    rendezvous.now += BEAT_TIMEOUT_S + 1
    rendezvous.hello("b", 1, instance=2)
    for second in range(int(GATHER_S) + 1):
        if there:
            rendezvous.beat("a", 3, training=False)
        answer = rendezvous.ask("b", 1)
        if second < GATHER_S:
            assert "1 more peer(s) to come" in answer.waiting_for
        rendezvous.now += 1
    assert answer == StartingState(newest=2 if there else 0)
    assert (rendezvous.rounds.closed(2) is not None) is there


# A process that sent a hello and nothing else does not make the rendezvous forget the rounds of the others.
def test_a_silent_newcomer_voids_nothing():
    rendezvous = RendezvousState()
    rendezvous.begin("a", "b", rounds=3)
    rendezvous.now += 2 * BEAT_TIMEOUT_S
    rendezvous.hello("c")
    assert rendezvous.rounds.closed(2) is not None
    rendezvous.beat("a", 3)
    rendezvous.beat("b", 3)
    assert isinstance(rendezvous.ask("c", 0, base_hash="other"), RoundNotReady) and rendezvous.rounds.newest == 2


# A peer that differs on one of its ranks only takes over the state on all of them.
def test_one_differing_rank():
    rendezvous = RendezvousState()
    rendezvous.begin("a", "b", ranks=2, rounds=3)
    rendezvous.now += 2 * BEAT_TIMEOUT_S
    rendezvous.hello("b", 2, ranks=2, instance=2)
    rendezvous.beat("a", 3)
    assert "rank 1 of peer b" in rendezvous.ask("b", 2, rank=0).waiting_for
    assert isinstance(rendezvous.ask("b", 2, rank=1, base_hash="other"), RoundNotReady)
    rendezvous.now += 1
    rendezvous.beat("a", 3)
    assert isinstance(rendezvous.ask("b", 2, rank=0), RoundNotReady)
    rendezvous.serve("a", 3)
    answers = [rendezvous.ask("b", 2, rank=0), rendezvous.ask("b", 2, rank=1, base_hash="other")]
    assert [answer.header.rank for answer in answers] == [0, 1]
    assert len({(answer.header.serial, answer.newest) for answer in answers}) == 1


# Rounds that close between the questions of two ranks do not make their answers differ.
@pytest.mark.parametrize("own", [True, False])
def test_all_ranks_get_one_answer(own):
    rendezvous, other = RendezvousState(), None if own else "other"
    rendezvous.begin("a", "b", ranks=2, rounds=3)
    rendezvous.now += 2 * BEAT_TIMEOUT_S
    rendezvous.hello("b", 2, ranks=2, instance=2)
    for rank in range(2):
        rendezvous.ask("b", 2, rank=rank, base_hash=other)
    rendezvous.beat("a", 3)
    if not own:
        assert isinstance(rendezvous.ask("b", 2, rank=0, base_hash=other), RoundNotReady)
        rendezvous.serve("a", 3)
    first = rendezvous.ask("b", 2, rank=0, base_hash=other)
    rendezvous.close(3, "a")
    second = rendezvous.ask("b", 2, rank=1, base_hash=other)
    assert (first.header is None) is own and first.newest == second.newest == 2


# Ranks that stand at different outer steps are refused.
def test_ranks_at_different_steps():
    rendezvous = RendezvousState()
    rendezvous.hello("a", 4, ranks=2)
    rendezvous.ask("a", 4, rank=0)
    with pytest.raises(RunMismatchError, match=r"ranks of peer a stand at outer steps \[4, 5\].*without --resume"):
        rendezvous.ask("a", 5, rank=1)


# A peer ahead of a run that went on without it is never taken back: it waits until the others have passed it.
def test_never_back():
    rendezvous = RendezvousState(start_peers=1)
    rendezvous.begin("a", rounds=3)
    rendezvous.hello("c", 5)
    rendezvous.now += 1
    rendezvous.beat("a", 3)
    text = rendezvous.ask("c", 5).waiting_for
    assert "at outer step 3, to pass outer step 5 of peer c" in text and "without --resume" in text
    for outer_step in range(3, 6):
        rendezvous.close(outer_step, "a")
    rendezvous.now += 1
    rendezvous.beat("a", 6)
    assert rendezvous.ask("c", 5) == StartingState(newest=5)  # its model is the others': it replays round 5


# A source's memory was damaged before it sent its state: the rounds since go on from another model, so the joining peer
# gets the state of another peer.
def test_a_state_of_another_model():
    rendezvous = RendezvousState()
    rendezvous.begin("a", "b", "c", rounds=2)
    rendezvous.hello("d")
    assert "the state of peer a" in rendezvous.ask("d", 0, base_hash="other").waiting_for
    rendezvous.offer(
        "a", 2, kind="state", base_hash="damaged", body=b"state", serial=rendezvous.joins.requested_from("a")
    )
    rendezvous.beat("a", 2, training=False)
    rendezvous.close(2, "b", "c")
    rendezvous.beat("b", 3)
    rendezvous.beat("c", 3)
    assert "later rounds build on" in rendezvous.ask("d", 0, base_hash="other").waiting_for
    assert "the state of peer b" in rendezvous.ask("d", 0, base_hash="other").waiting_for
    rendezvous.serve("b", 3)
    assert rendezvous.ask("d", 0, base_hash="other").header.peer == "b"


# A rendezvous was restarted under peer a, which trains on, and a joining peer is heard first: a newcomer, or one that
# was stopped further back. It gets a's state all the same, also where a single peer is enough to start.
@pytest.mark.parametrize("step", [0, 10])
def test_a_restarted_rendezvous_listens_first(step):
    rendezvous = RendezvousState(just_started=True, start_peers=1)
    rendezvous.hello("b", step)
    assert (
        rendezvous.ask("b", step, base_hash="other").waiting_for
        == "clusters that train already to be heard, 6 s at most"
    )
    rendezvous.now += 5
    rendezvous.hello("a", 12)
    rendezvous.beat("a", 12)
    assert "the state of peer a" in rendezvous.ask("b", step, base_hash="other").waiting_for
    rendezvous.serve("a", 12)
    assert rendezvous.ask("b", step, base_hash="other").header.outer_step == 12


STEPS = st.integers(0, 8)


# Whatever checkpoints a fleet comes back with, in whatever order, on however many ranks, whether the rendezvous kept
# running or not: it goes on from the highest step, and no peer is taken back.
@settings(max_examples=60, deadline=None)
@given(
    came=st.permutations(["a", "b", "c"]),
    steps=st.tuples(STEPS, STEPS, STEPS),
    ranks=st.integers(1, 3),
    closed=st.integers(0, 8),
    keep=st.integers(1, 9),
)
def test_any_fleet_agrees(came, steps, ranks, closed, keep):
    rendezvous, at = RendezvousState(start_peers=3, keep_rounds=keep), dict(zip("abc", steps, strict=True))
    if closed:
        rendezvous.begin("a", "b", "c", ranks=ranks, rounds=closed)
        rendezvous.now += 2 * BEAT_TIMEOUT_S
    for name in came:
        rendezvous.hello(name, at[name], ranks=ranks, instance=2)
    joined: dict[str, int] = {}
    for _ in range(20):
        rendezvous.now += 1
        for name in came:
            if name in joined:
                rendezvous.beat(name, joined[name])
                if rendezvous.joins.requested_from(name):
                    rendezvous.serve(name, joined[name])
                continue
            answers = [rendezvous.ask(name, at[name], rank=rank) for rank in range(ranks)]
            answers = [rendezvous.ask(name, at[name], rank=rank) for rank in range(ranks)]
            if any(isinstance(answer, RoundNotReady) for answer in answers):
                continue
            assert len({(type(answer), answer.newest) for answer in answers}) == 1
            state = answers[0].header.outer_step if answers[0].header else at[name]
            joined[name] = max(state, answers[0].newest + 1)
            rendezvous.beat(name, joined[name])
    assert set(joined.values()) == {max(steps)} and joined.keys() == at.keys()
    rendezvous.close(max(steps), *"abc")
