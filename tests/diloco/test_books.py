"""The rendezvous' books: what makes a delta whole, what stays in memory, which process speaks for a peer."""

from __future__ import annotations

import pytest
from books import BEAT_TIMEOUT_S, DEADLINE_S, Books, base

from composer_prime.errors import RunMismatchError, WireError
from diloco.transport.messages import AskRound, Beat, BodyChunk, DeltaOffer, PeerWelcome, RoundNotReady, Unusable


# Bodies in memory stay below the bound: the oldest rounds go first, the newest stays for those that are late.
def test_memory_is_bounded():
    books = Books(keep_rounds=16, max_bytes=500)
    books.begin("a", "b")
    for outer_step in range(9):
        books.close(outer_step, "a", "b", body=b"x" * 50)
        assert books.rounds.held <= 500
    assert books.rounds.oldest == 4 and books.rounds.closed(8) is not None


# A body that does not fit even so is refused with both figures.
def test_a_body_beyond_the_bound():
    books = Books(max_bytes=500)
    books.begin("a", "b")
    with pytest.raises(WireError, match=r"has 6e-07 GB, .* holds 0 of the rendezvous' 5e-07 GB: .*--memory-gb"):
        books.offer("a", 0, body=b"x" * 600)


# A body of more bytes than its layout can have is refused, whatever room there is, and nothing is dropped for it; so is
# a peer of more ranks than can be.
@pytest.mark.parametrize("kind", ["delta", "state"])
def test_sizes_that_cannot_be(kind):
    books = Books(max_bytes=10**8)
    books.begin("a", "b", rounds=3)
    with pytest.raises(WireError, match=rf"has 10000000 bytes, a {kind} of its layout at most 2097152"):
        books.offer("a", 3, kind=kind, body=bytes(10**7))
    assert books.rounds.oldest == 0 and books.rounds.open_round() is None
    (refused, *_) = books.hello("c", ranks=4097)[:1]
    assert "rank 0 of 4097, expected 1 to 4096 ranks" in refused.error


# Ranks whose parts are not of one delta (another weight: trained on since) do not make a contribution.
def test_parts_of_two_deltas():
    books = Books()
    books.begin("a", "b", ranks=2)
    for rank, weight in enumerate([3.0, 5.0]):
        books.offer("a", 0, rank=rank, weight=weight)
    assert books.rounds.open_round().contributors(books.rounds.peers) == {}
    books.offer("a", 0, rank=0, body=b"newer", weight=5.0)
    assert list(books.rounds.open_round().contributors(books.rounds.peers)) == ["a"]


# Both peers need longer than the deadline to bring their deltas: it runs from the first that is whole, so neither is
# left out. What is not there when it ends does not count.
@pytest.mark.parametrize(("late_s", "members"), [(DEADLINE_S - 1, {"a", "b"}), (DEADLINE_S + 1, {"a"})])
def test_uploads_longer_than_the_deadline(late_s, members):
    books, half = Books(), DEADLINE_S + 1
    books.begin("a", "b")

    def closable_after(seconds):
        books.now += seconds
        books.beat("a", 0)
        books.beat("b", 0)
        closable = books.rounds.closable(books.now, 1)
        return closable if closable is None else set(closable)

    def bring(peer, offset):
        name = books.rounds.open_round().blobs[peer, 0].header.name
        books.answers.to(BodyChunk(name=name, offset=offset, data=b"x" * 5, instance=1))

    for peer in "ab":
        books.offer(peer, 0, body=b"x" * 10, brought=5)
    assert closable_after(half) is None
    bring("a", 5)
    assert books.rounds.left_s(books.rounds.open_round(), books.now) == DEADLINE_S
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
    books = Books()
    books.begin("a", "b")
    ends = int(DEADLINE_S) + (replaced_s or 0)
    for second in range(ends + 1):
        body = b"newer" if replaced_s is not None and second >= replaced_s else b"delta"
        books.offer("a", 0, body=body)
        books.beat("a", 0)
        books.beat("b", 0)
        closable = books.rounds.closable(books.now, 1)
        assert closable is None if second < ends else set(closable) == {"a"}
        books.now += 1


# Of peers that have brought their deltas the most impatient decides how long the round waits for the rest.
@pytest.mark.parametrize("impatient", ["a", "b"])
def test_the_most_impatient_peer_decides(impatient):
    books = Books()
    books.begin("a", "b", "c")
    for peer in "ab":
        books.rounds.peers[peer].deadline_s = DEADLINE_S if peer == impatient else 3 * DEADLINE_S
        books.offer(peer, 0)
    books.now += DEADLINE_S - 1
    assert books.rounds.left_s(books.rounds.open_round(), books.now) == 1
    books.now += 1
    assert set(books.rounds.closable(books.now, 1)) == {"a", "b"}


# What a process brought to an open round goes when another takes its place, and with it the deadline that it started.
def test_a_successor_brings_its_own():
    books = Books()
    books.begin("a", "b")
    books.offer("b", 0)
    books.now += BEAT_TIMEOUT_S
    books.hello("b", instance=2)
    current = books.rounds.open_round()
    assert current.contributors(books.rounds.peers) == {}
    books.beat("a", 0)
    books.beat("b", 0)
    books.offer("b", 0)
    assert books.rounds.left_s(current, books.now) == DEADLINE_S


