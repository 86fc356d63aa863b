"""Actions in the text of an answer, as agents without tools are told to write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopback import says, xml

from composer_prime.traces.replay.actions import actions_in_text, canonical, way_of


@pytest.mark.parametrize(
    ("said", "way", "calls"),
    [
        (xml("bash", command="ls"), "xml", [("bash", {"command": "ls"})]),
        (xml("edit", path="\na\n", new="\n\n  b\n"), "xml", [("edit", {"path": "a", "new": "\n  b"})]),
        (xml("submit"), "xml", [("submit", {})]),
        (xml("a") + xml("b", x="1"), "xml", [("a", {}), ("b", {"x": "1"})]),
        (xml("write", text="```bash\nls\n```"), "xml", [("write", {"text": "```bash\nls\n```"})]),
        (xml("a", "Not:\n```bash\nls\n```"), "xml", [("a", {})]),
        ("```bash\ncat <<E\n<function=a>\nE\n```", "fence", [("bash", {"command": "cat <<E\n<function=a>\nE\n"})]),
        (xml("a", x="</function>"), "broken", []),
        (xml("a", x="<function=b></function>"), "broken", []),
        (xml("a").removesuffix("</function>"), "broken", []),
        ("<function=a>\nls\n</function>", "broken", []),
        ("<function=a><parameter=x>1</function>", "broken", []),
        ("<function=>", "broken", []),
    ],
)
def test_what_a_text_does(said: str, way: str, calls: list) -> None:
    acts = actions_in_text(said)
    assert acts is not None and (acts.way, acts.calls) == (way, calls)
    assert way_of([says("Hm."), says(said), says("Done.")]) == (None if way == "broken" else way)


# Line breaks beside the tags do not count, the command does; and a call in another way of writing is another action.
def test_forms_of_calls_in_text() -> None:
    def form(said: str, tools: list | None = None):
        return canonical(says(said), tools or [])

    one, other = xml("bash", "Let me look.", command="ls -l"), xml("bash", "So.", command="\nls  -l\n")
    assert form(one) == form(other) != form(xml("bash", command="ls"))
    assert form(one) != form("```bash\nls -l\n```")
    assert form(xml("submit")) == form("Done.")
    offered = [{"function": {"name": "bash"}}]
    assert form(one, offered) != form(other, offered)  # where tools are offered, a call in the text is none


PARTS = ["<function=a>", "</function>", "<parameter=b>", "</parameter>", "```bash\n", "```", "x"]


# Whatever a text holds, it has a reading, and a form that is hashable.
@given(st.lists(st.sampled_from(PARTS)))
def test_any_text_can_be_read(parts: list[str]) -> None:
    acts = actions_in_text("".join(parts))
    assert acts is None or (acts.way == "broken") == (not acts.calls)
    assert hash(canonical(says("".join(parts)), [])) is not None
