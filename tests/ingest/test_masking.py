"""Secrets leave a trace; ordinary text stays as it is. Every secret here is made up, and put together at run time."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import pytest
from ingest_traces import answer as said
from ingest_traces import lines, prompt, taken, use

from orchestrator.ingest.masking import Masker

ALNUM = "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8s9T0"
SECRETS = {
    "github-token": "ghp_" + ALNUM[:36],
    "api-key": "sk-ant-api03-" + ALNUM[:32],
    "aws-key": "AKIA" + "QRSTUVWXYZ234567",
    "slack-token": "xoxb-" + "123456789012-" + ALNUM[:24],
    "hugging-face-token": "hf_" + ALNUM[:34],
    "jwt": "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0NTY3ODkwIn0." + ALNUM,
    "google-api-key": "AIza" + ALNUM[:35],
    "gitlab-token": "glpat-" + ALNUM[:20],
    "stripe-key": "sk_live_" + ALNUM[:24],
    "email": "jane.doe@example.com",
}


def masked(text: str) -> tuple[str, Counter[str]]:
    found: Counter[str] = Counter()
    return Masker(found).text(text), found


@pytest.mark.parametrize("kind", SECRETS)
def test_tokens_are_masked_and_counted(kind: str) -> None:
    text, found = masked(f"the value {SECRETS[kind]} was printed")
    assert SECRETS[kind] not in text and text.endswith("was printed")
    assert found == {kind: 1}


# Of what surrounds a secret, nothing is lost.
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('password = "Tr0ub4dor&3x"', 'password = "<masked:password>"'),
        ("export DB_PASSWORD=hunter2hunter2 && run", "export DB_PASSWORD=<masked:password> && run"),
        ("curl -H 'Authorization: Bearer " + ALNUM + "' x", "curl -H 'Authorization: Bearer <masked:bearer-token>' x"),
        ("postgres://bob:s3cretpw@db/x", "postgres://bob:<masked:basic-auth>@db/x"),
        ("cd /home/jdoe/src && ls /Users/jdoe", "cd /home/user/src && ls /Users/user"),
        ("C:\\Users\\jdoe\\src", "C:\\Users\\user\\src"),
    ],
)
def test_only_the_secret_goes(text: str, expected: str) -> None:
    assert masked(text)[0] == expected


# A private key goes as a whole, not only its first line.
def test_private_keys_go_as_a_block() -> None:
    key = "-----BEGIN RSA PRIVATE " + "KEY-----\nMIIEabc\ndef\n-----END RSA PRIVATE " + "KEY-----"
    assert masked(f"before\n{key}\nafter")[0] == "before\n<masked:private-key>\nafter"


# What agents write all day is no secret: hashes, ids, code about passwords, clone addresses.
@pytest.mark.parametrize(
    "text",
    [
        "commit 3f786850e387550fdab836ed7e6dc881de23001b",
        "def check(password: str) -> bool: return password == stored",
        'parser.add_argument("--password", help="the password")',
        "git clone git@github.com:org/repo.git",
        "api_key = os.environ['API_KEY']",
        "id 1af7fc5e-8455-4414-9ccd-011d40f70b2a",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert masked(text) == (text, Counter())


# Masking goes through arguments and results as well, and --no-mask switches it off.
def test_masking_reaches_every_message(tmp_path: Path) -> None:
    token = SECRETS["github-token"]
    records = [
        prompt("u1", None, f"use {token}"),
        said("a1", "u1", use("t1", "Bash", command=f'echo "{token}"', env={"T": [token]})),
        prompt("u2", "a1", f"again {token}"),
        said("a2", "u2", {"type": "thinking", "thinking": token}, {"type": "text", "text": token}),
    ]
    path = lines(tmp_path / "s.jsonl", *records)
    states, tally = taken(path)
    assert token not in json.dumps([[*state.messages, state.student_action] for state in states])
    assert tally.masked == {"github-token": 6}
    assert token in json.dumps([state.messages for state in taken(path, mask=False)[0]])


# No pattern takes quadratic time on a long line: ten times the text may take at most thirty times as long.
def test_long_lines_do_not_hang() -> None:
    def seconds(count: int) -> float:
        start = time.perf_counter()
        masked("password=" * count + " a@" * count + "/home/" * count + "://x" * count)
        return time.perf_counter() - start

    assert seconds(20_000) < max(30 * seconds(2_000), 2.0)
