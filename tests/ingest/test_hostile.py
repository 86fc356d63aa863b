"""Hostile and broken files, and files that are read twice: nothing crashes, all is accounted for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ingest_traces import MESSAGES, OPENHANDS, SESSION, TOOLS, answer, lines, prompt, taken, text, use

from composer_prime.errors import ConfigError
from composer_prime.traces.ingest.ingest import FORMATS, find_files, ingest, main
from composer_prime.traces.ingest.trace_file import Options, Tally
from composer_prime.traces.records import read_states


# The line that a crash cut short is counted, and the turn that was open still gives its state.
def test_truncated_last_line(tmp_path: Path) -> None:
    path = lines(tmp_path / "s.jsonl", *SESSION)
    path.write_bytes(path.read_bytes()[:-40])
    states, tally = taken(path)
    assert len(states) == 1 and tally.skipped == {"truncated last line": 1}


# Bytes that are no UTF-8 cost their own line.
def test_invalid_utf8(tmp_path: Path) -> None:
    raw = json.dumps(prompt("u9", "a5", "caf")).encode().replace(b"caf", b"caf\xff\xfe")
    states, tally = taken(lines(tmp_path / "s.jsonl", *SESSION[:7], raw, SESSION[7]))
    assert len(states) == 2 and tally.skipped == {"not UTF-8": 1}


# What only Python's own reader takes (NaN, half a surrogate pair) is read, and written as valid JSON.
def test_nan_and_lone_surrogates(tmp_path: Path) -> None:
    raw = json.dumps(answer("a9", "a5", text("half \ud83d"))).encode().replace(b'"uuid"', b'"cost": NaN, "uuid"')
    states, _ = taken(lines(tmp_path / "s.jsonl", *SESSION, prompt("u2", "a5", "go"), raw))
    assert states[-1].student_action["content"] == "half ?"


# A file's name need not be UTF-8 either.
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere such names cannot be")
def test_a_name_that_is_not_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = lines(Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.jsonl")), {"messages": MESSAGES})
    assert main([str(path), "-o", str(tmp_path / "states.jsonl")]) == 0
    assert [state.trace_id for state in read_states(tmp_path / "states.jsonl")] == ["caf?:0"] * 2
    assert "caf?.jsonl" in capsys.readouterr().out


# A line of 50 MB is passed over without being held.
def test_a_50_mb_line(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    with path.open("wb") as file:
        for record in SESSION[:4]:
            file.write(json.dumps(record).encode() + b"\n")
        file.write(b'{"type": "user", "x": "' + b"a" * 50_000_000 + b'"}\n')
        for record in SESSION[4:]:
            file.write(json.dumps(record).encode() + b"\n")
    states, tally = taken(path)
    assert len(states) == 2 and tally.skipped == {"line longer than 16 MiB": 1}


# Values of the wrong type, in every place that is read.
@pytest.mark.parametrize("wrong", [None, 7, 1.5, True, "x", [], {}, [None], [[]], {"a": {}}, ["x", 3]])
def test_wrong_types(tmp_path: Path, wrong: object) -> None:
    records = [
        *SESSION,
        *({**SESSION[3], "uuid": f"w{n}", field: wrong} for n, field in enumerate(("message", "type", "parentUuid"))),
        *({**SESSION[0], "uuid": wrong, "sessionId": wrong} for _ in range(2)),
        {**SESSION[3], "uuid": "c1", "message": {**SESSION[3]["message"], "content": wrong}},
        {**SESSION[3], "uuid": "c2", "message": {**SESSION[3]["message"], "content": [wrong], "id": wrong}},
        {**SESSION[5], "uuid": "c3", "message": {"role": "user", "content": wrong}},
        wrong,
    ]
    states, tally = taken(lines(tmp_path / "s.jsonl", *records))
    assert len(states) >= 2 and tally.seen == len(records)


# Results that nobody asked for, an empty file, and files of something else.
def test_strays_and_emptiness(tmp_path: Path) -> None:
    stray = [MESSAGES[1], {"role": "tool", "tool_call_id": "nobody", "content": "x"}, MESSAGES[4]]
    states, _ = taken(lines(tmp_path / "m.jsonl", {"messages": stray}))
    assert [message["role"] for message in states[0].messages] == ["user", "user"]
    for name, content in {"e.jsonl": b"", "e.json": b"", "n.jsonl": b"\n\n \n"}.items():
        (tmp_path / name).write_bytes(content)
        assert taken(tmp_path / name)[0] == []
    assert taken(lines(tmp_path / "o.jsonl", {"a": 1}, [1], b"{"))[1].skipped == {
        "not a known trace format": 2,
        "not JSON": 1,
    }
    (tmp_path / "b.traj").write_bytes(b'{"history": [')
    assert taken(tmp_path / "b.traj")[1].skipped == {"not JSON": 1}
    (tmp_path / "deep.json").write_bytes(b"[" * 100_000)
    assert taken(tmp_path / "deep.json")[1].seen == 1


# One record nested deeper than any real one costs itself, in whatever place and however deep; the next one is read.
@pytest.mark.parametrize("depth", [101, 480, 900, 5_000])
@pytest.mark.parametrize("place", ["content", "arguments", "tools"])
def test_nested_too_deeply(tmp_path: Path, place: str, depth: int) -> None:
    record = json.dumps({"messages": MESSAGES, "tools": TOOLS})
    last = {"content": '"It sets x."', "arguments": r'"{\"path\": \"a.py\"}"', "tools": json.dumps(TOOLS)}[place]
    assert last in record
    states, tally = taken(lines(tmp_path / "m.jsonl", nested(record, last, depth), nested(record, last, 90)))
    assert states and tally.taken == 1 and tally.skipped == {"nested too deeply": 1}


def nested(record: str, old: str, depth: int) -> bytes:
    return record.replace(old, "[" * depth + "]" * depth).encode()


# A format that the user names meets files of any other: everything is counted, nothing raised.
@pytest.mark.parametrize("name", [reader.NAME for reader in FORMATS])
def test_a_named_format_on_files_of_another(tmp_path: Path, name: str) -> None:
    (tmp_path / "lines.jsonl").write_text(json.dumps({"messages": MESSAGES}) + '\n{"history": 3}\n[1]\n"x"\n')
    documents = ['{"a": 1}', "[1, 2]", "[]", '{"history": {}, "messages": 3}', '{"a":', "7", '{"trajectory": [3]}']
    for number, document in enumerate(documents):
        (tmp_path / f"{number}.json").write_text(document)
    (tmp_path / "folder" / "events").mkdir(parents=True)
    (tmp_path / "folder" / "base_state.json").write_text("[]")
    (tmp_path / "folder" / "events" / "0.json").write_text("3")
    for path in tmp_path.iterdir():
        _, tally = taken(path, format=name)
        assert tally.seen > 0 or path.read_text() == "[]", path


# The limit of a document holds, upwards as well as downwards.
def test_the_limit_of_a_document(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps([*MESSAGES[:2], {"role": "assistant", "content": "x" * 2_000_000}], indent=1))
    _, tally = taken(path, document_bytes=1 << 20)
    assert tally.skipped == {"JSON document larger than 1 MiB": 1}
    path.write_bytes(path.read_bytes() + b" " * (33 << 20))
    states, _ = taken(path, document_bytes=64 << 20)
    assert len(states) == 1


# Lines at the beginning that are skipped for their size do not hide what the file is.
def test_a_file_that_begins_with_long_lines(tmp_path: Path) -> None:
    path = lines(tmp_path / "s.jsonl", *[b"x" * 6_000_000] * 2, *SESSION)
    states, tally = taken(path, line_bytes=5 << 20)
    assert len(states) == 2 and tally.skipped == {"line longer than 5 MiB": 2}


# An action that is longer than any context is passed over; of the error that followed one, only the beginning is kept.
def test_an_action_without_end(tmp_path: Path) -> None:
    said = [MESSAGES[1], {"role": "assistant", "content": "x" * 600}, {"role": "user", "content": "Error " + "y" * 600}]
    said += [{"role": "assistant", "content": "z" * 3_000}]
    states, tally = taken(lines(tmp_path / "m.jsonl", {"messages": said}), context_chars=2_000)
    assert [len(state.error or "") for state in states] == [500]
    assert tally.passed_over == {"action over 2,000 characters": 1}


# A context that outgrows the limit gives no states until it starts anew.
def test_a_context_without_end(tmp_path: Path) -> None:
    records, parent = [], None
    for number in range(20):
        records += [prompt(f"u{number}", parent, "x" * 1000), answer(f"a{number}", f"u{number}", text("y"))]
        parent = f"a{number}"
    path = lines(tmp_path / "s.jsonl", *records)
    states, tally = taken(path, context_chars=5_500)
    assert len(states) == 5 and tally.passed_over == {"context over 5,500 characters": 15}


# A branch that leaves behind the place where the context was given up has no context either: what came before is gone.
def test_a_branch_of_a_context_without_end(tmp_path: Path) -> None:
    records = [prompt("u0", None, "task"), answer("a0", "u0", text("y")), prompt("u1", "a0", "x" * 1000)]
    records += [answer("a1", "u1", text("y")), prompt("u2", "a1", "x"), answer("a2", "u2", text("y"))]
    records += [prompt("u3", "a1", "again"), answer("a3", "u3", text("y")), prompt("u4", "a3", "x")]
    path = lines(tmp_path / "s.jsonl", *records, answer("a4", "u4", text("z")))
    states, tally = taken(path, context_chars=500)
    assert [state.step for state in states] == [0] and tally.passed_over == {"context over 500 characters": 4}


# A session that does not end within the memory for sessions gives the states so far; the sessions after it are read.
def test_a_session_without_end(tmp_path: Path) -> None:
    records, parent = [], None
    for number in range(600):
        records += [prompt(f"u{number}", parent, "x"), answer(f"a{number}", f"u{number}", text(f"y{number}"))]
        parent = f"a{number}"
    other = [prompt("o1", None, "z", sessionId="s2"), answer("o2", "o1", text("z"), sessionId="s2")]
    states, tally = taken(lines(tmp_path / "s.jsonl", *records, *other), session_bytes=1 << 20)
    reason = "session not over after 1 MiB"
    assert tally.skipped[reason] > 100 and tally.passed_over == {reason: 1} and tally.seen == 1_202
    assert [state.trace_id for state in states[-2:]] == ["s1", "s2"] and len(states[-1].messages) == 1


# A session file of 200 MB (made of many sessions and of one without end) stays within 200 MB of memory with everything
# that the interpreter itself needs. (Read from VmHWM: a child's ru_maxrss begins at the peak of whoever forked it.)
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of resident memory from /proc")
def test_memory_is_bounded(tmp_path: Path) -> None:
    path, size = tmp_path / "s.jsonl", 0
    with path.open("wb") as file:
        while size < 200_000_000:
            session = size % 7_000_000 // 1_000_000
            for number, record in enumerate(SESSION):
                own = {"sessionId": f"s{size if session else 0}", "uuid": f"{size}-{number}", "parentUuid": None}
                raw = json.dumps({**record, **own, "padding": "x" * 2_000}).encode() + b"\n"
                size += file.write(raw)
    assert peak_kib(path) < 200 * 1024


# So does one line of what takes most memory for its size: small objects, as many as may be, a text with one letter of
# four bytes, and histories of events one after another.
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of resident memory from /proc")
@pytest.mark.parametrize("kind", ["messages", "objects", "text", "histories"])
def test_memory_is_bounded_for_any_line(tmp_path: Path, kind: str) -> None:
    wide = "\U0001f600" + "x, " * 5_200_000
    record = {
        "messages": {"messages": MESSAGES[1:2] * 120_000},
        "objects": {"messages": MESSAGES, "x": [{"a": f"b{number}"} for number in range(249_000)]},
        "text": {"messages": [MESSAGES[1], {"role": "assistant", "content": wide}, *MESSAGES]},
        "histories": {"history": [{**event, "x": "y" * 400_000} for event in OPENHANDS * 5]},
    }[kind]
    raw = json.dumps(record, ensure_ascii=False).encode()
    assert len(raw) <= Options().line_bytes
    path = tmp_path / "s.jsonl"
    with path.open("wb") as file:
        file.writelines([raw + b"\n"] * 3)
    assert peak_kib(path) < 200 * 1024


def peak_kib(path: Path) -> int:
    """Peak of resident memory of a process that ingests the file."""
    program = (
        "import sys; from composer_prime.traces.ingest.ingest import main; main(sys.argv[1:]);"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    command = [sys.executable, "-c", program, str(path), "-o", str(path.with_name("states.jsonl"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    return int(done.stdout.split()[-1])


# The command: a table, whole output or none, and refusals that say what to do.
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines(tmp_path / "a.jsonl", *SESSION)
    lines(tmp_path / "b.jsonl", {"messages": MESSAGES})
    output = tmp_path / "out" / "states.jsonl"
    assert main([str(tmp_path), "-o", str(output)]) == 0
    shown = capsys.readouterr()
    assert "claude_code/2" in shown.out and "4 states in" in shown.out
    assert [state.state_id for state in read_states(output)] == ["s1/0000", "s1/0001", "b:0/0000", "b:0/0001"]
    with pytest.raises(SystemExit):
        main([str(tmp_path), "-o", str(output)])
    assert "--overwrite" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path / "nowhere"), "-o", str(output), "--overwrite"])
    with pytest.raises(SystemExit):
        main([str(tmp_path), "-o", str(tmp_path)])
    assert "is a folder" in capsys.readouterr().err
    assert len(list(read_states(output))) == 4


# States are no traces: neither those of an earlier call that lie in the folder, nor the output itself, are read again.
def test_states_are_not_ingested_again(tmp_path: Path) -> None:
    lines(tmp_path / "b.jsonl", {"messages": MESSAGES})
    output = tmp_path / "states.jsonl"
    assert main([str(tmp_path), "-o", str(output)]) == 0
    once = output.read_bytes()
    assert main([str(tmp_path), "-o", str(output), "--overwrite"]) == 0 and output.read_bytes() == once
    states, tally = taken(output)
    assert states == [] and tally.skipped == {"not a known trace format": 1}


def ingested(output: Path, **stdin: Any) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "composer_prime.cli.main", "ingest", "/dev/stdin", "-o", str(output)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, **stdin)


# A pipe is refused before anything is opened, with what to do; one that has a name would wait for a writer.
def test_pipes_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="is a pipe, but ingestion reads its input twice: save it to a file first"):
        find_files([tmp_path / "fifo"], tmp_path / "o.jsonl")
    with pytest.raises(ConfigError, match="/dev/null is a device or socket"):
        find_files([Path("/dev/null")], tmp_path / "o.jsonl")


# What is piped in is refused likewise; what is redirected from a file is that file.
@pytest.mark.process
def test_standard_input(tmp_path: Path) -> None:
    session, output = lines(tmp_path / "s.jsonl", *SESSION), tmp_path / "o.jsonl"
    piped = ingested(output, input=session.read_text())
    assert piped.returncode == 2 and "/dev/stdin is a pipe" in piped.stderr and not output.exists()
    with session.open() as file:
        redirected = ingested(output, stdin=file)
    assert redirected.returncode == 0 and len(list(read_states(output))) == 2


# What a session writes while it is read is left for another time, whatever it is: a tool's call, or half a line.
@pytest.mark.parametrize("more", [answer("b1", "a5", use("t9", "Edit")), b'{"type": "assist'])
def test_a_file_that_grows(tmp_path: Path, more: object) -> None:
    path = lines(tmp_path / "s.jsonl", *SESSION)
    whole, tally = taken(path)
    late = Tally()
    reading = ingest(path, late)
    states = [next(reading)]
    rest = lines(tmp_path / "more", more).read_bytes()
    with path.open("ab") as file:
        file.write(rest)
    states += reading
    assert states == whole and late == tally
