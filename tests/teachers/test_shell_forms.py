"""Which shell commands are the same: spacing and the kind of quotes do not count, what the shell makes of them does."""

from __future__ import annotations

import re
import shlex

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from composer_prime.traces.replay.shell import shell

WORDS = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), min_size=1, max_size=4)
BLANKS = st.sampled_from([" ", "  ", "\t", " \\\n"])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("ls  -la 'a b'", 'ls -la "a b"'),
        ("ls|wc", "ls | wc"),
        ("a>f 2>&1", "a > f 2>&1"),
        ("grep --include='*.py' x", 'grep "--include=*.py" x'),
        ("\n\nls\n\n\nwc\n", "ls\nwc"),
        ("ls \\\n  -la", "ls -la"),
        ('cat "a.py"', "cat a.py"),
    ],
)
def test_the_same_command(first: str, second: str) -> None:
    assert shell(first) == shell(second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("echo a\nrm b", "echo a rm b"),
        ("rm '*'", "rm *"),
        ("echo ';' rm x", "echo ; rm x"),
        ("echo '\n' rm x", "echo \n rm x"),
        ("echo '$HOME'", 'echo "$HOME"'),
        ('echo "$HOME"', "echo $HOME"),
        ("ls '~'", "ls ~"),
        ("ls ~'/a'", "ls ~/a"),
        ("ls [a'-'c]", "ls [a-c]"),
        ("echo {a','b}", "echo {a,b}"),
        ("'a'=b", "a=b"),
        ("\\rm a", "rm a"),
        ("'if' a", "if a"),
        ("rm a # b", "rm a"),
        ("echo 2>f", "echo 2 >f"),
        ("echo '2'>f", "echo 2>f"),
        ("a&>f", "a & >f"),
        ("ls @(a|b)c", "ls @(a|b) c"),
        ("a=(b)", "a= (b)"),
        ("ls a<(b)", "ls a <(b)"),
        ("echo 'open", "echo  'open"),
        ("cat <<EOF\na  b\nEOF", "cat <<EOF\na b\nEOF"),
        ("cat <<EOF\n$a\nEOF", "cat <<'EOF'\n$a\nEOF"),
        ("cat <<EOF\na\nEOF\nb", "cat <<EOF\na\nEOF b"),
        ("cat <<EOF\n\ta\n\tEOF\nb  c", "cat <<-EOF\n\ta\n\tEOF\nb  c"),
        ("[[ a =~ (b  c) ]]", "[[ a =~ (b c) ]]"),
        ('git commit -m "$(cat <<E\n:) "a  b"\nE\n)"', 'git commit -m "$(cat <<E\n:) "a b"\nE\n)"'),
        ("echo $(case x in x) echo \"a  b\";; esac)", "echo $(case x in x) echo \"a b\";; esac)"),
        ("echo `echo 'a  b'`", "echo `echo 'a b'`"),
        ("echo ${a:-'b  c'}", "echo ${a:-'b c'}"),
        ("echo $'a\\'  b'", "echo $'a\\' b'"),
        ("a\\\n&&b", "a &&b # "),
        ("cat <\\\n<E\na  b\nE", "cat <\\\n<E\na b\nE"),
    ],
)  # fmt: skip
def test_another_command(first: str, second: str) -> None:
    assert shell(first) != shell(second)


# Python's own quoting as oracle: words come back whatever stands between them, and other words are another form.
@given(WORDS, WORDS, st.data())
def test_words_are_told_apart(words: list[str], others: list[str], data: st.DataObject) -> None:
    spaced = "".join(shlex.quote(word) + data.draw(BLANKS) for word in words)
    assert shell(spaced) == shell(shlex.join(words)) and len(shell(spaced)) == len(words)
    assert (shell(shlex.join(words)) == shell(shlex.join(others))) == (words == others)


# Any character inside quotes, and any character of a here-document, counts; so does whether one is quoted at all that
# could mean something.
@given(st.text(max_size=9), st.text(max_size=9), st.sampled_from(["'", "cat <<'END'\n"]))
def test_every_quoted_character_counts(first: str, second: str, opening: str) -> None:
    closing = "'" if opening == "'" else "\nEND\n"
    assume(first != second and closing.strip() not in first + second)
    assert shell(f"{opening}{first}{closing}") != shell(f"{opening}{second}{closing}")


@given(st.text("ab", max_size=3), st.sampled_from("*?[]{}~$`\\!#;&|<>()\n \t="), st.text("ab", max_size=3))
def test_quotes_around_what_is_active_count(before: str, active: str, after: str) -> None:
    assert shell(f"x {before}'{active}'{after}") != shell(f"x {before}{active}{after}")


# A form says all that the command says but for spaces and quotes (and the line that ends a here-document).
@given(st.text("ab '\"\\$();<>\n#2={}*`", max_size=12))
def test_nothing_but_spaces_and_quotes_is_left_out(command: str) -> None:
    assume("<<" not in command)
    said = "".join(token if isinstance(token, str) else token[1] for token in shell(command))
    assert re.sub(r"[\s'\"\\]", "", said) == re.sub(r"[\s'\"\\]", "", command)
