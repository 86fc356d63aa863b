"""Secrets in a JSON value that only the name beside them gives away.

    {"password": "..."}  {"headers": {"Authorization": "Basic ..."}}  {"env": {"DB_PASS": "..."}}     the key
    {"name": "API_KEY", "value": "..."}                                                            the name or key
    ["login", "--token", "..."]                                                                    the flag before it

A name counts by its end, so that `token_count`, `secret_name` and `password_file` give nothing away; and a value only
where it can be a secret: no path, variable, identifier, number or sentence. assigned.py does the same for plain text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from orchestrator.ingest import assigned

Secret = tuple[str, list[tuple[int, int]]]
"""(kind, (start, end) of what to mask)."""
_LONGEST_NAME = 64
_NAMES = [
    ("password", re.compile(r"(?i:password|passwd|passphrase)$")),
    ("short", re.compile(r"(?i:(?:^|(?<=[_-]))(?:pass|pwd))$")),
    ("basic-auth", re.compile(r"(?i:(?:proxy-)?authorization)\Z")),
    ("cookie", re.compile(r"(?i:(?:set-)?cookie)\Z")),
    ("", re.compile(r"(?i:(?:page|next|cursor|continuation|sync)[_-]?token)$")),
    (
        "key",
        re.compile(
            r"(?:(?<![A-Za-z])|(?<=[a-z])(?=[A-Z]))"
            r"(?i:(?:api|access|auth|private|secret|account|client)[_-]?key(?:_base)?|secret|token)$"
        ),
    ),
]
"""What a name promises, the first that fits."""
_REFERENCE = re.compile(r"[$<%{~/.].*|[A-Za-z]:[\\/].*|\*+|.*\s.*", re.DOTALL)
"""Variables, templates, paths, stars, sentences."""
_CREDENTIALS = re.compile(r"(?:(?i:basic|bearer|token|apikey) +(?P<secret>[A-Za-z0-9._~+/-]{6,4096}=*))")
_TOKEN = re.compile(r"[A-Za-z0-9+/=_.~!@#%^*-]{8,4096}")


def secrets(name: str, value: str) -> Secret | None:
    """What in `value` is secret because `name` stands beside it; None when nothing is."""
    promised = _promised(name) if len(name) <= _LONGEST_NAME else None
    if not promised:
        return None
    whole = [(0, len(value))]
    if promised in ("password", "short"):
        known = len(value) >= 6 and not _REFERENCE.fullmatch(value)
        return ("password", whole) if known and (promised == "password" or any(map(str.isdigit, value))) else None
    if promised == "cookie":
        found = [(start, end) for start, end in assigned.crumbs(value) if assigned.is_secret(value[start:end])]
        return ("password", found) if found else None
    match = _CREDENTIALS.fullmatch(value) if promised == "basic-auth" else None
    if match:
        return "basic-auth", [match.span("secret")]
    return ("password", whole) if _TOKEN.fullmatch(value) and assigned.is_secret(value) else None


@lru_cache(maxsize=4096)
def _promised(name: str) -> str | None:
    return next((promised for promised, names in _NAMES if names.search(name)), None)


def beside_items(items: list[Any], name: str) -> Iterator[tuple[str, Any]]:
    """(name, item) of each item of a list that stands beside `name`: the flag before it, where there is one."""
    flag = ""
    for item in items:
        yield flag or name, item
        flag = item.lstrip("-") if isinstance(item, str) and item[:1] == "-" else ""


def beside_members(members: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(key, name, value) of each member of an object: its name is its key, of a pair of name and value the name."""
    named = next((members[key] for key in ("name", "key") if isinstance(members.get(key), str)), "")
    for key, value in members.items():
        yield key, named if named and key == "value" else key, value
