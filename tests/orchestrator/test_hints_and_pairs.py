"""What SDPO and replay-DPO add to buffer, batches, journal and resume, and a whole orchestrator with both."""

from typing import Any

import msgspec
import pytest
from orch_groups import ended, plan, ready, rollout
from orch_peers import MODEL, ScriptedPool, make_config

from composer_prime.channels.replay_dpo import pair_unit
from composer_prime.config import Config
from composer_prime.data.pairs import Pair, PairState
from composer_prime.wire.types import ints, pack_ints
from orchestrator.batching.batch_metrics import batch_metrics
from orchestrator.batching.batches import Versions
from orchestrator.chat_renderer import build_renderer
from orchestrator.durability import Finished, Formed, OrchestratorState, Started, resume
from orchestrator.file_rows import PairCursor
from orchestrator.rollouts.groups import FinishedGroup, GroupOutcome
from orchestrator.tasks import Sources
from orchestrator.workers.pool import MessageRecord, RolloutReply, RunRollout, SessionRecord, ToolCall

TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}]
PLAIN = {
    "pair_id": "p", "chosen_ids": pack_ints([1, 2]), "rejected_ids": pack_ints([1, 3]), "context": 1, "epsilon": 0.1,
}  # fmt: skip
PAIR = pair_unit(**PLAIN)


def distilled(number: int, version: int = 0) -> FinishedGroup:
    return msgspec.structs.replace(ready(number, version, rewards=(0.0, 0.0)), outcome=GroupOutcome.DISTILLED)


def test_a_distilled_group_counts_as_filtered():
    """It carried no advantage, whatever else it is good for."""
    hinted = rollout("a", 0.0, hints={"found": 2, "hinted": 1, "skipped/cut": 1, "kind/bad_json": 2})
    group = msgspec.structs.replace(distilled(1), rollouts=[hinted, rollout("b", 0.0)])
    metrics = batch_metrics(0, [ready(0, 0), group], [ended(2, GroupOutcome.FILTERED, 1.0)])
    assert (metrics["groups/filtered"], metrics["groups/distilled"], metrics["batch/groups"]) == (2, 1, 1)
    assert metrics["groups/filtered_share"] == pytest.approx(2 / 3)
    counts = {name: value for name, value in metrics.items() if name.startswith("hints/")}
    assert counts == {"hints/found": 2, "hints/hinted": 1, "hints/skipped/cut": 1, "hints/kind/bad_json": 2}


@pytest.mark.parametrize("pairs", [{"units": [PAIR]}, {"preferences": [PLAIN]}], ids=["now", "an older run"])
def test_a_resumed_batch_has_its_pairs_and_the_cursor_moves_on(pairs):
    """Pairs are served again as they were; the next batch draws after the newest one that was formed."""
    state = OrchestratorState(
        run_id="run", step=1, journal_seq=3, next_group=2, in_flight=[], ready=[], dropped=[], batches={2: [0]},
        curricula={}, counters={}, pairs=PairCursor(position=2, known=9),
        versions=Versions(trained=1, newest=1, since=1),
    )  # fmt: skip
    later = PairCursor(position=4, known=9)
    entries = [
        Started(seq=1, plan=plan(0)),
        Finished(seq=2, group=ready(0)),
        Formed(seq=3, step=2, groups=[0], dropped=[], metrics={}, pairs=state.pairs, **pairs),
    ]
    sources = Sources(make_config(MODEL).orchestrator, seed=3, num_tasks={"s": 4})
    found = resume(state, entries, sources)
    assert found.batches[0].preferences == [PAIR] and found.pairs == state.pairs
    entries += [
        Finished(seq=4, group=distilled(1)),
        Formed(seq=5, step=3, groups=[1], dropped=[], metrics={}, pairs=later),
    ]
    found = resume(state, entries, sources)
    assert found.pairs == later and found.batches[1].groups[0].outcome is GroupOutcome.DISTILLED
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(entries[2]), type=Formed)
    assert again == entries[2]


