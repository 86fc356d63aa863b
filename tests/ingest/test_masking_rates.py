"""How much ordinary code is masked, and how many secrets stay: bounds on both, over the standard library's sources and
over random secrets in the places where agents meet them."""

import string
import sysconfig
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from composer_prime.traces.ingest.masking.masker import Masker

ALNUM, HEX, UPPER = string.ascii_letters + string.digits, "0123456789abcdef", string.ascii_uppercase + string.digits
URLSAFE = ALNUM + "-_"
Make = Callable[[Random], str]


def text_of(prefix: str, *parts: tuple[str, int]) -> Make:
    """Random text: `prefix`, then for each part so many characters of an alphabet."""
    return lambda rng: prefix + "".join("".join(rng.choices(letters, k=count)) for letters, count in parts)


TOKENS: dict[str, Make] = {
    "openai": text_of("sk-proj-", (URLSAFE, 48)),
    "anthropic": text_of("sk-ant-api03-", (URLSAFE, 93), ("A", 2)),
    "github": text_of("ghp_", (ALNUM, 36)),
    "github fine": text_of("github_pat_", (ALNUM, 22), ("_", 1), (ALNUM, 59)),
    "gitlab": text_of("glpat-", (URLSAFE, 19), (ALNUM, 1)),
    "aws": text_of("AKIA", (UPPER, 16)),
    "slack": text_of("xoxb-", (string.digits, 12), ("-", 1), (string.digits, 12), ("-", 1), (ALNUM, 24)),
    "stripe": text_of("sk_live_", (ALNUM, 99)),
    "google": text_of("AIza", (URLSAFE, 35)),
    "hugging face": text_of("hf_", (string.ascii_letters, 34)),
    "npm": text_of("npm_", (ALNUM, 36)),
    "pypi": text_of("pypi-AgEIcHlwaS5vcmc", (URLSAFE, 150)),
    "jwt": text_of("eyJ", (ALNUM, 33), (".", 1), (URLSAFE, 60), (".", 1), (URLSAFE, 43)),
    "telegram": text_of("", (string.digits, 10), (":", 1), (URLSAFE, 34), (ALNUM, 1)),
    "discord": text_of("M", (ALNUM, 25), (".", 1), (URLSAFE, 6), (".", 1), (URLSAFE, 26), (ALNUM, 1)),
    "notion": text_of("ntn_", (string.digits, 11), (ALNUM, 35)),
    "atlassian": text_of("ATATT3xFfGF0", (URLSAFE, 180)),
    "supabase": text_of("sbp_", (HEX, 40)),
    "e-mail": text_of(
        "", (string.ascii_lowercase, 9), ("@", 1), (string.ascii_lowercase, 8), (".", 1), ("i", 1), ("o", 1)
    ),
}
AROUND_TOKENS = [
    "export X=%s\n", "x: %s\n", '{"x": "%s"}', '{\\"x\\": \\"%s\\"}', "curl -H 'X-Thing: %s' https://x.io", "f(%s)",
    "invalid credentials %s for", "https://x.io/a?k=%s&b=1", "\x1b[32m%s\x1b[0m", "`%s`", "x\\n%s\\ny", "<a>%s</a>",
    "\x1b[01;31m\x1b[K%s\x1b[m\x1b[K", "\x1b[38;5;208m%s\x1b[0m", "u=a%%3D%s%%26b", "x\\u0027%s\\u0027", "x -p%s x",
]  # fmt: skip
VALUES: dict[str, Make] = {
    "hex": text_of("", (HEX, 32)),
    "letters and digits": text_of("", (ALNUM, 32)),
    "base64": text_of("", (ALNUM + "+/", 43), ("=", 1)),
    "aws": text_of("", (ALNUM + "+/", 40)),
    "password": text_of("", (string.ascii_lowercase, 6), (string.digits, 4), ("!#%", 1)),
}
AROUND_VALUES = [
    "API_KEY=%s\n", "export DB_PASSWORD=%s && x", "PGPASSWORD=%s psql", "  password: %s\n", 'api_key: "%s"\n',
    '"client_secret": "%s"', '{\\"access_token\\": \\"%s\\"}', "password = '%s'", "tool --token %s run",
    "x-api-key: %s\n", "authToken: `%s`", "aws_secret_access_key = %s\n", "x\\nSECRET_KEY=%s\\ny",
]  # fmt: skip


def stay(makes: dict[str, Make], around: list[str], times: int) -> tuple[Counter[tuple[str, str]], int]:
    """(name, place) of secrets of which a part stays, counted; and how many there were."""
    rng, stayed, seen = Random(0), Counter[tuple[str, str]](), 0
    for name, make in makes.items():
        for place in around:
            for _ in range(times):
                secret, seen = make(rng), seen + 1
                text = Masker(Counter()).text(place % secret)
                stayed[name, place] += secret[-9:] in text or secret[:12] in text
    return +stayed, seen


# No token of a known form stays, not even its end.
def test_no_token_stays() -> None:
    assert stay(TOKENS, AROUND_TOKENS, 8)[0] == {}


# Of values that only their name gives away, at most one in a hundred looks like a word and stays.
def test_few_named_values_stay() -> None:
    stayed, seen = stay(VALUES, AROUND_VALUES, 20)
    assert stayed.total() <= seen // 100, stayed


# In the standard library's sources nearly nothing but authors' addresses is masked: examples of passwords and of homes.
@pytest.mark.parametrize("part", range(3))
def test_little_of_the_standard_library_is_masked(part: int) -> None:
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[part::3]
    found, size_bytes = Counter[str](), 0
    for path in sources:
        source = path.read_bytes()
        Masker(found).text(source.decode(errors="replace"))
        size_bytes += len(source)
    assert size_bytes > 500_000 and set(found) <= {"email", "password", "home-folder", "file-owner"}
    assert found["password"] + found["home-folder"] <= size_bytes / 500_000, found
    assert found["email"] <= size_bytes / 20_000, found
