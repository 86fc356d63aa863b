"""Mask secrets in a trace before anything else reads it: keys, tokens, passwords, e-mail addresses, home folders.

    secret_patterns.py  secrets that their form, a header, a URL or a command gives away
    named_values.py     values beside a telling name, in text and in JSON
    below               what names a person

Three choices:

1. Entropy detectors stay off: commit hashes and ids fill agent traces.
2. A pattern runs only where a literal occurs that every match must hold.
3. The time is linear in the length of any text.

An address ends in an existing domain (Public Suffix List) or in one reserved for private use. These are not addresses:
`logo@2x.png`, `q@k.t(`, `x@self.weight`, `pkg@1.2.3-beta.rc`, `vpn@office.service`. After a common domain more text
may follow, as in `a@example.com.json`. The login of a service, as in `git@github.com`, is not an address.

A home folder starts an absolute path, or a relative one that climbs at least two folders: `../../Users/jdoe/x`. A
module that code imports from there is not one. `src/home/x`, `../home/x`, `~/Users/x`, `https://host/home/x` and the
file `/home/index.html` contain none. `/home/dashboard` counts as a route of a web site if the code around it suggests
one (an HTTP method, href, redirect, fetch), else as a folder: a wrongly masked route costs one word. In the header of
a diff, `--- a/home/jdoe/x`, and below mounts it may be a folder of a project: folders with usual names stay.

The long listing of `ls` names the owner of each file. Owners of a system's own stay.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

from publicsuffixlist import PublicSuffixList

from composer_prime.traces.ingest.masking import named_values
from composer_prime.traces.ingest.masking.secret_patterns import RULES

_LITERALS = [(literal, number) for number, (_, literals, _) in enumerate(RULES) for literal in literals]
"""(literal, rule number). Most texts hold none, and this scan is their whole cost."""
_PLACEHOLDER = re.compile(
    r"<.*>.*|\{.*\}.*|\$.*|%[sd]|%\(.*|\*+|[xX]{3,}|.{0,16}\.\.\.|(?i:pass(?:word|wd)?|pwd|token|secret)"
)
_RULE = r"\w+(?::[\w,]+)?"
_PLAIN_VALUE = re.compile(
    r"(?:[A-Za-z_.\s-]|:(?=\s|\Z))*|\W*|<masked:.*"
    r"|(?=\S*\s)(?:[\s.,:;!?()'/-]|[A-Za-z]+(?:32|64|128|256|384|512)?(?!\w))*"
    r"|(?=.*\b(?:characters|chars|digits|bytes|bits|must|at least|at most)\b)[\w\s.,:;!?()'/-]*"
    rf"|(?=(?:{_RULE}\|)*(?:required|nullable|sometimes|min|max|string|confirmed|encrypted|hashed)\b){_RULE}(?:\|{_RULE})*"
)
"""Values in quotes beside a name that hold no secret: words, punctuation, masked values, validation rules
(`required|min:8`), and sentences without a number or about password rules. Pass phrases have numbers."""


class Masker:
    """Mask text, and count the masked secrets by kind in `counts`."""

    def __init__(self, counts: Counter[str], enabled: bool = True) -> None:
        self.counts = counts
        self._enabled = enabled

    def text(self, text: str) -> str:
        """Replace every secret by `<masked:kind>`, and the owner of a home folder or file by `user`."""
        if not self._enabled or len(text) < 6:
            return text
        for number in sorted({number for literal, number in _LITERALS if literal in text}):
            kind, _, pattern = RULES[number]
            text = pattern.sub(self._replacer(kind), text)
        return self._person(self._named(text))

    def _named(self, text: str) -> str:
        lowered = lower(text)
        if any(stem in lowered for stem in named_values.STEMS) and any(quote in text for quote in "'\"`"):
            text = self._mask(text, named_values.quoted_spans(text), _is_value)
            lowered = lower(text)
        if any(word in lowered for word in named_values.WORDS):
            text = self._mask(text, named_values.value_spans(text, lowered), named_values.is_secret)
        return text

    def _person(self, text: str) -> str:
        if "@" in text or "%40" in text:
            text = self._mask(text, addresses(text), kind="email")
        if "home" in text or "Users" in text:
            text = self._mask(text, owners(text), kind="home-folder")
        if "r--" in text or "rwx" in text or "rw-" in text:
            text = self._mask(text, file_owners(text), kind="file-owner")
        return text

    def value(self, value: Any, name: str = "") -> Any:
        """Mask all strings of a JSON value, keys included. `name` is the name beside it."""
        if not self._enabled:
            return value
        if isinstance(value, str):
            masked = self.text(value)
            kind, spans = named_values.secrets(name, masked)
            return self._mask(masked, spans, kind=kind)
        if isinstance(value, list):
            return [self.value(item, beside) for beside, item in named_values.beside_items(value, name)]
        if isinstance(value, dict):
            return self._members(value)
        return value

    def _members(self, members: dict[str, Any]) -> dict[str, Any]:
        """Mask an object. Keys that become equal are numbered."""
        masked, alike = dict[str, Any](), Counter[str]()
        for key, beside, item in named_values.beside_members(members):
            name = shown = self.text(key)
            while shown in masked:
                alike[name] += 1
                shown = f"{name} {alike[name] + 1}"
            masked[shown] = self.value(item, beside)
        return masked

    def _replacer(self, kind: str) -> Callable[[re.Match[str]], str]:
        def replace(match: re.Match[str]) -> str:
            start, end = match.span("secret" if "secret" in match.re.groupindex else 0)
            if _PLACEHOLDER.fullmatch(match.string, start, end):
                return match[0]
            self.counts[kind] += 1
            return f"{match.string[match.start() : start]}<masked:{kind}>{match.string[end : match.end()]}"

        return replace

    def _mask(
        self,
        text: str,
        spans: Iterable[tuple[int, int]],
        is_secret: Callable[[str], bool] = bool,
        kind: str = "password",
    ) -> str:
        """Mask the secrets at `spans`; of two overlapping ones the first."""
        parts, done = [], 0
        for start, end in sorted(spans):
            if start >= done and is_secret(text[start:end]):
                parts += [text[done:start], "user" if kind in ("home-folder", "file-owner") else f"<masked:{kind}>"]
                done = end
                self.counts[kind] += 1
        return "".join([*parts, text[done:]]) if parts else text


def lower(text: str) -> str:
    """Return `text` in lower case with the same length."""
    lowered = text.lower()
    if len(lowered) == len(text):
        return lowered
    return "".join(low if len(low := letter.lower()) == 1 else letter for letter in text)


def _is_value(value: str) -> bool:
    return len(value) >= 6 and not _PLAIN_VALUE.fullmatch(value)


_COMMON = {
    "com", "org", "net", "edu", "gov", "io", "dev", "ai", "co", "de", "ch", "fr", "uk", "ie", "nl", "be", "eu",
    "es", "pl", "cz", "gr", "se", "dk", "fi", "ru", "us", "ca", "au", "jp", "cn", "br",
}  # fmt: skip
"""No attribute has such a name: `self.de` is a domain."""
_AT = re.compile(
    rf"(?:@|%40)(?!v?\d{{1,4}}\.\d|(?:self|cls|this)\.(?!(?:{'|'.join(sorted(_COMMON))})\b))"
    r"(?P<domain>(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24})\b"
)
_USER_CHARS = 64
_USER = re.compile(r"(?:\\[nrt]|\\u[0-9A-Fa-f]{4}|\x1b\[[\d;]{0,12}[mK]|\b)(?P<name>[A-Za-z0-9._%+-]+)\Z")
"""JSON escapes and terminal colors are no part of a name."""
_SERVICES = {"git", "hg", "svn", "root", "ubuntu", "debian", "centos", "ec2-user"}
_PRIVATE = {
    "local", "localhost", "localdomain", "internal", "intranet", "private", "lan", "home", "corp", "cluster",
    "test", "example", "invalid",
}  # fmt: skip
"""Domains of RFC 2606, 6761 and 6762, and others in private use."""

_ROOT = re.compile(
    r"/(?:home|Users)\\{0,2}/|(?i:%2F)(?:home|Users)(?i:%2F)|:\\{1,2}Users\\{1,2}|-(?:home|Users)-(?=[^-])"
)
_BEFORE_CHARS = 48
_PATH_BEGINS = re.compile(
    r"(?:(?<![A-Za-z0-9_.~@#%*})\]/\\-])|://|\\[nrt]|[\d\[]m|\[\d?K|(?:^|[\s\"'=,\[])-[A-Za-z])"  # "\n", colors, -I
    r"(?:/(?:(?:mnt|cygdrive|host_mnt)/)?[A-Za-z]|/(?:var|usr|export|nfs|host_mnt)|/System/Volumes/Data)?\\{0,2}\Z"
)
"""What may precede `/home/`, mounts included."""
_RARE_CHARS = 192
_RARE_BEGINS = re.compile(
    r"(?:=@|\s-(?:d|F|T|-data(?:-[a-z]{3,9})?|-json)[ =][\"']?@|\bs(?P<sep>[#@%])(?:\S{0,32}(?P=sep))?"  # curl, sed
    r"|(?:^|[\s\"'(])\[[A-Z]{3,9}\]"
    r"|\b(?:sftp|(?:git\+)?ssh|scp|rsync|nfs|vscode(?:-remote)?)://[^\s/\"'<>]{1,64}"
    r"|(?P<diff>(?:^|\n|\\n)(?:--- a|\+\+\+ b|diff --git a(?:/\S{1,100} b)?))"
    r"|(?:(?<![A-Za-z0-9_.~@#%*})\]/\\-])|[\d\[]m|\[\d?K)(?:/(?:mnt|media|Volumes)(?:/[\w.-]{1,32}){1,2}"
    r"|/(?:data|gpfs|lustre|cluster|nas|private|rootfs|chroot|proc/\d{1,9}/root)"
    r"|/[\w./-]{0,64}/overlay2/[\w-]{1,80}/(?:merged|diff)))\\{0,2}\Z"
)
"""Tried after _PATH_BEGINS. A project may have a folder `home` there too."""
_CLIMBS = re.compile(r"(?:(?<![\w.~@#%*})\]/-])|(?:^|[\s\"'=,\[])-[A-Za-z])(?:\.\./)*\.\./\.\.\Z")
"""What may precede `/Users/` in a relative path."""
_IMPORTED = re.compile(r"(?:\bfrom|\bimport|\brequire\(|\bimport\(|@import)\s?[\"'`]\Z")
_LISTED = re.compile(
    r"(?:^|(?<=\n)|(?<=\\n))[ \t]{0,16}[-dlbcps](?:[r-][w-][xsS-]){2}[r-][w-][xtT-][.+@]?[ \t]{1,8}\d{1,9}[ \t]{1,16}"
    r"(?P<owner>[^\s\d]\S{0,63})[ \t]{1,64}(?P<group>\S{1,64})[ \t]{1,64}\d"
)
_SYSTEM_OWNERS = _SERVICES | {
    "_www", "admin", "app", "bin", "circleci", "codespace", "daemon", "docker", "jenkins", "jovyan", "linuxbrew",
    "mysql", "nginx", "node", "nobody", "postgres", "runner", "staff", "sys", "systemd-network", "user", "vagrant",
    "vscode", "wheel", "www-data",
}  # fmt: skip
_FOLDERS = {
    "api", "app", "assets", "components", "css", "dashboard", "docs", "fixtures", "forms", "hooks", "images", "js",
    "lib", "locale", "management", "migrations", "models", "pages", "partials", "services", "src", "static", "styles",
    "templates", "templatetags", "test", "tests", "utils", "views",
}  # fmt: skip
_BEGINS = {
    "/": _PATH_BEGINS,
    "%": re.compile(r"(?<![A-Za-z0-9_.%])\Z"),
    ":": re.compile(r"(?<![A-Za-z0-9])[A-Za-z]\Z|\\[nrt][A-Za-z]\Z"),
    "-": re.compile(r"(?<![\w-])\Z"),
}
_ROUTE = re.compile(
    r"(?:\b(?:GET|POST|PUT|PATCH|DELETE|HEAD) "
    r"|\b(?:to=|(?:href|action|route|redirect(?:_to)?|navigate(?:To)?|fetch|visit|goto"
    r"|(?:app|client|api|axios|requests|router)\.[a-z]{3,8})[\"']?\s?[=(:]\s?)[\"'`])\Z"
)
_NAMES = {
    "/": re.compile(r"(?!(?:user|Shared|linuxbrew)(?![\w-]|\.\w))(?=[.-]{0,64}\w)[\w.-]*\w"),
    "%": re.compile(r"(?!user(?![\w.-]))\w[\w.-]*"),
    ":": re.compile(r"(?!(?:user|Public)(?![\w-]|\.\w))(?:[\w.-]+(?: [\w.-]+){1,3}(?=\\)|[\w.-]*\w)"),
    "-": re.compile(r"(?!user(?!\w))(?!(?:page|dir|path|url)(?![\w.-]))[\w.]+"),
}
"""Windows users may have spaces. Claude Code names a project's folder `-home-jdoe-src`; `-home-page` is an option."""
_FILE = re.compile(
    r"\.(?i:html?|php|aspx?|jsp|[cm]?[jt]sx?|vue|svelte|astro|s?css|sass|less|py|rb|go|rs|java|kt|cs|erb|haml|ejs|hbs|tpl"
    r"|md|mdx|rst|txt|json|ya?ml|toml|xml|svg|png|jpe?g|gif|webp|ico|pdf|csv|sql|sh)\Z"
)


