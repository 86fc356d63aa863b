"""E-mail addresses and owners of home folders leave a trace; code that looks like them stays. Every name is made up."""

import tomllib
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_prime.traces.ingest.masking.masker import Masker

TEXTS = tomllib.loads(Path(__file__).with_name("texts.toml").read_text())


def masked(text: str) -> tuple[str, Counter[str]]:
    found: Counter[str] = Counter()
    return Masker(found).text(text), found


# Code, packages, units, routes and files inside a project look like them, and stay.
@pytest.mark.parametrize("text", TEXTS["code"])
def test_code_stays(text: str) -> None:
    assert masked(text) == (text, Counter())


# Addresses are found wherever they stand; of a URL's user the host stays.
@pytest.mark.parametrize(("text", "expected"), TEXTS["addresses"])
def test_addresses_are_masked(text: str, expected: str) -> None:
    assert masked(text)[0] == expected


# However a path is written, its owner goes and nothing else.
@pytest.mark.parametrize("text", TEXTS["owners"])
@pytest.mark.parametrize("name", ["jdoe", "j_doe2", "jürgen", "user2"])
def test_owners_are_masked(text: str, name: str) -> None:
    assert masked(text.replace("NAME", name))[0] == text.replace("NAME", "user")


# A long listing names the owner of each file, on Linux and macOS, also in escaped text. Other columns stay.
@pytest.mark.parametrize(
    "text",
    [
        "total 8\ndrwxr-xr-x  2 NAME NAME 4096 Jan  1 12:00 .\n-rw-r--r--  1 NAME docker   12 Jan  1 12:00 a NAME",
        "-rw-r--r--@  1 NAME  staff   384 Jan  1 12:00 a.py\nlrwxrwxrwt. 1 NAME staff 4 Jan 1 12:00 b -> a",
        "total 8\\ndrwxr-xr-x 2 NAME NAME 4096 Jan 1 .\\n-rwsr-x--- 1 NAME NAME 4096 Jan 1 x",
        "    drwxr-xr-x 2 NAME NAME 4096 Jan 1 .\n\t-rw-r--r-- 1 NAME NAME 4096 Jan 1 x",
    ],
)
def test_owners_of_files_are_masked(text: str) -> None:
    written = text.replace("NAME", "jdoe")
    expected = text.replace(" a NAME", " a jdoe").replace("NAME", "user")
    found = masked(written)
    assert found[0] == expected and found[1].total() == found[1]["file-owner"] > 1


# Names with dots and dashes go whole, as long as they are no files.
def test_names_with_dots() -> None:
    assert masked("/home/jane.doe/x /home/jane-doe /Users/user.b/y")[0] == "/home/user/x /home/user /Users/user/y"


PATH = st.lists(st.sampled_from(["src", "home", "Users", "app", "a-b", "x.py", "index.html", "v1.2"]), min_size=1)


# Different paths of a project stay different and whole; those of a home folder lose its owner alone.
@given(PATH, PATH)
def test_files_stay_different(first: list[str], second: list[str]) -> None:
    inside, other = "/repo/" + "/".join(first), "/repo/" + "/".join(second)
    assert masked(inside)[0] == inside and masked(other)[0] == other
    assert masked(f"/home/jdoe{inside}")[0] == f"/home/user{inside}"
