"""Read Aider's .aider.chat.history.md: what the user typed, the model answered and Aider printed, in Markdown.

    # aider chat started at 2025-01-02 03:04:05     a session, and a trace
    > Model: gpt-4o with diff edit format           Aider's own words
    #### add a test                                 the user's; one line a line
    (any other text)                                the model's answer, with its edits

1. Aider ends its own lines and the user's with two spaces. So a comment or a quotation in the model's code is not
   mistaken for one. Files whose line ends were trimmed are read only by the beginnings of lines.
2. Commands to Aider (`/add a.py`) are skipped. `/ask`, `/code` and `/architect` carry a message.
3. Aider's words between two answers are shown as the user's: a failed edit is reported so. Others are skipped.

A record is a session's title, or adjacent lines of one speaker.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from composer_prime.traces.ingest.messages import TraceBuilder, failure
from composer_prime.traces.ingest.reading import CHUNK_BYTES, FileStart
from composer_prime.traces.ingest.trace_file import TraceFile
from composer_prime.traces.state import TraceState

NAME, VERSION = "aider", 1
"""Written for Aider 0.20 to 0.8x."""
FILE = ".aider.chat.history.md"
_TITLE = re.compile(rb"# aider chat started at \d")
_STRICT = re.compile(rb"^(?:####|>) [^\n]*  \r?$", re.MULTILINE)
_MODEL = re.compile(r"^(?:Main )?[Mm]odel: (?P<name>\S+)(?: with|$)", re.MULTILINE)
_COMMAND = re.compile(r"/(?P<name>[a-z-]+)\s*(?P<rest>.*)", re.DOTALL)
_WITH_MESSAGE = {"ask", "code", "architect", "context"}
_ASIDE = re.compile(
    r"(?:Aider v|(?:Main |Weak |Editor )?[Mm]odel: |Git repo: |Repo-map: |Tokens: |Cost: |Applied edit to |Commit "
    r"|Added |Use /help|Restored previous|Running |You can skip|Newer aider|https?://|Update git|Add .*\? y"
    r"|Allow edits|Scraping )"
)
_FAILED = re.compile(
    r"did not conform to the edit format|SearchReplace\w+|failed to (?:match|apply|exactly match)|can't edit|Can't edit"
    r"|Malformed|\bTraceback\b|(?:\A|\n)\S*Error\b|exit(?:ed)? (?:code|status) [1-9]|Invalid edit|No filename provided"
)


def matches(sample: FileStart) -> bool:
    return sample.document is None and _TITLE.match(sample.head.lstrip()) is not None


def read(file: TraceFile) -> Iterator[TraceState]:
    if file.path.is_dir() or file.whole is not None:
        file.unknown()
        return
    history = _History(file)
    for kind, text in _blocks(file):
        reason = history.take(kind, text)
        if reason is None:
            file.tally.take()
        else:
            file.tally.skip(reason)
        yield from file.drain()
    history.end()
    yield from file.drain()


def _blocks(file: TraceFile) -> Iterator[tuple[str, str]]:
    """Yield (title, user, aider or model; text) of adjacent lines of one speaker, each at most as long as a context."""
    limit = file.options.limits.context_chars
    with file.path.open("rb", buffering=CHUNK_BYTES) as opened:
        strict = _STRICT.search(opened.read(CHUNK_BYTES)) is not None
        opened.seek(0)
        speaker, said, size, left = "model", list[str](), 0, file.size
        while raw := opened.readline(min(limit, left)):
            left -= len(raw)
            kind, line = _line(raw, strict)
            kind = kind if line.strip() else speaker
            if said and (kind != speaker or kind == "title"):
                yield speaker, "\n".join(said)
                said, size = [], 0
            speaker = kind
            if size <= limit:  # a longer one is skipped for its length anyway
                said.append(line)
                size += len(line) + 1
            if file.progress is not None:
                file.progress(len(raw))
        if said:
            yield speaker, "\n".join(said)


def _line(raw: bytes, strict: bool) -> tuple[str, str]:
    """Return (speaker, text) of a line."""
    line = raw.decode("utf-8", "replace").rstrip("\r\n")
    if _TITLE.match(raw):
        return "title", line
    marked = not strict or line.endswith("  ")
    if marked and line.startswith("#### "):
        return "user", line[5:].rstrip()
    if marked and line.startswith("> "):
        return "aider", line[2:].rstrip()
    return "model", line


class _History:
    """What is known of the history so far. Aider's own words are held until the next speaker is known."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self._builder: TraceBuilder | None = None
        self._model: str | None = None
        self._words = ""
        """Aider's own lines since the last answer that are not used yet."""
        self._answered = False
        """Whether the last message is the model's."""

    def take(self, kind: str, text: str) -> str | None:
        """Process one record. Return why it is skipped; None when it is not."""
        if not text.strip():
            return "blank lines"
        if kind == "title":
            self._begin(text.strip().removeprefix("# aider chat started at "))
            return None
        if kind == "aider":
            return self._own_words(text)
        if kind == "user":
            return self._user(text)
        return self._answer(text.strip("\n"))

    def end(self) -> None:
        """Close the last session. An error that Aider reported at its end belongs to the last answer."""
        if self._words:
            self._tell(None)
        if self._builder is not None:
            self._builder.close()

    def _begin(self, started: str) -> None:
        self.end()
        name = f"{self._file.path.resolve().parent.name} {started}"
        self._builder = TraceBuilder(self._file, name)
        self._words, self._answered, self._model = "", False, None

    def _of_session(self) -> TraceBuilder:
        if self._builder is None:
            self._begin(self._file.path.stem)
        assert self._builder is not None
        return self._builder

    def _own_words(self, text: str) -> str | None:
        named = _MODEL.search(text)
        self._model = named["name"] if named else self._model
        told = "\n".join(line for line in text.split("\n") if line.strip() and not _ASIDE.match(line))
        if not told or not self._answered:
            return "words of Aider itself"
        self._words = f"{self._words}\n{told}".strip()
        return None

    def _user(self, text: str) -> str | None:
        command = _COMMAND.match(text.strip())
        if command is not None and not (command["name"] in _WITH_MESSAGE and command["rest"].strip()):
            return "command to Aider"
        self._tell((text if command is None else command["rest"]).strip())
        return None

    def _tell(self, text: str | None) -> None:
        """Show the user's text, behind what Aider said since the answer where that tells of an error."""
        words, self._words = self._words, ""
        error = words if _FAILED.search(words) else failure(words)
        shown = [part for part in (words if error or text is None else "", text or "") if part]
        if shown:
            self._of_session().context("user", "\n\n".join(shown), error=error)
        self._answered = False

    def _answer(self, text: str) -> str | None:
        builder = self._of_session()
        if self._words:
            self._tell(None)
        builder.assistant(text, model=self._model)
        self._answered = True
        return None
