"""Claims about the tool loop: rollouts through verifiers over loopback, with a scripted inference node."""

import asyncio
import json
from typing import Any

import pytest

from tests import scripted_node
from tests.scripted_node import FULL, ScriptedNode

pytestmark = pytest.mark.process  # verifiers' subprocess runtime


@pytest.fixture(scope="module")
def vf() -> Any:
    module = pytest.importorskip("verifiers.v1")
    from orchestrator.workers.verifiers_adapter import import_dotted_plugins

    import_dotted_plugins()
    return module


def call(name: str, arguments: dict[str, Any]) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def test_the_divisor_of_the_loss_counts_the_turns_of_the_loop():
    # The configuration cannot import verifiers, so it states the default number of turns once more.
    from composer_prime.config.orchestrator import TOOL_LOOP, TOOL_LOOP_TURNS
    from orchestrator.environments.tool_loop.harness import ToolLoopConfig

    assert ToolLoopConfig.model_fields["max_turns"].default == TOOL_LOOP_TURNS
    assert f"{TOOL_LOOP}." in ToolLoopConfig.__module__ + "."


def roll_out(script: Any, *, max_turns: int = 6, **taskset: Any) -> tuple[Any, Any, ScriptedNode]:
    """Plays the first task; `script` makes the node's texts from its data."""
    settings = {"id": "orchestrator.environments.toolsmith", **taskset}
    return scripted_node.roll_out(settings, script, max_turns=max_turns)


def expert(data: Any) -> list[str]:
    """The texts of a faultless rollout."""
    episode = data.tool_executor()
    tools = [(episode.tool_for(step.operation), step) for step in episode.steps]
    return [call(tool.name, tool.encode(step.operands)) for tool, step in tools] + [episode.answer]


def assert_prefixes_extend(trace: Any, prompts: list[list[int]]) -> None:
    """Every prompt is the one before it, then its completion, then new tokens; the trace holds the same tokens."""
    (branch,) = trace.branches
    for prompt in prompts:
        assert branch.token_ids[: len(prompt)] == prompt


def test_the_expert_earns_one_and_every_prompt_extends_the_last(vf):
    # A faultless rollout has reward 1, no errors, and one branch whose prefixes are the prompts that were sent.
    trace, data, node = roll_out(expert, min_difficulty=3)
    assert trace.ok and trace.reward == 1.0
    assert trace.metrics["tool_errors"] == 0.0 and trace.num_turns == 4
    assert len(node.prompts) == data.difficulty + 1
    assert_prefixes_extend(trace, node.prompts)


def test_every_broken_call_gets_an_error_turn(vf):
    # A wrong name, bad JSON, an unclosed call, a name that is no text, prose with a bad call: none is dropped.
    def script(data: Any) -> list[str]:
        good = expert(data)
        return [
            call("no_such_tool", {"x": 1}),
            good[0].replace("}}", "}"),
            "<tool_call>\n{",
            '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>',
            'First <tool_call>\n{"name": \n</tool_call>',
            '<tool_call>\n{"name": "\\ud800", "arguments": {}}\n</tool_call>',
            *good,
        ]

    trace, _, node = roll_out(script, max_turns=9, min_difficulty=1, max_difficulty=1)
    replies = [str(message.content) for message in trace.tool_messages]
    assert replies[:6] == ["Tool not found: no_such_tool", *["Invalid JSON in tool call"] * 5]
    assert trace.ok and trace.reward == 1.0
    assert trace.metrics["tool_errors"] == 6.0
    assert_prefixes_extend(trace, node.prompts)


def test_the_turn_limit_stops_the_rollout_without_failing_it(vf):
    # A rollout that uses up its turns is scored 0 and kept; it is not an error.
    trace, _, node = roll_out(lambda _: [call("x", {})] * 9, max_turns=3)
    assert len(node.prompts) == 3
    assert trace.ok and trace.stop_condition == "max_turns" and trace.reward == 0.0


def test_a_conversation_that_outgrows_the_context_is_scored_as_it_stands(vf):
    # Overflow after a turn stops the rollout with its reward; before any turn the task itself is too long: a failure.
    trace, _, _ = roll_out(lambda _: [call("x", {}), FULL])
    assert trace.ok and trace.stop_condition == "context_full" and trace.reward == 0.0 and trace.num_turns == 1
    hopeless, _, _ = roll_out(lambda _: [FULL])
    assert not hopeless.ok and not hopeless.rewards


def test_a_task_without_tools_is_one_turn(vf):
    # The same harness plays plain question and answer, with a system prompt of its own.
    trace, _, node = roll_out(lambda _: ["2"], id="single_turn_plugin")
    assert trace.ok and trace.reward == 1.0 and trace.num_turns == 1
    assert [message.role for message in trace.messages] == ["system", "user", "assistant"]
    assert "# Tools" not in node.seen()


def test_a_node_that_fails_makes_a_failed_rollout_not_a_zero(vf):
    # Running out of script, the node answers 500: the rollout is an error with a cause, and has no reward.
    trace, _, _ = roll_out(lambda _: [call("x", {})])
    assert not trace.ok and trace.errors
    assert not trace.rewards


# A tool's reply has a bound: the model sees its two ends and how much was cut, and one event names the tool.
def test_a_long_reply_is_cut(vf, caplog):
    from orchestrator.environments.tool_loop.harness import bounded

    content = bounded("a" + "x" * 1_000_000 + "z", 200, "tool 'dump'")
    assert content.startswith("ax") and content.endswith("xz") and "999802 of 1000002" in content
    assert len(content) < 300
    (record,) = caplog.records
    assert record.event_id == "cut tool 'dump'" and "max_reply_chars" in record.getMessage()
    assert bounded("short", 200, "tool 'dump'") == "short"


# Other harnesses pass text as it is: what cannot fit the context is refused before it is rendered.
def test_an_endless_conversation_is_refused(vf, monkeypatch):
    from verifiers.v1.dialects import ChatDialect

    from orchestrator.workers.verifiers_adapter import GatewayClient

    monkeypatch.setenv("SOME_TOKEN", "t")

    async def ask() -> None:
        client = GatewayClient(vf.TrainClientConfig(base_url="http://127.0.0.1:1/v1", api_key_var="SOME_TOKEN"), 64)
        try:
            await client.get_response(ChatDialect(), {"messages": [{"role": "user", "content": "x" * 20_000}]}, None)
        finally:
            await client.client.close()

    with pytest.raises(vf.ProviderError) as refused:
        asyncio.run(ask())
    assert refused.value.status_code == 400 and "model.max_context" in str(refused.value)
