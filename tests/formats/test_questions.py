"""Questions with a final answer: the files that are read, how answers are compared, one rollout, bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_prime.errors import ConfigError
from orchestrator.coding.formats.conversion import read_records
from orchestrator.environments.answers import find_answer, same_answer
from tests.scripted_node import play, source_spec_of

ID = "orchestrator.coding.formats.questions"
# In the form of GSM8K: worked steps with calculator marks, and the answer after ####.
GSM8K = [
    {
        "question": "A shelf holds 12 jars. Nadia fills 3 shelves and breaks 4 jars. How many jars are whole?",
        "answer": "3 shelves hold 3 * 12 = <<3*12=36>>36 jars.\n36 - 4 = <<36-4=32>>32 jars are whole.\n#### 32",
    },
    {"question": "A van costs $9,500 and a trailer $1,500. What do both cost?", "answer": "Add them.\n#### 11,000"},
]


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@given(value=st.integers(-(10**9), 10**9))
def test_a_number_is_itself_however_it_is_written(value: int) -> None:
    # Thousands separators, a currency sign, a percent sign, a full stop and trailing zeros change no number.
    for written in (f"{value:,}", f"{value}.00", f" {value}. ", f"{value} %", f"${value}", f"{2 * value}/2"):
        assert same_answer(written, str(value)), written
    assert not same_answer(str(value + 1), str(value))


@pytest.mark.parametrize(
    ("answer", "expected", "same"),
    [
        ("Paris.", " paris", True),
        ("1/2", "0.5", True),
        ("-$5", "-5", True),
        ("1,2", "12", False),
        ("3 4", "34", False),
        ("1/0", "0", False),
        ("", "0", False),
        ("9" * 5000, "9", False),
    ],
)
def test_answers_that_are_no_plain_numbers(answer: str, expected: str, same: bool) -> None:
    # Text compares without case and outer spaces; what only looks like a number is not a number.
    assert same_answer(answer, expected) is same


def test_the_answer_after_the_last_hashes_counts() -> None:
    assert find_answer(GSM8K[1]["answer"], "hashes") == "11,000"
    assert find_answer("#### 1\n#### 2\nmore", "hashes") == "2"
    assert find_answer("no mark", "hashes") is None
    assert find_answer("it is 11,000 dollars", "number") == "11000"


def test_a_file_holds_its_records(tmp_path: Path) -> None:
    # A blank line and a byte order mark are no records; the place names the line.
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\n\n".join(map(json.dumps, GSM8K)) + "\n")
    records = list(read_records(tmp_path / "a.jsonl"))
    assert [record.values for record in records] == GSM8K
    assert records[1].place.endswith("a.jsonl:3")


def test_a_missing_field_is_answered_with_the_nearest_names(tmp_path: Path) -> None:
    record = next(read_records(write_lines(tmp_path / "a.jsonl", [{"questions": "?", "answer": "1", "none": None}])))
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: .*'question'.*answer"):
        record.text("question")
    with pytest.raises(ConfigError, match="'questions'"):
        record.texts("questions")
    with pytest.raises(ConfigError, match="'none'"):
        record.value("none")


@pytest.mark.parametrize(
    ("name", "content", "kind", "says"),
    [
        ("a.jsonl", b"\n \n", ConfigError, r"a\.jsonl"),
        ("a.jsonl", b'{"question": "caf\xe9"}\n', ConfigError, r"a\.jsonl:1: .* 17 "),
        ("a.jsonl", b'{"question"\n', ConfigError, r"a\.jsonl:1"),
        ("a.jsonl", b"[1]\n", ConfigError, r"a\.jsonl:1"),
        ("trian.jsonl", None, ConfigError, r"trian\.jsonl"),
    ],
)
def test_a_file_that_is_no_task_file_says_where(
    tmp_path: Path, name: str, content: bytes | None, kind: type[Exception], says: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(kind, match=says):
        list(read_records(tmp_path / name))


def questions(**settings: Any) -> list[Any]:
    from orchestrator.coding.formats.questions import Questions, QuestionsConfig

    return list(Questions(QuestionsConfig(id=ID, **settings)))


@pytest.mark.process  # importing verifiers takes seconds
def test_one_file_can_hold_both_splits(tmp_path: Path) -> None:
    # Every question is in exactly one split, and a split without a question is an error that says what to change.
    records = [{"q": f"What is {n} + 1?", "a": n + 1} for n in range(40)]
    file = write_lines(tmp_path / "sums.jsonl", records)
    settings = {"file": file, "question_field": "q", "answer_field": "a", "eval_share": 0.25}
    train, held = questions(**settings), questions(**settings, split="eval")
    assert {task.data.prompt for task in train}.isdisjoint(task.data.prompt for task in held)
    assert len(train) + len(held) == 40 and held
    assert train[0].data.answer == str(records[int(train[0].data.name.removeprefix("sums-")) - 1]["a"])
    with pytest.raises(ConfigError, match="'eval'"):
        questions(**(settings | {"eval_share": 1e-9}), split="eval")


@pytest.mark.process
@pytest.mark.parametrize(
    ("reply", "reward"), [("12 * 3 - 4 <answer>32.0</answer>", 1.0), ("<answer>36</answer>", 0.0), ("It is 32.", 0.0)]
)
async def test_a_rollout_of_gsm8k_is_scored_by_its_number(tmp_path: Path, reply: str, reward: float) -> None:
    file = write_lines(tmp_path / "gsm8k.jsonl", GSM8K)
    result = await play(source_spec_of({"id": ID, "file": str(file)}), lambda _: [reply])
    assert (result.failure, result.reward, result.task_id) == (None, reward, "gsm8k-1")
    assert [turn.role for turn in result.turns] == ["system", "user", "assistant"]


@pytest.mark.process
def test_a_wrong_field_name_reaches_the_screen(tmp_path: Path) -> None:
    # As `--dry-run` opens the source: the source, the file, the line and the nearest name.
    from orchestrator.workers.verifiers_adapter import Environment

    file = write_lines(tmp_path / "a.jsonl", [{"question": "1 + 1?", "answers": "2"}])
    with pytest.raises(ConfigError, match=r"'tasks'.*a\.jsonl:1: .*'answer'"):
        Environment(source_spec_of({"id": ID, "file": str(file)}), "train", None)
