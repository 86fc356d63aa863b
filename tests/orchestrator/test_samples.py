"""Generation records -> samples: exact-prefix merge, branches, and every sampled token trained exactly once."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_prime.errors import RolloutError
from composer_prime.wire.node_messages import Sampling
from composer_prime.wire.types import Sample, TurnSpan, VersionSpan, flags, floats, ints, pack_floats
from orchestrator.gateway.http import GenerationRecord
from orchestrator.rollouts.groups import FinishedGroup, GroupOutcome, GroupPlan, trained_by_node, with_advantage
from orchestrator.rollouts.rollout import compile_rollout, finish_rollout
from orchestrator.rollouts.rollout_log import rollout_line
from orchestrator.workers.pool import MessageRecord, RolloutReply, SessionRecord
from tests.records_made import record_of
from tests.rollouts_made import Step, play

ONE_SESSION = [SessionRecord(session_id="r", agent="policy", trainable=True, reward=1.0)]
PLAN = GroupPlan(group=3, source="s", task_index=1, seed=5, size=4)


def record(
    prompt: list[int], completion: list[int], *versions: int, session: str = "r", name: str = ""
) -> GenerationRecord:
    count = len(completion)
    cuts = np.linspace(0, count, len(versions or (0,)) + 1).astype(int)
    spans = [
        VersionSpan(int(a), int(b), version) for a, b, version in zip(cuts, cuts[1:], versions or (0,), strict=False)
    ]
    logprobs = [-0.001 * token for token in completion]
    sampling = Sampling(max_tokens=64, temperature=0.7)
    return record_of(session, prompt, completion, logprobs=logprobs, spans=spans, sampling=sampling, record_id=name)


def answering(made: GenerationRecord, **changes) -> GenerationRecord:
    return replace(made, answer=msgspec.structs.replace(made.answer, **changes))


def compiled(records: list[GenerationRecord], **reply) -> list[Sample]:
    return compile_rollout(PLAN, RolloutReply(rollout_id="r", task_id="t", reward=1.0, **reply), records)


def test_turns_that_extend_one_another_become_one_sample():
    """Turn 2's prompt is turn 1 and the tool's answer: one sample, the answer masked, spans and turns placed."""
    [sample] = compiled([record([1, 2], [3, 4], 7), record([1, 2, 3, 4, 9, 9], [5, 6], 7, 8)])
    assert ints(sample.input_ids).tolist() == [1, 2, 3, 4, 9, 9, 5, 6]
    assert flags(sample.loss_mask).tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert floats(sample.logprobs) == pytest.approx([0, 0, -0.003, -0.004, 0, 0, -0.005, -0.006])
    assert sample.version_spans == [VersionSpan(2, 4, 7), VersionSpan(6, 7, 7), VersionSpan(7, 8, 8)]
    assert sample.turns == [TurnSpan(2, 4, 0), TurnSpan(6, 8, 1)]
    assert (sample.sample_id, sample.group_id, sample.temperature) == ("r/0", "g000003", 0.7)
    assert (sample.version_min, sample.version_max) == (7, 8)


def test_a_broken_prefix_starts_a_branch():
    """A history that was rewritten (here the first reply was shortened) can't be one sequence with what was sampled."""
    first, second = compiled([record([1, 2], [3, 4]), record([1, 2, 3, 9], [5])])
    assert ints(first.input_ids).tolist() == [1, 2, 3, 4]
    assert ints(second.input_ids).tolist() == [1, 2, 3, 9, 5]
    assert flags(second.loss_mask).tolist() == [0, 0, 0, 0, 1]
    assert second.turns == [TurnSpan(4, 5, 1)]


def test_branches_train_a_shared_turn_once():
    """Two continuations of one turn: the shared turn is trained in the first sample and masked in the second."""
    root, one, other = record([1], [2, 3]), record([1, 2, 3, 8], [4]), record([1, 2, 3, 9], [5])
    first, second = compiled([root, one, other])
    assert flags(first.loss_mask).tolist() == [0, 1, 1, 0, 1]
    assert flags(second.loss_mask).tolist() == [0, 0, 0, 0, 1]
    assert second.version_spans == [VersionSpan(4, 5, 0)]


def test_a_turn_joins_the_longest_sequence_that_it_continues():
    """Two samples of one prompt, then a turn after the second: it belongs to that one, not to its shorter sibling."""
    first, second = compiled([record([1], [2]), record([1], [2, 3]), record([1, 2, 3, 9], [4])])
    assert ints(first.input_ids).tolist() == [1, 2]
    assert ints(second.input_ids).tolist() == [1, 2, 3, 9, 4]
    assert flags(second.loss_mask).tolist() == [0, 1, 1, 0, 1]


