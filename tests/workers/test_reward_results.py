"""Rewards and metrics that are `async def` and return no number: what a user is told."""

from __future__ import annotations

import asyncio
import re
import selectors

import pytest
from test_adapter import TINY, TOOL_LOOP, block, environment, play

from composer_prime.errors import ConfigError
from orchestrator.workers import worker
from orchestrator.workers.pool import BLOCKED_BY, blamed, blocked_at, frame_text, is_own
from orchestrator.workers.worker import waiting
from tests.scripted_node import ScriptedNode

pytestmark = pytest.mark.process  # verifiers' subprocess runtime

METRIC = """
    @vf.metric
    async def longest(self, trace: vf.Trace) -> float:
        pass
"""
OTHER = """
    async def other(self) -> float:
        return 1.0
"""


# Nothing, a coroutine that nobody awaited, a text, NaN, a number beyond float32, a metric beside a right reward: the
# failure names the function with its file and line, and is not tried again.
@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("correct", "pass"),
        ("correct", f"return self.other()\n{OTHER}"),
        ("correct", 'return "yes"'),
        ("correct", 'return float("nan")'),
        ("correct", "return 1e39"),
        ("longest", f"return 1.0\n{METRIC}"),
    ],
)
def test_a_reward_that_returns_no_number(tmp_path, monkeypatch, name, body) -> None:
    module = f"no_number_{name}_{len(body)}"
    text = block("python").replace("return float(trace.last_reply.split() == [self.data.larger])", body)
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    error = play(environment(TINY, {"id": module}, harness=TOOL_LOOP), ScriptedNode(["7"], TINY)).failure
    assert error is not None and not error.retryable
    kind = "metric" if name == "longest" else "reward"
    assert kind in error.message and name in error.message
    assert re.fullmatch(rf"\S*{module}\.py:\d+, in {name}", error.where or "")


# A reward with the name of a member of vf.Task would take its place: it is named before a task is played.
@pytest.mark.parametrize("name", ["score", "key", "data", "hooks"])
def test_a_reward_that_hides_a_member(tmp_path, monkeypatch, name) -> None:
    module = f"hidden_{name}"
    (tmp_path / f"{module}.py").write_text(block("python").replace("def correct", f"def {name}"))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=rf"`{name}` \(\S*{module}\.py:\d+, in {name}\) hides vf.Task.{name}"):
        environment(TINY, {"id": module}, harness=TOOL_LOOP)


# What is installed comes first: the file of a module without a task set is named, which may not be the user's.
def test_a_task_set_with_the_name_of_an_installed_module() -> None:
    with pytest.raises(ConfigError, match=r"calendar\.py .*exports no Taskset"):
        environment(TINY, {"id": "calendar"}, harness=TOOL_LOOP)


HELPER = "\n    def {name}(self, reply, answer):\n        return 1.0\n"


# So does a helper that cannot be called as that member; and a reward gets what verifiers has, by name.
@pytest.mark.parametrize("name", ["score", "setup", "correct"])
def test_a_helper_that_hides_a_member(tmp_path, monkeypatch, name) -> None:
    module, text = f"helper_{name}", block("python")
    end = "\n\nclass LargerConfig"
    text = text.replace(end, HELPER.format(name=name) + end, 1) if name != "correct" else text.replace(
        "self, trace: vf.Trace", "self, completion, answer")  # fmt: skip
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=rf"`{name}` \(\S*{module}\.py:\d+, in {name}\)"):
        environment(TINY, {"id": module}, harness=TOOL_LOOP)


TOOLS = """
class Tools:
    schemas = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]

    async def call(self, name: str, arguments_json: str):
        return RETURNED


class LargerData(vf.TaskData):
    def tool_executor(self):
        return Tools()
"""


def played_with_tool(tmp_path, monkeypatch, module: str, returned: str):
    text = block("python").replace("class LargerData(vf.TaskData):", TOOLS.replace("RETURNED", returned))
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    return play(environment(TINY, {"id": module}, harness=TOOL_LOOP), ScriptedNode([call, "7"], TINY))


