"""The pages name what exists."""

import re

import pytest

from infra import check_docs, settings_page
from infra.count_settings import leaf_keys


# Every file, link and setting that a page or a configuration names exists.
def test_pages():
    assert check_docs.all_problems() == []


# A name that leads nowhere is reported: a file, a link, a setting.
@pytest.mark.parametrize("text", ["see trainer/no_such_file.py", "[a](no-such-page.md)", "set `trainer.optim.lrr`"])
def test_wrong_names(text, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(text)
    assert len(check_docs.problems(page)) == 1


# The site's page of all settings has every key, and no other.
def test_the_page_of_settings_has_every_key():
    rows, section = [], ""
    for line in settings_page.page().splitlines():
        if heading := re.match(r"## `\[([\w.]+)\]`", line):
            section = heading[1]
        if key := re.match(r"\| `(\w+)`<br>", line):
            rows.append(f"{section}.{key[1]}")
    assert sorted(rows) == sorted(leaf_keys())
