"""Shell commands as tokens: commands with equal tokens do the same.

    word       'a b', "a b" and a' 'b are one
    operator   ; | || && > >> 2>&1 and a newline, outside quotes

Spaces between tokens and the kind of quotes do not count, nor the order of the options that directly follow a common
command and take no value: `ls -la` is `ls -a -l`. A command with anything else in it (an expansion, a pattern, a
here-document, a comment) is one token, as written: how a shell would read it takes a shell.
"""

from __future__ import annotations

import re

Token = str | tuple[str, str]
_PLAIN = r"[\w@%+:,./-]"
"""Characters for which it makes no difference whether they are quoted."""
_TOKEN = re.compile(
    r"(?P<blank>[ \t](?:[ \t]|\\\n)*)"
    r"|(?P<operator>(?<![^ \t])2>&1(?=[\s;|]|\Z)|&&|\|\||>>|[;|>\n])"
    rf"|(?P<word>(?:{_PLAIN}+|=|'[^']*'|\"[^\"\\$`]*\")+)"
)
_PIECE = re.compile(r"'([^']*)'|\"([^\"]*)\"|([^'\"]+)")
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
_BEFORE_COMMAND = {"\n", ";", "&&", "||", "|"}


def shell(command: str) -> tuple[Token, ...]:
    """Return the tokens of a command; one, ("unread", command), where it holds more than words and operators."""
    tokens: list[str] = []
    at, touching = 0, False
    while at < len(command):
        match = _TOKEN.match(command, at)
        if match is None or (touching and match["word"]):
            return (("unread", command),)
        at, touching = match.end(), match["word"] is not None
        if touching and match[0].isdigit() and command.startswith(">", at):  # a descriptor
            return (("unread", command),)
        if touching:
            tokens.append(_word(match[0]))
        elif match["operator"] and not (match[0] == "\n" and (not tokens or tokens[-1] == "\n")):
            tokens.append(match[0])
    return tuple(_ordered(tokens[:-1] if tokens and tokens[-1] == "\n" else tokens))


def _word(written: str) -> str:
    """Return a word, quoted in one way; as written where it may be an assignment or a reserved word."""
    pieces = _PIECE.findall(written)
    value = "".join(first or second or bare for first, second, bare in pieces)
    if not written.startswith("-") and any("=" in bare for _, _, bare in pieces):
        return written
    if value != written and _RESERVED.fullmatch(value):
        return written
    return value if re.fullmatch(f"{_PLAIN}+", value) else "'" + value.replace("'", "'\\''") + "'"


def _ordered(tokens: list[str]) -> list[str]:
    """Write the options that follow a command of _OPTIONS apart and in one order."""
    ordered: list[str] = []
    at = 0
    while at < len(tokens):
        token, first = tokens[at], not ordered or ordered[-1] in _BEFORE_COMMAND
        ordered.append(token)
        at += 1
        if not (first and token in _OPTIONS):
            continue
        plain, exclusive = _OPTIONS[token]
        start = at
        while at < len(tokens) and re.fullmatch(f"-[{plain}]+", tokens[at]):
            at += 1
        letters = set("".join(bundle[1:] for bundle in tokens[start:at]))
        if any(len(letters & set(group)) > 1 for group in exclusive):
            ordered += tokens[start:at]
        else:
            ordered += [f"-{letter}" for letter in sorted(letters)]
    return ordered