# Of two processes with one peer id the first stays; when it is silent the second takes its place on all ranks, and the
# first is refused from then on, also when the second is silent.
def test_two_processes_with_one_name():
    books = Books()
    books.begin("a", ranks=2)
    assert isinstance(books.hello("a", ranks=2, instance=2)[0], RoundNotReady)
    books.now += BEAT_TIMEOUT_S
    assert [type(answer) for answer in books.hello("a", ranks=2, instance=2)] == [PeerWelcome, PeerWelcome]
    late = Beat(peer="a", rank=0, instance=1, outer_step=0, base_hash="", training=True)
    for request in (late, AskRound(peer="a", rank=1, instance=1, outer_step=0, base_hash="")):
        with pytest.raises(RunMismatchError, match="peer a was silent, and another process has taken its place"):
            books.answers.to(request)
    books.now += 2 * BEAT_TIMEOUT_S
    with pytest.raises(RunMismatchError, match="another process has taken its place"):
        books.hello("a", ranks=2, instance=1)


# A process that thaws after another has taken its place cannot bring its delta, nor go on with one that it had begun:
# its successor's is what the round holds. Nor does it have a say in which state is given to joiners.
def test_a_thawed_predecessor_brings_nothing():
    books = Books()
    books.begin("a", "b")
    books.now += BEAT_TIMEOUT_S
    books.hello("b", instance=2)
    books.offer("b", 0, body=b"successor")
    blob = books.rounds.open_round().blobs["b", 0]
    for request in (
        DeltaOffer(header=blob.header, instance=1),
        BodyChunk(name=blob.header.name, offset=0, data=b"predecess", instance=1),
        Unusable(peer="b", instance=1, serial=1, reason="damaged"),
    ):
        with pytest.raises(RunMismatchError, match="another process has taken its place"):
            books.answers.to(request)
    assert blob.complete and bytes(blob.data) == b"successor"


# Nor does it where the rendezvous was restarted since, and does not know of the first: bytes of another start than that
# which offered the blob do not enter it.
def test_bytes_of_another_start():
    books = Books()
    books.hello("b", instance=2)
    books.beat("b", 0)
    books.offer("b", 0, body=b"successor", brought=4)
    blob = books.rounds.open_round().blobs["b", 0]
    gone = books.answers.to(BodyChunk(name=blob.header.name, offset=4, data=b"essor", instance=1))
    assert gone.reason == "nothing called delta/0/b/0 is expected" and blob.received == 4


# A body of another layout than its sender said hello with is refused, with both.
def test_layout_of_a_body():
    books = Books()
    books.begin("a", "b")
    with pytest.raises(RunMismatchError, match=r"delta/0/a/0 is of layout other, but peer a said hello with [0-9a-f]+"):
        books.offer("a", 0, layout_hash="other")


# Peers that say of one outer step that they hold different models are named, with both hashes, once: also of the last
# step, which no round starts from, of a peer that has ended meanwhile, and by a rendezvous that was restarted.
@pytest.mark.parametrize("restarted", [False, True])
def test_different_final_models(restarted, caplog):
    books = Books()
    books.begin("a", "b", rounds=2)
    assert not caplog.messages
    books.beat("a", 2, training=False)
    if restarted:
        books = Books()
        books.hello("a", 2)
        books.hello("b", 1)
    for _ in range(2):
        books.beat("b", 2, run="other")
    (said,) = caplog.messages
    models = f"{base(2)} and {base(2, 0, 'other')}"
    assert f"peers a and b hold different global models of outer step 2 (hashes {models} of rank 0)" in said


# A newcomer brings a model of its own, and steps that the run goes back to are taken anew: that is no difference.
def test_newcomers_and_void_steps_are_no_difference(caplog):
    books = Books()
    books.begin("a", "b", rounds=3)
    books.hello("c", run="other")
    books.rounds.go_to(1)
    books.beat("a", 3, run="other")
    assert not [each for each in caplog.messages if "different" in each]


# What the books say of a peer that is not in them.
def test_unknown_peer():
    books = Books()
    books.hello("a")
    del books.rounds.peers["a"]
    assert "hello first" in books.offer("a", 0).reason


# Of peers with different global models the smaller party is told to join anew when the run has begun, not while those
# that may outvote the larger are waited for. Who waits is told for how many.
def test_nobody_is_outvoted_before_the_run_has_begun():
    books = Books(start_peers=3)
    books.begin("a", "b")

    def ask(peer, run=""):
        return books.answers.to(AskRound(peer=peer, rank=0, instance=1, outer_step=0, base_hash=base(0, run=run)))

    books.offer("a", 0)
    assert ask("a").waiting_for == "the deltas of b and 1 more peer(s) to train (--start-peers)"
    books.offer("b", 0, base_hash=base(0, run="other"))
    assert ask("b", "other").waiting_for == "1 more peer(s) to train (--start-peers)"
    books.hello("c", run="other")
    books.beat("c", 0, run="other")
    books.offer("c", 0, base_hash=base(0, run="other"))
    assert "global model of peer a before outer step 0 is not that of b, c" in ask("a").reason


# Two peers with different global models, each too few for --min-peers: the second by name is told to join anew, which
# makes the party whole. Not before all are there, for a third may outvote the first.
def test_a_party_too_small_to_close():
    books = Books(min_peers=2)
    books.begin("a", "b", "c")

    def ask(peer, run=""):
        return books.answers.to(AskRound(peer=peer, rank=0, instance=1, outer_step=0, base_hash=base(0, run=run)))

    books.offer("a", 0, base_hash=base(0))
    books.offer("b", 0, base_hash=base(0, run="other"))
    assert isinstance(ask("b", "other"), RoundNotReady) and books.rounds.closable(books.now, 2) is None
    books.beat("c", 0, training=False)
    assert "1 more peer(s) with the same global model (--min-peers)" in ask("a").waiting_for
    assert "global model of peer b before outer step 0 is not that of a" in ask("b", "other").reason
    assert isinstance(ask("b"), RoundNotReady)
    books.offer("b", 0, base_hash=base(0))
    assert set(books.rounds.closable(books.now, 2)) == {"a", "b"}
