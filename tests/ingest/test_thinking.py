"""Thinking is told apart from what others see."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_prime.llm.reply import split_thinking


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
