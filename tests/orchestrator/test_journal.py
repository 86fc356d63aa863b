"""The journal keeps every whole entry, cuts a torn one, refuses a damaged one, and forgets what no checkpoint needs."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from pathlib import Path

import pytest
from orch_groups import ended, plan, ready

from composer_prime.errors import CheckpointError
from composer_prime.run.run_dir import write_remedy
from orchestrator.durability import Dropped, Entry, Finished, Formed, Journal, Started, formed_batches
from orchestrator.rollouts.groups import GroupOutcome


def entries(count: int) -> list[Entry]:
    """Started, Finished and, for every other group, Formed."""
    made: list[Entry] = []
    for group in range(count):
        made.append(Started(seq=len(made) + 1, plan=plan(group)))
        made.append(Finished(seq=len(made) + 1, group=ready(group)))
        if group % 2:
            groups, seq = [group - 1, group], len(made) + 1
            made.append(Formed(seq=seq, step=group // 2 + 1, groups=groups, dropped=[], metrics={"a": 1.0}))
    return made


async def written(folder: Path, made: list[Entry], **options: int) -> Journal:
    journal = Journal.create(folder, **options)
    for entry in made:
        assert journal.next_seq() == entry.seq
        await journal.append(entry)
    return journal


async def test_entries_come_back_in_order_and_numbers_go_on(tmp_path):
    """What was appended is read back whole, in order; the next sequence number follows the last one."""
    made = [*entries(4), Dropped(seq=11, group=ended(9, GroupOutcome.STALE, 1.0))]
    await (await written(tmp_path, made)).close()
    journal = Journal(tmp_path)
    found = list(journal)
    assert found == made
    assert journal.next_seq() == 12
    await journal.append(Started(seq=12, plan=plan(4)))
    await journal.close()
    assert [entry.seq for entry in Journal(tmp_path)] == list(range(1, 13))


async def test_a_tail_torn_at_any_byte_costs_only_the_torn_entry(tmp_path):
    """A crash may cut the file anywhere: whole entries before the cut survive, and the journal goes on."""
    made = entries(2)
    await (await written(tmp_path / "whole", made)).close()
    raw = (tmp_path / "whole" / "000001.log").read_bytes()
    sizes = []
    for cut in range(0, len(raw), 7):
        folder = tmp_path / "torn"
        folder.mkdir(exist_ok=True)
        for path in folder.iterdir():
            path.unlink()
        (folder / "000001.log").write_bytes(raw[:cut])
        journal = Journal(folder)
        found = list(journal)
        assert found == made[: len(found)]
        seq = journal.next_seq()
        assert seq == len(found) + 1
        await journal.append(Started(seq=seq, plan=plan(77)))
        await journal.close()
        assert list(Journal(folder)) == [*found, Started(seq=seq, plan=plan(77))]
        sizes.append(len(found))
    assert sizes == sorted(sizes)
    assert sizes[-1] == len(made) - 1


async def test_a_flipped_bit_in_an_older_segment_is_refused_by_name(tmp_path):
    """Only the newest segment can have a torn tail; damage elsewhere is not silently cut off."""
    journal = await written(tmp_path, entries(6), segment_bytes=1)
    await journal.close()
    first = tmp_path / "000001.log"
    raw = bytearray(first.read_bytes())
    raw[-3] ^= 1
    first.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"000001\.log is damaged at byte"):
        Journal(tmp_path)


async def test_compaction_deletes_whole_segments_that_nothing_needs(tmp_path):
    """A segment stays while it holds an entry after the oldest checkpoint, or a group that this checkpoint names."""
    journal = await written(tmp_path, entries(8), segment_bytes=1)
    before = len(list(tmp_path.iterdir()))
    await journal.compact(oldest_seq=15, groups={1}, steps={2})
    kept = list(Journal(tmp_path))
    assert len(list(tmp_path.iterdir())) < before
    assert [entry.seq for entry in kept if entry.seq <= 15] == [4, 10]
    assert [entry.seq for entry in kept if entry.seq > 15] == [16, 17, 18, 19, 20]
    await journal.close()


async def test_a_new_run_starts_with_an_empty_journal(tmp_path):
    """What an earlier run left in the folder is not this run's."""
    await (await written(tmp_path, entries(2))).close()
    journal = Journal.create(tmp_path)
    assert list(journal) == []
    await journal.close()


async def test_a_full_disk_is_named(tmp_path):
    """When the disk refuses a write, the entry's future says which file and what to do."""
    journal = await written(tmp_path, entries(2))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "000001.log").stat().st_size + 10, limit[1]))
    try:
        with pytest.raises(CheckpointError, match=r"000001\.log cannot be written"):
            await journal.append(Started(seq=journal.next_seq(), plan=plan(5)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    await journal.close()


async def test_many_writers_keep_the_order_of_their_calls(tmp_path):
    """Entries appended without waiting are written in call order: a Formed never precedes its groups."""
    journal = Journal.create(tmp_path)
    made = entries(20)
    await asyncio.gather(*(journal.append(entry) for entry in made))
    await journal.close()
    assert list(Journal(tmp_path)) == made


async def test_numbers_go_on_from_the_checkpoint_when_compaction_emptied_the_journal(tmp_path):
    # Entries of the new life must not carry numbers that the checkpoint has already accounted for.
    Journal.create(tmp_path)
    journal = Journal(tmp_path, min_seq=41)
    assert list(journal) == []
    assert journal.next_seq() == 42


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free some space or keep less"),
        (errno.EROFS, "the disk is mounted read-only: mount it for writing, or set run.output_dir to another one"),
        (errno.EACCES, "let this user write there, or set run.output_dir to another folder"),
        (errno.EIO, "check that disk or free some space or keep less"),
    ],
)
def test_a_write_that_fails_has_the_remedy_of_its_cause(number, remedy):
    """Only a full disk is called full; also where the error has become text on its way to another rank."""
    error = OSError(number, os.strerror(number), "/data/journal")
    assert write_remedy(error, " or keep less") == write_remedy([str(error)], " or keep less") == remedy


def test_a_batch_is_served_again_with_the_same_tokens_as_context():
    """The journal holds the oldest version that a batch trained."""
    group = ready(0, 1, 3)
    finished = Finished(seq=1, group=group)
    for oldest, trained in ((2, 1), (0, 2)):
        formed = Formed(seq=2, step=1, oldest_version=oldest, groups=[0], dropped=[], metrics={})
        [batch] = formed_batches([finished, formed], after=0)
        assert [sample.num_trained for sample in batch.samples] == [trained, trained]
