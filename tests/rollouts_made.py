"""Finished rollouts with their samples, played in the test: real token ids of a real renderer, without a model."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from composer_prime.wire.types import Sample
from orchestrator.gateway.http import GenerationRecord
from orchestrator.rollouts.groups import FinishedRollout, GroupPlan
from orchestrator.rollouts.rollout import finish_rollout
from orchestrator.workers.pool import MessageRecord, RolloutReply, SessionRecord, ToolCall
from tests.chat_models import chat
from tests.records_made import record_of

TOOLS = json.loads(Path(__file__).with_name("tools.json").read_text())
PLAN = GroupPlan(group=3, source="s", task_index=1, seed=5, size=4)


@dataclass
class Step:
    """One assistant turn as the model wrote it, and what a tool said to it (None ends the conversation)."""

    text: str
    reply: str | None = None
    error: bool = False
    calls: list[tuple[str, str]] = field(default_factory=list)
    """(name, arguments) as the worker reads them."""
    finish: str = "stop"


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@dataclass
class PlayedRollout:
    rollout: FinishedRollout
    samples: list[Sample]
    records: list[GenerationRecord]


def play(
    model: str,
    question: str,
    steps: list[Step],
    *,
    rollout_id: str = "g000003-0",
    reward: float = 0.0,
    task_id: str = "t",
) -> PlayedRollout:
    """What dispatch holds after such a rollout: turns numbered, tokens compiled."""
    renderer, tokenizer = chat(model)
    turns = [MessageRecord(role="user", text=question)]
    prompt = list(renderer.render_ids([{"role": "user", "content": question}], tools=TOOLS, add_generation_prompt=True))
    records = []
    for number, step in enumerate(steps):
        name = f"{rollout_id}/{number}"
        end = "<|im_end|>" if step.finish == "stop" else ""
        ids = tokenizer.encode(step.text + end, add_special_tokens=False)
        records.append(record_of(rollout_id, prompt, ids, finish=step.finish, record_id=name))
        calls = [ToolCall(id="c", name=name, arguments=arguments) for name, arguments in step.calls]
        turns.append(MessageRecord(role="assistant", text=step.text, num_tokens=len(ids), call=number, tool_calls=calls,
                                   record_id=name, parent=len(turns) - 1))  # fmt: skip
        if step.reply is None:
            break
        told = {"role": "tool", "tool_call_id": "c", "content": step.reply}
        turns.append(MessageRecord(role="tool", text=step.reply, error=step.reply if step.error else None, num_tokens=9,
                                parent=len(turns) - 1))  # fmt: skip
        bridged = renderer.bridge_to_next_turn(prompt, ids, [told], tools=TOOLS)
        assert bridged is not None
        prompt = bridged.token_ids
    session = SessionRecord(session_id=rollout_id, agent="policy", trainable=True, reward=reward, tools=TOOLS)
    reply = RolloutReply(rollout_id=rollout_id, task_id=task_id, reward=reward, turns=turns, sessions=[session])
    return PlayedRollout(*finish_rollout(PLAN, reply, records, seed=1), records)
