"""Patterns of secrets that their form or their context gives away.

Form: tokens, most by a prefix: detect-secrets' detectors and further providers. Context: private keys, headers, URLs,
commands and shell variables.

The list follows the public rules of gitleaks and the providers' documentation. A token is a whole word. A letter or
digit before it makes it part of a hash, a number or an identifier, which is not masked. Tokens of GitHub, SendGrid,
Slack and Stripe (`ghp_` and 36 characters) never occur by chance: they count after anything.
"""

from __future__ import annotations

import re
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
from detect_secrets.plugins.pypi_token import PypiTokenDetector
from detect_secrets.plugins.sendgrid import SendGridDetector
from detect_secrets.plugins.slack import SlackDetector
from detect_secrets.plugins.square_oauth import SquareOAuthDetector
from detect_secrets.plugins.stripe import StripeDetector
from detect_secrets.plugins.telegram_token import TelegramBotTokenDetector
from detect_secrets.plugins.twilio import TwilioKeyDetector

from composer_prime.traces.ingest.masking import named_values

Rule = tuple[str, tuple[str, ...], list[re.Pattern[str]]]
"""(kind, literals of which every match holds one, patterns). A pattern's group `secret` is masked if there is one."""

_ALNUM, _WORD, _HEX = "[A-Za-z0-9]", "[A-Za-z0-9_-]", "[A-Fa-f0-9]"
_BY_PREFIX = {
    # models
    "sk-": r"(?:ant-|or-v1-|proj-|svcacct-)?(?=[a-z_-]{0,64}[A-Z0-9])[A-Za-z0-9_-]{20,}",  # not a CSS class
    "gsk_": _ALNUM + "{32,}", "xai-": _ALNUM + "{32,}", "nvapi-": _WORD + "{40,}", "r8_": _ALNUM + "{32,}",
    "pplx-": _ALNUM + "{32,}", "tvly-": "[A-Za-z0-9-]{20,}", "csk-": _ALNUM + "{40,}", "fw_": _ALNUM + "{22,}",
    "jina_": _WORD + "{40,}", "lsv2_pt_": "[a-f0-9_]{42,}", "lsv2_sk_": "[a-f0-9_]{42,}", "tgp_v1_": _WORD + "{40,}",
    "pcsk_": "[A-Za-z0-9_]{50,}", "e2b_": "[a-f0-9]{40}", "fc-": "[a-f0-9]{32}", "ABSK": "[A-Za-z0-9+/]{100,}",
    "api_org_": "[A-Za-z]{34}",
    # code and packages
    "npm_": _ALNUM + "{36}", "rubygems_": "[a-f0-9]{48}", "ATATT3": "[A-Za-z0-9_=-]{16,}",
    "CCIPAT_": "[A-Za-z0-9_]{40,}", "bkua_": "[a-f0-9]{40}", "sqp_": "[a-f0-9]{40}", "squ_": "[a-f0-9]{40}",
    "sqa_": "[a-f0-9]{40}", "sgp_": "[a-f0-9_]{40,}", "PMAK-": "[a-f0-9]{24}-[a-f0-9]{34}", "figd_": _WORD + "{20,}",
    "ntn_": _ALNUM + "{40,}", "secret_": _ALNUM + "{43}", "lin_api_": _ALNUM + "{32,}", "lin_oauth_": _ALNUM + "{32,}",
    "dckr_pat_": _WORD + "{20,}", "dckr_oat_": _WORD + "{20,}",
    # clouds and databases
    "dop_v1_": "[a-f0-9]{64}", "doo_v1_": "[a-f0-9]{64}", "dor_v1_": "[a-f0-9]{64}", "hvs.": _WORD + "{24,}",
    "hvb.": _WORD + "{24,}", "dapi": "[a-f0-9]{32}", "sbp_": "[a-f0-9]{40}", "sb_secret_": _WORD + "{20,}",
    "pscale_tkn_": r"[\w=.-]{32,}", "pscale_pw_": r"[\w=.-]{32,}", "pscale_oauth_": r"[\w=.-]{32,}",
    "pul-": "[a-f0-9]{40}", "dp.pt.": _ALNUM + "{40,}", "dp.st.": "[A-Za-z0-9_.-]{40,}", "dp.sa.": _ALNUM + "{40,}",
    "fo1_": _WORD + "{43}", "fm1a_": "[A-Za-z0-9+/]{40,}", "fm1r_": "[A-Za-z0-9+/]{40,}", "fm2_": "[A-Za-z0-9+/]{40,}",
    "HRKU-AA": _WORD + "{50,}", "LTAI": _ALNUM + "{20}", "rnd_": _ALNUM + "{32}", "nfp_": _ALNUM + "{36,}",
    "vercel_blob_rw_": "[A-Za-z0-9_]{30,}", "tskey-": "(?:auth|api|client|scim|webhook)-" + _WORD + "{20,}",
    "GOCSPX-": _WORD + "{20,}", "1//0": _WORD + "{40,}", "ops_eyJ": "[A-Za-z0-9+/]{60,}={0,3}", "pnu_": _ALNUM + "{36}",
    # operation
    "sntrys_": "[A-Za-z0-9+/=_]{40,}", "sntryu_": "[a-f0-9]{64}", "glsa_": _ALNUM + "{32}_" + _HEX + "{8}",
    "glc_": "[A-Za-z0-9+/]{32,}={0,3}", "NRAK-": "[A-Z0-9]{27}", "dt0c01.": "[A-Z0-9]{24}[.][A-Z0-9]{64}",
    "phx_": _ALNUM + "{32,}",
    # commerce and messages
    "whsec_": "[A-Za-z0-9+/=]{24,}", "sk_test_": _ALNUM + "{16,}", "rk_test_": _ALNUM + "{16,}",
    "sq0atp-": _WORD + "{22,}", "shpat_": _HEX + "{32}", "shpca_": _HEX + "{32}", "shppa_": _HEX + "{32}",
    "shpss_": _HEX + "{32}", "xkeysib-": "[a-f0-9]{64}-" + _ALNUM + "{16}", "xapp-": r"\d-[A-Z0-9]+-\d+-[a-f0-9]+",
    "xoxe-": r"\d-[A-Za-z0-9]{100,}", "EAAC": _ALNUM + "{80,}", "EAAM": _ALNUM + "{80,}",
    "AGE-SECRET-KEY-1": "[A-Z0-9]{40,}",
}  # fmt: skip
"""Prefix -> pattern of the rest."""
_NAMED_PREFIXES = [
    ("github-token", "github_pat_", "[A-Za-z0-9_]{22,}"),
    ("hugging-face-token", "hf_", _ALNUM + "{30,}"),
    ("google-api-key", "AIza", _WORD + "{35}"),
    ("google-token", "ya29.", _WORD + "{16,}"),
]


