"""Find secrets that only the name beside them gives away, in text and in JSON values.

    api_key: 3f78...   DB_PASS=...   {\\"token\\": \\"...\\"}   --token 3f78...   Cookie: a=...      text
    {"password": "..."}  {"headers": {"Authorization": "Basic ..."}}  {"env": {"DB_PASS": "..."}}  JSON: the key
    {"name": "API_KEY", "value": "..."}                                                            JSON: name or key
    ["login", "--token", "..."]                                                                    JSON: the last flag

A name counts by its end: `token_count` and `password_file` give nothing away. Code is full of such names, so a value
counts only when it cannot be code or prose: no word, path, number, call, variable or sentence. Beside a shell variable
(upper case, no space before the value) nearly any value counts. A value in quotes may be anything behind one of
detect-secrets' names (`quoted_spans`); masker.py tells words, rules and sentences apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any

WORDS = ("key", "pass", "pwd", "secret", "token", "cookie")
"""In the name of a secret, in lower case."""
_ENDS = r"(?:[\s\"'`;&|$<>(){}\[\],\\]|$)"
_ATTRIBUTE = rf"[A-Za-z_]{{1,64}}(?:\.[A-Za-z_]{{1,64}}){{1,8}}{_ENDS}"
VARIABLE = (
    rf"(?:(?<![A-Za-z])|(?<=\\[nrt]))(?:(?:API_?KEY|ACCESS_KEY|SECRET(?:_KEY)?|TOKEN(?!=[\"']?\d{{1,15}}{_ENDS})|(?<=(?:GH|UB|AB|XT)_)PAT)="
    rf"(?![\"']?{_ATTRIBUTE})"
    r"|(?:PASSWORD|PASSWD|PGPASSWORD|SSHPASS|REDISCLI_AUTH|(?<=_)(?:PASS|PWD|PW))=)(?!=)[\"']?"
    r"(?P<secret>(?:[^\s\"'`;&|$<>(){}\\]|\\++(?![nrt\"']|u00)){6,512})"
)
"""Excludes `MAX_TOKEN=4096` and `API_KEY=args.api_key`. A password may look like either. PAT stands for GH_PAT and
the like. Only JSON's backslashes end the value."""
_NAMED = re.compile(
    r"(?:(?<![A-Za-z])|(?<=[a-z])(?=[A-Z])|(?<=\\[nrt]))"
    r"(?i:(?:api|access|auth|private|secret|account|client)[_-]?key(?:_base)?|secret|(?<!publickey)token|password|passwd|passphrase"
    r"|(?<=[_-])(?:pass|pwd))"
    r"\\*[\"']?\]?[ \t]{0,8}(?::=|=>|[:=](?![:=]))[ \t]{0,8}\\*[\"'`]?"
    r"(?P<secret>[A-Za-z0-9+/=_.~!@#%^*-]{8,512})(?=[\s\"'`\\,;}&)]|$)"
)
_GAP = r"[._/~-]"
_ALGORITHM = r"[A-Za-z]+(?:25519|448|256|384|512)"
_WORD = rf"(?:(?:{_ALGORITHM})++(?:[A-Za-z]+\d{{0,2}})?|[A-Za-z]+\d{{0,2}})"
_CODE = re.compile(rf"{_GAP}*{_WORD}(?:{_GAP}+(?:{_WORD}|\d{{1,2}}))*{_GAP}*")
"""Joined words with at most two digits after each: identifiers, paths, versions."""
_STRONG = re.compile(r"(?=.*[a-z])(?=.*[A-Z]).*[!@#%^*]")
"""What password rules require besides a digit."""
_RANDOM_CHARS = 20
"""Least length of a random value with at most one digit."""
_VALUE = r"[ \t]{1,8}[\"']?(?![A-Za-z_-]{1,16}=[^=])(?P<secret>[A-Za-z0-9+/=_.~!@#%^*-]{8,512})(?=[\s\"'`\\,;}&)|]|$)"
_FLAG = re.compile(
    r"-(?<!\w-)(?:[A-Za-z0-9]{1,16}-){0,3}"
    r"(?i:(?:api|access|auth|private|secret|account|client)-?key|secret|token|password|passwd|passphrase)" + _VALUE
)
_NETRC = re.compile(r"password(?<!\S.{8})" + _VALUE)
_COOKIE = re.compile(r"cookie\\*[\"']?[ \t]{0,8}[ :=,][ \t]{0,8}\\*[\"']?")
_COOKIES_END = re.compile(r"[\r\n\"'\\]|\Z")
_CRUMB = re.compile(r"(?<![\w.-])(?!(?i:domain|path|expires)=)[\w.-]{1,64}=(?P<secret>[^\s;,]{8,4096})")
_MOST_COOKIES = 4096


