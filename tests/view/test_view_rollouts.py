"""The index of rollouts: it follows the files, filters, and reads one rollout without reading all."""

import json

import msgspec
import pytest

from composer_prime.errors import ConfigError
from composer_prime.view.rollout_index import RolloutIndex
from composer_prime.view.rollout_payload import evaluation_difference, one_rollout, read_evaluations, rollout_list
from composer_prime.view.workspace import Workspace
from tests.view.run_made import HOSTILE, batch, make_run, rollout, write_lines


@pytest.fixture
def run_dir(tmp_path):
    return make_run(tmp_path / "a1", steps=3)


@pytest.fixture
def index(run_dir):
    return RolloutIndex(run_dir)


def ids(index: RolloutIndex, **query: str) -> list[str]:
    return [row["rollout_id"] for row in rollout_list(index, query)["rows"]]


# Every filter keeps exactly the rollouts that it names; the newest step comes first.
def test_filters(index):
    everything = rollout_list(index, {})
    assert everything["total"] == 24 and everything["rows"][0]["step"] == 3
    assert everything["facets"]["steps"] == [1, 2, 3]
    assert ids(index, step="1", min="0.5") == ["g000002-1", "g000002-3", "g000003-1", "g000003-3"]
    assert ids(index, group="4") == ["g000004-0", "g000004-1", "g000004-2", "g000004-3"]
    assert ids(index, step="2", max="0.5", q="g000005") == ["g000005-0", "g000005-2"]
    assert ids(index, step="2", error="tool") == ["g000004-1", "g000005-1"]
    assert ids(index, step="2", error="hinted") == ["g000004-1", "g000005-1"]
    assert ids(index, kind="failed") == ["g000002-0"] == ids(index, kind="failed", q="box broke")
    assert len(ids(index, kind="eval", step="3", min="1")) == 7
    assert ids(index, sort="-reward", limit="1", step="1") == ["g000002-1"]
    assert ids(index, step="1", limit="2", offset="6") == ["g000003-2", "g000003-3"]
    assert len(ids(index, limit="-5")) == 1


# Text of a filter is text: neither SQL nor a pattern.
@pytest.mark.parametrize("text", ["%", "_", "²", "' OR 1=1 --", "\\", 'task"; DROP TABLE rollouts'])
def test_a_filter_is_no_pattern_and_no_sql(index, text):
    assert ids(index, q=text) == [] == ids(index, task=text)
    assert rollout_list(index, {"source": text, "status": text})["total"] == 0
    assert rollout_list(index, {"sort": text, "error": text})["total"] == 24
    with pytest.raises(ConfigError, match="is not a whole number"):
        rollout_list(index, {"step": text})


# The verdict of the monitor for hacks and the nodes of a rollout can be filtered by, where the run records them.
def test_verdicts_and_nodes_are_filters(run_dir, index):
    found = {"rule": "test-edit", "severity": "suspicious", "place": "turn 2", "evidence": "rm tests"}
    verdicts = [{"hack": True, "findings": []}, {"hack": False, "findings": [found]}, {"hack": False, "findings": []}]
    lines = [rollout(9, 90, number, 1.0, verdict=verdict, nodes=["a", "b"]) for number, verdict in enumerate(verdicts)]
    write_lines(run_dir.rollouts(9), [*lines, rollout(9, 90, 3, 1.0, node="b", verdict=None)])
    for number, verdict in enumerate(("hack", "suspicious", "clean")):
        assert ids(index, verdict=verdict) == [f"g000090-{number}"]
    assert ids(index, node="a") == ["g000090-0", "g000090-1", "g000090-2"] and len(ids(index, node="b")) == 4
    assert rollout_list(index, {})["facets"]["verdicts"] == ["clean", "hack", "suspicious"]


# The index follows a live run: a replaced batch, a growing failed.jsonl with a torn line, a file that is gone.
def test_the_index_follows_the_files(run_dir, index):
    assert len(ids(index)) == 24
    write_lines(run_dir.rollouts(3), batch(3)[:5])
    with run_dir.failed_rollouts.open("a") as file:
        file.write(json.dumps(rollout(2, 7, 1, None)) + "\n" + json.dumps(rollout(2, 7, 2, None))[:40])
    run_dir.rollouts(1).unlink()
    assert len(ids(index)) == 13
    assert ids(index, kind="failed") == ["g000007-1", "g000002-0"]
    with run_dir.failed_rollouts.open("a") as file:
        file.write(json.dumps(rollout(2, 7, 2, None))[40:] + "\nnot json\n[1]\n")
    assert ids(index, kind="failed") == ["g000007-1", "g000007-2", "g000002-0"]


