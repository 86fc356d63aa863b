"""Harbor task folders in a sandbox: an episode with tools, the verifier's reward, and folders that cannot be played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import ConfigError, SandboxError
from orchestrator.coding.sandbox.box import open_box
from tests.scripted_node import call, play, source_spec_of

pytestmark = pytest.mark.process

ID = "orchestrator.coding.formats.harbor"
HARNESS = {"id": "orchestrator.environments.tool_loop", "max_turns": 4}
FILES = {
    "task.toml": 'version = "1.0"\n[verifier]\ntimeout_sec = 60.0\n',
    "instruction.md": "Write the sum of the numbers in /app/numbers.txt to /app/sum.txt.\n",
    "environment/numbers.txt": "3\n4\n5\n",
    "solution/solve.sh": "#!/bin/bash\necho 12 > /app/sum.txt\n",
    "tests/test.sh": "#!/bin/bash\npython /tests/check.py\n",
    "tests/check.py": (
        "from pathlib import Path\nright = Path('/app/sum.txt').read_text().strip() == '12'\n"
        "Path('/logs/verifier/reward.txt').write_text(str(int(right)))\n"
    ),
}


def written(folder: Path, **changes: str | None) -> Path:
    names = {name.replace("/", "_").replace(".", "_"): name for name in FILES}
    for name, text in {**FILES, **{names.get(key, key): text for key, text in changes.items()}}.items():
        if text is not None:
            (folder / "sum" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "sum" / name).write_text(text)
    return folder


@pytest.fixture
async def bubblewrap() -> dict[str, str]:
    try:
        async with await open_box(RuntimeConfig(type="bubblewrap")):
            return {"type": "bubblewrap"}
    except SandboxError as error:
        pytest.skip(f"needs bubblewrap: {error}")


@pytest.mark.parametrize(
    ("command", "reward", "has_file"),
    [
        ("echo 12 > sum.txt", 1.0, 1.0),
        ("echo 12 > /work/sum.txt", 1.0, 1.0),
        ("echo 13 > sum.txt", 0.0, 1.0),
        ("mkdir -p .harbor/logs/verifier && echo 1 > .harbor/logs/verifier/reward.txt", 0.0, 0.0),
    ],
)
async def test_an_episode_is_scored_by_the_verifiers_file(
    tmp_path: Path, bubblewrap: dict[str, str], command: str, reward: float, has_file: float
) -> None:
    # The instruction's paths are those of the sandbox; a reward file that the agent plants does not count.
    spec = source_spec_of({"id": ID, "folder": str(written(tmp_path))}, HARNESS, runtime=bubblewrap)
    reply = await play(
        spec, lambda _: [call("bash", command="cat numbers.txt"), call("bash", command=command), "Done."]
    )
    assert (reply.failure, reply.reward, reply.task_id) == (None, reward, "harbor/sum")
    assert reply.metrics["has_reward_file"] == has_file
    assert "/work/numbers.txt" in reply.turns[1].text and "/app" not in reply.turns[1].text
    assert "3\n4\n5" in next(turn.text for turn in reply.turns if turn.role == "tool")


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        ({"environment/Dockerfile": "FROM x\n"}, ConfigError, "Dockerfile.*ignore_dockerfile"),
        ({"task_toml": '[environment]\ndocker_image = "x"\n'}, ConfigError, "docker_image"),
        ({"task_toml": "version ="}, ConfigError, "sum"),
        ({"tests_test_sh": None}, ConfigError, r"tests/test\.sh"),
        ({"task_toml": None}, ConfigError, r"task\.toml"),
    ],
)
def test_a_folder_that_cannot_be_played_says_why(
    tmp_path: Path, changes: dict[str, Any], kind: type[Exception], says: str
) -> None:
    from orchestrator.coding.formats.harbor import Harbor, HarborConfig

    with pytest.raises(kind, match=says):
        list(Harbor(HarborConfig(id=ID, folder=written(tmp_path, **changes))))


def test_a_task_without_its_dockerfile_is_played_on_request(tmp_path: Path) -> None:
    # The Dockerfile is no file of the agent's.
    from orchestrator.coding.formats.harbor import Harbor, HarborConfig

    folder = written(tmp_path, **{"environment/Dockerfile": "FROM x\n"})
    (task,) = Harbor(HarborConfig(id=ID, folder=folder, ignore_dockerfile=True))
    assert task.data.verifier_timeout_s == 60.0
    assert list(task.data.code_task().start) == ["numbers.txt"]


@given(st.binary(max_size=40))
def test_scores_are_numbers_or_none(content: bytes) -> None:
    # reward.txt has one number, reward.json an object of numbers; all else is no score.
    from orchestrator.coding.formats.harbor import read_scores

    assert all(isinstance(value, float) and abs(value) < float("inf") for value in read_scores(content).values())
    assert read_scores(b" 0.5\n") == {"reward": 0.5} and read_scores(b'{"reward": 1, "speed": 2}')["speed"] == 2.0
    assert read_scores(b'{"reward": NaN}') == {} and read_scores(b"") == {}
