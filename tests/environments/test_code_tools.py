"""The agent's tools: what they answer, what they keep, and how they fail."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from code_tasks_made import make_task, make_tree

from composer_prime.config.sandbox import RuntimeConfig
from orchestrator.coding.code.tools import CodeTools, clip, is_tool_error
from orchestrator.coding.sandbox.box import Box, open_box, read_tree
from orchestrator.hints.generate import Templates

process = pytest.mark.process


class Played:
    """The tools of one box, called with plain arguments."""

    def __init__(self, box: Box, **limits: Any) -> None:
        self.box = box
        settings = {"output_chars": 4000, "timeout_s": 60.0} | limits
        self.tools = CodeTools(box, **settings)

    async def __call__(self, name: str, **arguments: Any) -> str:
        return await self.tools.call(name, json.dumps(arguments))


@pytest.fixture
async def play(tmp_path: Path) -> AsyncIterator[Played]:
    task = make_task()
    files = {path: text.encode() for path, text in task.start.items()}
    box = await open_box(RuntimeConfig(type="subprocess"), files={**read_tree(make_tree(tmp_path / "trees")), **files})
    async with box:
        yield Played(box)


# A long text keeps its head and its tail, and the line between says how much is gone.
def test_clip() -> None:
    text = clip("a" * 600 + "b" * 500, 1000)
    assert text.startswith("a" * 500) and text.endswith("b" * 500) and "100 characters cut" in text
    assert clip("short", 1000) == "short"


# Wrong names, broken JSON and wrong arguments are tool errors in the words that hints know.
@process
@pytest.mark.parametrize(
    ("name", "arguments", "reply"),
    [
        ("open", "{}", "Tool not found: open"),
        ("bash", "{", "Invalid JSON in the arguments"),
        ("bash", "{}", "Missing argument: command"),
        ("bash", '{"command": 3}', "Wrong type for argument command: expected string, got integer"),
        ("bash", '{"command": "ls", "x": 1}', "Unknown argument: x"),
    ],
)
async def test_calls_that_break_the_schema(play: Played, name: str, arguments: str, reply: str) -> None:
    assert await play.tools.call(name, arguments) == reply
    assert is_tool_error(reply)
    assert Templates.load().kind_of(reply) != "other"


# Directory and exported variables are kept between calls, also past an exit; output and exit code come back.
@process
async def test_bash_keeps_its_state(play: Played) -> None:
    assert await play("bash", command="cd demo && export NAME='a b' && ls") == "__init__.py\nnumbers.py"
    assert await play("bash", command="pwd | xargs basename; echo $NAME; exit 3") == "demo\na b\n[exit code 3]"
    assert (await play("bash", command="echo $NAME >&2; false")) == "a b\n[exit code 1]"
    missing = await play("bash", command="no_such_program")
    assert missing.startswith("Error: exit code 127") and is_tool_error(missing)
    assert await play("bash", command="cd /") == "(no output)"


# A command that hangs is ended, with its output so far, and the next call works.
@process
async def test_bash_is_ended_by_its_limit(play: Played) -> None:
    reply = await play("bash", command="echo begun; sleep 1000", timeout_s=1)
    assert reply.startswith("Error: ended by the limit wall_s") and "begun" in reply
    assert await play("bash", command="echo on") == "on"


# 100 MB of output and binary output come back short and as text.
@process
async def test_huge_and_binary_output(play: Played) -> None:
    reply = await play("bash", command="head -c 100000000 /dev/zero | tr '\\0' x")
    assert len(reply) < 5000 and ("cut" in reply or "ended by the limit" in reply)
    assert "�" in await play("bash", command="printf '\\377\\376'")
    assert await play("bash", command="echo \0") != ""


# Files are shown with numbers, and ranges work; what is no text is said.
@process
async def test_view(play: Played) -> None:
    assert (await play("view", path="demo/numbers.py", start_line=4, end_line=5)).splitlines() == [
        "     4\tdef total(values):",
        '     5\t    """Return the sum of the values, 0 for none."""',
    ]
    await play.box.write_files({"l.txt": b"caf\xe9", "empty.py": b""})
    assert await play("view", path="l.txt") == "Error: l.txt is no UTF-8 text; look at it with bash"
    assert await play("view", path="empty.py") == "(empty.py is empty)"
    assert await play("view", path="none.py") == "Error: no such file: none.py"
    assert "but demo/numbers.py has" in await play("view", path="demo/numbers.py", start_line=999)
    for path in ("../x", "/etc/passwd", "."):
        assert "names no file in the work folder" in await play("view", path=path)
    assert await play("view", path="demo") == "Error: no such file: demo"


# A link is not followed, in either direction.
@process
async def test_links_are_not_followed(play: Played) -> None:
    await play("bash", command="ln -s /etc/passwd link")
    assert (await play("view", path="link")).startswith("Error: ")


# An edit shows its place, or says why it cannot be made.
@process
async def test_edits(play: Played) -> None:
    stub = "    raise NotImplementedError"
    assert "return sum(values)" in await play(
        "str_replace", path="demo/numbers.py", old_str=stub, new_str="    return sum(values)"
    )
    assert "was not found" in await play("str_replace", path="demo/numbers.py", old_str=stub, new_str="")
    assert "occurs 2 times" in await play("str_replace", path="demo/numbers.py", old_str="def ", new_str="")
    assert await play("create", path="new/a.py", text="x = 1") == "Wrote new/a.py, 1 lines."
    assert "u.py cannot be written" in await play("create", path="u.py", text="\ud800")


# The failing assertion is where the hint templates look for it, whatever options of pytest the repository has.
@process
async def test_tests_give_hints_their_words(play: Played) -> None:
    reply = await play("bash", command="python -m pytest tests")
    assert "FAILED tests/test_numbers.py::test_total - NotImplementedError" in reply and not is_tool_error(reply)
    assert Templates.load().detected(reply, {"test_failure"}) == "test_failure"


# Claim: however much an agent wrote, none of the files that it began with seems to be deleted.
@process
async def test_bulk_hides_no_file_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers.v1")
    from orchestrator.coding.code import code_taskset

    monkeypatch.setattr(code_taskset, "MAX_TREE_BYTES", 100)
    start = {"tests/test_a.py": bytes(90), "z": bytes(90)}
    files = {**start, "a": bytes(90), "b": bytes(90)}
    async with await open_box(RuntimeConfig(type="subprocess"), files=files) as box:
        assert set(await code_taskset.read_files(box, start)) == {*start, "a"}
