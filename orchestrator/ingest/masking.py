"""Secrets leave a trace before anything else sees it: keys, tokens, passwords, e-mail addresses, home folders.

The patterns are detect-secrets' (its detectors of one provider's tokens, and its keyword detector), plus tokens that it
does not know yet. Three choices:

1. Its entropy detectors stay off: commit hashes and ids fill agent traces, and masking them would change what was done.
2. A pattern runs only where a literal that every match must hold occurs, so that ordinary text costs almost nothing.
3. Whatever the text holds, the time is linear in its length (keywords.py, assigned.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from detect_secrets.plugins.artifactory import ArtifactoryDetector
from detect_secrets.plugins.aws import AWSKeyDetector
from detect_secrets.plugins.azure_storage_key import AzureStorageKeyDetector
from detect_secrets.plugins.basic_auth import BasicAuthDetector
from detect_secrets.plugins.discord import DiscordBotTokenDetector
from detect_secrets.plugins.github_token import GitHubTokenDetector
from detect_secrets.plugins.gitlab_token import GitLabTokenDetector
from detect_secrets.plugins.jwt import JwtTokenDetector
from detect_secrets.plugins.mailchimp import MailchimpDetector
from detect_secrets.plugins.npm import NpmDetector
from detect_secrets.plugins.openai import OpenAIDetector
from detect_secrets.plugins.private_key import PrivateKeyDetector
from detect_secrets.plugins.pypi_token import PypiTokenDetector
from detect_secrets.plugins.sendgrid import SendGridDetector
from detect_secrets.plugins.slack import SlackDetector
from detect_secrets.plugins.square_oauth import SquareOAuthDetector
from detect_secrets.plugins.stripe import StripeDetector
from detect_secrets.plugins.telegram_token import TelegramBotTokenDetector
from detect_secrets.plugins.twilio import TwilioKeyDetector

from orchestrator.ingest import assigned, keywords, named_values, personal

Rule = tuple[str, tuple[str, ...], list[re.Pattern[str]]]
"""(kind, literals of which every match holds one, patterns). Group `secret`, where there is one, is what is masked."""

_PREFIXES = (
    "npm_", "_v1_", "hvs.", "hvb.", "nvapi-", "r8_", "pplx-", "dckr_", "AGE-S", "xapp-", "k_test_", "shp", "lin_api_",
    "dapi", "tvly-", "1//0",
)  # fmt: skip
_ARGUMENT = r"(?P<quote>[\"'])?(?![$<{`])(?P<secret>(?(quote)[^\"'\n]|[^\s\"'`;&|]){1,200})"
"""Of a command, no variable and no placeholder; in quotes it may have spaces."""
_NEWER: list[Rule] = [
    (
        "private-key",
        ("PRIVATE KEY",),
        # Up to its end, or, where that was cut off, as far as there are lines of a key: headers and base64.
        [
            re.compile(
                r"-----BEGIN [A-Z ]*PRIVATE KEY[A-Z ]*-----"
                r"(?:(?:(?!-----)[\s\S])*-----END [A-Z ]*PRIVATE KEY[A-Z ]*-----"
                r"|(?:\s|\\[nr]|(?:Proc-Type|DEK-Info): [^\n\\]*|[A-Za-z0-9+/=]{16,})*)"
            )
        ],
    ),
    ("api-key", ("sk-",), [re.compile(r"\bsk-(?:ant-|or-v1-|proj-|svcacct-)?[A-Za-z0-9_-]{20,}")]),
    ("hugging-face-token", ("hf_",), [re.compile(r"\bhf_[A-Za-z0-9]{30,}")]),
    ("google-api-key", ("AIza",), [re.compile(r"\bAIza[0-9A-Za-z_-]{35}")]),
    ("github-token", ("github_pat_",), [re.compile(r"\bgithub_pat_[A-Za-z0-9_]{22,}")]),
    ("api-key", ("gsk_", "xai-"), [re.compile(r"\b(?:gsk_|xai-)[A-Za-z0-9]{32,}")]),
    (
        "bearer-token",
        ("earer ",),
        [re.compile(r"\b[Bb]earer (?P<secret>[A-Za-z0-9._~+/-]{20,}=*)")],
    ),
    (
        "basic-auth",
        ("uthorization", "AUTHORIZATION"),
        [re.compile(r"(?i)\bauthorization\W{1,8}(?:basic|token|apikey) (?P<secret>[A-Za-z0-9._~+/-]{6,}=*)")],
    ),
    # Without the header's name: base64 has a digit or padding in it, which "Basic authentication" has not.
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
    # Commands that take a password behind a short option: mysql without a space; -p3306:3306 is a port of docker's.
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
    (
        "api-key",
        _PREFIXES,
        [
            re.compile(
                r"(?<![A-Za-z0-9])(?:npm_[A-Za-z0-9]{36}|do[opr]_v1_[a-f0-9]{64}|hv[sb]\.[A-Za-z0-9_-]{24,}"
                r"|nvapi-[A-Za-z0-9_-]{40,}|r8_[A-Za-z0-9]{32,}|pplx-[A-Za-z0-9]{32,}|dckr_pat_[A-Za-z0-9_-]{20,}"
                r"|AGE-SECRET-KEY-1[A-Z0-9]{40,}|xapp-\d-[A-Z0-9]+-\d+-[a-f0-9]+|[rs]k_test_[A-Za-z0-9]{16,}"
                r"|shp(?:at|ca|pa|ss)_[A-Fa-f0-9]{32}|lin_api_[A-Za-z0-9]{32,}|dapi[a-f0-9]{32}"
                r"|tvly-[A-Za-z0-9-]{20,}|1//0[A-Za-z0-9_-]{40,})"
            )
        ],
    ),
    ("google-token", ("ya29.",), [re.compile(r"\bya29\.[A-Za-z0-9_-]{16,}")]),
    ("password", ("KEY=", "SECRET=", "TOKEN=", "PASSWORD=", "PASSWD=", "_PASS=", "_PWD="), [assigned.VARIABLE]),
]
_KNOWN: list[tuple[str, type[Any], tuple[str, ...]]] = [
    ("artifactory-token", ArtifactoryDetector, ("AKC", "AP")),
    ("aws-key", AWSKeyDetector, ("AKIA", "ASIA", "ABIA", "ACCA", "A3T", "aws", "AWS")),
    ("azure-storage-key", AzureStorageKeyDetector, ("AccountKey=",)),
    ("basic-auth", BasicAuthDetector, ("://",)),
    ("discord-token", DiscordBotTokenDetector, (".",)),
    ("github-token", GitHubTokenDetector, ("ghp_", "gho_", "ghu_", "ghs_", "ghr_")),
    (
        "gitlab-token",
        GitLabTokenDetector,
        (
            "glpat-",
            "gldt-",
            "glft-",
            "glsoat-",
            "glrt-",
            "GR1348941",
            "glcbt-",
            "glimt-",
            "glptt-",
            "glagent-",
            "gloas-",
        ),
    ),
    ("jwt", JwtTokenDetector, ("eyJ",)),
    ("mailchimp-key", MailchimpDetector, ("-us",)),
    ("npm-token", NpmDetector, ("_authToken",)),
    ("openai-key", OpenAIDetector, ("T3BlbkFJ",)),
    ("private-key", PrivateKeyDetector, ("PRIVATE KEY", "SSH2 ENCRYPTED", "PuTTY-User-Key")),
    ("pypi-token", PypiTokenDetector, ("pypi-",)),
    ("sendgrid-key", SendGridDetector, ("SG.",)),
    ("slack-token", SlackDetector, ("xox", "hooks.slack.com")),
    ("square-token", SquareOAuthDetector, ("sq0csp",)),
    ("stripe-key", StripeDetector, ("_live_",)),
    ("telegram-token", TelegramBotTokenDetector, (":",)),
    ("twilio-key", TwilioKeyDetector, ("AC", "SK")),
]


_BOUNDS = (("=]+", "=]{1,4096}+"), (r"\/.+", r"\/.{1,512}"), ("-_]*", "-_]{0,256}"))
"""For repetitions without end (jwt, npm, openai) that a hostile text would begin at every place."""


def _linear(pattern: re.Pattern[str]) -> re.Pattern[str]:
    source = pattern.pattern
    for endless, bounded in _BOUNDS:
        source = source.replace(endless, bounded)
    return re.compile(source, pattern.flags)


_RULES: list[Rule] = _NEWER + [
    (kind, literals, [_linear(pattern) for pattern in detector.denylist]) for kind, detector, literals in _KNOWN
]
_SPACED = {"private-key", "bearer-token", "basic-auth", "password", "artifactory-token", "aws-key", "npm-token"}
"""Kinds whose matches may hold spaces or be short. All others are words of _SHORTEST_WORD characters or more."""
_LITERALS = [(literal, number) for number, (_, literals, _) in enumerate(_RULES) for literal in literals]
_IN_TEXT = [(literal, number) for literal, number in _LITERALS if _RULES[number][0] in _SPACED]
_IN_WORDS = [(literal, number) for literal, number in _LITERALS if _RULES[number][0] not in _SPACED]
"""Flat, with the rule's number: most texts hold none, and this is what they cost."""
_SHORTEST_WORD, _SPLIT_CHARS = 16, 1 << 20
"""Longer texts are not split: their words could take many times their size in memory."""
_PARTIAL = {"basic-auth": 1, "npm-token": 1, "aws-key": -1}
"""Patterns of detect-secrets that match more than the secret: the group that holds it, -1 for the last."""
_PLAIN_VALUE = re.compile(r"[A-Za-z_.\s-]*|\W*|<masked:.*")
"""Values that the keyword detector reports and that hold no secret: words, punctuation, what is masked already."""


