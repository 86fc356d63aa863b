"""Patterns of secrets that their context gives away: private keys, headers, URLs, commands and shell variables."""

from __future__ import annotations

import re

from detect_secrets.plugins.basic_auth import BasicAuthDetector

from composer_prime.traces.ingest.masking import named_values
from composer_prime.traces.ingest.masking.provider_tokens import Rule

_NO_DASHES = r"(?:(?!----)[\s\S])"
"""Text up to the next header, which has four dashes or more. No pattern looks past another header."""
_PRIVATE_KEY = re.compile(
    r"-{4,5} ?BEGIN [A-Z0-9 ]{0,32}PRIVATE KEY[A-Z ]{0,16}-{4,5}"
    # Up to the end marker, if a key is between the two. Code has the markers alone.
    rf"(?:(?:(?:\s|\\+[nr]|[A-Za-z0-9+/=])*|(?={_NO_DASHES}{{0,16384}}?[A-Za-z0-9+/=]{{40}}){_NO_DASHES}*)"
    r"-{4,5} ?END [A-Z0-9 ]{0,32}PRIVATE KEY[A-Z ]{0,16}-{4,5}"
    # Or, where the key was cut off, its lines: headers and base64.
    r"|(?:(?:\s|\\+[nr]|(?:Proc-Type|DEK-Info): [^\n\\]{0,256})*+[A-Za-z0-9+/=]{16,}+)+)"
)
PRIVATE_KEYS: list[Rule] = [
    ("private-key", ("PRIVATE KEY",), [_PRIVATE_KEY]),
    (
        "private-key",
        ("Private-Lines",),
        [
            re.compile(
                r"Private-Lines: \d{1,3}\s{1,2}(?P<secret>[A-Za-z0-9+/=]{16,64}(?:\s{1,2}[A-Za-z0-9+/=]{16,64})*)"
            )
        ],
    ),  # PuTTY
]
_ARGUMENT = r"(?P<quote>[\"'])?(?![$<{`])(?P<secret>(?(quote)[^\"'\n]|[^\s\"'`;&|]){1,200})"
"""An argument of a command that is no variable and no placeholder. In quotes it may have spaces."""

RULES: list[Rule] = [
    (
        "bearer-token",
        ("earer ",),
        [re.compile(r"\b[Bb]earer (?=[A-Za-z._~+/-]{0,256}(?:\d|[a-z][A-Z]{2}))(?P<secret>[A-Za-z0-9._~+/-]{20,}=*)")],
    ),
    (
        "basic-auth",
        ("uthorization", "AUTHORIZATION"),
        [re.compile(r"(?i)\bauthorization\W{1,8}(?:basic|token|apikey) (?P<secret>[A-Za-z0-9._~+/-]{6,}=*)")],
    ),
    # Without the header's name: base64 holds a digit or padding, "Basic authentication" does not.
    (
        "basic-auth",
        ("Basic ",),
        [re.compile(r"\bBasic (?=[A-Za-z+/]*[0-9=])(?P<secret>[A-Za-z0-9+/]{12,}={0,2})(?!\w)")],
    ),
    (
        "basic-auth",
        ("curl",),
        [
            re.compile(
                r"\bcurl\b[^\n|;]{0,400}?\s(?:-u|--user)[ =]?[\"']?"
                r"[^\s:\"']{1,100}:(?P<secret>[^\s\"'$<{][^\s\"']{0,200})"
            )
        ],
    ),
    # Commands that take a password after a short option, mysql without a space. -p3306:3306 is a port of docker's.
    ("password", ("sshpass",), [re.compile(r"\bsshpass\s{1,8}-p[ \t]{0,8}" + _ARGUMENT)]),
    (
        "password",
        ("mysql", "mariadb"),
        [
            re.compile(
                r"(?<![\w./-])(?:/[\w./-]{1,64}/)?(?:mysql(?:dump|admin|import|show|check)?|mariadb(?:-dump|-admin)?)"
                r"(?=\s)[^\n|;&]{0,400}?\s-p(?![\d.]+:)" + _ARGUMENT
            )
        ],
    ),
    (
        "password",
        ("login", "redis-cli"),
        [
            re.compile(r"\b(?:docker|podman|az|oc) login\s(?:[^\n|;&]{0,400}?\s)?-p[ =]" + _ARGUMENT),
            re.compile(r"\bredis-cli\s(?:[^\n|;&]{0,400}?\s)?-a " + _ARGUMENT),
        ],
    ),
    ("basic-auth", ("://:",), [re.compile(r"\w://:(?P<secret>[^\s@/\"'$<{][^\s@/\"']{0,200})@")]),
    ("basic-auth", ("://",), list[re.Pattern[str]](BasicAuthDetector().denylist)),
    (
        "password",
        ("KEY=", "SECRET=", "TOKEN=", "PASSWORD=", "PASSWD=", "PASS=", "_PWD=", "_PW=", "_PAT=", "REDISCLI_AUTH="),
        [named_values.VARIABLE],
    ),
]