# What a tool returns is text. Anything else is named with the tool's place, and another try would not help.
@pytest.mark.parametrize("returned", ["b'x'", "{'stdout': 'x'}", "7", "None"])
def test_a_tool_that_returns_no_text(tmp_path, monkeypatch, returned) -> None:
    module = f"odd_tool_{type(eval(returned)).__name__.lower()}"
    error = played_with_tool(tmp_path, monkeypatch, module, returned).failure
    assert error is not None and not error.retryable and error.kind == "toolset"
    assert type(eval(returned)).__name__ in error.message and "'look'" in error.message
    assert re.fullmatch(rf"\S*{module}\.py:\d+, in call", error.where or "")


# A `call` that is no function has no line to name.
def test_a_callable_object_that_returns_no_text(tmp_path, monkeypatch) -> None:
    odd = "''\n\nTools.call = type('Call', (), {'__call__': lambda self, name, arguments_json: 7})()"
    error = played_with_tool(tmp_path, monkeypatch, "odd_callable", odd).failure
    assert error is not None and not error.retryable and error.kind == "toolset" and "'look'" in error.message


# Tools that are no OpenAI function definitions are named before the model is asked.
@pytest.mark.parametrize(
    "schemas", ["['look']", "[{'name': 'look'}]", "None", "[{'function': {'name': 'look', 'parameters': int}}]"]
)
def test_schemas_that_are_none(tmp_path, monkeypatch, schemas) -> None:
    module = f"odd_schemas_{len(schemas)}"
    error = played_with_tool(tmp_path, monkeypatch, module, f"''\n\nTools.schemas = {schemas}").failure
    assert error is not None and not error.retryable and "`schemas`" in error.message
    assert re.fullmatch(rf"\S*{module}\.py:\d+, in call", error.where or "")