class ToolPool(ScriptedPool):
    """Real prompts of the tiny model: a question, a wrong call that a tool complains about, an answer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._renderer = build_renderer(str(MODEL), None)[1]

    async def run(self, request: RunRollout, **_: Any) -> RolloutReply:
        self.requests.append(request)
        asked = [{"role": "user", "content": f"Add {request.task_index} and 2."}]
        prompt = self._renderer.render_ids(asked, tools=TOOLS, add_generation_prompt=True)
        first = await self._generate(request, prompt)
        one = self._record_ids[request.rollout_id]
        told = {"role": "tool", "tool_call_id": "c", "content": "Tool not found: plus"}
        prompt = self._renderer.bridge_to_next_turn(prompt, first, [told], tools=TOOLS).token_ids
        second = await self._generate(request, prompt)
        two = self._record_ids[request.rollout_id]
        calls = [ToolCall(id="c", name="plus", arguments="{}")]
        turns = [
            MessageRecord(role="user", text="q"),
            MessageRecord(
                role="assistant", text="a", num_tokens=len(first), call=0, parent=0, tool_calls=calls, record_id=one
            ),
            MessageRecord(role="tool", text=told["content"], error=told["content"], num_tokens=9, parent=1),
            MessageRecord(role="assistant", text="b", num_tokens=len(second), call=1, parent=2, record_id=two),
        ]
        reward = float(self._reward(request))
        session = SessionRecord(session_id=request.rollout_id, agent="a", trainable=True, reward=reward, tools=TOOLS)
        return RolloutReply(rollout_id=request.rollout_id, task_id=f"t{request.task_index}", reward=reward,
                            parts={"correct": reward}, turns=turns, sessions=[session])  # fmt: skip


def both_losses(root, *, max_steps: int, resume_: bool = False, **orchestrator: Any) -> Config:
    pairs = root / "pairs.jsonl"
    if not pairs.exists():
        states = [PairState(state_id=str(n), messages=[{"role": "user", "content": f"Say {n}."}]) for n in range(5)]
        made = [
            Pair(trace="t", state=state, chosen={"role": "assistant", "content": "yes"},
                 rejected={"role": "assistant", "content": "no"}, epsilon=0.125)
            for state in states
        ]  # fmt: skip
        pairs.write_bytes(b"".join(msgspec.json.encode(pair) + b"\n" for pair in made))
    values = make_config(root, max_steps=max_steps, resume=resume_, hints={}, **orchestrator).model_dump()
    values["orchestrator"]["preferences"] = {"pairs": str(pairs), "pairs_per_step": 2}
    values["channels"]["sdpo"] |= {"weight": 0.5}
    values["channels"]["replay_dpo"] |= {"weight": 0.1}
    return Config.model_validate(values)


async def test_batches_carry_hinted_turns_and_pairs(open_run, run_dir, tmp_path):
    """Each row's turns match id by id, every step has its pairs, the log shows the hints, and a resume goes on."""
    config = both_losses(tmp_path, max_steps=3)
    async with open_run(config, ToolPool()) as run, run.trainer(0) as trainer:
        for step in (1, 2):
            [reply] = await trainer.train(step)
            assert reply.totals.distilled_turns > 0 and reply.totals.units == {"replay_dpo": 2}
            assert reply.metrics["hints/hinted"] >= reply.totals.distilled_turns
            assert reply.metrics["rollout/turn_error_rate"] == 0.5
            for row in reply.micro_batches:
                ids = ints(row.input_ids)
                for turn in row.turns:
                    student, teacher = ids[turn.student :][: turn.count], ints(turn.tail)[-turn.count :]
                    assert student.tolist() == teacher.tolist()
        assert (await trainer.checkpoint(2)).error is None
        lines = await run.rollouts(1)
        hints = {turn["hint"] for line in lines for turn in line["turns"]} - {None}
        assert hints == {"Reminder: Available tools are: add"}
        assert {line["status"] for line in lines} <= {"trained", "distilled", "filtered"}
        before = [pair.name for reply in trainer.steps[2] for row in reply.micro_batches for pair in row.units]
    config = both_losses(tmp_path, max_steps=3, resume_=True)
    async with open_run(config, ToolPool()) as run, run.trainer(2) as trainer:
        [reply] = await trainer.train(3)
        after = [pair.name for row in reply.micro_batches for pair in row.units]
        assert len(after) == 2 and not set(after) & set(before)


async def test_with_weights_0_the_rows_are_those_of_the_policy_loss(open_run, run_dir, tmp_path):
    """Hints may be made anyway; the trainer gets none of them."""
    config = make_config(tmp_path, max_steps=1, hints={})
    async with open_run(config, ToolPool()) as run, run.trainer(0) as trainer:
        [reply] = await trainer.train(1)
        assert reply.metrics["hints/hinted"] > 0
        assert not any(row.turns or row.units for row in reply.micro_batches)
        assert reply.totals.distilled_turns == 0
