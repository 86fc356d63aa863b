"""Replay: who votes, in which order, what comes of it, and where it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from loopback import Endpoint, call, configured, kept_answers, overrule, play, replayed, says, serving, state, xml
from pydantic import ValidationError

from composer_prime.config.teachers import TeachersConfig
from composer_prime.data.pairs import Pair
from composer_prime.run.costs import spent
from composer_prime.traces.records import StateRecord, TraceState, read_pairs, read_records, votes_beside
from composer_prime.traces.replay.replay import replay_summary


# Two teachers that agree settle a majority of three: the third is never asked.
def test_the_third_is_asked_only_when_two_disagree(tmp_path: Path) -> None:
    progress, endpoint = play(tmp_path, [state(0)])
    assert len(endpoint.answered) == 2 and progress.pairs == 1
    (pair,) = read_pairs(tmp_path / "pairs.jsonl")
    assert pair.epsilon == pytest.approx(1 - 2.5 / 3)

    def split(model: str, messages: list[dict]) -> tuple[str, dict]:
        return "cat", {"path": "b.py" if model == "gpt-a" else "a.py"}

    other = tmp_path / "other"
    progress, endpoint = play(other, [state(0)], answers=split)
    assert len(endpoint.answered) == 3
    assert next(read_pairs(other / "pairs.jsonl")).epsilon == pytest.approx(1 - 2.5 / 4)


# Two of one family that agree against the third decide nothing; where the third failed, the state is tried again later.
def test_one_family_is_no_majority(tmp_path: Path) -> None:
    def split(model: str, messages: list[dict]) -> tuple[str, dict]:
        return "cat", {"path": model[:3]}

    models = ("gpt-a", "qwen-b", "gpt-c")
    progress, endpoint = play(tmp_path, [state(0)], answers=split, models=models)
    assert len(endpoint.answered) == 3 and progress.outcomes == {"no_majority": 1} and progress.pairs == 0

    def silent(model: str, messages: list[dict]) -> str | tuple[str, dict]:
        return "" if model == "qwen-b" else ("cat", {"path": "a.py"})

    progress, _ = play(tmp_path / "silent", [state(0)], answers=silent, models=models)
    assert progress.outcomes == {"failed": 1} and progress.pairs == 0
    progress, _ = play(tmp_path / "silent", [state(0)], models=models)
    assert progress.resumed == 0


# A trace is never shown to its own family; with fewer than two others it is refused, and nothing is asked.
def test_no_family_judges_its_own_trace(tmp_path: Path) -> None:
    models = ("claude-x", "gpt-a", "qwen-b")
    _, endpoint = play(tmp_path, [state(0)], models=models, voters=3)
    assert {model for model, _ in endpoint.answered} == {"gpt-a", "qwen-b"}
    progress, endpoint = play(tmp_path / "two", [state(0)], models=("claude-x", "gpt-a"))
    assert endpoint.asked == [] and progress.outcomes == {"refused": 1}
    assert "two families are needed" in next(iter(progress.refusals))
    progress, endpoint = play(tmp_path / "unknown", [state(0, family="unknown")])
    assert endpoint.asked == [] and "assume_family" in next(iter(progress.refusals))
    progress, _ = play(tmp_path / "assumed", [state(0, family="unknown")], assume_family="claude")
    assert progress.outcomes == {"overruled": 1}


def test_a_pool_of_one_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="all of family 'gpt'"):
        configured(tmp_path, "http://x/v1", models=("gpt-a", "gpt-b"))
    with pytest.raises(ValidationError, match="whose family no rule knows"):
        TeachersConfig(teacher=[{"name": "x", "model": "mystery"}])  # pyright: ignore


# What teachers see: a neutral system prompt, no thinking; a trace's own system prompt stays alone.
def test_what_teachers_see(tmp_path: Path) -> None:
    own = state(1, messages=[{"role": "system", "content": "Mine."}, {"role": "user", "content": "Go."}])
    _, endpoint = play(tmp_path, [state(0), own])
    prompts = {body["messages"][0]["content"][:21] for body in endpoint.seen}
    assert prompts == {"You are a capable sof", "Mine."}
    assert all(body["temperature"] == 0 and body["max_tokens"] == 20 for body in endpoint.seen)


# A student whom the majority agrees with beats the minority; where nobody agrees there is no pair.
def test_minority_and_no_majority(tmp_path: Path) -> None:
    def minority(model: str, messages: list[dict]) -> tuple[str, dict]:
        return ("rm", {"n": 0}) if model == "gpt-a" else ("ls", {"n": 0})

    play(tmp_path, [state(0)], answers=minority)
    (pair,) = read_pairs(tmp_path / "pairs.jsonl")
    assert pair.chosen["tool_calls"][0]["function"]["name"] == "ls"
    assert pair.rejected["tool_calls"][0]["function"]["name"] == "rm"
    progress, _ = play(tmp_path / "none", [state(0)], answers=lambda model, messages: (model, {}))
    assert progress.outcomes == {"no_majority": 1} and progress.pairs == 0


# Every pair names its votes, and each vote the answer in the cache that it was.
def test_pairs_can_be_traced_to_their_votes(tmp_path: Path) -> None:
    play(tmp_path, [state(0), state(1)])
    records = {record.state: record for record in read_records(votes_beside(tmp_path / "pairs.jsonl"))}
    for pair in read_pairs(tmp_path / "pairs.jsonl"):
        record = records[pair.state.state_id]
        assert pair.pair_id in record.pairs
        for vote in record.votes:
            assert pair.teachers["votes"][vote.teacher]["answer"] == vote.answer
            assert vote.answer in kept_answers(tmp_path / "cache")
        assert pair.cost_usd == record.cost_usd == pytest.approx(0.22)


# The second replay skips what is done; a third into new files pays nothing, and writes the same pairs. An answer from
# the cache keeps the price of when it was asked for, beside what is paid now.
async def test_nothing_is_paid_twice(tmp_path: Path) -> None:
    states = [state(number) for number in range(5)]
    async with serving(Endpoint(answers=overrule)) as endpoint:
        config = configured(tmp_path, endpoint.url)
        first = await replayed(tmp_path, config, states[:3])
        second = await replayed(tmp_path, config, states)
        assert (first.votes.calls, second.votes.calls, second.resumed) == (6, 4, 3)
        again = tmp_path / "again"
        third = await replayed(again, config, states)
        assert third.votes.calls == 0 and third.votes.cached == 10
        assert third.usd == 0 and third.price_usd == pytest.approx(1.1)
        assert len(endpoint.asked) == 10
    folders = (tmp_path, tmp_path / "again")
    once, twice = (list(read_pairs(folder / "pairs.jsonl")) for folder in folders)
    assert {pair.pair_id for pair in once} == {pair.pair_id for pair in twice}
    assert spent(tmp_path / "costs.jsonl").usd == pytest.approx(1.1)
    assert spent(tmp_path / "again" / "costs.jsonl").usd == 0
    assert [pair.cost_usd for pair in twice] == pytest.approx([0.22] * 5)
    paid, cached = (next(read_records(votes_beside(folder / "pairs.jsonl"))) for folder in folders)
    assert (paid.cost_usd, cached.cost_usd) == (pytest.approx(0.22), 0)
    assert paid.price_usd == cached.price_usd == pytest.approx(0.22)


# A crash between a state's pairs and its votes, or within a line, loses nothing and doubles nothing.
def test_a_crash_between_the_files(tmp_path: Path) -> None:
    play(tmp_path, [state(0), state(1)])
    votes = votes_beside(tmp_path / "pairs.jsonl")
    whole = votes.read_bytes()
    votes.write_bytes(whole[: whole.index(b"\n") + 30])
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_bytes(pairs.read_bytes() + b'{"trace": "t", "sta')
    progress, _ = play(tmp_path, [state(0), state(1)])
    assert (progress.resumed, progress.votes.calls) == (1, 2)  # another port is another endpoint
    assert len({pair.pair_id for pair in read_pairs(pairs)}) == len(list(read_pairs(pairs))) == 2
    assert len(list(read_records(votes))) == 2


# What was not decided is tried again: here the first replay did not know the family, the second is told.
def test_undecided_states_are_taken_up_again(tmp_path: Path) -> None:
    unknown = [state(0, family="unknown"), state(1)]
    first, _ = play(tmp_path, unknown)
    second, _ = play(tmp_path, unknown, assume_family="claude")
    assert first.outcomes == {"refused": 1, "overruled": 1}
    assert second.outcomes == {"overruled": 1} and second.resumed == 1
    assert len(list(read_pairs(tmp_path / "pairs.jsonl"))) == 2


# An answer of many times the other's length gives no pair.
def test_lengths(tmp_path: Path) -> None:
    progress, _ = play(tmp_path / "long", [state(0)], answers=lambda model, messages: ("cat", {"path": "x" * 500}))
    assert progress.pairs == 0 and progress.dropped == 1


def said(model: str, messages: list[dict]) -> str:
    return f"All done, says {model}."


# A crash before the votes were written, and a teacher that is back since: the pair of the state stays the one it is,
# and the new votes name it.
async def test_a_state_has_one_pair_against_a_rejected_form(tmp_path: Path) -> None:
    votes = votes_beside(tmp_path / "pairs.jsonl")
    async with serving(Endpoint(answers=said, script={"gpt-a": ["401"]})) as endpoint:
        config = configured(tmp_path, endpoint.url)
        await replayed(tmp_path, config, [state(0)])
        votes.write_bytes(b"")
        progress = await replayed(tmp_path, config, [state(0)])
        assert (progress.votes.calls, progress.votes.cached) == (1, 1)
    (pair,), (record,) = read_pairs(tmp_path / "pairs.jsonl"), read_records(votes)
    assert pair.chosen["content"] == "All done, says qwen-b." and len(record.votes) == 2
    assert record.pairs == [pair.pair_id]


def split(model: str, messages: list[dict]) -> tuple[str, dict]:
    return "cat", {"path": "a" if model == "gpt-a" else "b"}


# A state whose votes a cap cut off has no pair yet: the next replay decides it.
async def test_votes_that_a_cap_cut_off_decide_nothing(tmp_path: Path) -> None:
    async with serving(Endpoint(answers=split)) as endpoint:
        capped = {"usd_per_run": 0.5}
        config = configured(tmp_path, endpoint.url, system_prompt="")
        for teacher in config.teacher[2:]:
            teacher.output_usd_per_mtok = 10_000.0
        first = await replayed(
            tmp_path, config.model_copy(update={"budget": type(config.budget)(**capped)}), [state(0)]
        )
        assert first.stopped and (first.states, first.pairs) == (0, 0) and len(endpoint.asked) == 2
        assert (await replayed(tmp_path, config, [state(0)])).pairs == 1


# Two states of one id: the second is left out, and the summary says which; the very same state again is done already.
@pytest.mark.parametrize("at_once", [1, 8])
async def test_two_states_of_one_id(tmp_path: Path, at_once: int) -> None:
    other = state(0, messages=[{"role": "user", "content": "Quite another task."}])
    async with serving(Endpoint(answers=said)) as endpoint:
        config = configured(tmp_path, endpoint.url, concurrent_states=at_once)
        progress = await replayed(tmp_path, config, [state(0), other, state(0)])
        assert (progress.states, progress.left_out, progress.resumed) == (1, 1, 1)
        assert "trace 't' has another state 't/0000'" in "\n".join(replay_summary(progress, tmp_path / "pairs.jsonl"))
        later = await replayed(tmp_path, config, [other, state(0)])
        assert (later.states, later.left_out, later.resumed) == (0, 1, 1)


def voted(tmp_path: Path, endpoint: Endpoint, asked: TraceState) -> tuple[StateRecord, list[Pair]]:
    """What became of one state."""
    play(tmp_path, [asked], endpoint=endpoint)
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