# A metric that is no finite number would make every mean NaN: it is left out, and its function named.
def test_a_metric_that_is_nan(tmp_path, monkeypatch, caplog) -> None:
    body = "return 1.0\n" + METRIC.replace("pass", "return float('nan')")
    text = block("python").replace("return float(trace.last_reply.split() == [self.data.larger])", body)
    (tmp_path / "nan_metric.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    reply = play(environment(TINY, {"id": "nan_metric"}, harness=TOOL_LOOP), ScriptedNode(["7"], TINY))
    assert (reply.reward, reply.metrics) == (1.0, {})
    (warning,) = [record for record in caplog.records if "longest = nan" in record.message]
    assert re.fullmatch(r"\S*nan_metric\.py:\d+, in longest", warning.event_where)


# Where code that is not the product's waits is known by the task's name. Of many tasks each file is looked at once.
async def test_a_place_that_waits_is_known() -> None:
    async def waits() -> None:
        await asyncio.Event().wait()

    tasks = [asyncio.create_task(waits(), name=f"g000001-{number}") for number in range(100)]
    await asyncio.sleep(0)
    waiting()
    looked = is_own.cache_info().misses
    ((_, file, line, function),) = [wait for wait in waiting() if wait[0] == "g000001-7"]
    assert is_own.cache_info().misses == looked
    for task in tasks:
        task.cancel()
    assert re.fullmatch(r"\S*test_reward_results\.py:\d+, in waits", frame_text(file, line, function))


# Only the waits of rollouts are told: what an environment runs beside them may wait for ever.
async def test_what_waits_beside_the_rollouts_is_no_news(monkeypatch, caplog) -> None:
    async def waits() -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(worker, "STALL_S", -1.0)
    tasks = {name: asyncio.create_task(waits(), name=name) for name in ("g000001-0", "Task-7")}
    serving = worker.Worker.__new__(worker.Worker)
    serving._running, serving._waits = {"g000001-0": tasks["g000001-0"]}, {}
    await asyncio.sleep(0)
    serving._name_waits()
    for task in tasks.values():
        task.cancel()
    assert [name for name, *_ in serving._waits] == ["g000001-0"] and len(caplog.records) == 1


# An environment that deletes its folder is named by its whole path.
def test_the_folder_is_gone(tmp_path, monkeypatch) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert frame_text("/envs/words.py", 12, "load") == "/envs/words.py:12, in load"


# Half a character becomes "?", and a coroutine that a tool hands on is awaited.
@pytest.mark.parametrize(("returned", "seen"), [("'a\\ud83db'", "a?b"), ("asyncio.sleep(0, 'late')", "late")])
def test_a_tool_s_text_can_be_sent(tmp_path, monkeypatch, returned, seen) -> None:
    module = f"text_tool_{len(returned)}"
    reply = played_with_tool(tmp_path, monkeypatch, module, returned.replace("asyncio.", "__import__('asyncio')."))
    assert reply.failure is None
    assert [turn.text for turn in reply.turns if turn.role == "tool"] == [seen]


# Copies of a task are one task: they have one id, and how many there are is said.
def test_copies_are_one_task(tmp_path, monkeypatch) -> None:
    (tmp_path / "copies.py").write_text(block("python").replace("draw.sample(range(100), 2)", "(made % 3 * 4, 9)"))
    monkeypatch.syspath_prepend(tmp_path)
    env = environment(TINY, {"id": "copies", "split": "any", "num_tasks": 6}, harness=TOOL_LOOP)
    assert [env.describe(index)[0] for index in range(6)] == ["task-0", "task-1", "task-2"] * 2
    note = env.repeated
    assert note is not None and "its 6 tasks are copies of 3" in note


# Different tasks that share a name count as several: only a name of its own is a task's id.
def test_tasks_with_one_name_are_several(tmp_path, monkeypatch) -> None:
    named = "name='sum' if made % 3 else f'first {made}', "
    (tmp_path / "alike.py").write_text(block("python").replace("LargerData(prompt=", f"LargerData({named}prompt="))
    monkeypatch.syspath_prepend(tmp_path)
    env = environment(TINY, {"id": "alike", "split": "any", "num_tasks": 4}, harness=TOOL_LOOP)
    assert [env.describe(index)[0] for index in range(4)] == ["task-0", "task-1", "first 3", "task-3"]


# The main thread of a worker, as faulthandler writes it after another thread's.
DUMP = """    Timeout (0:00:05)!
    Thread 0x1 (most recent call first):
      File "/x/orchestrator/workers/worker.py", line 158 in _name_blockers
    \n    Thread 0x2 (most recent call first):
{}      File "/x/orchestrator/workers/worker.py", line 242 in main
"""
LOOP = '      File "/python/asyncio/base_events.py", line 1884 in _run_once\n'


def test_only_the_last_standstill_is_blamed() -> None:
    """What blocked a worker before, and went on, is not what blocks it now."""
    named = f"    {BLOCKED_BY}g000001-0\n"
    assert blamed(DUMP + named) == "g000001-0"
    assert blamed(DUMP + named + DUMP) is None  # Code that holds the interpreter lock is not named.
    assert blamed(DUMP + f"    {BLOCKED_BY}\n") is None


def test_a_loop_that_waits_is_not_blocked() -> None:
    """A starved process is late for its heartbeat, and its stack shows that nothing blocks."""
    waiting = f'      File "{selectors.__file__}", line 468 in select\n'
    assert blocked_at(DUMP.format(waiting + LOOP)) is None
    asking = waiting + '      File "/x/env.py", line 3 in setup\n'
    assert blocked_at(DUMP.format(asking + LOOP)) == "/x/env.py:3, in setup"


def test_a_slow_machine_is_not_the_users_code() -> None:
    """A standstill in code of others is named only when it lasts."""
    others = DUMP.format('      File "/python/lib/site-packages/pydantic/main.py", line 7 in validate\n')
    others = others.replace("/x/orchestrator/workers/worker.py", worker.__file__)
    assert blocked_at(others, silent_s=6.0) is None
    assert blocked_at(others, silent_s=60.0) == "/python/lib/site-packages/pydantic/main.py:7, in validate"
