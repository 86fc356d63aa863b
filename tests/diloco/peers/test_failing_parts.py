"""A part of a peer fails while the others live: one of its ranks, or what a rank is told."""

from __future__ import annotations

import signal

import msgspec
import pytest
from peer_process import start_ranks

from diloco.transport.messages import AskRound, RoundOutcome, ToPeer


# One rank of a two-rank peer is killed: its other rank ends too, the other cluster goes on alone, and the cluster that
# is started again takes over the global state on both ranks and contributes.
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_is_killed(make_rendezvous, key_file, tmp_path, rank):
    values = {"rendezvous": make_rendezvous(start_peers=2, beat_timeout_s=4).endpoint, "key_file": str(key_file)}
    values |= {"sync_every": 8, "fragments": 2, "delay": 2, "outer": {"lr": 0.7, "momentum": 0.9}}
    steady = start_ranks(tmp_path, "a", 0, values, until=70)
    broken = start_ranks(tmp_path, "b", 1, values, failure=(rank, 23, signal.SIGKILL), until=70)
    assert broken[rank].end(300) == -signal.SIGKILL
    assert broken[1 - rank].end(300) not in (0, None)
    at = max(steady[0].seen, default=0)
    for each in steady:
        each.wait_until(at + 3, 120)
    again = start_ranks(tmp_path, "b", 1, values, until=65)
    assert [each.end(300) for each in (*again, *steady)] == [0] * 4
    for index in range(2):
        mine, theirs = steady[index].seen, again[index].seen
        both = mine.keys() & theirs.keys()
        assert len(both) > 10 and all(mine[step] == theirs[step] for step in both)


# Rank 1 of peer b gets another outcome than rank 0, as from two rendezvous behind one address: they ask again, and
# apply the same one.
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_get_different_outcomes(make_rendezvous, key_file, tmp_path):
    server = make_rendezvous(start_peers=2, beat_timeout_s=4)
    handler = server.server.handler
    honest, lies = handler._outcome, {2: 1, 5: 4}

    def lying(ask: AskRound) -> ToPeer:
        answer = honest(ask)
        to_lie = isinstance(answer, RoundOutcome) and (ask.peer, ask.rank) == ("b", 1) and lies.get(ask.outer_step)
        if not to_lie:
            return answer
        lies[ask.outer_step] -= 1
        return msgspec.structs.replace(answer, digest="f" * 32)

    handler._outcome = lying
    values = {"rendezvous": server.endpoint, "key_file": str(key_file), "sync_every": 4, "fragments": 2, "delay": 1}
    steady = start_ranks(tmp_path, "a", 0, values, until=20)
    deceived = start_ranks(tmp_path, "b", 1, values, until=20)
    assert [each.end(300) for each in (*deceived, *steady)] == [0] * 4
    assert lies == {2: 0, 5: 0}
    for rank, each in enumerate(deceived):
        assert all(steady[rank].seen[step] == each.seen[step] for step in each.seen.keys() & steady[rank].seen.keys())
        log = each.lines.with_name(each.lines.name + ".log").read_text()
        assert "got different outcomes of outer step 5" in log and "more than one rendezvous" in log