class Masker:
    """Masks text and counts what it found, by kind, in `found`."""

    def __init__(self, found: Counter[str], enabled: bool = True) -> None:
        self.found, self._enabled = found, enabled

    def text(self, text: str) -> str:
        """`text` with every secret replaced by `<masked:kind>`, a home folder's owner by `user`."""
        if not self._enabled or len(text) < 6:
            return text
        for number in _rules_of(text):
            kind, _, patterns = _RULES[number]
            for pattern in patterns:
                text = pattern.sub(self._replacer(kind), text)
        lowered = lower(text)
        if any(stem in lowered for stem in keywords.STEMS) and any(quote in text for quote in "'\"`"):
            text = self._mask(text, keywords.spans(text, lowered), _is_value)
            lowered = lower(text)
        if any(word in lowered for word in assigned.WORDS):
            text = self._mask(text, assigned.spans(text, lowered), assigned.is_secret)
        if "@" in text:
            text = self._mask(text, personal.addresses(text), kind="email")
        if "home" in text or "Users" in text:
            text = self._mask(text, personal.owners(text), kind="home-folder")
        return text

    def value(self, value: Any, name: str = "") -> Any:
        """A JSON value with all its strings masked, keys of objects included; `name` is what stands beside it."""
        if not self._enabled:
            return value
        if isinstance(value, str):
            return self._named(name, value)
        if isinstance(value, list):
            return [self.value(item, beside) for beside, item in named_values.beside_items(value, name)]
        if isinstance(value, dict):
            return self._members(value)
        return value

    def _members(self, members: dict[str, Any]) -> dict[str, Any]:
        """Keys that are masked alike are numbered, so that none takes another's place."""
        masked, alike = dict[str, Any](), Counter[str]()
        for key, beside, item in named_values.beside_members(members):
            name = shown = self.text(key)
            while shown in masked:
                alike[name] += 1
                shown = f"{name} {alike[name] + 1}"
            masked[shown] = self.value(item, beside)
        return masked

    def _named(self, name: str, value: str) -> str:
        masked = self.text(value)
        found = named_values.secrets(name, masked)
        return self._mask(masked, found[1], kind=found[0]) if found else masked

    def _replacer(self, kind: str) -> Callable[[re.Match[str]], str]:
        def replace(match: re.Match[str]) -> str:
            secret = _secret_of(match, kind)
            if secret is None or secret.startswith("<masked:"):
                return match[0]
            self.found[kind] += 1
            if "secret" in match.re.groupindex:
                return _without_group(match, kind)
            return match[0].replace(secret, f"<masked:{kind}>")

        return replace

    def _mask(
        self,
        text: str,
        spans: Iterable[tuple[int, int]],
        is_secret: Callable[[str], bool] = bool,
        kind: str = "password",
    ) -> str:
        """`text` without the values at `spans` that are secrets; of two that overlap the first one goes."""
        parts, done = [], 0
        for start, end in sorted(spans):
            if start >= done and is_secret(text[start:end]):
                parts += [text[done:start], "user" if kind == "home-folder" else f"<masked:{kind}>"]
                done = end
                self.found[kind] += 1
        return "".join([*parts, text[done:]]) if parts else text


