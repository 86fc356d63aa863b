"""A message's turn number is the one that its tokens have in the sample, whatever sessions a rollout has."""

from __future__ import annotations

import msgspec
import pytest

from orchestrator.rollouts.rollout import compile_rollout, numbered_turns
from orchestrator.workers.protocol import MessageRecord, RolloutReply, SessionRecord
from tests.rollouts_made import PLAN, Step, play


def test_turns_of_two_agents_are_numbered_through():
    # A user simulator speaks between the policy's turns; its turn has a number too, but no tokens in a sample.
    policy = play("tiny", "Add.", [Step("a", "1"), Step("bb")]).records
    [user] = play("tiny", "Play the user.", [Step("please go on")], rollout_id="g000003-0#1").records
    records = [policy[0], user, policy[1]]
    turns = [
        MessageRecord(role="user", text="q"),
        MessageRecord(role="assistant", text="a", call=0, session=0, record_id="g000003-0/0"),
        MessageRecord(role="assistant", text="bb", call=1, session=0, record_id="g000003-0/1"),
        MessageRecord(role="assistant", text="please go on", call=0, session=1, record_id="g000003-0#1/0"),
    ]
    sessions = [
        SessionRecord(session_id="g000003-0", agent="policy", trainable=True, reward=1.0),
        SessionRecord(session_id="g000003-0#1", agent="user", trainable=False, reward=None),
    ]
    reply = RolloutReply(rollout_id="g000003-0", task_id="t", reward=1.0, turns=turns, sessions=sessions)
    numbered = numbered_turns(reply, records)
    assert [turn.turn for turn in numbered] == [None, 0, 1, 2]
    [sample] = compile_rollout(PLAN, reply, records)
    assert [span.turn for span in sample.turns] == [0, 1]
    assert [span.end - span.start for span in sample.turns] == [len(record.answer) for record in policy]


# Mean surprisal in nats a token: what replay takes for how uncertain the student was.
def test_a_turn_says_how_surprising_it_was():
    played = play("tiny", "Add.", [Step("a", "1"), Step("b")])
    said = [turn.surprisal for turn in played.rollout.turns if turn.turn is not None]
    assert said == [pytest.approx(-float(record.answer.token_logprobs.mean()), abs=1e-4) for record in played.records]


def test_a_turn_says_how_it_ended():
    played = play("tiny", "Add.", [Step("a", "1"), Step("b", finish="length")])
    assert [turn.finish_reason for turn in played.rollout.turns if turn.turn is not None] == ["stop", "length"]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(played.rollout), type=type(played.rollout)) == played.rollout
