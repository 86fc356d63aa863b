"""The compact file of states, and ingestion by several processes."""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path

import msgspec
import pytest
import zstandard
from ingest_traces import MESSAGES, SESSION, lines, taken

from composer_prime.errors import ConfigError
from composer_prime.traces.ingest.command import find_files, main
from composer_prime.traces.ingest.processes import write_states
from composer_prime.traces.ingest.trace_file import Options
from composer_prime.traces.replay.command import count_states
from composer_prime.traces.state import TraceState, write_state
from composer_prime.traces.states_file import StateLines, check_own, compressed, read_states, state_file_lines


def long_session(turns: int) -> list[dict]:
    """A conversation whose states repeat ever longer contexts, of text that does not repeat itself."""
    said = [{"role": "user", "content": "Count."}]
    for turn in range(turns):
        words = " ".join(f"{turn * 7919 + word * 104729:x}" for word in range(60))
        said += [{"role": "assistant", "content": f"Turn {turn}."}, {"role": "user", "content": words}]
    return said


def written(path: Path, states: list[TraceState]) -> Path:
    table = StateLines()
    with path.open("wb") as file, compressed(file) as sink:
        for state in states:
            sink.write(b"".join(table.lines(state)))
    return path


# A file holds each message once. What is read is what was ingested, and states share their messages.
def test_a_message_is_written_once(tmp_path: Path) -> None:
    states, _ = taken(lines(tmp_path / "a.jsonl", {"messages": long_session(60)}))
    states += taken(lines(tmp_path / "b.jsonl", *SESSION))[0]
    path = written(tmp_path / "states.zst", states)
    read = list(read_states(path))
    assert read == states and read[0].messages[0] is read[1].messages[0]
    assert count_states(path) == len(states)
    whole = sum(len(write_state(state)) for state in states)
    assert path.stat().st_size * 20 < whole
    assert sum(1 for line in state_file_lines(path) if line.startswith(b'{"message":')) < 3 * 60


# Runs of a table, which a condensation or two interleaved traces make, lead to the same contexts.
def test_contexts_with_gaps(tmp_path: Path) -> None:
    (first, *_), _ = taken(lines(tmp_path / "a.jsonl", {"messages": MESSAGES}))
    said = [{"role": "user", "content": str(number)} for number in range(9)]
    contexts = [said[:5], [said[0], *said[3:5]], [said[4], said[0], said[8]], [dict(said[2]), said[2]], said[:1]]
    names = ["t", "t", "u", "t", "u"]
    states = [
        msgspec.structs.replace(first, trace_id=name, state_id=f"{name}/{step:04d}", step=step, messages=context)
        for step, (name, context) in enumerate(zip(names, contexts, strict=True))
    ]
    assert list(read_states(written(tmp_path / "states.zst", states))) == states


# Files of whole states, which `--plain` writes, are read too.
def test_whole_states(tmp_path: Path) -> None:
    source = lines(tmp_path / "s.jsonl", *SESSION)
    compact, plain = tmp_path / "states.zst", tmp_path / "states.jsonl"
    assert main([str(source), "-o", str(compact)]) == 0 and main([str(source), "-o", str(plain), "--plain"]) == 0
    assert list(read_states(compact)) == list(read_states(plain)) and count_states(plain) == 2
    assert [json.loads(line)["state_id"] for line in plain.read_text().splitlines()] == ["s1/0000", "s1/0001"]


