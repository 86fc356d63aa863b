"""Endpoints that take other parameters: what is sent to them, and what is said where they refuse some."""

from __future__ import annotations

from pathlib import Path

import pytest
from loopback import Endpoint, configured, replayed, serving, state
from pydantic import ValidationError

from composer_prime.config.teachers import TeacherConfig, TeachersConfig
from composer_prime.llm.cache import Question

CONFIGS = Path(__file__).parents[2] / "configs"


def reasoning(config: TeachersConfig, name: str = "gpt-a", **changes: object) -> TeachersConfig:
    """The same pool, where this teacher is asked as OpenAI's reasoning models are."""
    changes = {"max_tokens_key": "max_completion_tokens", "temperature": "omit"} | changes
    teachers = [each.model_dump() | (changes if each.name == name else {}) for each in config.teacher]
    return TeachersConfig.model_validate(config.model_dump() | {"teacher": teachers})


def differ(model: str, messages: list[dict]) -> tuple[str, dict]:
    """No two teachers agree, so all are asked."""
    return "cat", {"path": model}


# A teacher is asked by the keys that its endpoint knows; the others are asked as before.
async def test_each_teacher_has_its_keys(tmp_path: Path) -> None:
    async with serving(Endpoint(answers=differ)) as endpoint:
        await replayed(tmp_path, reasoning(configured(tmp_path, endpoint.url)), [state(0)])
    seen = {body["model"]: body for body in endpoint.seen}
    assert seen["gpt-a"]["max_completion_tokens"] == 20 and not {"max_tokens", "temperature"} & set(seen["gpt-a"])
    for model in ("qwen-b", "glm-c"):
        assert (seen[model]["max_tokens"], seen[model]["temperature"]) == (20, 0)
        assert "max_completion_tokens" not in seen[model]


# Another name of the limit asks nothing else, so answers that are kept stay valid; another temperature does.
async def test_the_name_of_the_limit_is_no_part_of_the_question(tmp_path: Path) -> None:
    async with serving(Endpoint(answers=differ)) as endpoint:
        config = configured(tmp_path, endpoint.url)
        await replayed(tmp_path, config, [state(0)])
        renamed = await replayed(tmp_path / "renamed", reasoning(config, temperature=None), [state(0)])
        assert (renamed.votes.calls, renamed.votes.cached) == (0, 3)
        omitted = await replayed(tmp_path / "omitted", reasoning(config), [state(0)])
        assert (omitted.votes.calls, omitted.votes.cached) == (1, 2)


# The key of a question as releases before wrote it: what was paid for then is found.
def test_old_answers_stay_valid() -> None:
    question = Question(
        endpoint="https://x/v1", model="m", messages=[{"role": "user", "content": "Hi"}], tools=[], temperature=0.0,
        max_tokens=20,
    )  # fmt: skip
    assert question.key == "31e034146e05786adb88ddaf28ee6b75"


@pytest.mark.parametrize("wrong", [-0.1, 2.5, "none"])
def test_a_wrong_temperature_is_refused(wrong: float | str) -> None:
    with pytest.raises(ValidationError, match="'omit'"):
        TeacherConfig.model_validate({"name": "x", "model": "openai/gpt-4o-mini", "temperature": wrong})
