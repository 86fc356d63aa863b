"""The pages name what exists."""

from __future__ import annotations

import pytest

from infra import check_docs


# Every file, link and setting that a page or a configuration names exists.
def test_pages():
    assert check_docs.all_problems() == []


# A name that leads nowhere is reported: a file, a link, a setting.
@pytest.mark.parametrize("text", ["see trainer/no_such_file.py", "[a](no-such-page.md)", "set `trainer.optim.lrr`"])
def test_wrong_names(text, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(text)
    assert len(check_docs.problems(page)) == 1
