"""Secrets that only the name beside them gives away: `api_key: 3f78...`, `DB_PASS=...`, `{\\"token\\": \\"...\\"}`,
`--token 3f78...`, and the values of cookies.

Code is full of such names too, so a value counts only where it cannot be code: no word, path, number, call or variable.
A shell variable (upper case, no space before the value) holds its value as it stands; there nearly any value counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

WORDS = ("key", "pass", "pwd", "secret", "token", "cookie")
"""A name that holds none of these, in lower case, is no secret's."""
_NAME = re.compile(
    r"(?:api|access|auth|private|secret|account|client)[_-]?key|secret|token|passw(?:or)?d|passphrase|pass|pwd"
)
"""Where _NAMED may begin, in text in lower case."""
_ENDS = r"(?:[\s\"'`;&|$<>(){}\[\],\\]|$)"
_ATTRIBUTE = rf"[A-Za-z_]{{1,64}}(?:\.[A-Za-z_]{{1,64}}){{1,8}}{_ENDS}"
VARIABLE = re.compile(
    rf"(?:(?<![A-Za-z])|(?<=\\[nrt]))(?:(?:API_?KEY|ACCESS_KEY|SECRET(?:_KEY)?|TOKEN(?!=[\"']?\d{{1,15}}{_ENDS})|(?<=(?:GH|UB|AB|XT)_)PAT)="
    rf"(?![\"']?{_ATTRIBUTE})"
    r"|(?:PASSWORD|PASSWD|PGPASSWORD|SSHPASS|REDISCLI_AUTH|(?<=_)(?:PASS|PWD|PW))=)(?!=)[\"']?"
    r"(?P<secret>(?:[^\s\"'`;&|$<>(){}\\]|\\++(?![nrt\"']|u00)){6,512})"
)
"""Not of `MAX_TOKEN=4096` and `API_KEY=args.api_key`, which are settings and code; a password may be either. PAT is of
GH_PAT, GITHUB_PAT, GITLAB_PAT and AZURE_DEVOPS_EXT_PAT. A backslash belongs to the value, but for those of JSON."""
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
"""Words with at most two digits behind each, joined: identifiers, paths, versions, X25519PrivateKey."""
_STRONG = re.compile(r"(?=.*[a-z])(?=.*[A-Z]).*[!@#%^*]")
"""What rules for passwords ask for, beside a digit."""
_RANDOM_CHARS = 20
"""Of a random value with one digit or none; a shorter one could be a name."""
_VALUE = r"[ \t]{1,8}[\"']?(?![A-Za-z_-]{1,16}=[^=])(?P<secret>[A-Za-z0-9+/=_.~!@#%^*-]{8,512})(?=[\s\"'`\\,;}&)|]|$)"
_FLAG = re.compile(
    r"-(?<!\w-)(?:[A-Za-z0-9]{1,16}-){0,3}"
    r"(?i:(?:api|access|auth|private|secret|account|client)-?key|secret|token|password|passwd|passphrase)" + _VALUE
)
"""Not of `--secret id=...` (docker)."""
_NETRC = re.compile(r"password(?<!\S.{8})" + _VALUE)
_COOKIE = re.compile(r"cookie\\*[\"']?[ \t]{0,8}[ :=,][ \t]{0,8}\\*[\"']?")
"""In text in lower case."""
_COOKIES_END = re.compile(r"[\r\n\"'\\]|\Z")
_CRUMB = re.compile(r"(?<![\w.-])(?!(?i:domain|path|expires)=)[\w.-]{1,64}=(?P<secret>[^\s;,]{8,4096})")
_MOST_COOKIES = 4096
"""Characters of a header."""


def spans(text: str, lowered: str) -> Iterator[tuple[int, int]]:
    """(start, end) of each value beside such a name; `lowered` is the text in lower case, of the same length."""
    done = 0
    for name in _NAME.finditer(lowered):
        match = _NAMED.match(text, name.start()) if name.start() >= done else None
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


def crumbs(text: str, start: int = 0, end: int | None = None) -> Iterator[tuple[int, int]]:
    """(start, end) of each value of the cookies that are listed from `start` on."""
    for crumb in _CRUMB.finditer(text, start, _end_of_cookies(text, start) if end is None else end):
        yield crumb.span("secret")


def _end_of_cookies(text: str, start: int) -> int:
    """Where the header ends whose cookies begin at `start`: of a longer one, after _MOST_COOKIES."""
    most = min(start + _MOST_COOKIES, len(text))
    end = _COOKIES_END.search(text, start, most)
    return end.start() if end else most


def is_secret(value: str) -> bool:
    """Whether a value that was found beside a name can only be a secret."""
    digits = sum(character.isdigit() for character in value)
    if digits >= 2:
        return any(map(str.isalpha, value)) and not _CODE.fullmatch(value)
    return bool(digits and _STRONG.match(value)) or (len(value) >= _RANDOM_CHARS and _is_random(value))


def _is_random(value: str) -> bool:
    """Whether the case of letters changes as in random text: often, and with capitals side by side, unlike in names."""
    pairs = [pair for pair in pairwise(value) if pair[0].isalpha() and pair[1].isalpha()]
    changes = sum(first.isupper() != second.isupper() for first, second in pairs)
    capitals = sum(first.isupper() and second.isupper() for first, second in pairs)
    return changes >= 0.34 * len(pairs) and capitals >= max(0.1 * len(pairs), 1)
