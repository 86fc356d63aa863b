"""Files that a replay did not write are left as they are; what it wrote and lost is made again."""

import os
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from loopback import Endpoint, call, configured, overrule, play, replayed, serving, state

from composer_prime.data.pairs import Pair, PairState
from composer_prime.errors import ConfigError
from composer_prime.traces.ingest.ingest import main as ingest
from composer_prime.traces.records import RULES, ReplayRecords, read_pairs, read_records, votes_beside
from composer_prime.traces.replay.replay import main as replay

FOREIGN = [b'{"precious": 1}', b'{"precious": 1}\n', b"A letter.\n\nDear reader", b"\n\n[1, 2]\n", b"\xff\x00"]
STATES = [state(number) for number in range(3)]


# Pairs and votes go into no file that holds something else, whole lines or not; the message names it and what to do.
@pytest.mark.parametrize("content", FOREIGN)
@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.votes.jsonl"])
def test_a_foreign_file_is_left_as_it_is(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{name} does not hold (pairs|votes).*left as it is.*name another file"):
        play(tmp_path, STATES)
    assert path.read_bytes() == content


# A first line that a crash cut short is no reason to refuse, nor is an empty file; a last line that is whole is kept.
@pytest.mark.parametrize("torn", [b"", b"\n", b"{", b'{"trace":"t","sta'])
def test_a_torn_first_line_is_replayed(tmp_path: Path, torn: bytes) -> None:
    pairs = tmp_path / "pairs.jsonl"
    for path in (pairs, votes_beside(pairs)):
        path.write_bytes(torn)
    assert play(tmp_path, STATES)[0].pairs == 3
    for path in (pairs, votes_beside(pairs)):
        path.write_bytes(path.read_bytes().rstrip(b"\n"))
    again, _ = play(tmp_path, [*STATES, state(3)])
    assert (again.resumed, again.pairs, again.votes.calls) == (3, 1, 2)
    assert len(list(read_pairs(pairs))) == len(list(read_records(votes_beside(pairs)))) == 4


# Pairs that are gone while their votes are there, all of them or some, are made again: from the cache, for nothing.
@pytest.mark.parametrize("left", [None, 0, 1])
async def test_lost_pairs_are_made_again(tmp_path: Path, left: int | None) -> None:
    pairs = tmp_path / "pairs.jsonl"
    async with serving(Endpoint(answers=overrule)) as endpoint:
        config = configured(tmp_path, endpoint.url)
        await replayed(tmp_path, config, STATES)
        if left is None:
            pairs.unlink()
        else:
            pairs.write_bytes(b"".join(pairs.read_bytes().splitlines(keepends=True)[:left]))
        again = await replayed(tmp_path, config, STATES)
        assert (again.pairs, again.resumed, again.votes.calls) == (3 - (left or 0), left or 0, 0)
    assert len({pair.pair_id for pair in read_pairs(pairs)}) == len(list(read_pairs(pairs))) == 3


# A states file under another name, through a link or a longer path, is no place for pairs.
def test_states_are_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states = tmp_path / "states.jsonl"
    states.write_text("{}\n")
    os.link(states, tmp_path / "hard.jsonl")
    (tmp_path / "soft.jsonl").symlink_to(states)
    for name in ("hard.jsonl", "soft.jsonl"):
        with pytest.raises(SystemExit):
            replay([str(states), "-o", str(tmp_path / name), "@", "x.toml"])
        assert "are one file: name another" in capsys.readouterr().err
    assert states.read_text() == "{}\n"


# Ingestion replaces states, with --overwrite, and nothing else.
def test_other_outputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}\n'
    (tmp_path / "in.jsonl").write_text(said)
    words = [str(tmp_path / "in.jsonl"), "--family", "claude", "--overwrite", "-o"]
    assert ingest([*words, str(tmp_path / "out.jsonl")]) == ingest([*words, str(tmp_path / "out.jsonl")]) == 0
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "in.jsonl")
    for name in ("in.jsonl", "link.jsonl"):
        with pytest.raises(SystemExit):
            ingest([*words, str(tmp_path / name)])
        assert f"{name} does not hold states" in capsys.readouterr().err
    assert (tmp_path / "in.jsonl").read_text() == said


CONTEXT = 200_000


def write_pairs(path: Path, count: int) -> None:
    with path.open("wb") as file:
        for number in range(count):
            chosen, rejected = ({"role": "assistant", "tool_calls": [call(name, {})]} for name in ("cat", "ls"))
            asked = PairState(
                state_id=f"t/{number}", messages=[{"role": "user", "content": f"{number}" + "x" * CONTEXT}]
            )
            pair = Pair(trace="t", state=asked, chosen=chosen, rejected=rejected, epsilon=0.1)
            file.write(msgspec.json.encode(pair) + b"\n")


# Votes that were compared by other rules are not continued, those of releases without the number neither.
@pytest.mark.parametrize(("written", "told"), [(b',"rules":6', 6), (b"", 0)])
def test_votes_by_other_rules_are_not_continued(tmp_path: Path, written: bytes, told: int) -> None:
    play(tmp_path, STATES)
    votes = votes_beside(tmp_path / "pairs.jsonl")
    votes.write_bytes(votes.read_bytes().replace(b',"rules":%d' % RULES, written))
    with pytest.raises(ConfigError, match=rf"votes compared by rules {told}, .* rules {RULES}: .*another file"):
        play(tmp_path, STATES)


# A resumed replay knows its pairs by their digests.
def test_one_context_at_a_time(tmp_path: Path) -> None:
    path, count = tmp_path / "pairs.jsonl", 60
    write_pairs(path, count)
    tracemalloc.start()
    try:
        assert len(ReplayRecords(path, votes_beside(path))._ids) == count
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 * CONTEXT < count * CONTEXT
