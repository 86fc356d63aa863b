"""A ledger that somebody edited: what was spent is known, or the line that hides it is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_prime.config.load import resolve
from composer_prime.errors import LedgerError
from composer_prime.plan.plan import build_plan
from composer_prime.run.costs import spent

GOOD = '{"kind": "reserved", "call": "a", "usd": 2, "trace": "t"}\n'
WRONG = {
    '{"kind": "settled", "usd": 1}': "call is None, expected text",
    '{"kind": "settled", "call": "a"}': "usd is None, expected a number of at least 0",
    '{"kind": "settled", "call": "a", "usd": "1"}': "usd is '1'",
    '{"kind": "settled", "call": "a", "usd": NaN}': "usd is nan",
    '{"kind": "settled", "call": "a", "usd": -3}': "usd is -3",
    '{"kind": "settled", "call": "a", "usd": ' + "9" * 400 + "}": "usd is 9999",
    '{"kind": "reserved", "call": ["a"], "usd": 1}': "call is .'a'.",
    '{"kind": "reserved", "call": "b", "usd": true}': "usd is True",
    '{"kind": "seconds", "seconds": 3}': "gpu_seconds is None",
    '{"kind": "machine", "seconds": 3}': "usd is None",
    '{"kind": "bytes", "link": "x"}': "bytes is None",
    '{"kind": "hint"}': "usd is None",
}


# The message names file, line, what is wrong and what to do; a sum that leaves the line out would pass a cap.
@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "costs.jsonl"
    path.write_text(GOOD + line + "\n")
    with pytest.raises(LedgerError, match=rf"costs.jsonl:2 is not a ledger line \({WRONG[line]}.*: correct the line"):
        spent(path)


# Whatever stands in a line, there is a sum or that message.
@given(
    st.dictionaries(
        st.sampled_from(("kind", "call", "usd", "bound", "status", "trace", "seconds", "gpu_seconds", "link", "bytes")),
        st.sampled_from(("reserved", "settled", "hint", "seconds", "bytes", "ok", "a"))
        | st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats()
        | st.lists(st.integers(), max_size=1),
    )
)  # fmt: skip
def test_any_line_is_summed_or_named(tmp_path_factory: pytest.TempPathFactory, line: dict) -> None:
    path = tmp_path_factory.mktemp("ledger") / "costs.jsonl"
    path.write_text(GOOD + json.dumps(line) + "\n")
    try:
        assert spent(path).usd >= 0
    except LedgerError as error:
        assert "costs.jsonl:2" in str(error)


# What is no JSON, as a crash leaves it, or of a kind that is not known, is passed over.
def test_other_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "costs.jsonl"
    path.write_text('{"kind": "settl\n[1]\n{"kind": "stopped"}\n{"kind": 3}\n{}\n' + GOOD)
    assert (spent(path).usd, spent(path).unsettled) == (2, 1)


# The plan of a run with teachers says what is wrong in a row: it is no reason not to train.
def test_the_plan_names_a_wrong_line(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "costs.jsonl").write_text('{"kind": "settled", "call": "a", "usd": null}\n')
    words = ["@", "configs/a1.toml", "@", "configs/teachers/openrouter.toml", "--teachers.online", "true"]
    words += ["--run.name", "one", "--run.output_dir", str(tmp_path)]
    plan = build_plan(resolve(words).config)
    shown = plan.text()
    assert "spent so far: not known" in shown and not any("costs.jsonl" in problem for problem in plan.problems)
    assert "costs.jsonl:1 is not a ledger line (usd is None, expected a number of at least 0)" in shown
