"""No family judges its own traces, however anyone spells it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from loopback import Endpoint, configured, replayed, serving, state

from composer_prime.llm.families import UNKNOWN, family_named, family_of
from composer_prime.traces.ingest.command import ingest_parser
from composer_prime.traces.replay.records import read_records, votes_beside

MODELS = ("claude-a", "qwen-b", "glm-c")


def voters(folder: Path, family: str, **more) -> set[str]:
    """Families that vote on a trace of `family`."""

    async def run() -> None:
        async with serving(Endpoint(answers=lambda model, messages: ("cat", {"path": "a.py"}))) as endpoint:
            config = configured(folder, endpoint.url, models=MODELS, **more)
            await replayed(folder, config, [state(0, family=family)])

    asyncio.run(run())
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