def addresses(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each e-mail address, or of a URL's user."""
    for at in _AT.finditer(text):
        user = _USER.search(text[max(at.start() - _USER_CHARS, 0) : at.start()])
        end = _end_of_domain(at, text[at.end() : at.end() + 1]) if user and user["name"] not in _SERVICES else None
        if user and end:
            start = at.start() - len(user["name"])
            in_url = text[at.start()] == "@" and text[max(start - 3, 0) : start] == "://"
            yield start, at.start() if in_url else end


def _end_of_domain(at: re.Match[str], behind: str) -> int | None:
    """Return the end of an address's domain, if it is one. `behind`: the next character."""
    labels = at["domain"].split(".")
    last = labels[-1].lower()
    if behind not in ("(", "[") and (last in _COMMON | _PRIVATE or _suffixes().publicsuffix(at["domain"])):
        return at.end()
    while len(labels) > 1 and labels[-1].lower() not in _COMMON:
        labels.pop()
    return at.start("domain") + len(".".join(labels)) if len(labels) > 1 else None


@cache
def _suffixes() -> PublicSuffixList:
    """Return the Public Suffix List, which takes 30 ms to load."""
    return PublicSuffixList(accept_unknown=False)


def owners(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each home folder's owner."""
    for root in _ROOT.finditer(text):
        name = _NAMES[root[0][0]].match(text, root.end())
        if name and _is_owner(text, root, name):
            yield name.span()


def file_owners(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each owner in the long listings of `ls`, and of a group of that name."""
    for line in _LISTED.finditer(text):
        if line["owner"] not in _SYSTEM_OWNERS:
            yield line.span("owner")
            if line["group"] == line["owner"]:
                yield line.span("group")


def _is_owner(text: str, root: re.Match[str], name: re.Match[str]) -> bool:
    """Check whether `root` starts a home folder's path."""
    form, begin = root[0][0], root.start()
    before = text[max(begin - _BEFORE_CHARS, 0) : begin]
    if _BEGINS[form].search(before):
        return form != "/" or not (_is_file(text, name) or _ROUTE.search(before))
    climb = _CLIMBS.search(before) if form == "/" else None
    if climb:
        outside = _IMPORTED.search(before, 0, climb.start()) is None
        return outside and name[0] not in _FOLDERS and not _is_file(text, name)
    rare = _RARE_BEGINS.search(text, max(begin - _RARE_CHARS, 0), begin) if form == "/" else None
    if not rare or name[0] in _FOLDERS or _is_file(text, name):
        return False
    inside = not rare["diff"] or text[name.end() : name.end() + 1] == "/"
    return inside and not _ROUTE.search(text, max(rare.start() - _BEFORE_CHARS, 0), rare.start())


def _is_file(text: str, name: re.Match[str]) -> bool:
    return text[name.end() : name.end() + 1] not in ("/", "\\") and bool(_FILE.search(name[0]))