# One rollout comes whole, with its siblings in order; an evaluation's siblings are those of its task.
def test_one_rollout_with_siblings(index):
    page = one_rollout(index, {"kind": "step", "step": "2", "id": "g000004-1"})
    assert page is not None and page["rollout"]["turns"][1]["hint"] == "Use a."
    assert [each["entry"]["rollout_id"] for each in page["siblings"]] == [f"g000004-{number}" for number in range(4)]
    assert "offset" not in page["entry"]
    evaluated = one_rollout(index, {"kind": "eval", "step": "3", "id": "eval3-s-2"})
    assert evaluated is not None and len(evaluated["siblings"]) == 1
    assert one_rollout(index, {"id": "../../etc/passwd"}) is None


# What training fixed and broke comes from the tasks that both evaluations have.
def test_flipped_tasks(run_dir, index):
    write_lines(run_dir.eval_rollouts(3), [rollout(3, None, task, float(task > 0)) for task in range(7)])
    found = evaluation_difference(read_evaluations(index), None, None)
    assert [row["task"] for row in found["fixed"]] == [f"s/task-{task}" for task in range(2, 7)]
    assert [row["task"] for row in found["broken"]] == ["s/task-0"]
    assert (found["solved_count"], found["unsolved_count"]) == (1, 0)
    assert found["change"].count == 7
    with pytest.raises(ConfigError, match="there is no evaluation of step 8; there are 0, 3"):
        evaluation_difference(read_evaluations(index), 8, None)


# Odd values in a line never cost the other lines.
def test_odd_lines_are_kept_or_skipped(run_dir, index):
    odd = rollout(5, 50, 0, 1.0) | {"task_id": 7, "policy_versions": [], "cost": None, "error": "text", "group": 1.5}
    huge = rollout(5, 50, 1, 1.0) | {"turns": "none"}
    run_dir.rollouts(5).write_bytes(msgspec.json.encode(odd) + b"\n" + msgspec.json.encode(huge) + b"\n\xff\xfe\n{}\n")
    found = rollout_list(index, {"step": "5"})["rows"]
    assert [row["task_id"] for row in found] == ["7"] and found[0]["error"] == "text"


# Sampled tokens are spelled with the model's tokenizer; with a model that is not here they stay ids. So do
# odd ones.
@pytest.mark.parametrize(("model", "spelled"), [("tiny", ["B", "e"]), ("no/such/folder", [36, 71])])
def test_sampled_tokens_are_spelled(run_dir, model, spelled):
    run_dir.config.write_text(json.dumps({"model": {"path": model}}))
    line = rollout(9, 90, 0, 1.0)
    line["turns"][3]["tokens"] = [[36, -0.25], [71, -2.0]]
    line["turns"][1]["tokens"] = odd = [7, ["a", -0.1], [-3, 1]]
    write_lines(run_dir.rollouts(9), [line])
    page = Workspace([run_dir.root]).rollout({"run": "a1", "kind": "step", "step": "9", "id": "g000090-0"})
    assert page["rollout"]["turns"][3]["tokens"] == [[spelled[0], -0.25], [spelled[1], -2.0]]
    assert page["rollout"]["turns"][1]["tokens"] == odd


# The list has each task's question, the expected answer and the last reply; flipped tasks have them too.
def test_lists_say_what_was_asked(run_dir, index):
    write_lines(run_dir.rollouts(9), [rollout(9, 90, 0, 1.0, expected="4")])
    [row] = rollout_list(index, {"step": "9", "q": "</script>"})["rows"]
    assert (row["question"], row["expected"], row["reply"]) == (HOSTILE, "4", "3")
    write_lines(run_dir.eval_rollouts(3), [rollout(3, None, task, 1.0, expected="5") for task in range(8)])
    fixed = Workspace([run_dir.root]).evaluation({"run": "a1"})["fixed"]
    assert {(row["question"], row["expected"], row["reply"]) for row in fixed} == {(HOSTILE, "5", "3")}
