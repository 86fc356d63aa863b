"""The pages name what exists."""

import re

import pytest

from composer_prime.config.load import resolve
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


# Each file that a tutorial has its readers save is a configuration, alone or over a shipped one.
def test_files_of_tutorials(tmp_path):
    saved = {}
    for page in (check_docs.ROOT / "docs/tutorial").glob("*.md"):
        saved |= re.findall(r"Save this as `(\w+\.toml)`[^`]*```toml\n(.*?)```", page.read_text(), re.DOTALL)
    assert {"mine.toml", "larger.toml"} <= saved.keys()
    for name, text in saved.items():
        (tmp_path / name).write_text(text)
        config = resolve([*([] if "base =" in text else ["@", "a1"]), "@", str(tmp_path / name)])
        assert [source.name for source in config.orchestrator.source] == [name.removesuffix(".toml")]


# The site's page of all settings has every key, and no other.
def test_the_page_of_settings_has_every_key():
    rows, section = [], ""
    for line in settings_page.page().splitlines():
        if heading := re.match(r"## `\[([\w.]+)\]`", line):
            section = heading[1]
        if key := re.match(r"\| `(\w+)`<br>", line):
            rows.append(f"{section}.{key[1]}")
    assert sorted(rows) == sorted(leaf_keys())
