"""Command lines as simple commands: `cd x && cat a | grep -r b` is three.

Wrappers (env, timeout, xargs, bash -c, find -exec) and substitutions are opened, so that a rule sees what runs.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence


def words_of(text: str) -> frozenset[str]:
    return frozenset(text.split())


_BEFORE_PROGRAM = words_of(
    "! if then elif else do while until time exec command builtin { } fi done esac env nohup setsid nice timeout xargs "
    "stdbuf sudo watch parallel"
)
"""Words of the shell, and programs that run another one."""
_VALUE = re.compile(r"-.*|[\d.]+[smhd]?|\{\}|[A-Za-z_]\w*=.*", re.DOTALL)
"""Options, numbers and assignments before a program."""
_DOCUMENT = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1([^\n]*)\n(.*?)(?:^[ \t]*\2[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_SUBSTITUTION = re.compile(r"[$<>]\((?!\()(.*?)\)|`([^`]*)`", re.DOTALL)
_OPERATORS = ";&|<>()\n"
_SHELLS = words_of("bash sh dash zsh")
_MOST_DEPTH = 5


def documents(text: str) -> list[str]:
    """Return the here-documents of a command line."""
    return [match[4] for match in _DOCUMENT.finditer(text)]


def program_of(words: Sequence[str]) -> str:
    return words[0].rpartition("/")[2]


def simple_commands(text: str, depth: int = 0) -> list[list[str]]:
    """Return the words of each simple command, those inside wrappers and substitutions too.

    Files that a redirection reads are among the words, those that it writes are not.
    """
    if depth > _MOST_DEPTH:
        return []
    commands: list[list[str]] = []
    for words in _split(_DOCUMENT.sub(r"\3\n", text)):
        commands += _opened(words, depth)
    for match in _SUBSTITUTION.finditer(text):
        commands += simple_commands(match[1] or match[2] or "", depth + 1)
    return commands


def _split(text: str) -> Iterator[list[str]]:
    words: list[str] = []
    is_written = False
    for token in _tokens(text):
        if token and not token.strip(_OPERATORS):
            is_written = ">" in token
            if not is_written and token.strip("<"):
                yield words
                words = []
        elif is_written:
            is_written = False
        else:
            words.append(token)
    yield words


def _tokens(text: str) -> list[str]:
    """Return words and operators. Text that shlex cannot read is split at blanks."""
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=_OPERATORS)
    lexer.whitespace, lexer.commenters = " \t\r", ""
    lexer.wordchars += "{}[]$%@^+:,!#"
    try:
        return list(lexer)
    except ValueError:
        return [piece.strip("'\"") for piece in re.findall(r"[;&|<>()\n]+|[^\s;&|<>()]+", text)]


def _opened(words: list[str], depth: int) -> list[list[str]]:
    """Return a command without what stands before its program, and the commands that it runs."""
    while words and (words[0] in _BEFORE_PROGRAM or _VALUE.fullmatch(words[0])):
        words = words[1:]
    if not words:
        return []
    if program_of(words) in _SHELLS:
        code = next((at for at, word in enumerate(words[:-1]) if re.fullmatch(r"-[A-Za-z]*c", word)), None)
        return simple_commands(words[code + 1], depth + 1) if code is not None else [words]
    inner = [words[at + 1 :] for at, word in enumerate(words) if word in ("-exec", "-execdir", "-ok")]
    return [words, *(each for command in inner if depth < _MOST_DEPTH for each in _opened(command, depth + 1))]
