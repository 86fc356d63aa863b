"""The adapter in this process: replies for tool errors, broken gateways, limits and several agents."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from peer import Peer
from tokenizers_made import CHATML, write_tokenizer

from composer_prime.errors import ConfigError
from orchestrator.chat_renderer import build_renderer
from orchestrator.environments.toolsmith.taskset import ToolsmithConfig, ToolsmithTaskset
from orchestrator.workers.pool import RolloutReply, RunRollout, SourceSpec
from orchestrator.workers.verifiers_adapter import (
    Environment,
    install_renderer,
    keep_folders_in,
    refuse_wrong_rewards,
    tool_error,
)
from tests.scripted_node import ScriptedNode

pytestmark = pytest.mark.process  # verifiers' subprocess runtime

TINY = str(Path(__file__).parents[2] / "composer_prime" / "assets" / "tiny" / "policy")
TOOL_LOOP = {"id": "orchestrator.environments.tool_loop"}


def environment(model_path: str, taskset: dict[str, Any] | None = None, **more: Any) -> Environment:
    tasksets = {"train": {"id": "bench_env", **(taskset or {})}}
    spec = SourceSpec(
        **{"name": "src", "tasksets": tasksets, "harness": {"id": "bench_env"}, "model_path": model_path} | more
    )
    config, renderer = build_renderer(model_path, spec.renderer)
    install_renderer(model_path, config, renderer)
    keep_folders_in(Path(tempfile.mkdtemp()))
    return Environment(spec, "train", config)


def play(env: Environment, peer: Peer, **request: Any) -> RolloutReply:
    """One rollout against `peer`."""

    async def scenario() -> RolloutReply:
        async with peer, env.serving():
            defaults = dict(rollout_id="r", task_index=0, model="policy", timeout_s=20.0, gateway_url=peer.url)
            return await env.run(RunRollout(**defaults | request))

    return asyncio.run(scenario())


def test_tool_errors_are_marked_on_their_turns() -> None:
    """In toolsmith a call of an unknown tool and a broken call give error turns; the calls are on the turn before."""
    taskset = {"id": "orchestrator.environments.toolsmith", "num_tasks": 4}
    env = environment(TINY, tasksets={"train": taskset}, harness=TOOL_LOOP)
    texts = [
        '<tool_call>\n{"name": "nope", "arguments": {"x": 1}}\n</tool_call>',
        "<tool_call>\n{oops\n</tool_call>",
        "7",
    ]
    reply = play(env, ScriptedNode(texts, TINY))
    assert reply.failure is None
    by_role = [(turn.role, turn.error) for turn in reply.turns if turn.role in ("assistant", "tool")]
    assert by_role == [
        ("assistant", None),
        ("tool", "Tool not found: nope"),
        ("assistant", None),
        ("tool", "Invalid JSON in tool call"),
        ("assistant", None),
    ]
    called = next(turn for turn in reply.turns if turn.call == 0)
    assert [(call.name, json.loads(call.arguments)) for call in called.tool_calls] == [("nope", {"x": 1})]
    assert [turn.call for turn in reply.turns if turn.role == "assistant"] == [0, 1, 2]
    # Each sampled turn has the times of its request, in order; nothing else has.
    times = [s for turn in reply.turns if turn.call is not None for s in (turn.asked_s, turn.answered_s)]
    assert len(times) == 6 and times[0] >= 0 and times == sorted(times)
    assert {turn.asked_s for turn in reply.turns if turn.call is None} == {None}
    assert reply.metrics["tool_errors"] == 2.0
    task = next(ToolsmithTaskset(ToolsmithConfig.model_validate(taskset)).load())
    assert [session.expected for session in reply.sessions] == [task.data.answer]


@pytest.mark.parametrize(
    ("text", "is_error"),
    [
        ("Error: no such file\nmore", True),
        ("ValueError: bad", True),
        ("Traceback (most recent call last):\n  …", True),
        ("Tool not found: add", True),
        ("14", False),
        ("the error was found and fixed", False),
        ("Errors in the report: none", False),
    ],
)
def test_tool_errors_by_their_words(text: str, is_error: bool) -> None:
    """Where the task does not decide, a tool message is an error if it begins like one. The first line is kept."""
    assert tool_error(None, text) == (text.splitlines()[0] if is_error else None)


class BrokenContract(Peer):
    """A gateway that forgets a logprob."""

    async def generate(self, request: web.Request) -> web.Response:
        choice = {"index": 0, "token_ids": [5, 2], "finish_reason": "stop", "logprobs": {"content": []}}
        return web.json_response({"request_id": "", "choices": [choice]})


def test_a_gateway_that_breaks_the_contract_is_named(model_path: str) -> None:
    """A reply without a logprob for every token is a provider error that says so."""
    reply = play(environment(model_path), BrokenContract())
    assert reply.reward is None
    assert reply.failure.kind == "provider"
    assert "generate contract" in reply.failure.message


def test_a_template_that_cannot_render_is_not_retried(tmp_path: Path) -> None:
    """A chat template that fails on the conversation fails the rollout for good, with the template's words."""
    refusal = "{% if 'count' in messages[0]['content'] %}{{ raise_exception('only poems, please') }}{% endif %}"
    write_tokenizer(tmp_path, CHATML + refusal)
    reply = play(environment(str(tmp_path)), Peer())
    assert (reply.reward, reply.failure.kind, reply.failure.retryable) == (None, "render", False)
    assert "only poems" in reply.failure.message


