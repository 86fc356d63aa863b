"""No family judges its own traces, however anyone spells it."""

from __future__ import annotations

from pathlib import Path

import pytest
from loopback import Endpoint, configured, kept_answers, overrule, play, replayed, serving, state

from composer_prime.config.teachers import TeacherConfig
from composer_prime.model_families import UNKNOWN, family_named, family_of, is_foreign
from composer_prime.traces.ingest.ingest import ingest_parser
from composer_prime.traces.records import read_records, votes_beside

MODELS = ("claude-a", "qwen-b", "glm-c")


def voters(folder: Path, family: str, **more) -> set[str]:
    """Families that vote on a trace of `family`."""
    play(folder, [state(0, family=family)], models=MODELS, **more)
    (record,) = read_records(votes_beside(folder / "pairs.jsonl"))
    return {vote.family for vote in record.votes}


# In a trace, in assume_family and for a teacher: every spelling of a family is that family.
@pytest.mark.parametrize("spelled", ["Claude", "anthropic", "Anthropic", " claude ", "claude-sonnet-4"])
def test_spellings(tmp_path: Path, spelled: str) -> None:
    assert voters(tmp_path / "trace", spelled) == {"qwen", "glm"}
    assert voters(tmp_path / "assumed", UNKNOWN, assume_family=spelled) == {"qwen", "glm"}
    pool = [teacher.model_dump() for teacher in configured(tmp_path, "http://x/v1", models=MODELS).teacher]
    named = configured(tmp_path, "http://x/v1", teacher=[{**pool[0], "family": spelled}, *pool[1:]])
    assert named.teacher[0].known_family == "claude"
    assert ingest_parser().parse_args(["x", "-o", "y", "--family", spelled]).family == "claude"


# Makers stand for their models; a family that no rule knows is one word, in lower case.
@pytest.mark.parametrize(
    ("word", "family"),
    [("OpenAI", "gpt"), ("Google", "gemini"), ("meta", "llama"), ("Ours", "ours"), ("tiny-policy", "tiny-policy"),
     ("Unknown", UNKNOWN), ("", UNKNOWN)],
)  # fmt: skip
def test_words_that_people_use(word: str, family: str) -> None:
    assert family_named(word) == family_named(family_named(word)) == family


# A folder is known by its own name: who owns the home folder says nothing.
def test_a_folder_is_known_by_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert family_of("/home/claude/models/step_100") == family_of("~/claude/step_100") == UNKNOWN
    assert family_of("/home/claude/models/Qwen2.5-7B/") == "qwen"
    (tmp_path / "claude" / "step_100").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert family_of("claude/step_100") == UNKNOWN
    assert family_of("anthropic/some-name") == "claude"


# A family is what the word says, whatever folders there are where the command runs.
@pytest.mark.parametrize("word", ["anthropic", "Anthropic", "moonshotai", "anthropic/some-name"])
def test_a_family_does_not_depend_on_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    elsewhere = family_named(word)
    (tmp_path / word.lower()).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert family_named(word) == elsewhere in ("claude", "kimi")


# Providers write one model in several ways, with a date or without; what counts is that it is of no other family.
@pytest.mark.parametrize(
    ("asked", "answered", "foreign"),
    [
        ("anthropic/claude-sonnet-4", "anthropic/claude-4-sonnet-20250522", False),
        ("deepseek/deepseek-chat:free", "deepseek/deepseek-chat", False),
        ("gpt-5", "gpt-5-mini", False),
        ("gpt-5", "claude-haiku-3", True),
        ("gpt-5", "who-knows", False),
    ],
)
def test_models_of_another_family(asked: str, answered: str, foreign: bool) -> None:
    assert is_foreign(asked, family_of(asked), answered) == foreign


# The family of a teacher is the one that its configuration names, also where the name of its model tells nothing. An
# answer of another family is not kept: a repaired endpoint is asked again.
async def test_a_reply_of_another_family_is_not_kept(tmp_path: Path) -> None:
    async with serving(Endpoint(answers=overrule, names={"a-latest": "gemini-3.8-flash"})) as endpoint:
        config = configured(tmp_path, endpoint.url)
        first = config.teacher[0].model_dump() | {"model": "a-latest", "family": "gpt"}
        config.teacher[0] = TeacherConfig.model_validate(first)
        (reason,) = (await replayed(tmp_path, config, [state(0)])).votes.without_vote
    assert "came from gemini-3.8-flash, of another family than a-latest" in reason
    assert len([answer for answer in kept_answers(tmp_path / "cache").values() if answer is not None]) == 2
