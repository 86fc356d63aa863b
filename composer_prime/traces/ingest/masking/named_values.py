"""Find secrets that only the name beside them gives away, in text and in JSON values.

    api_key: 3f78...   DB_PASS=...   {\\"token\\": \\"...\\"}   --token 3f78...   Cookie: a=...      text
    {"password": "..."}  {"headers": {"Authorization": "Basic ..."}}  {"env": {"DB_PASS": "..."}}  JSON: the key
    {"name": "API_KEY", "value": "..."}                                                            JSON: name or key
    ["login", "--token", "..."]                                                                    JSON: the last flag

A name counts by its end: `token_count`, `secret_name` and `password_file` give nothing away. Code is full of such
names, so a value counts only when it cannot be code or prose: no word, path, number, call, variable or sentence. A
shell variable (upper case, no space before the value) holds its value literally; there nearly any value counts.

`keyword_spans` is detect-secrets' keyword detector in linear time. Its patterns and names are unchanged but for two
points: every repetition has a bound, and a pattern is tried only where one of the names occurs. All matches of a line
count, where the library reports the first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any

from detect_secrets.plugins.keyword import (
    DENYLIST,
    PRECEDED_BY_EQUAL_COMPARISON_SIGNS_QUOTES_REQUIRED_REGEX,
    QUOTES_REQUIRED_DENYLIST_REGEX_TO_GROUP,
)

WORDS = ("key", "pass", "pwd", "secret", "token", "cookie")
"""The name of a secret holds one of these, in lower case."""
_FIRST = ("secret", "token", "pass", "pwd")
_BEFORE_KEY = re.compile(r"(?:api|access|auth|private|secret|account|client)[_-]?\Z")
"""How a name begins, and what it has before `key`, in lower-case text."""
_LONGEST_BEFORE = len("private_")
_ENDS = r"(?:[\s\"'`;&|$<>(){}\[\],\\]|$)"
_ATTRIBUTE = rf"[A-Za-z_]{{1,64}}(?:\.[A-Za-z_]{{1,64}}){{1,8}}{_ENDS}"
VARIABLE = re.compile(
    rf"(?:(?<![A-Za-z])|(?<=\\[nrt]))(?:(?:API_?KEY|ACCESS_KEY|SECRET(?:_KEY)?|TOKEN(?!=[\"']?\d{{1,15}}{_ENDS})|(?<=(?:GH|UB|AB|XT)_)PAT)="
    rf"(?![\"']?{_ATTRIBUTE})"
    r"|(?:PASSWORD|PASSWD|PGPASSWORD|SSHPASS|REDISCLI_AUTH|(?<=_)(?:PASS|PWD|PW))=)(?!=)[\"']?"
    r"(?P<secret>(?:[^\s\"'`;&|$<>(){}\\]|\\++(?![nrt\"']|u00)){6,512})"
)
"""Excludes `MAX_TOKEN=4096` and `API_KEY=args.api_key`: settings and code. A password may look like either.
PAT stands for GH_PAT, GITHUB_PAT, GITLAB_PAT and AZURE_DEVOPS_EXT_PAT. Only JSON's backslashes end the value."""
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
"""Joined words with at most two digits after each: identifiers, paths, versions, X25519PrivateKey."""
_STRONG = re.compile(r"(?=.*[a-z])(?=.*[A-Z]).*[!@#%^*]")
"""What password rules require besides a digit."""
_RANDOM_CHARS = 20
"""Least length of a random value with at most one digit. A shorter one could be a name."""
_VALUE = r"[ \t]{1,8}[\"']?(?![A-Za-z_-]{1,16}=[^=])(?P<secret>[A-Za-z0-9+/=_.~!@#%^*-]{8,512})(?=[\s\"'`\\,;}&)|]|$)"
_FLAG = re.compile(
    r"-(?<!\w-)(?:[A-Za-z0-9]{1,16}-){0,3}"
    r"(?i:(?:api|access|auth|private|secret|account|client)-?key|secret|token|password|passwd|passphrase)" + _VALUE
)
"""Excludes docker's `--secret id=...`."""
_NETRC = re.compile(r"password(?<!\S.{8})" + _VALUE)
_COOKIE = re.compile(r"cookie\\*[\"']?[ \t]{0,8}[ :=,][ \t]{0,8}\\*[\"']?")
"""For lower-case text."""
_COOKIES_END = re.compile(r"[\r\n\"'\\]|\Z")
_CRUMB = re.compile(r"(?<![\w.-])(?!(?i:domain|path|expires)=)[\w.-]{1,64}=(?P<secret>[^\s;,]{8,4096})")
_MOST_COOKIES = 4096
"""Most characters of a cookie header."""