_ESCAPES = (
    r"\\[nrt]", r"\\u[0-9A-Fa-f]{4}", r"\\x[0-9A-Fa-f]{2}", "%[0-9A-Fa-f]{2}",  # of JSON, programs and URLs
    r"\[m", r"[\[;]\dm", r"[\[;]\d\dm", r"[\[;]\d{3}m", r"\[K", r"\[\dK",  # of colors
    "(?<![A-Za-z0-9])-[A-Za-z]",  # a short option
)  # fmt: skip
"""What may directly precede a word although it ends in a letter or digit. Lookbehind needs a fixed length."""


def begin(first: str = "", ahead: str = "") -> str:
    """Return a pattern of `first`, of fixed length, at the start of a word.

    `ahead` is a lookahead, `(?=...)`, that is tried after `first` and before any lookbehind. It fails at most places
    and costs less.
    """
    return rf"{first}{ahead}(?:(?<![A-Za-z0-9]{first})|{'|'.join(f'(?<={item}{first})' for item in _ESCAPES)})"


def _word(prefix: str, rest: str) -> re.Pattern[str]:
    """Return a pattern that starts with the literal, which the engine finds fast, and then looks back."""
    return re.compile(begin(re.escape(prefix)) + rest)


_AWS_SECRET = re.compile(
    r"(?i:secret_?access_?key)\\*[\"']?[ \t]{0,8}[=:][ \t]{0,8}\\*[\"']?(?P<secret>[A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=])"
)
"""As in ~/.aws/credentials. The secret may hold any characters."""
_AZURE_AD = re.compile(begin(ahead="(?=.{4}Q~)") + r"[A-Za-z0-9_~.]{3}\dQ~[A-Za-z0-9_~.-]{31,34}")
_TERRAFORM = re.compile(begin(ahead=r"(?=.{14}\.a)") + r"[A-Za-z0-9]{14}\.atlasv1\.[A-Za-z0-9=_-]{60,70}")
_URLS: list[Rule] = [
    (
        "webhook",
        ("/webhooks/",),
        [re.compile(r"discord(?:app)?\.com/api/(?:v\d{1,2}/)?webhooks/\d{17,20}/(?P<secret>[\w-]{60,})")],
    ),
    (
        "webhook",
        ("hooks.slack.com",),
        [re.compile(r"hooks\.slack\.com/(?:workflows|triggers)/(?P<secret>[\w/+]{20,})")],
    ),
    ("webhook", ("webhook.office.com",), [re.compile(r"webhook\.office\.com/webhookb2/(?P<secret>[\w@/-]{40,})")]),
    ("api-key", ("Q~",), [_AZURE_AD]),
    ("api-key", (".atlasv1.",), [_TERRAFORM]),
]
_GITLAB = (
    "glpat-", "gldt-", "glft-", "glsoat-", "glrt-", "GR1348941", "glcbt-", "glimt-", "glptt-", "glagent-", "gloas-",
)  # fmt: skip
KNOWN: list[tuple[str, type[Any], tuple[str, ...]]] = [
    ("artifactory-token", ArtifactoryDetector, ("AKC", "AP")),
    ("aws-key", AWSKeyDetector, ("AKIA", "ASIA", "ABIA", "ACCA", "A3T", "aws", "AWS")),
    ("azure-storage-key", AzureStorageKeyDetector, ("AccountKey=",)),
    ("discord-token", DiscordBotTokenDetector, (".",)),
    ("github-token", GitHubTokenDetector, ("ghp_", "gho_", "ghu_", "ghs_", "ghr_")),
    ("gitlab-token", GitLabTokenDetector, _GITLAB),
    ("jwt", JwtTokenDetector, ("eyJ",)),
    ("mailchimp-key", MailchimpDetector, ("-us",)),
    ("npm-token", NpmDetector, ("_authToken",)),
    ("openai-key", OpenAIDetector, ("T3BlbkFJ",)),
    ("pypi-token", PypiTokenDetector, ("pypi-",)),
    ("sendgrid-key", SendGridDetector, ("SG.",)),
    ("slack-token", SlackDetector, ("xox", "hooks.slack.com")),
    ("square-token", SquareOAuthDetector, ("sq0csp",)),
    ("stripe-key", StripeDetector, ("_live_",)),
    ("telegram-token", TelegramBotTokenDetector, (":",)),
    ("twilio-key", TwilioKeyDetector, ("AC", "SK")),
]
"""(kind, detector, literals)."""
_TELEGRAM = rf"(?:{begin('[0-9]', '(?=[0-9]{7})')}|[0-9](?<=/bot[0-9]))[0-9]{{7,9}}:[\w-]{{35}}(?![A-Za-z0-9])"
"""A whole word, or after /bot in URLs. The lookbehind comes after the first digit, which the engine finds fast."""
CHANGES = {
    # Unbounded repetitions that a hostile text could start at every position.
    "jwt": [("=]*?", "=]{0,4096}+"), ("=]+", "=]{1,4096}+")],
    "npm-token": [(r"\/.+", r"\/.{1,512}")],
    "openai-key": [("-_]*", "-_]{0,256}")],
    # The length of today's keys.
    "stripe-key": [("k_live_[0-9a-zA-Z]{24}", "k_live_[0-9a-zA-Z]{24,256}")],
    # Excludes APPENDIX and APCore.
    "artifactory-token": [("AKC[", r"AKC(?=[A-Za-z]*\d)["), ("AP[", r"AP(?=[A-Za-z]*\d)[")],
    # Whole words only.
    "telegram-token": [(r"\d{8,10}:[0-9A-Za-z_-]{35}", _TELEGRAM)],
    "discord-token": [
        ("[MNO][", begin("[MNO]", r"(?=[\w-]{23})") + "["),
        (r"{6}\.[a-zA-Z\d_-]{27}", r"{6}\.[a-zA-Z\d_-]{27}(?![A-Za-z0-9])"),
    ],
}
"""Changes to detect-secrets' patterns, by kind: (part of the pattern, replacement)."""
_OWN_WORDS = {"aws-key": "(?=A[A-Z0-9]{19})", "mailchimp-key": "(?=[a-z0-9]{32}-)", "twilio-key": "(?=[AS][CK])"}
_BEGIN_WORDS = {"jwt": "(?=eyJ)"}
"""Kinds that start at the start of a word, with their lookahead. Those of _OWN_WORDS also end with the word."""


