"""The file of states, and thinking that is split off."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ingest_traces import MESSAGES, lines, taken

from composer_prime.errors import ConfigError
from composer_prime.llm.reply import split_thinking
from composer_prime.traces.ingest.ingest import main
from composer_prime.traces.records import TraceState, read_states, state_lines, write_state


def made(tmp_path: Path) -> tuple[Path, list[TraceState]]:
    """A file of states of two traces, and the states."""
    path = lines(tmp_path / "m.jsonl", {"messages": MESSAGES, "id": "a"}, {"messages": MESSAGES[1:], "id": "b"})
    assert main([str(path), "-o", str(tmp_path / "s.zst")]) == 0
    return tmp_path / "s.zst", taken(path)[0]


# Every state comes back, from the compressed file and from plain lines.
def test_states_come_back(tmp_path: Path) -> None:
    path, states = made(tmp_path)
    assert list(read_states(path)) == states and len(states) == 4
    plain = tmp_path / "plain.jsonl"
    plain.write_bytes(b"".join(state_lines(path)))
    assert list(read_states(plain)) == states


# The same trace in two files is read once, and other states of its name get a name of their own.
def test_several_files(tmp_path: Path) -> None:
    one = lines(tmp_path / "a.jsonl", {"messages": MESSAGES, "id": "a"})
    other = lines(tmp_path / "b.jsonl", {"messages": MESSAGES, "id": "a"}, {"messages": MESSAGES[1:], "id": "a"})
    assert main([str(one), str(other), "-o", str(tmp_path / "s.zst")]) == 0
    assert [state.trace_id for state in read_states(tmp_path / "s.zst")] == ["a", "a", "a~3", "a~3"]


# What is damaged, ends in the middle, is of an earlier release or is no state is an error that names file and line.
def test_what_is_refused(tmp_path: Path) -> None:
    path, (state, *_) = made(tmp_path)
    raw, other = path.read_bytes(), tmp_path / "other"
    newer = write_state(msgspec.structs.replace(state, schema_version=9))
    for content, named in (
        (raw[: len(raw) // 2], "other"),
        (raw[:50] + b"\0\0\0\0" + raw[54:], "other"),
        (b'{"trace":"a"}\n', "composer ingest"),
        (newer, "other:1"),
        (write_state(state) + b'{"trace_id": 1}\n', "other:2"),
        (write_state(msgspec.structs.replace(state, messages=[{"content": "x"}])), "other:1"),
    ):
        other.write_bytes(content)
        with pytest.raises(ConfigError, match=named):
            list(read_states(other))


# Blocks, blocks whose first tag stands in the prompt, answers that were cut, and tags that are only spoken of.
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no tag, I think", ("no tag, I think", "")),
        ("<think>a</think>\n\nb", ("b", "a")),
        ("x <thinking>a</thinking> y <think>b</think>z", ("x y z", "a\n\nb")),
        ("reasoning</think>answer", ("answer", "reasoning")),
        ("The user wants...\n</think>\n\nDone.", ("Done.", "The user wants...")),
        ("<think><think>a</think>b", ("b", "<think>a")),
        ("<think>a</think>b</think>c", ("b</think>c", "a")),
        ("<think>cut short", ("", "cut short")),
        ("<think>a</think>b <think>c", ("b <think>c", "a")),
        ("Strip `</think>` and '<think>' first.", ("Strip `</think>` and '<think>' first.", "")),
        ("so: `ls`</think>`ls -l`", ("`ls -l`", "so: `ls`")),
    ],
)
def test_thinking_is_split_off(text: str, expected: tuple[str, str]) -> None:
    assert split_thinking(text) == expected


# Nothing that was said or thought is lost, and nothing comes twice.
@given(st.lists(st.sampled_from(["<think>", "</think>", "</thinking>\n", "a", "`", " "]), max_size=12).map("".join))
def test_every_letter_is_kept(text: str) -> None:
    seen, thought = split_thinking(text)
    assert (thought + seen).count("a") == text.count("a")


# Repeated tags take linear time: quadratic work on this length would take far more than a minute.
@pytest.mark.timeout(60)
@pytest.mark.parametrize("unit", ["<think>", "</think>", "<think></think>", "</think> ", "`<think>`", "<think>\n"])
def test_many_tags_end(unit: str) -> None:
    seen, thought = split_thinking(unit * 200_000 + "x")
    assert "x" in seen + thought