def test_a_reward_that_raises_is_named_with_its_exception_file_and_line(model_path: str) -> None:
    """The failure has the reward, the exception and the line that raised; the detail ends with that frame."""
    reply = play(environment(model_path, {"fail_at": 0}), Peer())
    assert (reply.reward, reply.failure.kind) == (None, "task")
    assert "KeyError: 'the reward function broke'" in reply.failure.message
    source = (Path(__file__).parent / "plugins" / "bench_env.py").read_text().splitlines()
    line = next(number for number, text in enumerate(source, 1) if "raise KeyError" in text)
    assert reply.failure.where.endswith(f"tests/workers/plugins/bench_env.py:{line}, in length")
    assert reply.failure.detail.endswith("KeyError: 'the reward function broke'")
    assert f'bench_env.py", line {line}, in length' in reply.failure.detail


def test_limits_stop_a_rollout_that_is_scored(model_path: str) -> None:
    """max_total_tokens cuts the conversation; the rollout is complete, scored and marked as truncated."""
    reply = play(environment(model_path, harness={"id": "bench_env", "turns": 5}, max_total_tokens=40), Peer())
    assert (reply.reward, reply.failure) == (2.0, None)
    assert (reply.stop_reason, reply.truncated) == ("max_total_tokens", True)
    assert sum(turn.role == "assistant" for turn in reply.turns) == 2


def test_a_task_set_without_reward_is_no_zero(model_path: str) -> None:
    """A task that defines no reward function yields an error, not a reward of zero."""
    env = environment(model_path, tasksets={"train": {"id": "plain_env"}})
    reply = play(env, Peer())
    assert (reply.reward, reply.failure.kind, reply.failure.retryable) == (None, "no_reward", False)
    assert "@vf.reward" in reply.failure.message


def test_a_module_that_cannot_be_imported_has_its_own_remedy(model_path: str, tmp_path: Path, monkeypatch) -> None:
    """A package that is missing is to be installed; a mistake in the module is to be corrected there."""
    monkeypatch.syspath_prepend(tmp_path)
    for name, text, remedy in (("needy_one", "import no_such_package", "Install"), ("torn_one", "def (", "Correct")):
        (tmp_path / f"{name}.py").write_text(text)
        with pytest.raises(ConfigError, match=f"{name}.*{remedy}"):
            environment(model_path, tasksets={"train": {"id": name}})


def test_an_endless_task_set_is_cut(model_path: str) -> None:
    """Its first tasks are those of the set, always the same ones."""
    env = environment(model_path, tasksets={"train": {"id": "plain_env", "endless": True}})
    assert env.num_tasks == 4096
    assert env.describe(6)[1] == "plain 6" and env.describe(0)[0] == "task-0"


def test_a_task_set_that_raises_does_not_start(model_path: str) -> None:
    """Whether endless or not, the start is refused with the exception, its file and its line."""
    for endless, at in ((True, 0), (False, 1)):
        with pytest.raises(ConfigError, match=r"'src'.*LookupError: no word list \(.*plain_env.py:\d+, in load\)"):
            environment(model_path, tasksets={"train": {"id": "plain_env", "endless": endless, "raise_at": at}})


def test_an_environment_class_of_a_third_party_with_an_endless_task_set_is_played(model_path: str) -> None:
    """Its own Env class, task class and generator: loaded by id, played and scored by its own rule."""
    env = environment(model_path, tasksets={"train": {"id": "own_env"}})
    reply = play(env, Peer(), task_index=41)
    assert (reply.failure, reply.task_id, reply.reward) == (None, "round-41", 1.41)
    assert [session.agent for session in reply.sessions] == ["player"]


