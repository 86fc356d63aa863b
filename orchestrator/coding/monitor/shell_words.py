"""Command lines as simple commands: `cd x && cat a | grep -r b` is three.

Wrappers (env, timeout, xargs, bash -c, find -exec) and substitutions are opened, so that a rule sees what runs.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

_RESERVED = {"!", "if", "then", "elif", "else", "do", "while", "until", "time", "exec", "command", "builtin", "{"}
_ENDS = {"fi", "done", "}", "esac"}
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_DOCUMENT = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1([^\n]*)\n(.*?)(?:^[ \t]*\2[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_SUBSTITUTION = re.compile(r"[$<>]\((?!\()(.*?)\)|`([^`]*)`", re.DOTALL)
_WRAPPERS = {"env", "nohup", "setsid", "nice", "timeout", "xargs", "stdbuf", "sudo", "watch", "parallel"}
_WRAPPER_VALUE = re.compile(r"-.*|[\d.]+[smhd]?|\{\}|[A-Za-z_]\w*=.*", re.DOTALL)
"""Words between a wrapper and the program that it runs."""
_SHELLS = {"bash", "sh", "dash", "zsh"}
_MOST_DEPTH = 5


@dataclass(slots=True, kw_only=True)
class SimpleCommand:
    """One program and its words."""

    words: list[str] = field(default_factory=list)
    """The program and its arguments, without quotes. Files of redirections are left out."""
    read: list[str] = field(default_factory=list)
    """Files that redirections read."""
    document: str = ""
    """The here-document or here-string."""

    @property
    def program(self) -> str:
        return self.words[0].rpartition("/")[2] if self.words else ""

    @property
    def arguments(self) -> list[str]:
        return self.words[1:]


def simple_commands(text: str, depth: int = 0) -> list[SimpleCommand]:
    """Return the simple commands of a command line in order, those inside wrappers and substitutions too."""
    if depth > _MOST_DEPTH:
        return []
    documents = [match[4] for match in _DOCUMENT.finditer(text)]
    commands: list[SimpleCommand] = []
    for command in _split(_tokens(_DOCUMENT.sub(r"<<DOCUMENT\3\n", text)), documents):
        commands += [command, *_inside(command, depth)]
    for match in _SUBSTITUTION.finditer(text):
        inner = simple_commands(match[1] or match[2] or "", depth + 1)
        commands += [command for command in inner if command not in commands]  # Outside of quotes it was split above.
    return [command for command in commands if command.words and command.words[0] not in _ENDS]


def _tokens(text: str) -> list[str]:
    """Return words, and operators as words that begin with a NUL. Text that shlex cannot read is split at blanks."""
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=";&|<>()\n")
    lexer.whitespace, lexer.commenters = " \t\r", ""
    lexer.wordchars += "{}[]$%@^+:,!#"
    tokens: list[str] = []
    try:
        for token in lexer:
            tokens.append(f"\0{token.strip(' ')}" if token and not token.strip(";&|<>()\n") else token)
    except ValueError:
        pieces = re.findall(r"[;&|<>()\n]+|[^\s;&|<>()]+", text)
        return [f"\0{each}" if not each.strip(";&|<>()\n") else each.strip("'\"") for each in pieces]
    return tokens


def _split(tokens: list[str], documents: list[str]) -> Iterator[SimpleCommand]:
    command, waiting = SimpleCommand(), list(documents)
    redirection = ""
    for token in tokens:
        if token.startswith("\0"):
            redirection = token[1:] if token.strip("\0<>&|") == "" and ("<" in token or ">" in token) else ""
            if not redirection:
                yield command
                command = SimpleCommand()
        elif redirection:
            if redirection == "<<" and waiting:
                command.document += waiting.pop(0)
            elif redirection == "<<<":
                command.document += token
            elif redirection == "<":
                command.read.append(token)
            redirection = ""
        elif command.words or not (token in _RESERVED or _ASSIGNMENT.fullmatch(token)):
            command.words.append(token)
    yield command


def code_option(words: list[str]) -> str | None:
    """Return the word after `-c`, or after letters that end with it, `-lc`; None without one."""
    places = [index for index, word in enumerate(words[:-1]) if index and re.fullmatch(r"-[A-Za-z]*c", word)]
    return words[places[0] + 1] if places else None


def _inside(command: SimpleCommand, depth: int) -> list[SimpleCommand]:
    """Return the commands that a wrapper, a shell or `find -exec` runs."""
    words = command.words
    if command.program in _SHELLS:
        return simple_commands(code_option(words) or command.document, depth + 1)
    if command.program in _WRAPPERS and depth < _MOST_DEPTH:
        at = next((at for at, word in enumerate(words) if at and not _WRAPPER_VALUE.fullmatch(word)), len(words))
        inner = SimpleCommand(words=words[at:], read=command.read, document=command.document)
        return [inner, *_inside(inner, depth + 1)] if inner.words else []
    if command.program == "find":
        starts = [index for index, word in enumerate(words) if word in ("-exec", "-execdir", "-ok")]
        return [SimpleCommand(words=words[start + 1 :]) for start in starts if start + 1 < len(words)]
    return []