def _changed(kind: str, pattern: re.Pattern[str]) -> re.Pattern[str]:
    """Return a detector's pattern with linear run time, restricted to whole words."""
    source = pattern.pattern
    for part, instead in CHANGES.get(kind, []):
        source = source.replace(part, instead)
    ahead = (_OWN_WORDS | _BEGIN_WORDS).get(kind)
    if ahead and not source.startswith(("aws", "https")):
        source = f"{begin(ahead=ahead)}(?:{source})" + ("(?![A-Za-z0-9])" if kind in _OWN_WORDS else "")
    return re.compile(source, pattern.flags)


_TOKENS: list[Rule] = [
    *(("api-key", (prefix,), [_word(prefix, rest)]) for prefix, rest in _BY_PREFIX.items()),
    *((kind, (prefix,), [_word(prefix, rest)]) for kind, prefix, rest in _NAMED_PREFIXES),
    *_URLS,
    ("aws-key", ("secret_access_key", "SECRET_ACCESS_KEY", "ecretAccessKey"), [_AWS_SECRET]),
    *((kind, literals, [_changed(kind, item) for item in detector.denylist]) for kind, detector, literals in KNOWN),
]
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
_PRIVATE_KEYS: list[Rule] = [
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
"""An argument of a command that is neither a variable nor a placeholder. In quotes it may have spaces."""
_CONTEXTS: list[Rule] = [
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
RULES = [*_PRIVATE_KEYS, *_TOKENS, *_CONTEXTS]