def test_every_agent_of_an_environment_has_its_session(model_path: str) -> None:
    """A second agent's requests carry `<rollout id>#1`; the reward is that of the agent that is trained."""
    env = environment(model_path, tasksets={"train": {"id": "duo_env"}}, harness={"id": "bench_env"})
    peer = Peer()
    reply = play(env, peer)
    assert reply.failure is None
    assert sorted(peer.sessions) == ["r", "r#1"]
    assert [(s.session_id, s.agent, s.trainable) for s in reply.sessions] == [
        ("r", "critic", False),
        ("r#1", "solver", True),
    ]
    assert [(turn.session, turn.role, turn.parent) for turn in reply.turns] == [
        (0, "user", None),
        (0, "assistant", 0),
        (1, "user", None),
        (1, "assistant", 2),
    ]
    assert reply.reward == reply.sessions[1].reward


def test_a_plugin_without_task_set_is_told(model_path: str) -> None:
    """A module that exports no task set is a configuration error that says what is missing."""
    with pytest.raises(ConfigError, match="exports no Taskset"):
        environment(model_path, tasksets={"train": {"id": "orchestrator.environments.tool_loop"}})


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"harness": {"id": "no.such.harness"}}, ConfigError, r"harness 'no.such.harness'.*nstall"),
        ({"tasksets": {"train": {"id": "needy_env"}}}, ConfigError, "named 'no_such_module'"),
        ({"tasksets": {"train": {"id": "bench_env", "num_tasks": 0}}}, ConfigError, "'src'.*num_tasks"),
        ({"harness": {"id": "bench_env", "turn": 3}}, ConfigError, r"turn: no such setting; did you mean turns\?"),
    ],
)
def test_what_cannot_load_says_why(model_path: str, changes: dict[str, Any], error: type[Exception], says: str) -> None:
    """Each wrong setting of a source has its own error, which names the source and the remedy."""
    with pytest.raises(error, match=says):
        environment(model_path, **changes)


def block(language: str) -> str:
    """The first block of docs/tutorial/your-environment.md in `language`."""
    document = Path(__file__).parents[2] / "docs/tutorial/your-environment.md"
    found = re.search(rf"```{language}\n(.*?)```", document.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.parametrize(("reply", "reward"), [("{}", 1.0), ("no idea", 0.0)])
def test_the_documented_task_set_is_played_and_scored(tmp_path, monkeypatch, reply, reward) -> None:
    """The module and its settings as they stand in docs/tutorial/your-environment.md."""
    (tmp_path / "my_larger.py").write_text(block("python"))
    monkeypatch.syspath_prepend(tmp_path)
    (source,) = tomllib.loads(block("toml"))["orchestrator"]["source"]
    tasksets = {"train": source["taskset"], "eval": source["taskset"] | source["eval_taskset"]}
    env = environment(TINY, tasksets=tasksets, harness=TOOL_LOOP)
    assert env.num_tasks == 512
    first, second = map(int, re.findall(r"\d+", env.describe(0)[1]))
    played = play(env, ScriptedNode([reply.format(max(first, second))], TINY))
    assert played.failure is None and played.reward == reward and played.parts == {"correct": reward}


# A reward that is no coroutine is named with its file and line before a rollout fails.
def test_plain_reward_is_refused(tmp_path, monkeypatch) -> None:
    (tmp_path / "plain_larger.py").write_text(block("python").replace("async def", "def"))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"reward `correct` \(\S*plain_larger.py:\d+, in \w+\) must be `async def`"):
        environment(TINY, {"id": "plain_larger"}, harness=TOOL_LOOP)


# A wrapper that hands on the coroutine of an `async def` is a reward.
def test_wrapped_rewards_are_taken() -> None:
    async def scores(trace) -> float:
        return 1.0

    def plain(trace) -> float:
        return 1.0

    @functools.wraps(scores)
    def hands_on(trace):
        return scores(trace)

    class Task:
        def __init__(self, reward) -> None:
            self.reward = reward

        def hooks(self, attr: str) -> list:
            return [self.reward] if attr == "reward" else []

    for reward in (scores, hands_on):
        refuse_wrong_rewards(Task(reward))
    with pytest.raises(ConfigError, match="reward `plain`"):
        refuse_wrong_rewards(Task(plain))
