"""One call to a provider: a command line that prints JSON, or one HTTPS request. `rent --dry-run` prints both.

Nothing here knows a provider. A call is data, so that a dry run can show it and a test can compare it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import ssl
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from composer_prime.errors import ProviderError, ProviderLoginError, ProviderRefusedError

CALL_TIMEOUT_S = 120.0
"""The longest wait for the answer to one call."""

_LONG_TEXT = 200
"""Characters from which a printed call shows the length of a text instead of the text."""

_LOGGED_OUT = re.compile(r"\b(401|403)\b|unauthori[sz]ed|api[ -]?key|log ?in\b", re.IGNORECASE)
"""What providers answer to a call without a valid key."""

_HTTP_STATUS = re.compile(
    r"""(?:HTTP|"status_code":|error '?)\s?(\d{3})\b|\b(\d{3}) (?:client|server) error""", re.IGNORECASE
)
_WORDED_REFUSAL = re.compile(r"API key unauthorized|payment required", re.IGNORECASE)
"""How the providers' commands print that HTTP answered with an error; Prime's has words for 401 and 402."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """What the user needs before the first call."""

    install: str = ""
    """How to install the provider's command; empty where it has none."""
    remedy: str
    """How to log in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderCall:
    """One call. Exactly one of `words` and `url` is set."""

    login: Login
    words: tuple[str, ...] = ()
    """A command line."""
    stdin: str = ""
    """What the command reads. Secrets go here, because other users of the machine can read command lines."""
    silent: bool = False
    """Whether the command prints nothing when it works."""
    method: str = "GET"
    url: str = ""
    key_variable: str = ""
    """The environment variable that holds the bearer token."""
    body: Mapping[str, Any] | None = None
    timeout_s: float = CALL_TIMEOUT_S

    def text(self) -> str:
        """Return the call for a person, with long texts as their length."""
        if self.words:
            stdin = f"   # stdin: {len(self.stdin):,} characters" if self.stdin else ""
            return shlex.join(self.words) + stdin
        body = "" if self.body is None else " " + json.dumps(_shortened(self.body))
        return f"{self.method} {self.url}{body}   # bearer token: ${self.key_variable}"


def answer_to(call: ProviderCall) -> str:
    """Make the call and return what it answered. Raises ProviderError with the provider's own text.

    That is a ProviderRefusedError where the provider answered no, and a ProviderLoginError where no call could be
    made. After any other error the call may have worked.
    """
    return _command_output(call) if call.words else _response(call)


def json_of(answer: str, subject: str, kind: type = dict) -> Any:
    """Return the JSON object or list in `answer`. Raises ProviderError that names `subject` and shows the text."""
    try:
        content = json.loads(answer)
    except json.JSONDecodeError:
        raise ProviderError(f"{subject}: the answer is not JSON: {_tail(answer) or 'it is empty'}") from None
    if not isinstance(content, kind):
        raise ProviderError(f"{subject}: the answer is not a {kind.__name__}: {_tail(answer)}")
    return content


def _command_output(call: ProviderCall) -> str:
    if shutil.which(call.words[0]) is None:
        raise ProviderLoginError(f"the command {call.words[0]} is not installed: {call.login.install}")
    # rich breaks lines at the terminal's width, even in the middle of JSON.
    environment = {**os.environ, "COLUMNS": "10000", "NO_COLOR": "1", "TERM": "dumb"}
    try:
        done = subprocess.run(
            call.words, input=call.stdin, capture_output=True, text=True, errors="replace", timeout=call.timeout_s,
            env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ProviderError(f"`{call.text()}` gave no answer within {call.timeout_s:g} s") from None
    except OSError as error:
        raise ProviderError(f"`{call.text()}` could not start: {error}") from None
    # `vastai` exits with status 0 after an HTTP error, with the message on stderr and nothing on stdout.
    if done.returncode != 0 or not (done.stdout.strip() or call.silent):
        text = _tail(done.stderr) or _tail(done.stdout)
        killed = done.returncode < 0 or done.returncode > 128
        raise _failure(call, text, f"status {done.returncode}", refused=not killed and _says_refused(text))
    return done.stdout


def _response(call: ProviderCall) -> str:
    import httpx

    key = os.environ.get(call.key_variable, "").strip()
    if not key:
        raise ProviderLoginError(f"${call.key_variable} is not set: {call.login.remedy}")
    try:
        response = httpx.request(
            call.method,
            call.url,
            headers={"Authorization": f"Bearer {key}"},
            json=call.body,
            timeout=call.timeout_s,
            verify=_certificates(),
        )
    except httpx.HTTPError as error:
        raise ProviderError(f"{call.method} {call.url} failed: {type(error).__name__}: {error}") from None
    if response.is_error:
        refused = _is_refusal(response.status_code)
        raise _failure(call, _tail(response.text), f"HTTP {response.status_code}", refused=refused)
    return response.text


@cache
def _certificates() -> ssl.SSLContext:
    """Return what httpx would make for each request, which takes a tenth of a second."""
    import httpx

    return httpx.create_ssl_context()


def _is_refusal(status: int) -> bool:
    """Return whether an HTTP status says that nothing was done. 408 is a timeout: the request may have been done."""
    return 400 <= status < 500 and status != 408


def _says_refused(text: str) -> bool:
    status = _HTTP_STATUS.search(text)
    return _is_refusal(int(status[1] or status[2])) if status else bool(_WORDED_REFUSAL.search(text))


def _failure(call: ProviderCall, text: str, status: str, *, refused: bool) -> ProviderError:
    login = f"; {call.login.remedy}" if _LOGGED_OUT.search(f"{text} {status}") else ""
    shown = shlex.join(call.words[:4]) if call.words else f"{call.method} {call.url}"
    message = f"`{shown}` {'was refused' if refused else 'failed'} ({status}): {text or 'no message'}{login}"
    return ProviderRefusedError(message) if refused else ProviderError(message)


def _tail(text: str) -> str:
    return text.strip()[-500:]


def _shortened(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) < _LONG_TEXT else f"<{len(value):,} characters>"
    if isinstance(value, Mapping):
        return {key: _shortened(part) for key, part in value.items()}
    return [_shortened(part) for part in value] if isinstance(value, list) else value
