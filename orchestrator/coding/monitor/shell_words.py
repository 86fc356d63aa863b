"""Command lines as simple commands: `cd x && cat a | grep -r b` is three.

Wrappers (env, timeout, xargs, bash -c, find -exec) and substitutions are opened, so that a rule sees what runs. A
command that cannot be read for sure is split at its operators; nothing in it is skipped.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from composer_prime.traces.replay.actions.shell import JOINED, Token, shell

_SEPARATORS = {";", "&&", "||", "|", "|&", "&", "\n", "(", ")", "{", "}", "((", "))", ";;"}
_PIPES = {"|", "|&"}
_RESERVED = {
    "!",
    "if",
    "then",
    "elif",
    "else",
    "fi",
    "do",
    "done",
    "while",
    "until",
    "time",
    "exec",
    "command",
    "builtin",
}
_LOOPS = {"while", "until", "for"}
_WRITES = {">", ">>", ">|", "&>", "&>>", "<>"}
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_SUBSTITUTION = re.compile(r"[$<>]\((?!\()|`([^`]*)`")
_WRAPPERS = {"env", "nohup", "setsid", "nice", "ionice", "timeout", "xargs", "stdbuf", "sudo", "doas", "watch",
             "parallel"}  # fmt: skip
_WRAPPER_VALUE = re.compile(r"-.*|[\d.]+[smhd]?|\{\}|[%@]|[A-Za-z_]\w*=.*", re.DOTALL)
"""Words between a wrapper and the program that it runs."""
_SHELLS = {"bash", "sh", "dash", "zsh", "ash", "ksh"}
_MOST_DEPTH = 5


@dataclass(slots=True, kw_only=True)
class SimpleCommand:
    """One program and its words."""

    words: list[str] = field(default_factory=list)
    """The program's name, without its folder, and its arguments, without quotes."""
    written: list[str] = field(default_factory=list)
    """Files that redirections replace. What is only appended to keeps its content."""
    read: list[str] = field(default_factory=list)
    """Files that redirections read."""
    document: str = ""
    """The here-document or here-string."""
    consumers: list[SimpleCommand] = field(default_factory=list)
    """The commands that follow in its pipe, as they are written, also those of a loop at its end."""

    @property
    def program(self) -> str:
        return self.words[0].rpartition("/")[2] if self.words else ""

    @property
    def arguments(self) -> list[str]:
        return self.words[1:]


def simple_commands(text: str, depth: int = 0) -> list[SimpleCommand]:
    """Return the simple commands of a command line in order, those inside wrappers and substitutions too."""
    commands: list[SimpleCommand] = []
    if depth > _MOST_DEPTH:
        return commands
    producers: list[tuple[SimpleCommand, int]] = []
    was_piped = False
    for tokens, is_piped, loops in _split(_read(text)):
        command = _simple(tokens)
        if not was_piped:  # A pipe into a loop feeds each command of the loop.
            producers = [(producer, outside) for producer, outside in producers if outside < loops]
        for producer, _ in producers:
            producer.consumers.append(command)
        producers += [(command, loops)] if is_piped else []
        was_piped = is_piped
        commands.append(command)
        commands += _inside(command, depth)
    for match in _SUBSTITUTION.finditer(text):
        inner = match[1] if match[1] is not None else text[match.end() : _closing(text, match.end())]
        commands += simple_commands(inner, depth + 1)
    return [command for command in commands if command.words or command.written]


def _closing(text: str, start: int) -> int:
    """Return where the parenthesis that is open at `start` closes; the end of the text where it does not."""
    depth = 1
    for at in range(start, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if not depth:
            return at
    return len(text)


def _read(text: str) -> tuple[Token, ...]:
    tokens = shell(text)
    if len(tokens) == 1 and isinstance(tokens[0], tuple) and tokens[0][0] == "unread":
        lexer = shlex.shlex(text.replace("\n", " ; "), posix=False, punctuation_chars="();<>|&")
        lexer.whitespace_split = True
        lexer.commenters = ""
        try:
            return tuple(lexer)
        except ValueError:
            return tuple(re.findall(r"[;&|<>()]+|[^\s;&|<>()]+", text))
    return tokens


def _split(tokens: tuple[Token, ...]) -> Iterator[tuple[list[Token], bool, int]]:
    """Yield the tokens of each simple command, whether a pipe follows it, and how many loops it is in."""
    current: list[Token] = []
    loops = 0
    for token in tokens:
        if not current and isinstance(token, str):
            loops += (token in _LOOPS) - (token == "done")
        if isinstance(token, str) and (token in _SEPARATORS or (not current and token in _RESERVED)):
            if current:
                yield current, token in _PIPES, loops
            current = []
        elif isinstance(token, tuple) and token[0] == "heredoc" and not current:
            yield [token], False, loops  # The body follows its command's line.
        else:
            current.append(token)
    if current:
        yield current, False, loops


def _simple(tokens: list[Token]) -> SimpleCommand:
    command = SimpleCommand()
    at = 0
    while at < len(tokens):
        token = tokens[at]
        at += 1
        if isinstance(token, tuple):
            command.document += token[1] if token[0] in ("heredoc", "unread") else ""
            if token[0] == "heredoc" and not command.words:
                command.words = ["<<"]
        elif token in _WRITES or token in ("<", "<<<", "<<", "<<-", ">&", "<&"):
            target = _unquoted(tokens[at]) if at < len(tokens) else ""
            at += 1
            if token in _WRITES and not token.endswith(">>"):
                command.written.append(target)
            elif token == "<":
                command.read.append(target)
            elif token == "<<<":
                command.document += target
        elif token == JOINED or (not command.words and _ASSIGNMENT.match(token)) or token.startswith("#"):
            continue
        else:
            command.words.append(_unquoted(token))
    return command


def _unquoted(token: Token) -> str:
    if isinstance(token, tuple):
        return token[1]
    try:
        parts = shlex.split(token)
    except ValueError:
        return token.strip("'\"")
    return " ".join(parts) if parts else ""


def code_option(words: list[str]) -> str | None:
    """Return the word after `-c`, or after letters that end with it, `-lc`; None without one."""
    places = [index for index, word in enumerate(words[:-1]) if index and re.fullmatch(r"-[A-Za-z]*c", word)]
    return words[places[0] + 1] if places else None


def wrapped(command: SimpleCommand) -> SimpleCommand:
    """Return the command that wrappers such as xargs and env run; the command itself without one."""
    chain = [command, *(_inside(command, 0) if command.program in _WRAPPERS else [])]
    return next((each for each in chain if each.program not in _WRAPPERS), command)


def _inside(command: SimpleCommand, depth: int) -> list[SimpleCommand]:
    """Return the commands that a wrapper, a shell or `find -exec` runs."""
    words = command.words
    if command.program in _SHELLS:
        code = code_option(words)
        if code is not None:
            return simple_commands(code, depth + 1)
        return simple_commands(command.document, depth + 1) if command.document else []
    if command.program in _WRAPPERS:
        rest = words[1:]
        while rest and _WRAPPER_VALUE.fullmatch(rest[0]):
            rest = rest[1:]
        inner = SimpleCommand(words=rest, written=command.written, read=command.read, document=command.document)
        return [inner, *_inside(inner, depth + 1)] if rest and depth < _MOST_DEPTH else []
    if command.program == "find":
        starts = [index for index, word in enumerate(words) if word in ("-exec", "-execdir", "-ok")]
        return [SimpleCommand(words=words[start + 1 :]) for start in starts if start + 1 < len(words)]
    return []
