"""Secrets in the arguments of tools, that only the name beside them gives away. Every secret here is made up."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ingest_traces import MESSAGES, lines, taken

from composer_prime.traces.ingest.masking.masker import Masker

HEX = "3f786850e387550fdab836ed7e6dc881de23001b"


def masked(value: Any) -> tuple[Any, Counter[str]]:
    found: Counter[str] = Counter()
    return Masker(found).value(value), found


# The name beside it gives a secret away: a key, the name of a pair, a flag. What stands around it is kept.
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"password": "Tr0ub4dor3x9", "user": "bob"}, {"password": "<masked:password>", "user": "bob"}),
        ({"password": "correct-horse-9-battery-7"}, {"password": "<masked:password>"}),
        ({"password": "correcthorse"}, {"password": "<masked:password>"}),
        ({"api_key": HEX}, {"api_key": "<masked:password>"}),
        ({"headers": {"x-api-key": HEX}}, {"headers": {"x-api-key": "<masked:password>"}}),
        ({"Authorization": "Basic dXNlcjpwYXNzdzByZA=="}, {"Authorization": "Basic <masked:basic-auth>"}),
        ({"authorization": f"token {HEX}"}, {"authorization": "token <masked:basic-auth>"}),
        ({"env": {"DB_PASSWORD": "hunter2"}}, {"env": {"DB_PASSWORD": "<masked:password>"}}),
        ({"env": {"PGPASSWORD": "hunter2", "MYSQL_PWD": "hunter2"}},
         {"env": {"PGPASSWORD": "<masked:password>", "MYSQL_PWD": "<masked:password>"}}),
        ({"accessToken": HEX}, {"accessToken": "<masked:password>"}),
        ({"Cookie": f"theme=dark; sid={HEX}"}, {"Cookie": "theme=dark; sid=<masked:password>"}),
        ({"Cookie": f"jwt=ghp_{HEX[:36]}; sid={HEX}"}, {"Cookie": "jwt=<masked:github-token>; sid=<masked:password>"}),
        ({"password": "ghp_" + HEX[:36]}, {"password": "<masked:github-token>"}),
        ({"Authorization": "Bearer " + HEX}, {"Authorization": "Bearer <masked:bearer-token>"}),
        ({"env": [{"name": "API_KEY", "value": HEX}]}, {"env": [{"name": "API_KEY", "value": "<masked:password>"}]}),
        (["mysql", "--password", "Tr0ub4dor3x9", "x"], ["mysql", "--password", "<masked:password>", "x"]),
        (["gh", "--auth-token", HEX], ["gh", "--auth-token", "<masked:password>"]),
        ({"secret": [HEX, 7]}, {"secret": ["<masked:password>", 7]}),
    ],
)  # fmt: skip
def test_a_name_gives_a_secret_away(value: Any, expected: Any) -> None:
    found = masked(value)
    assert found[0] == expected
    assert found[1].total() == json.dumps(expected).count("<masked:")


# What the tools of coding agents are given every day stays as it is.
@pytest.mark.parametrize(
    "value",
    [
        {"key": "enter", "keyword": "def1 x2y3z4", "tokens": 100, "max_tokens": "4096", "token": "15043123"},
        {"password": 123456, "token": None, "secret": True, "api_key": {"type": "string"}},
        {"file_path": "/srv/app2/password.py", "old_string": "token = x1y2z3()", "new_string": "secret: str"},
        {"password": "$DB_PASSWORD", "token": "${{ secrets.GH2_TOKEN3 }}", "secret": "<your secret 12>"},
        {"token_count": HEX, "secret_name": "prod/db12/key34", "password_file": "/run/secrets/db1234"},
        {"next_page_token": HEX, "cursor": HEX, "primary_key": HEX, "cache_key": HEX, "commit": HEX},
        {"private_key": "~/.ssh/id_ed25519", "pad_token": "<pad>", "stop_token": "</s>"},
        {"env": {"PWD": "/tmp/build-123456/x9", "OLDPWD": "/srv/x1y2z3w4", "TOKEN": "$TOKEN"}},
        {"authorization": "required", "cookie": "theme=dark; lang=en", "password": "***"},
        {"label": "password", "text": "Enter a password of 12 characters", "password": "at least 8 characters"},
        {"required": ["password", "token", "api_key"], "args": ["--token", "x", "--password", "$PW"]},
        {"args": ["pytest", "--secret-file", HEX, "--", "tests/test_a1b2c3.py"]},
        {"name": "commit", "value": HEX},
    ],
)
def test_ordinary_arguments_stay(value: Any) -> None:
    assert masked(value) == (value, Counter())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["password", "api_key", "Cookie", "name", "value", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)


def shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    return [shape(item) for item in value] if isinstance(value, list) else "" if isinstance(value, str) else value


# Whatever the value is, only strings are replaced: types, keys, lengths of lists and numbers stay.
@given(JSON)
def test_masking_keeps_the_shape(value: Any) -> None:
    assert shape(masked(value)[0]) == shape(value)


# In states too: arguments written as JSON text are read, masked by name, and written again.
def test_arguments_of_a_trace(tmp_path: Path) -> None:
    arguments = json.dumps({"headers": {"x-api-key": HEX}, "url": "https://example.com"})
    call = {"id": "c1", "type": "function", "function": {"name": "http", "arguments": arguments}}
    said = [MESSAGES[1], {"role": "assistant", "content": None, "tool_calls": [call]}, MESSAGES[4]]
    states, tally = taken(lines(tmp_path / "m.jsonl", {"messages": said}))
    written = states[0].student_action["tool_calls"][0]["function"]["arguments"]
    assert json.loads(written) == {"headers": {"x-api-key": "<masked:password>"}, "url": "https://example.com"}
    assert tally.masked == {"password": 1} and HEX not in json.dumps(states[1].messages)
