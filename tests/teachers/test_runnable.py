"""What is chosen can run: whole calls of the state's own tools, written as the trace writes its actions."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from loopback import Endpoint, call, configured, replayed, says, serving, state, xml

from composer_prime.data.pairs import Pair
from composer_prime.traces.replay.records import StateRecord, read_pairs, read_records, votes_beside
from composer_prime.traces.states import TraceState


def voted(tmp_path: Path, endpoint: Endpoint, asked: TraceState) -> tuple[StateRecord, list[Pair]]:
    """What became of one state."""

    async def run() -> None:
        async with serving(endpoint):
            await replayed(tmp_path, configured(tmp_path, endpoint.url), [asked])

    asyncio.run(run())
    (record,) = read_records(votes_beside(tmp_path / "pairs.jsonl"))
    return record, list(read_pairs(tmp_path / "pairs.jsonl"))


class Cut(Endpoint):
    """Calls with half of the arguments."""

    def _completion(self, body: dict) -> dict:
        completion = super()._completion(body)
        completion["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] = '{"path": "a'
        return completion


# Two equal answers that cannot run are no better than what the student did, whatever it was; the report says so.
@pytest.mark.parametrize(
    ("kind", "tool", "reason"), [(Cut, "cat", "is broken"), (Endpoint, "rm", "a tool that the state lacks")]
)
def test_a_majority_that_cannot_run_gives_no_pair(tmp_path: Path, kind: type[Endpoint], tool: str, reason: str) -> None:
    endpoint = kind(answers=lambda model, messages: (tool, {"path": "a"}))
    record, pairs = voted(tmp_path, endpoint, state(0))
    assert record.outcome == "cannot_run" and reason in (record.reason or "") and not pairs


# Nor does a student that calls what its state lacks win over a minority.
def test_a_student_that_cannot_run_is_not_chosen(tmp_path: Path) -> None:
    acts = {"role": "assistant", "content": None, "tool_calls": [call("rm", {})]}
    endpoint = Endpoint(answers=lambda model, messages: ("cat" if model == "gpt-a" else "rm", {}))
    record, pairs = voted(tmp_path, endpoint, state(0, student_action=acts))
    assert record.outcome == "cannot_run" and len(record.votes) == 3 and not pairs


SWE_SMITH = [{"role": "system", "content": "Call one function."}, {"role": "user", "content": "Fix it."}]
SEEN = [says(xml("bash", command="ls")), {"role": "user", "content": "a.py"}]


# Calls in the text are compared without the thought beside them; the chosen one is text as the trace has it.
def test_a_trace_of_xml_calls_gives_a_pair(tmp_path: Path) -> None:
    def answer(model: str, messages: list[dict]) -> str:
        return xml("bash", f"As {model} I read.", command="cat a.py")

    asked = state(0, tools=[], messages=SWE_SMITH, student_action=says(xml("bash", command="ls a.py")))
    record, (pair,) = voted(tmp_path, Endpoint(answers=answer), asked)
    assert record.outcome == "overruled" and len(record.votes) == 2
    assert pair.chosen == says(xml("bash", "As gpt-a I read.", command="cat a.py"))


# Two answers in another way of writing would not run where the trace comes from; of two ways the trace's is chosen.
def test_a_chosen_text_is_written_as_the_trace(tmp_path: Path) -> None:
    asked = state(0, tools=[], messages=[*SWE_SMITH, *SEEN], student_action=says("What now?"))
    record, pairs = voted(tmp_path, Endpoint(answers=lambda *_: "```bash\ncat a.py\n```"), asked)
    assert record.outcome == "cannot_run" and "the trace's as xml" in (record.reason or "") and not pairs
