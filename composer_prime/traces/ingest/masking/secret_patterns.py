"""Patterns of secrets that their form or their context gives away: tokens, private keys, headers, URLs, commands.

They follow the public rules of detect-secrets and gitleaks and the providers' documentation. A token is a whole word:
after a letter or digit it is part of a hash or an identifier. Tokens that never occur by chance count after anything.
"""

from __future__ import annotations

import re

from composer_prime.traces.ingest.masking import named_values

Rule = tuple[str, tuple[str, ...], re.Pattern[str]]
"""(kind, literals of which every match holds one, pattern, of which the group `secret` is masked, if any)."""

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
"""Prefix of an API key -> pattern of the rest."""
_NAMED_PREFIXES = {
    "github_pat_": ("github-token", "[A-Za-z0-9_]{22,}"),
    "hf_": ("hugging-face-token", _ALNUM + "{30,}"),
    "AIza": ("google-api-key", _WORD + "{35}"),
    "ya29.": ("google-token", _WORD + "{16,}"),
    "eyJ": ("jwt", r"[\w=-]{1,4096}+\.[\w=-]{1,4096}+\.?[\w.+/=-]{0,4096}+"),
}
_ESCAPES = (
    r"\\[nrt]", r"\\u[0-9A-Fa-f]{4}", r"\\x[0-9A-Fa-f]{2}", "%[0-9A-Fa-f]{2}",  # of JSON, programs and URLs
    r"\[m", r"[\[;]\dm", r"[\[;]\d\dm", r"[\[;]\d{3}m", r"\[K", r"\[\dK",  # of colors
    "(?<![A-Za-z0-9])-[A-Za-z]",  # a short option
)  # fmt: skip
"""What may directly precede a word although it ends in a letter or digit."""


def begin(first: str = "", ahead: str = "") -> str:
    """Return a pattern of `first`, of fixed length, at the start of a word.

    `ahead`, a lookahead after `first`, fails at most places and costs less than the lookbehinds.
    """
    return rf"{first}{ahead}(?:(?<![A-Za-z0-9]{first})|{'|'.join(f'(?<={item}{first})' for item in _ESCAPES)})"


