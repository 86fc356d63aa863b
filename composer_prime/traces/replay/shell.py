"""Shell commands as tokens: commands with equal tokens do the same.

    word             'a b', "a b" and a\\ b are one; as written where something in it is active: *.py, "$HOME", x=1
    operator         ; | && 2>> ( and a newline, outside quotes only
    here-document    ("heredoc", body), verbatim
    comment          as written

Spaces between tokens and the kind of quotes do not count, nor the order of the options that directly follow a common
command and take no value: `ls -la` is `ls -a -l`. Where it is unclear how a shell would read a command, the
whole of it is one token, as written. After the token recognition, quoting and here-documents of POSIX.1-2024, Shell
Command Language, 2.2, 2.3 and 2.7.4, and the expansions of bash.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

Token = str | tuple[str, str]
JOINED = ""
"""Between a parenthesis and a word that touch: `a=(1)` and `a= (1)` differ."""
_BLANK = re.compile(r"(?:[ \t]|\\\n)+")
_OPERATOR = re.compile(r"<<<|<<-?|<[&>(]?|>[>&|(]?|&&|&>>?|&|\|[|&]?|;;&|;[;&]?|\(\(?|\)\)?|\n")
_ENDS_WORD = " \t\n;&|<>()"
_DESCRIPTOR = re.compile(r"\d+|\{\w+\}")
_DELIMITER = re.compile(r"""[ \t]*('([^'\n]+)'|"([^"\\$`\n]+)"|\\?([\w.-]+))(?=[ \t\n;&|<>()]|\Z)""")
_PLAIN = re.compile(r"[\w@%+:,./-]+")
"""Characters for which it makes no difference whether they are quoted."""
_SINGLE = re.compile(r"'([^']*)'")
_DOUBLE = re.compile(r'"((?:[^"\\$`]|\\.)*)"', re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED_IN_DOUBLE = re.compile(r'\\(?:([$`"\\])|\n)')
_UP_TO_EXPANSION = re.compile(r'(?:[^"\\$`]|\\.|\$\$|\$(?![({]))*', re.DOTALL)
_EXPANSION = re.compile(
    r"""\$'(?:[^'\\]|\\.)*'|\$[$?!\#@*-]|\$\w+|\$\{(?:[^'"`\\{}$]|\$(?![({]))*\}|`(?:[^`\\]|\\.)*`""", re.DOTALL
)
_TANGLED = re.compile(r"<<|\bcase\b|[\s;&|()]#")
"""Inside $( ), these may hold a parenthesis or a quote that does not count."""
_RESERVED = re.compile(r"if|then|elif|else|fi|for|select|in|while|until|do|done|case|esac|function|time|coproc")
"""No longer reserved when quoted."""


_OPTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ls": ("lahARrtSdF1ips", ("l1", "tS", "aA", "Fp")),
    "grep": ("rRnilcvwxohHsqEFPIaL", ("EFP", "hH", "lLcoq", "rR")),
    "rm": ("rfv", ()),
    "cp": ("rpv", ()),
    "mkdir": ("pv", ()),
    "wc": ("lwcm", ()),
    "du": ("shac", ("sa",)),
    "df": ("hT", ()),
}
"""Options without a value, and those of which the last one counts, by command."""
_BEFORE_COMMAND = {"\n", ";", "&&", "||", "|", "|&", "&", "(", "!"}


class _UnsureError(Exception):
    pass


def shell(command: str) -> tuple[Token, ...]:
    """Return the tokens of a command; one, ("unread", command), where it cannot be read for sure."""
    try:
        if "=~" in command:  # spaces and parentheses mean something else in a regular expression
            raise _UnsureError
        tokens = list(_tokens(command))
    except (_UnsureError, RecursionError):
        return (("unread", command),)
    tokens = _ordered(tokens)
    lines = [token for index, token in enumerate(tokens) if token != "\n" or (index and tokens[index - 1] != "\n")]
    return tuple(lines[:-1] if lines and lines[-1] == "\n" else lines)


def _ordered(tokens: list[Token]) -> list[Token]:
    """Write the options that follow a command of _OPTIONS apart and in one order."""
    ordered: list[Token] = []
    at = 0
    while at < len(tokens):
        token, first = tokens[at], not ordered or ordered[-1] in _BEFORE_COMMAND
        ordered.append(token)
        at += 1
        if not (first and isinstance(token, str) and token in _OPTIONS):
            continue
        plain, exclusive = _OPTIONS[token]
        start = at
        while at < len(tokens) and _is_bundle(tokens[at], plain):
            at += 1
        letters = set("".join(str(bundle)[1:] for bundle in tokens[start:at]))
        if any(len(letters & set(group)) > 1 for group in exclusive):
            ordered += tokens[start:at]
        else:
            ordered += [f"-{letter}" for letter in sorted(letters)]
    return ordered


def _is_bundle(token: Token, plain: str) -> bool:
    return isinstance(token, str) and len(token) > 1 and token[0] == "-" and set(token[1:]) <= set(plain)


