"""Secrets leave a trace; ordinary text stays as it is. Every secret here is made up, and put together at run time."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from ingest_traces import answer as said
from ingest_traces import lines, prompt, taken, use

from composer_prime.traces.ingest.masking.masker import Masker
from composer_prime.traces.records import write_state

TEXTS = tomllib.loads(Path(__file__).with_name("texts.toml").read_text())
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
    "twilio-key": "SK" + "3f78" * 8,
}
PREFIXED = [
    "npm_" + ALNUM[:36],
    "dop_v1_" + "3f786850" * 8,
    "hvs." + ALNUM,
    "nvapi-" + ALNUM + ALNUM[:24],
    "r8_" + ALNUM[:37],
    "pplx-" + ALNUM + ALNUM[:8],
    "dckr_pat_" + ALNUM[:27],
    "AGE-SECRET-KEY-1" + "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L" * 2,
    "xapp-1-A0123456-1234567890123-" + "3f" * 32,
    "sk_test_" + ALNUM[:24],
    "shpat_" + "3f78" * 8,
    "lin_api_" + ALNUM,
    "dapi" + "3f78" * 8,
    "tvly-" + ALNUM[:32],
    "1//0g" + ALNUM,
    "ATATT3xFfGF0" + ALNUM,
    "sbp_" + "3f786850" * 5,
    "sntrys_" + ALNUM + "_" + ALNUM,
    "PMAK-" + "3f78" * 6 + "-" + "3f" * 17,
    "figd_" + ALNUM,
    "sq0atp-" + ALNUM[:22],
    "ntn_" + ALNUM + "abcde6",
    "whsec_" + ALNUM[:32],
    "GOCSPX-" + ALNUM[:28],
    "glsa_" + ALNUM[:32] + "_3f786850",
    "pscale_tkn_" + ALNUM,
    "tskey-auth-" + ALNUM,
    "lsv2_pt_" + "3f78" * 8 + "_3f78685012",
    "shpat_" + "3F78" * 8,
    "abc1Q~" + ALNUM[:33],
    "fm2_" + ALNUM + ALNUM,
    "sk-proj-" + ALNUM + "_-" + ALNUM,
]
"""Of further providers."""


def masked(text: str) -> tuple[str, Counter[str]]:
    found: Counter[str] = Counter()
    return Masker(found).text(text), found


@pytest.mark.parametrize("kind", SECRETS)
def test_tokens_are_masked_and_counted(kind: str) -> None:
    text, found = masked(f"the value {SECRETS[kind]} was printed")
    assert SECRETS[kind] not in text and text.endswith("was printed")
    assert found == {kind: 1}


@pytest.mark.parametrize("token", PREFIXED)
def test_more_providers(token: str) -> None:
    assert masked(f"x {token} y") == ("x <masked:api-key> y", Counter({"api-key": 1}))


# Of what surrounds a secret, nothing is lost.
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *TEXTS["masked"],
        ("curl -H 'Authorization: Bearer " + ALNUM + "' x", "curl -H 'Authorization: Bearer <masked:bearer-token>' x"),
        ("got ya29." + ALNUM[:30] + " back", "got <masked:google-token> back"),
        (
            "https://discord.com/api/webhooks/123456789012345678/" + ALNUM + ALNUM[:28],
            "https://discord.com/api/webhooks/123456789012345678/<masked:webhook>",
        ),
        (
            "https://api.telegram.org/bot123456789:AAF" + ALNUM[:32] + "/send",
            "https://api.telegram.org/bot<masked:telegram-token>/send",
        ),
        ("sk_live_" + ALNUM + ALNUM + " x", "<masked:stripe-key> x"),
        (SECRETS["jwt"] + " x", "<masked:jwt> x"),
        ("Private-Lines: 2\n" + ALNUM + "\n" + ALNUM + "\nx", "Private-Lines: 2\n<masked:private-key>\nx"),
        ("x" + SECRETS["github-token"] + " x", "x<masked:github-token> x"),
    ],
)
def test_only_the_secret_goes(text: str, expected: str) -> None:
    assert masked(text)[0] == expected


# A private key goes as a whole, not only its first line.
def test_private_keys_go_as_a_block() -> None:
    key = "-----BEGIN RSA PRIVATE " + "KEY-----\nMIIEabc\ndef\n-----END RSA PRIVATE " + "KEY-----"
    assert masked(f"before\n{key}\nafter")[0] == "before\n<masked:private-key>\nafter"


# An encrypted key has headers with dashes in them; of a key that was cut off, what is there goes.
@pytest.mark.parametrize("end", ["-----END RSA PRIVATE " + "KEY-----\nafter", ""])
def test_encrypted_private_keys_go_whole(end: str) -> None:
    head = "-----BEGIN RSA PRIVATE " + "KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,3F17\n\n"
    assert masked(head + f"{ALNUM}\n{ALNUM}\n{end}")[0] == "<masked:private-key>" + ("\nafter" if end else "\n")


# What agents write all day is no secret: hashes, ids, code about passwords, clone addresses.
@pytest.mark.parametrize(
    "text",
    [
        *TEXTS["ordinary"],
        'START = b"-----BEGIN OPENSSH PRIVATE ' + 'KEY-----"\nEND = b"-----END OPENSSH PRIVATE ' + 'KEY-----"\n',
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


# Keys that are masked alike keep their values, each under a name of its own.
def test_keys_that_are_masked_alike() -> None:
    value = {"a@example.com": 1, "b@example.com": 2, "<masked:email> 2": 3, "c@example.com": {"d@example.com": 4}}
    masked_value = Masker(Counter()).value(value)
    assert list(masked_value.values()) == [1, 2, 3, {"<masked:email>": 4}] and "example" not in str(masked_value)


# Tools, the name of the trace and the model's come from the file too.
def test_masking_reaches_what_surrounds_the_messages(tmp_path: Path) -> None:
    token = SECRETS["github-token"]
    tool = {"type": "function", "function": {"name": "cat", "description": f"uses {token}", "parameters": {}}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    record = {"messages": messages, "tools": [tool], "id": f"-home-jdoe-{token}", "model": f"/home/jdoe/{token}"}
    states, _ = taken(lines(tmp_path / "m.jsonl", record))
    assert states and all(text not in write_state(states[0]).decode() for text in (token, "jdoe"))


HOSTILE = [
    "secret", "password=", "secret-", 'password="', "password=`x", "`", "eyJ", "=eyJ", "xsk-", "//", "//:_authToken=",
    "authorization: ", "curl -u ", "://a:", " a@", "a@a.", "/home/", "-----BEGIN PRIVATE " + "KEY-----", "api_key\\",
    "token: ", "--token ", "-a", "cookie: ", "cookie: a=", "cookie=b;", "cookie: a=b\n", "cookie\\", "password ",
    "Basic ", "npm_", "1//0", "C:\\Users\\a b ", "secret==", "'a' == secret", "xoxa-1-", "aws", "-home-",
    "TOKEN=a.", "TOKEN=1", "mysql ", "/mysql -p", "sshpass -p", "docker login ", "redis-cli -a ",
    "/home/a", "/home/-", "%2Fhome%2F", "a%40b.", "sk-a", "Bearer a", "secret_access_key=", "Private-Lines: 1\n",
    "-----BEGIN PRIVATE " + "KEY-----\n" + "A" * 64, "Proc-Type: ", "aA", "token: aA1!", "123456789:", "M.", "Q~",
    "s#/home/a", "[A]/home/a", "x/overlay2/a/diff/home/a", "diff --git a/home/a b",
    "PASSWORD=\\", "PASSWORD=\\\\n", 'password="min|',
    "../", "../../home/a", "-rw-r--r-- 1 a a 1\n", "-rw-r--r-- 1 a" + " " * 60, "drwxr-xr-x",
    "----BEGIN PRIVATE " + "KEY----" + "A" * 40 + "!", "----BEGIN PRIVATE " + "KEY----!?",
]  # fmt: skip


# Time is linear in the length, whatever a text repeats: quadratic work on this length would take minutes.
@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("unit", HOSTILE)
def test_hostile_text_ends(unit: str) -> None:
    text, _ = masked(unit * (250_000 // len(unit)) + " T3BlbkFJ _authToken @ aws secret '" + " /home/ 8Q~")
    assert text.rstrip("'").endswith("8Q~") or "<masked:" in text


# A secret far into a line of megabytes is found, for lines are not read in pieces.
def test_a_secret_in_a_long_line() -> None:
    text, found = masked("x = 1; " * 100_000 + 'password = "Tr0ub4dor&3x"; ' + "y = 2; " * 100_000)
    assert "Tr0ub4dor" not in text and found == {"password": 1}
