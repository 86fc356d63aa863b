"""Final answers in replies: where they stand, and when two are the same. Also which questions are held out."""

from __future__ import annotations

import hashlib
import re
import zlib
from fractions import Fraction
from typing import Literal

Split = Literal["train", "eval"]
AnswerPlace = Literal["tag", "hashes", "last_line", "whole", "number"]

INSTRUCTIONS: dict[AnswerPlace, str] = {
    "tag": "Think, then give only the final answer between <answer> and </answer>.",
    "hashes": "Think, then give only the final answer on the last line, after ####.",
    "last_line": "Give the final answer alone on the last line.",
    "whole": "Give only the final answer.",
    "number": "Give the final answer as a number.",
}
"""System prompts that ask for the answer at a place."""

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_HASHES = re.compile(r"####[ \t]*(.*)")
_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")
_SIGN_AND_UNITS = re.compile(r"^([+-]?)\s*\\?[$€£]?\s*([+-]?)|\s*\\?%?\.?$")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d*)?", re.ASCII)
_PLAIN_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:/\d+)?", re.ASCII)
_NUMBER_DIGITS = 200


def split_of(name: str, eval_share: float) -> Split:
    """Return "eval" for a share `eval_share` (0..1) of all names, which are questions or repositories."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return "eval" if int.from_bytes(digest) < eval_share * 2**64 else "train"


def split_one_in(count: int, name: str) -> Split:
    """Return "eval" for one in about `count` of all names, by their CRC-32."""
    return "eval" if zlib.crc32(name.encode()) % count == 0 else "train"


def find_answer(reply: str, place: AnswerPlace) -> str | None:
    """Return the final answer in a reply, or None."""
    if place in ("tag", "hashes"):
        marked = (_TAGGED if place == "tag" else _HASHES).findall(reply)
        return marked[-1].strip() if marked else None
    if place == "number":
        numbers = _NUMBER.findall(reply)
        return numbers[-1].replace(",", "") if numbers else None
    lines = reply.strip().splitlines() if place == "last_line" else [reply]
    return (lines[-1].strip() or None) if lines else None


def same_answer(answer: str, expected: str) -> bool:
    """Tell whether two final answers are equal: as numbers where both are, else as text without case and spaces.

    Thousands separators, currency and percent signs count for nothing: "$1,200.00" is "1200". "1/2" is "0.5".
    """
    number, expected_number = _as_number(answer), _as_number(expected)
    if number is not None and expected_number is not None:
        return number == expected_number
    return _as_text(answer) == _as_text(expected)


def _as_number(answer: str) -> Fraction | None:
    plain = _SIGN_AND_UNITS.sub(r"\1\2", answer.strip())
    if _THOUSANDS.fullmatch(plain):
        plain = plain.replace(",", "")
    if len(plain) > _NUMBER_DIGITS or not _PLAIN_NUMBER.fullmatch(plain):
        return None
    numerator, _, denominator = plain.partition("/")
    try:
        return Fraction(numerator) / Fraction(denominator or 1)
    except ZeroDivisionError:
        return None


def _as_text(answer: str) -> str:
    return " ".join(answer.casefold().split()).strip(".")