def _tokens(text: str) -> Iterator[Token]:
    at, touching = 0, None
    """Where a word, or a closing parenthesis, ended last."""
    pending: list[tuple[str, bool]] = []
    while at < len(text):
        if blank := _BLANK.match(text, at):
            if text[at] == "\\" and at and text[at - 1] not in " \t\n":
                raise _UnsureError  # a continued line joins the words on both sides
            at = blank.end()
        elif text[at] == "#":
            start, at = at, _end_of_line(text, at)
            yield text[start:at]
        elif operator := _OPERATOR.match(text, at):
            if operator[0].endswith("(") and touching == at:
                yield JOINED
            yield operator[0]
            at = operator.end()
            if operator[0] in ("<<", "<<-"):
                written, delimiter, at = _delimiter(text, at)
                pending.append((delimiter, operator[0] == "<<-"))
                yield written
            elif operator[0] == "\n":
                for delimiter, indented in pending:
                    body, at = _here_document(text, at, delimiter, indented)
                    yield "heredoc", body
                pending = []
            touching = at if operator[0].startswith(")") else None
        else:
            if touching == at:
                yield JOINED
            start, (token, at) = at, _word(text, at)
            if pending and "\n" in text[start:at]:
                raise _UnsureError
            redirects = text[at : at + 1] in ("<", ">") and _DESCRIPTOR.fullmatch(text, start, at)
            yield ("descriptor", token) if redirects else token
            touching = at


def _word(text: str, at: int) -> tuple[str, int]:
    """Return (the word, its end): quoted in one way where nothing in it is active, else as written."""
    start, literal, active = at, list[str](), False
    while at < len(text) and text[at] not in _ENDS_WORD:
        if text.startswith("\\\n", at):
            raise _UnsureError
        if match := _PLAIN.match(text, at):
            literal.append(match[0])
            at = match.end()
        elif text[at] == "=" and text[start] == "-":  # an option, so no assignment
            literal.append("=")
            at += 1
        elif match := _SINGLE.match(text, at):
            literal.append(match[1])
            at = match.end()
        elif match := _DOUBLE.match(text, at):
            literal.append(_ESCAPED_IN_DOUBLE.sub(lambda escaped: escaped[1] or "", match[1]))
            at = match.end()
        elif match := _ESCAPED.match(text, at):
            literal.append(match[1])
            active = active or _PLAIN.match(match[1]) is not None  # \rm is no alias, \~ no home
            at = match.end()
        else:
            active, at = True, _end_of_active(text, at)
    value, written = "".join(literal), text[start:at]
    if active or (value != written and _RESERVED.fullmatch(value)):
        return written, at
    return value if _PLAIN.fullmatch(value) else "'" + value.replace("'", "'\\''") + "'", at


def _end_of_active(text: str, at: int) -> int:
    """Return where the expansion, the double quotes around one, or the single active character at `at` ends."""
    if match := _EXPANSION.match(text, at):
        return match.end()
    if text.startswith("$(", at):
        return _end_of_substitution(text, at + 2)
    if text[at] == '"':
        return _end_of_double(text, at + 1)
    if text[at] in "'`" or text.startswith(("${", "$'"), at):
        raise _UnsureError
    return at + 1


def _end_of_double(text: str, at: int) -> int:
    """`at` is inside double quotes."""
    while True:
        match = _UP_TO_EXPANSION.match(text, at)
        at = match.end() if match else at
        if at >= len(text):
            raise _UnsureError
        if text[at] == '"':
            return at + 1
        at = _end_of_active(text, at)


def _end_of_substitution(text: str, at: int) -> int:
    """`at` is after the opening parenthesis of $( )."""
    start, depth = at, 1
    while depth:
        if at >= len(text):
            raise _UnsureError
        if match := _SINGLE.match(text, at) or _ESCAPED.match(text, at):
            at = match.end()
        elif text[at] in "'\"`$":
            at = _end_of_active(text, at)
        else:
            depth += (text[at] == "(") - (text[at] == ")")
            at += 1
    if _TANGLED.search(text, start - 1, at):
        raise _UnsureError
    return at


def _delimiter(text: str, at: int) -> tuple[str, str, int]:
    """Return (as written, without quotes, its end)."""
    match = _DELIMITER.match(text, at)
    if match is None:
        raise _UnsureError
    return match[1], match[2] or match[3] or match[4], match.end()


def _here_document(text: str, at: int, delimiter: str, indented: bool) -> tuple[str, int]:
    """Return (the lines before the delimiter, where the text continues); all the rest without a delimiter."""
    start = at
    while at < len(text):
        end = _end_of_line(text, at)
        line = text[at:end]
        if (line.lstrip("\t") if indented else line) == delimiter:
            return text[start:at], min(end + 1, len(text))
        at = min(end + 1, len(text))
    return text[start:], at


def _end_of_line(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end