def value_spans(text: str, lowered: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each value beside such a name. `lowered`: the text in lower case."""
    for sign, pattern in (("", _NAMED), ("-", _FLAG), ("password ", _NETRC)):
        for match in pattern.finditer(text) if sign in text else ():
            yield match.span("secret")
    done = 0
    for header in _COOKIE.finditer(lowered) if "cookie" in lowered else ():
        if header.start() >= done:
            done = _end_of_cookies(text, header.end())
            yield from crumbs(text, header.end(), done)


def crumbs(text: str, start: int = 0, end: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each value of a list of cookies."""
    for crumb in _CRUMB.finditer(text, start, _end_of_cookies(text, start) if end is None else end):
        yield crumb.span("secret")


def _end_of_cookies(text: str, start: int) -> int:
    """Return the end of the cookies that begin at `start`."""
    most = min(start + _MOST_COOKIES, len(text))
    end = _COOKIES_END.search(text, start, most)
    return end.start() if end else most


def is_secret(value: str) -> bool:
    """Check whether a value beside a telling name can only be a secret."""
    digits = sum(character.isdigit() for character in value)
    if digits >= 2:
        return any(map(str.isalpha, value)) and not _CODE.fullmatch(value)
    return bool(digits and _STRONG.match(value)) or (len(value) >= _RANDOM_CHARS and _is_random(value))


def _is_random(value: str) -> bool:
    """Check whether the case changes as in random text: often, with adjacent capitals."""
    pairs = [pair for pair in pairwise(value) if pair[0].isalpha() and pair[1].isalpha()]
    changes = sum(first.isupper() != second.isupper() for first, second in pairs)
    capitals = sum(first.isupper() and second.isupper() for first, second in pairs)
    return changes >= 0.34 * len(pairs) and capitals >= max(0.1 * len(pairs), 1)


Secret = tuple[str, list[tuple[int, int]]]
"""(kind, [(start, end) of what to mask])."""
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
"""(what the name announces, its pattern). The first match wins."""
_REFERENCE = re.compile(r"[$<%{~/.].*|[A-Za-z]:[\\/].*|\*+|.*\s.*", re.DOTALL)
"""Variables, templates, paths, stars, sentences."""
_CREDENTIALS = re.compile(r"(?:(?i:basic|bearer|token|apikey) +(?P<secret>[A-Za-z0-9._~+/-]{6,4096}=*))")
_TOKEN = re.compile(r"[A-Za-z0-9+/=_.~!@#%^*-]{8,4096}")


def secrets(name: str, value: str) -> Secret:
    """Return what the name beside `value` makes secret in it."""
    whole = [(0, len(value))]
    match _announced(name) if len(name) <= _LONGEST_NAME else None:
        case "password" if len(value) >= 6 and not _REFERENCE.fullmatch(value):
            return "password", whole
        case "short" if len(value) >= 6 and not _REFERENCE.fullmatch(value) and any(map(str.isdigit, value)):
            return "password", whole
        case "cookie":
            return "password", [(start, end) for start, end in crumbs(value) if is_secret(value[start:end])]
        case "basic-auth" if match := _CREDENTIALS.fullmatch(value):
            return "basic-auth", [match.span("secret")]
        case "key" | "basic-auth" if _TOKEN.fullmatch(value) and is_secret(value):
            return "password", whole
    return "", []


@lru_cache(maxsize=4096)
def _announced(name: str) -> str | None:
    return next((announced for announced, names in _NAMES if names.search(name)), None)


def beside_items(items: list[Any], name: str) -> Iterator[tuple[str, Any]]:
    """Yield (name, item) for a list. The flag before an item replaces the list's name."""
    flag = ""
    for item in items:
        yield flag or name, item
        flag = item.lstrip("-") if isinstance(item, str) and item[:1] == "-" else ""


def beside_members(members: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield (key, name, value) for an object, of a pair of name and value with that name."""
    named = next((members[key] for key in ("name", "key") if isinstance(members.get(key), str)), "")
    for key, value in members.items():
        yield key, named if named and key == "value" else key, value


_QUOTED_NAMES = (
    r"(?:(?:api|auth|service|account|db|database|priv|private|client)_?key|(?:db|database|key)_?pass"
    r"|password|passwd|pwd|secret|contrase[ñn]a)"
)
STEMS = ("key", "pass", "pwd", "secret", "contrase")
_QUOTED = r"(?P<quote>['\"`])(?P<secret>(?=\w)[^\r\n\v'\"]{0,1024}[^\v,'\"`])(?P=quote)"
_NAMED_QUOTED = re.compile(
    rf"{_QUOTED_NAMES}\w{{0,64}}+(?:[\]'\"]{{0,2}}[ \t]{{0,8}}(?::|=>|={{1,3}}|!==?)[ \t]{{0,8}}{_QUOTED}"
    rf"|\S{{0,50}}?[ \t]{{0,8}}{_QUOTED.replace('quote', 'end').replace('secret', 'ended')};)",
    re.IGNORECASE,
)
_COMPARED = re.compile(rf"{_QUOTED}[ \t]{{0,8}}[!=]{{2,3}}[ \t]{{0,8}}\w{{0,64}}{_QUOTED_NAMES}", re.IGNORECASE)
_SIGNS = re.compile(r"[!=]=[ \t]{0,8}\w{0,64}\Z")
_NAMES_ALONE = re.compile(_QUOTED_NAMES, re.IGNORECASE)


def quoted_spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each value in quotes beside a name, or compared with it."""
    for name in _NAMES_ALONE.finditer(text):
        match = _NAMED_QUOTED.match(text, name.start())
        if match:
            yield match.span("secret" if match["secret"] is not None else "ended")
        start = max(name.start() - 80, 0)
        if _SIGNS.search(text, start, name.start()):
            compared = _COMPARED.search(text, max(start - 1024, 0), name.end())
            if compared:
                yield compared.span("secret")