def value_spans(text: str, lowered: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each value beside such a name. `lowered`: the text in lower case, of the same length."""
    done = 0
    for start in _name_starts(lowered):
        match = _NAMED.match(text, start) if start >= done else None
        if match:
            done = match.end()
            yield match.span("secret")
    for sign, pattern in (("-", _FLAG), ("password ", _NETRC)):
        for match in pattern.finditer(text) if sign in text else ():
            yield match.span("secret")
    done = 0
    for header in _COOKIE.finditer(lowered) if "cookie" in lowered else ():
        if header.start() >= done:
            done = _end_of_cookies(text, header.end())
            yield from crumbs(text, header.end(), done)


def _name_starts(lowered: str) -> list[int]:
    """Return where _NAMED may match, in order. Looking for words is many times faster than for one of many patterns."""
    starts = {start for word in _FIRST for start in _places(lowered, word)}
    for end in _places(lowered, "key"):
        before = _BEFORE_KEY.search(lowered, max(end - _LONGEST_BEFORE, 0), end)
        if before:
            starts.add(before.start())
    return sorted(starts)


def _places(text: str, word: str) -> Iterator[int]:
    place = text.find(word)
    while place >= 0:
        yield place
        place = text.find(word, place + 1)


def crumbs(text: str, start: int = 0, end: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each value of the cookies listed from `start` on."""
    for crumb in _CRUMB.finditer(text, start, _end_of_cookies(text, start) if end is None else end):
        yield crumb.span("secret")


def _end_of_cookies(text: str, start: int) -> int:
    """Return the end of the header whose cookies begin at `start`, at most _MOST_COOKIES later."""
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
    """Check whether the case changes as in random text: often, and with adjacent capitals, unlike in names."""
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
"""(what the name announces, pattern of the name). The first match wins."""
_REFERENCE = re.compile(r"[$<%{~/.].*|[A-Za-z]:[\\/].*|\*+|.*\s.*", re.DOTALL)
"""Variables, templates, paths, stars, sentences."""
_CREDENTIALS = re.compile(r"(?:(?i:basic|bearer|token|apikey) +(?P<secret>[A-Za-z0-9._~+/-]{6,4096}=*))")
_TOKEN = re.compile(r"[A-Za-z0-9+/=_.~!@#%^*-]{8,4096}")


def secrets(name: str, value: str) -> Secret | None:
    """Return what is secret in `value` because of the name beside it; None when nothing is."""
    announced = _announced(name) if len(name) <= _LONGEST_NAME else None
    if not announced:
        return None
    whole = [(0, len(value))]
    if announced in ("password", "short"):
        literal = len(value) >= 6 and not _REFERENCE.fullmatch(value)
        return ("password", whole) if literal and (announced == "password" or any(map(str.isdigit, value))) else None
    if announced == "cookie":
        cookies = [(start, end) for start, end in crumbs(value) if is_secret(value[start:end])]
        return ("password", cookies) if cookies else None
    match = _CREDENTIALS.fullmatch(value) if announced == "basic-auth" else None
    if match:
        return "basic-auth", [match.span("secret")]
    return ("password", whole) if _TOKEN.fullmatch(value) and is_secret(value) else None


@lru_cache(maxsize=4096)
def _announced(name: str) -> str | None:
    return next((announced for announced, names in _NAMES if names.search(name)), None)


def beside_items(items: list[Any], name: str) -> Iterator[tuple[str, Any]]:
    """Yield (name, item) for a list beside `name`. The flag before an item replaces the name."""
    flag = ""
    for item in items:
        yield flag or name, item
        flag = item.lstrip("-") if isinstance(item, str) and item[:1] == "-" else ""


def beside_members(members: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield (key, name, value) for an object. The name is the key; for a pair of name and value, the name."""
    named = next((members[key] for key in ("name", "key") if isinstance(members.get(key), str)), "")
    for key, value in members.items():
        yield key, named if named and key == "value" else key, value


_MOST_NAME, _MOST_SPACE, _MOST_SECRET = 64, 8, 1024
"""Most characters of an identifier, a gap and a secret."""
_BOUNDS = (
    (r"(?=[^\v\'\"]*)(?=\w+)[^\v\'\"]*", rf"(?=\w)[^\r\n\v\'\"]{{0,{_MOST_SECRET}}}"),
    (r")\w*", rf")\w{{0,{_MOST_NAME}}}+"),
    (r"\w*", rf"\w{{0,{_MOST_NAME}}}"),
    (r"\s*", rf"[ \t]{{0,{_MOST_SPACE}}}"),
)


def _bounded(pattern: re.Pattern[str]) -> re.Pattern[str]:
    source = pattern.pattern
    for endless, bounded in _BOUNDS:
        source = source.replace(endless, bounded)
    return re.compile(source, pattern.flags)


NAMES = re.compile("|".join(DENYLIST))
"""For lower-case text."""
STEMS = ("key", "pass", "pwd", "secret", "contrase")
"""Each of those names holds one of these."""
_BEHIND = [
    (_bounded(pattern), group)
    for pattern, group in QUOTES_REQUIRED_DENYLIST_REGEX_TO_GROUP.items()
    if pattern is not PRECEDED_BY_EQUAL_COMPARISON_SIGNS_QUOTES_REQUIRED_REGEX
]
_BEFORE = _bounded(PRECEDED_BY_EQUAL_COMPARISON_SIGNS_QUOTES_REQUIRED_REGEX)
_BEFORE_GROUP = QUOTES_REQUIRED_DENYLIST_REGEX_TO_GROUP[PRECEDED_BY_EQUAL_COMPARISON_SIGNS_QUOTES_REQUIRED_REGEX]
_COMPARED = re.compile(rf"[!=]=[ \t]{{0,{_MOST_SPACE}}}\w{{0,{_MOST_NAME}}}\Z")


def keyword_spans(line: str, lowered: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each secret in `line`. `lowered`: the line in lower case, of the same length."""
    for name in NAMES.finditer(lowered):
        for pattern, group in _BEHIND:
            match = pattern.match(line, name.start())
            if match:
                yield match.span(group)
        start = max(name.start() - _MOST_NAME - 2 * _MOST_SPACE, 0)
        if _COMPARED.search(line, start, name.start()):
            match = _BEFORE.search(line, max(start - _MOST_SECRET, 0), name.end())
            if match:
                yield match.span(_BEFORE_GROUP)
