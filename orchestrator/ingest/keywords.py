"""detect-secrets' keyword detector in linear time: what stands in quotes beside a name such as `db_password`.

Its patterns and names are taken as they are, with two changes. Every repetition has a bound, so that no text makes a
pattern look further than that; and a pattern is tried only where one of the names stands, instead of everywhere. All
places of a line count, where the library reports the first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from detect_secrets.plugins.keyword import (
    DENYLIST,
    PRECEDED_BY_EQUAL_COMPARISON_SIGNS_QUOTES_REQUIRED_REGEX,
    QUOTES_REQUIRED_DENYLIST_REGEX_TO_GROUP,
)

_MOST_NAME, _MOST_SPACE, _MOST_SECRET = 64, 8, 1024
"""Characters that an identifier, a gap and a secret may have."""
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
"""In text in lower case."""
STEMS = ("key", "pass", "pwd", "secret", "contrase")
"""Each of those names holds one."""
_BEHIND = [
    (_bounded(pattern), group)
    for pattern, group in QUOTES_REQUIRED_DENYLIST_REGEX_TO_GROUP.items()
    if pattern is not PRECEDED_BY_EQUAL_COMPARISON_SIGNS_QUOTES_REQUIRED_REGEX
]
_BEFORE = _bounded(PRECEDED_BY_EQUAL_COMPARISON_SIGNS_QUOTES_REQUIRED_REGEX)
_BEFORE_GROUP = QUOTES_REQUIRED_DENYLIST_REGEX_TO_GROUP[PRECEDED_BY_EQUAL_COMPARISON_SIGNS_QUOTES_REQUIRED_REGEX]
_COMPARED = re.compile(rf"[!=]=[ \t]{{0,{_MOST_SPACE}}}\w{{0,{_MOST_NAME}}}\Z")


def spans(line: str, lowered: str) -> Iterator[tuple[int, int]]:
    """(start, end) of each secret in `line`; `lowered` is the line in lower case, of the same length."""
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