def test_a_turn_without_tokens_leaves_no_masked_tail_and_no_empty_sample():
    """What follows the last sampled token carries no loss; a branch without a sampled token is no sample."""
    [sample] = compiled([record([1, 2], [3]), record([1, 2, 3, 4, 4], [])])
    assert ints(sample.input_ids).tolist() == [1, 2, 3]
    assert compiled([record([1], [])]) == []


def test_a_truncated_rollout_keeps_its_samples():
    """Context overflow ends a rollout; what was sampled before is still trained."""
    [sample] = compiled([record([1, 2], [3, 4, 5])], truncated=True, stop_reason="max_total_tokens")
    assert sample.num_trained == 3


def test_only_trainable_sessions_become_samples():
    """A simulated user's tokens are not the policy's to learn, although it sampled them."""
    sessions = [
        SessionRecord(session_id="r", agent="policy", trainable=True, reward=1.0),
        SessionRecord(session_id="r#1", agent="user", trainable=False, reward=None),
    ]
    samples = compiled([record([1], [2]), record([5], [6], session="r#1")], sessions=sessions)
    assert [ints(sample.input_ids).tolist() for sample in samples] == [[1, 2]]


@pytest.mark.parametrize("turns", [{"a": 2, "b": 2}, {"a": 3}])
def test_a_worker_that_saw_other_turns_is_contradicted(turns):
    """Turns that the gateway did not record, or with another length, mean incomplete tokens: no training on them."""
    with pytest.raises(RolloutError):
        compiled([record([1], [2, 3], name="a")], turns=shown(**turns), sessions=ONE_SESSION)


def shown(**counts: int) -> list[MessageRecord]:
    """The worker's turns: the tokens of each, by the name of its record."""
    return [
        MessageRecord(role="assistant", text="", call=call, num_tokens=count, record_id=name)
        for call, (name, count) in enumerate(counts.items())
    ]


def test_a_reply_that_the_rollout_never_saw_is_not_trained():
    """Lost on its way and asked for again, or too late for a rollout that had ended: no part in the reward."""
    lost, again = record([1], [2, 3], name="lost"), record([1], [4, 5], name="again")
    late = record([1, 4, 5, 9], [6, 7, 8], name="late")
    for records in ([lost, again], [lost, again, late], [again, late]):
        [sample] = compiled(records, turns=shown(again=2), sessions=ONE_SESSION)
        assert ints(sample.input_ids).tolist() == [1, 4, 5]


def test_several_answers_to_one_prompt_that_the_rollout_saw_are_all_trained():
    """An agent may ask for two answers to one prompt: neither is a repetition of the other."""
    records = [record([1], [2, 3], name="a"), record([1], [4], name="b")]
    samples = compiled(records, turns=shown(a=2, b=1), sessions=ONE_SESSION)
    assert [ints(sample.input_ids).tolist() for sample in samples] == [[1, 2, 3], [1, 4]]


def test_turns_of_another_temperature_are_another_sample():
    """A sample has one temperature, the recorded one: its logprobs are those after it."""
    warm = replace(record([1, 2, 3, 9], [5]), sampling=Sampling(max_tokens=9, temperature=1.5))
    first, second = compiled([record([1, 2], [3]), warm])
    assert (first.temperature, second.temperature) == (0.7, 1.5)
    assert flags(second.loss_mask).tolist() == [0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"logprobs": pack_floats([0.0])}, "came with 1 log-prob"),
        ({"logprobs": pack_floats([0.0, np.nan])}, "not finite"),
        ({"version_spans": [VersionSpan(0, 1, 0)]}, "do not cover"),
        ({"version_spans": [VersionSpan(0, 1, 0), VersionSpan(0, 2, 1)]}, "do not cover"),
        ({"version_spans": [VersionSpan(0, 2, 0), VersionSpan(2, 5, 1)]}, "do not cover"),
        ({"prompt_ids": np.empty(0, np.int32)}, "without a prompt"),
        ({"sampling": Sampling(max_tokens=9, temperature=0.0)}, "sampled with temperature 0, top_p 1, top_k 0"),
        ({"sampling": Sampling(max_tokens=9, top_p=0.9)}, "top_p 0.9"),
        ({"sampling": Sampling(max_tokens=9, top_k=5)}, "top_k 5"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(change, said):
    """Misaligned logprobs or spans would shift every later token's loss."""
    with pytest.raises(RolloutError, match=said):
        made = record([1], [2, 3])
        change_it = replace if change.keys() <= {"prompt_ids", "sampling"} else answering
        compiled([change_it(made, **change)])


@st.composite
def conversations(draw) -> list[GenerationRecord]:
    """Records of a random tree of conversations: turns extend any earlier sequence, exactly or after a break."""
    tokens = st.lists(st.integers(3, 6), max_size=4)
    sequences, records = [[1]], []
    for _ in range(draw(st.integers(1, 8))):
        history = draw(st.sampled_from(sequences))
        kept = history if draw(st.booleans()) else history[: draw(st.integers(1, len(history)))]
        prompt = [*kept, *draw(tokens)]
        completion = draw(tokens)
        records.append(record(prompt, completion, *draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))))
        sequences.append([*prompt, *completion])
    return records