_END = "(?![A-Za-z0-9])"
_AWS_VALUE = r"(?P<secret>[A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=])"
_NO_DASHES = r"(?:(?!----)[\s\S])"
"""Text up to the next header of four dashes or more."""
_PRIVATE_KEY = (
    r"-{4,5} ?BEGIN [A-Z0-9 ]{0,32}PRIVATE KEY[A-Z ]{0,16}-{4,5}"
    # Up to the end marker, if a key is between the two. Code has the markers alone.
    rf"(?:(?:(?:\s|\\+[nr]|[A-Za-z0-9+/=])*|(?={_NO_DASHES}{{0,16384}}?[A-Za-z0-9+/=]{{40}}){_NO_DASHES}*)"
    r"-{4,5} ?END [A-Z0-9 ]{0,32}PRIVATE KEY[A-Z ]{0,16}-{4,5}"
    # Or, where the key was cut off, its lines: headers and base64.
    r"|(?:(?:\s|\\+[nr]|(?:Proc-Type|DEK-Info): [^\n\\]{0,256})*+[A-Za-z0-9+/=]{16,}+)+)"
)
_ARGUMENT = r"(?P<quote>[\"'])?(?![$<{`])(?P<secret>(?(quote)[^\"'\n]|[^\s\"'`;&|]){1,200})"
"""An argument that is no variable or placeholder; in quotes it may have spaces."""
_MYSQL = (
    r"(?<![\w./-])(?:/[\w./-]{1,64}/)?(?:mysql(?:dump|admin|import|show|check)?|mariadb(?:-dump|-admin)?)"
    r"(?=\s)[^\n|;&]{0,400}?\s-p(?![\d.]+:)"
)
"""Takes a password after -p without a space. -p3306:3306 is docker's."""
_CURL = r"\bcurl\b[^\n|;]{0,400}?\s(?:-u|--user)[ =]?[\"']?[^\s:\"']{1,100}:(?P<secret>[^\s\"'$<{][^\s\"']{0,200})"
_RULES: list[tuple[str, str, str]] = [
    ("private-key", "PRIVATE KEY", _PRIVATE_KEY),
    (
        "private-key",
        "Private-Lines",  # PuTTY
        r"Private-Lines: \d{1,3}\s{1,2}(?P<secret>[A-Za-z0-9+/=]{16,64}(?:\s{1,2}[A-Za-z0-9+/=]{16,64})*)",
    ),
    # Tokens.
    ("api-key", "Q~", begin(ahead="(?=.{4}Q~)") + r"[A-Za-z0-9_~.]{3}\dQ~[A-Za-z0-9_~.-]{31,34}"),  # Azure
    ("api-key", ".atlasv1.", begin(ahead=r"(?=.{14}\.a)") + r"[A-Za-z0-9]{14}\.atlasv1\.[A-Za-z0-9=_-]{60,70}"),
    (
        "artifactory-token",
        "AKC AP",
        r"(?:(?<=[\s=:\"])|^)(?P<secret>AKC(?=[A-Za-z]*\d)[a-zA-Z0-9]{10,}|AP(?=[A-Za-z]*\d)[\dABCDEF][a-zA-Z0-9]{8,})"
        r"(?=[\s\"]|$)",
    ),
    (
        "aws-key",
        "AKIA ASIA ABIA ACCA A3T",
        begin(ahead="(?=A[A-Z0-9]{19})") + rf"(?:A3T[A-Z0-9]|ABIA|ACCA|AKIA|ASIA)[0-9A-Z]{{16}}{_END}",
    ),
    (
        "aws-key",
        "aws AWS",
        r"(?i:aws.{0,20}?(?:key|pwd|pw|password|pass|token).{0,20}?)['\"](?P<secret>[0-9a-zA-Z/+]{40})['\"]",
    ),
    (
        "aws-key",
        "secret_access_key SECRET_ACCESS_KEY ecretAccessKey",  # as in ~/.aws/credentials
        rf"(?i:secret_?access_?key)\\*[\"']?[ \t]{{0,8}}[=:][ \t]{{0,8}}\\*[\"']?{_AWS_VALUE}",
    ),
    ("azure-storage-key", "AccountKey=", r"AccountKey=[a-zA-Z0-9+/=]{88}"),
    (
        "discord-token",
        ".",
        begin("[MNO]", r"(?=[\w-]{23})") + rf"[a-zA-Z\d_-]{{23,25}}\.[a-zA-Z\d_-]{{6}}\.[a-zA-Z\d_-]{{27}}{_END}",
    ),
    ("github-token", "ghp_ gho_ ghu_ ghs_ ghr_", r"gh[opsur]_[A-Za-z0-9_]{36}"),
    (
        "gitlab-token",
        "glpat- gldt- glft- glsoat- glrt- GR1348941 glcbt- glimt- glptt- glagent- gloas-",
        r"(?:gl(?:pat|dt|ft|soat|rt|cbt|imt|ptt|agent|oas)-|GR1348941)[A-Za-z0-9_-]{20,1024}+",
    ),
    ("mailchimp-key", "-us", begin(ahead="(?=[a-z0-9]{32}-)") + f"[0-9a-z]{{32}}-us[0-9]{{1,2}}{_END}"),
    ("npm-token", "_authToken", r"//.{1,512}/:_authToken=\s*(?P<secret>npm_.+|[A-Fa-f0-9-]{36})"),
    ("openai-key", "T3BlbkFJ", r"sk-[A-Za-z0-9_-]{0,256}[A-Za-z0-9]{20}T3BlbkFJ[A-Za-z0-9]{20}"),
    ("pypi-token", "pypi-", r"pypi-Ag(?:EIcHlwaS5vcmc|ENdGVzdC5weXBpLm9yZw)[A-Za-z0-9_-]{70,}"),
    ("sendgrid-key", "SG.", r"SG\.[a-zA-Z0-9_-]{22}\.[a-zA-Z0-9_-]{43}"),
    ("slack-token", "xox", r"(?i:xox[abposr]-(?:\d+-)+[a-z0-9]+)"),
    ("slack-token", "hooks.slack.com", r"https://hooks\.slack\.com/services/T\w+/B\w+/\w+"),
    ("square-token", "sq0csp", r"sq0csp-[0-9A-Za-z\\_-]{43}"),
    ("stripe-key", "_live_", r"[rs]k_live_[0-9a-zA-Z]{24,256}"),
    (
        "telegram-token",
        ":",  # a whole word, or after /bot in URLs
        rf"(?:{begin('[0-9]', '(?=[0-9]{7})')}|[0-9](?<=/bot[0-9]))[0-9]{{7,9}}:[\w-]{{35}}{_END}",
    ),
    ("twilio-key", "AC SK", begin(ahead="(?=[AS][CK])") + f"(?:AC|SK)[a-z0-9]{{32}}{_END}"),
    ("webhook", "/webhooks/", r"discord(?:app)?\.com/api/(?:v\d{1,2}/)?webhooks/\d{17,20}/(?P<secret>[\w-]{60,})"),
    ("webhook", "hooks.slack.com", r"hooks\.slack\.com/(?:workflows|triggers)/(?P<secret>[\w/+]{20,})"),
    ("webhook", "webhook.office.com", r"webhook\.office\.com/webhookb2/(?P<secret>[\w@/-]{40,})"),
    # Headers, commands and URLs.
    (
        "bearer-token",
        "earer",
        r"\b[Bb]earer (?=[A-Za-z._~+/-]{0,256}(?:\d|[a-z][A-Z]{2}))(?P<secret>[A-Za-z0-9._~+/-]{20,}=*)",
    ),
    (
        "basic-auth",
        "uthorization AUTHORIZATION",
        r"(?i)\bauthorization\W{1,8}(?:basic|token|apikey) (?P<secret>[A-Za-z0-9._~+/-]{6,}=*)",
    ),
    # Without the header's name: base64 holds a digit or padding, "Basic authentication" does not.
    ("basic-auth", "Basic", r"\bBasic (?=[A-Za-z+/]*[0-9=])(?P<secret>[A-Za-z0-9+/]{12,}={0,2})(?!\w)"),
    ("basic-auth", "curl", _CURL),
    ("password", "sshpass", r"\bsshpass\s{1,8}-p[ \t]{0,8}" + _ARGUMENT),
    ("password", "mysql mariadb", _MYSQL + _ARGUMENT),
    ("password", "login", r"\b(?:docker|podman|az|oc) login\s(?:[^\n|;&]{0,400}?\s)?-p[ =]" + _ARGUMENT),
    ("password", "redis-cli", r"\bredis-cli\s(?:[^\n|;&]{0,400}?\s)?-a " + _ARGUMENT),
    ("basic-auth", "://:", r"\w://:(?P<secret>[^\s@/\"'$<{][^\s@/\"']{0,200})@"),
    ("basic-auth", "://", r"://[^:/?#\[\]@!$&'()*+,;=\s]+:(?P<secret>[^:/?#\[\]@!$&'()*+,;=\s]+)@"),
    ("password", "KEY= SECRET= TOKEN= PASSWORD= PASSWD= PASS= _PWD= _PW= _PAT= REDISCLI_AUTH=", named_values.VARIABLE),
]


def _word(prefix: str, rest: str) -> re.Pattern[str]:
    """Return a pattern that starts with a literal, which is found fast, and then looks back."""
    return re.compile(begin(re.escape(prefix)) + rest)


_OTHERS: list[Rule] = [(kind, tuple(literals.split(" ")), re.compile(pattern)) for kind, literals, pattern in _RULES]
RULES: list[Rule] = [
    *_OTHERS[:2],  # private keys first: what is in one is no other secret
    *(("api-key", (prefix,), _word(prefix, rest)) for prefix, rest in _BY_PREFIX.items()),
    *((kind, (prefix,), _word(prefix, rest)) for prefix, (kind, rest) in _NAMED_PREFIXES.items()),
    *_OTHERS[2:],
]