# A damaged file is an error with its line, wherever it is cut, and never a traceback or a state that was not written.
def test_damaged_files(tmp_path: Path) -> None:
    states, _ = taken(lines(tmp_path / "a.jsonl", {"messages": long_session(9)}))
    whole = written(tmp_path / "states.zst", states).read_bytes()
    path = tmp_path / "cut.zst"
    for end in (5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(ConfigError, match=r"cut\.zst:\d+ is damaged .* `composer ingest`"):
            list(read_states(path))
    path.write_bytes(whole[:40] + b"\x00\xff" + whole[42:])
    with pytest.raises(ConfigError, match=r"cut\.zst:\d+ is (damaged|not a state)"):
        list(read_states(path))
    rows = list(state_file_lines(tmp_path / "states.zst"))
    path.write_bytes(b"".join(row for row in rows if not row.startswith(b'{"trace":')))
    told: list[ConfigError] = []
    assert list(read_states(path, told.append)) == [] and len(told) == len(states)
    path.write_bytes(b"".join(row for row in rows if not row.startswith(b'{"message":')))
    with pytest.raises(ConfigError, match=r"cut\.zst:3 is not a state \(messages 0 to 1 of the 0 in the table\)"):
        list(read_states(path))
    for end in (5, 40):
        path.write_bytes(whole[:end])
        with pytest.raises(ConfigError, match="damaged, so it is not known whether it holds states: remove it, or"):
            check_own(path, lambda line: True, "states")


# A damaged line of the table leaves out the states after it, up to the next trace: their contexts would be others.
def test_a_damaged_line_of_the_table(tmp_path: Path) -> None:
    states, _ = taken(lines(tmp_path / "a.jsonl", {"messages": long_session(3)}))
    states += taken(lines(tmp_path / "b.jsonl", *SESSION))[0]
    rows = list(state_file_lines(written(tmp_path / "states.zst", states)))
    known = {state.state_id: state for state in states}
    path = tmp_path / "damaged.jsonl"
    for number, row in enumerate(rows):
        if row.startswith(b'{"step":'):
            continue
        for damaged in (row[:-3] + b"\n", b"x" + row, b'{"message":{"content":"no role"}}\n'):
            path.write_bytes(b"".join([*rows[:number], damaged, *rows[number + 1 :]]))
            told: list[ConfigError] = []
            read = list(read_states(path, told.append))
            assert all(known[state.state_id] == state for state in read) and len(read) < len(states) and told


# A changed byte that still decompresses is found by the checksum.
def test_states_have_a_checksum(tmp_path: Path) -> None:
    states, _ = taken(lines(tmp_path / "b.jsonl", *SESSION))
    raw = written(tmp_path / "states.zst", states).read_bytes()
    assert zstandard.get_frame_parameters(raw).has_checksum


# A state that two files have counts once, with the first, and traces of one name get different ids.
def test_files_that_repeat_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    lines(folder / "a.jsonl", *SESSION)
    lines(folder / "b.jsonl", *SESSION)
    lines(folder / "c.jsonl", {"messages": MESSAGES, "id": "s1"})
    assert main([str(folder), "-o", str(tmp_path / "states.zst")]) == 0
    assert "copy of an earlier state" in capsys.readouterr().out
    read = [state.state_id for state in read_states(tmp_path / "states.zst")]
    assert read == ["s1/0000", "s1/0001", "s1~3/0000", "s1~3/0001"]


# Several processes write the same bytes as one. The files begin alike: what a longer one repeats counts once.
@pytest.mark.process
def test_processes_change_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(2):
        lines(folder / f"{number}.jsonl", {"messages": long_session(5 + number)}, {"messages": MESSAGES})
    outputs = [tmp_path / "one.zst", tmp_path / "two.zst"]
    for number, output in enumerate(outputs, 1):
        assert main([str(folder), "-o", str(output), "--processes", str(number)]) == 0
    assert outputs[0].read_bytes() == outputs[1].read_bytes() and count_states(outputs[0]) == 6 + 2


# A process that dies while files are still handed out ends the ingestion with the remedy, as one that dies later does.
@pytest.mark.process
def test_a_process_that_dies_early(tmp_path: Path) -> None:
    class Files(list):
        """Ends the processes before the last file is handed out."""

        def __getitem__(self, number):
            if number == 2:
                for process in multiprocessing.active_children():
                    process.kill()
                time.sleep(1)  # Until the pool knows.
            return super().__getitem__(number)

    files = Files(lines(tmp_path / f"{number}.jsonl", {"messages": MESSAGES}) for number in range(3))
    with pytest.raises(ConfigError, match=r"ended at .*0.jsonl or later .*: repeat with --processes 1"):
        list(write_states(files, [3, 2, 1], tmp_path / "s.zst", Options(), 2, lambda _: None))


# A folder is searched by names: a file that holds no traces may be unreadable (a process's memory from 0 on is).
def test_only_trace_files_are_opened(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", *SESSION)
    (tmp_path / "b.bin").symlink_to("/proc/self/mem")
    assert find_files([tmp_path], tmp_path / "s.zst") == [path]


# A number of processes that is none is refused.
def test_no_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = lines(tmp_path / "a.jsonl", *SESSION)
    with pytest.raises(SystemExit):
        main([str(path), "-o", str(tmp_path / "s.zst"), "--processes", "0"])
    assert "--processes is 0: give 1 or more" in capsys.readouterr().err