@settings(max_examples=300, deadline=None)
@given(conversations())
def test_every_sampled_token_is_trained_exactly_once_with_its_own_context(records):
    """Whatever the branches: the trained (context, token, logprob, version) tuples are exactly the sampled ones."""
    sampled = []
    for rec in records:
        for at, (token, logprob) in enumerate(zip(rec.answer.ids, rec.answer.token_logprobs, strict=True)):
            version = next(span.version for span in rec.answer.version_spans if span.start <= at < span.end)
            context = (*rec.prompt_ids.tolist(), *rec.answer.ids[:at].tolist())
            sampled.append((context, int(token), round(float(logprob), 5), version))
    trained = []
    samples = compiled(records)
    for sample in samples:
        ids, mask = ints(sample.input_ids).tolist(), flags(sample.loss_mask)
        versions = {at: span.version for span in sample.version_spans for at in range(span.start, span.end)}
        assert set(versions) == set(np.flatnonzero(mask).tolist())
        assert {at for turn in sample.turns for at in range(turn.start, turn.end)} == set(versions)
        assert mask[-1] == 1
        logprobs = floats(sample.logprobs)
        assert not logprobs[mask == 0].any()
        trained += [(tuple(ids[:at]), ids[at], round(float(logprobs[at]), 5), versions[at]) for at in versions]
    assert sorted(trained) == sorted(sampled)
    turns = sorted(turn.turn for sample in samples for turn in sample.turns)
    assert turns == [number for number, rec in enumerate(records) if len(rec.answer)]


def test_the_advantage_stands_on_trained_tokens_only():
    """Masked tokens carry advantage 0, so a loss that forgot its mask would still not train them."""
    [sample] = compiled([record([1, 2], [3]), record([1, 2, 3, 4], [5])])
    assert floats(with_advantage(sample, -0.5).advantages).tolist() == [0, 0, -0.5, 0, -0.5]


# A step's tokens are counted by the node that sampled them, turn by turn, also where two served a rollout. Tokens that
# are masked as too old count for nobody.
def test_trained_tokens_are_counted_by_node():
    records = [record([1, 2], [3, 4], 0), record([1, 2, 3, 4, 9], [5, 6, 7], 1)]
    reply = RolloutReply(rollout_id="r", task_id="t", reward=1.0)
    served = [
        answering(each, sampled_by=[(name, len(each.answer))])
        for each, name in zip(records, ["slow", "fast"], strict=True)
    ]
    finished, samples = finish_rollout(PLAN, reply, served, seed=1)
    assert (finished.nodes, finished.turn_nodes) == (["slow", "fast"], [0, 1])
    group = FinishedGroup(plan=PLAN, outcome=GroupOutcome.READY, rollouts=[finished], samples=samples)
    assert trained_by_node([group]) == {"slow": 2, "fast": 3}
    assert trained_by_node([group.without_stale_tokens(1)]) == {"slow": 0, "fast": 3}


# A message's turn number is the one that its tokens have in the sample, whatever sessions a rollout has.
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
    finished, [sample] = finish_rollout(PLAN, reply, records, seed=1)
    assert [turn.turn for turn in finished.turns] == [None, 0, 1, 2]
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


# A turn holds its sampled tokens where the run records them, also those that no batch is to train.
def test_a_turn_holds_its_tokens_where_asked():
    played = play("tiny", "Add.", [Step("a", "1"), Step("b")])
    reply = RolloutReply(rollout_id=played.rollout.rollout_id, task_id="t", turns=played.rollout.turns, reward=0.0)
    told, _ = finish_rollout(PLAN, reply, played.records, seed=1, with_tokens=True)
    tokens = [[token for token, _ in turn.tokens] for turn in told.turns if turn.turn is not None]
    assert tokens == [record.answer.ids.tolist() for record in played.records]
    assert all("tokens" not in turn for turn in rollout_line(1, "s", played.rollout, "filtered")["turns"])