def _rules_of(text: str) -> list[int]:
    """Numbers of the rules of which a literal occurs, in order."""
    words = text
    if len(text) <= _SPLIT_CHARS:
        words = " ".join([word for word in text.split() if len(word) >= _SHORTEST_WORD])
    numbers = {number for literal, number in _IN_TEXT if literal in text}
    return sorted(numbers.union(number for literal, number in _IN_WORDS if literal in words))


def lower(text: str) -> str:
    """`text` in lower case, of the same length: a few letters have a longer lower case, and stay."""
    lowered = text.lower()
    if len(lowered) == len(text):
        return lowered
    return "".join(low if len(low := letter.lower()) == 1 else letter for letter in text)


def _is_value(found: str) -> bool:
    """Whether what the keyword detector found can be a secret."""
    return len(found) >= 6 and not _PLAIN_VALUE.fullmatch(found)


def _without_group(match: re.Match[str], kind: str) -> str:
    """The match with its group `secret` masked, and nothing else that happens to be spelled alike."""
    start, end = match.start("secret") - match.start(), match.end("secret") - match.start()
    return f"{match[0][:start]}<masked:{kind}>{match[0][end:]}"


def _secret_of(match: re.Match[str], kind: str) -> str | None:
    if "secret" in match.re.groupindex:
        return match["secret"]
    if kind in _PARTIAL and match.re.groups:
        return match[_PARTIAL[kind] if _PARTIAL[kind] > 0 else match.re.groups]
    return match[0].strip(" \t\r\n\"'=:")
