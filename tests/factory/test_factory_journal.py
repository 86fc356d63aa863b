"""The output folder of the task factory: what a killed run leaves, and folders that are not its own."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from composer_prime.errors import ConfigError
from orchestrator.coding.factory.making_journal import CandidateVerdict, MakingJournal
from orchestrator.coding.task import CodeTask, read_tasks

SETTINGS = {"seed": 0, "kinds": ("delete",)}


def verdict(order: int, reason: str = "") -> CandidateVerdict:
    return CandidateVerdict(source="a", order=order, id=f"a/{order}", kind="delete", shape="function", reason=reason)


def task(order: int) -> CodeTask:
    return CodeTask(id=f"a/{order}", kind="delete", repository="a", prompt="do", fail_to_pass=["t"], pass_to_pass=["u"])


def filled(folder: Path) -> None:
    journal = MakingJournal(folder)
    journal.begin("a", SETTINGS)
    journal.add(verdict(2), task(2))
    journal.add(verdict(1, "no test fails"), None)
    journal.add(verdict(0), task(0))
    journal.close()


# A run that goes on knows all verdicts, and the tasks end up in the candidates' order, cut to the limit.
def test_journal_goes_on(tmp_path: Path) -> None:
    filled(tmp_path)
    journal = MakingJournal(tmp_path)
    journal.begin("a", SETTINGS)
    assert set(journal.verdicts) == {"a/0", "a/1", "a/2"}
    assert journal.finish(None) == 2
    assert [one.id for one in read_tasks(tmp_path)] == ["a/0", "a/2"]
    assert journal.finish(1) == 1
    assert [one.id for one in read_tasks(tmp_path)] == ["a/0"]


# Tasks of the same place in the order go by their ids, whatever the hashes of the process are.
def test_journal_breaks_ties_by_id(tmp_path: Path) -> None:
    journal = MakingJournal(tmp_path)
    for number in (5, 3, 8, 1, 7, 2):
        journal.add(msgspec.structs.replace(verdict(number), order=0), task(number))
    assert journal.finish(None) == 6
    assert [one.id for one in read_tasks(tmp_path)] == [f"a/{number}" for number in (1, 2, 3, 5, 7, 8)]


# A kill between task and verdict, or within a line, costs that candidate and nothing else.
def test_journal_drops_torn_lines(tmp_path: Path) -> None:
    filled(tmp_path)
    with (tmp_path / "tasks.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(task(3)) + b"\n" + b'{"id": "a/4", "ki')
    with (tmp_path / "making.jsonl").open("ab") as file:
        file.write(b'{"source": "a", "or')
    journal = MakingJournal(tmp_path)
    assert set(journal.verdicts) == {"a/0", "a/1", "a/2"}
    assert sorted(one.id for one in read_tasks(tmp_path)) == ["a/0", "a/2"]


# A verdict whose task is lost is done again.
def test_journal_repeats_a_lost_task(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "tasks.jsonl").write_bytes(msgspec.json.encode(task(0)) + b"\n")
    assert set(MakingJournal(tmp_path).verdicts) == {"a/0", "a/1"}


# The same source with other settings is refused with both values.
def test_journal_refuses_other_settings(tmp_path: Path) -> None:
    filled(tmp_path)
    journal = MakingJournal(tmp_path)
    with pytest.raises(ConfigError, match=r"'seed': \(0, 1\)"):
        journal.begin("a", {**SETTINGS, "seed": 1})


# Two runs do not write to one folder at a time; when the first has ended, another may go on.
def test_journal_refuses_a_second_writer(tmp_path: Path) -> None:
    journal = MakingJournal(tmp_path)
    with pytest.raises(ConfigError, match="another run writes"):
        MakingJournal(tmp_path)
    journal.close()
    MakingJournal(tmp_path).close()


# A folder of something else is refused and left alone.
def test_journal_refuses_a_foreign_folder(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="did not write"):
        MakingJournal(tmp_path)
    with pytest.raises(ConfigError, match="is a file"):
        MakingJournal(tmp_path / "thesis.txt")
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
