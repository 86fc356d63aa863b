"""Final answers in replies: where they stand, when two are the same, and tasks of one answer."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.utils.artifacts import MAX_ARTIFACT_BYTES

AnswerPlace = Literal["tag", "hashes", "last_line", "whole", "number"]

INSTRUCTIONS: dict[AnswerPlace, str] = {
    "tag": "Think, then give only the final answer between <answer> and </answer>.",
    "hashes": "Think, then give only the final answer on the last line, after ####.",
    "last_line": "Give the final answer alone on the last line.",
    "whole": "Give only the final answer.",
    "number": "Give the final answer as a number.",
}
"""System prompts by the answer's place."""

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_HASHES = re.compile(r"####[ \t]*(.*)")
_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")
_SIGN_AND_UNITS = re.compile(r"^([+-]?)\s*\\?[$€£]?\s*([+-]?)|\s*\\?%?\.?$")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d*)?", re.ASCII)
_PLAIN_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:/\d+)?", re.ASCII)
_NUMBER_DIGITS = 200


class TaskRow(vf.TaskData):
    """verifiers' row, for type checkers: they take a field for required whose default is positional."""

    artifact_max_bytes: int = Field(default=MAX_ARTIFACT_BYTES, gt=0)


class OneAnswer:
    """Mixed into a `vf.Task` of one model turn, with the answer at `answer_in`."""

    answer_in: AnswerPlace

    def answer(self, trace: vf.Trace) -> str | None:
        return find_answer(trace.last_reply, self.answer_in)

    @vf.stop
    async def answered(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1


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
    """Tell whether answers are equal: as numbers where both are, else as text without case and spaces.

    Separators, currency and percent signs count for nothing: "$1,200.00" is "1200", "1/2" is "0.5".
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
