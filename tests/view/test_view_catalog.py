"""Which runs the page lists, how they stand, and what it reads of their metrics."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from composer_prime.errors import ConfigError
from composer_prime.monitor.metrics_file import MetricsFile
from composer_prime.view.catalog import distinguishing, find_runs, flatten, read_settings
from composer_prime.view.run_payload import verdict
from composer_prime.view.workspace import Workspace
from tests.view.run_made import make_run


# Runs, evaluations below evals/ and the clusters of a joint run are found by their place; other folders are not.
def test_runs_are_found_below_a_folder(tmp_path):
    make_run(tmp_path / "a1")
    make_run(tmp_path / "evals" / "a1-tiny")
    make_run(tmp_path / "joint" / "a", diloco={"peer_id": "a"})
    (tmp_path / "not-a-run").mkdir()
    (tmp_path / "not-a-run" / "config.json").write_text("{}")
    found = find_runs([tmp_path])
    assert {run_id: run.joint for run_id, run in found.items()} == {
        "a1": None,
        "evals/a1-tiny": None,
        "joint/a": "joint",
    }
    assert list(find_runs([tmp_path / "a1"])) == ["a1"]
    with pytest.raises(ConfigError, match="there is no folder"):
        find_runs([tmp_path / "absent"])


# A run has a name wherever the command is typed, and runs of one name in several folders are all there.
def test_every_run_has_an_id_of_its_own(tmp_path, monkeypatch):
    roots = [make_run(tmp_path / place / "x" / "a1", steps=1).root for place in ("one", "two", "three")]
    monkeypatch.chdir(roots[0])
    assert list(find_runs([Path()])) == ["a1"]
    found = find_runs([root.parent for root in roots])
    assert {run_id: run.run_dir.root for run_id, run in found.items()} == dict(
        zip(["a1", "x/a1", "x/a1-2"], roots, strict=True)
    )


# A folder that may not be read is named where it was asked for, and is no run below another.
def test_a_folder_that_may_not_be_read():
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        run = make_run(Path(name, "a1"), steps=1).root
        (locked := Path(name, "locked")).mkdir(0)
        user = os.geteuid()
        os.seteuid(user or 65534)
        try:
            assert list(find_runs([Path(name)])) == [run.name]
            with pytest.raises(ConfigError, match=str(locked)):
                find_runs([locked])
        finally:
            os.seteuid(user)


# A link below the folder that leads elsewhere is no way out of it.
def test_a_link_below_a_run_folder_is_not_followed(tmp_path):
    outside = make_run(tmp_path / "elsewhere" / "secret").root
    (tmp_path / "outputs" / "deep").mkdir(parents=True)
    os.symlink(outside, tmp_path / "outputs" / "deep" / "link")
    assert find_runs([tmp_path / "outputs"]) == {}


# The list says how a run ended: by its steps, and by the launcher's last note.
def test_the_list_tells_states_apart(tmp_path):
    make_run(tmp_path / "done")
    failed = make_run(tmp_path / "failed", steps=3)
    MetricsFile(failed.metrics, "launcher").log(2, {"event": "ended", "state": "failed", "problem": "node died"})
    joined = make_run(tmp_path / "joined", steps=3, run={"name": "joined", "seed": 0, "max_steps": 20})
    MetricsFile(joined.metrics, "launcher").log(3, {"event": "ended", "state": "finished"})
    running = make_run(tmp_path / "running", steps=3)
    (running.root / ".launcher.lock").write_text(f"{os.getpid()}\n")
    rows = {row["id"]: row for row in Workspace([tmp_path]).run_list()["runs"]}
    states = {run_id: row["state"] for run_id, row in rows.items()}
    assert states == {"done": "finished", "failed": "failed", "running": "running", "joined": "finished"}
    assert rows["done"]["held_out"][-1]["mean"] == 7 / 8 and len(rows["done"]["spark"]) == rows["done"]["step"] == 12
    assert rows["done"]["reward"] == pytest.approx(0.35)
    assert rows["failed"]["differs"] == {} and rows["done"]["differs"] == {"run.max_steps": 12}


# Only settings that not all runs share are listed, for those runs that are unlike the most.
def test_differences_name_what_is_unlike_most_runs():
    base = {"trainer": {"lr": 1}, "source": [{"name": "s"}], "run": {"name": "x"}}
    other = {"trainer": {"lr": 2}, "source": [{"name": "s"}], "run": {"name": "y"}, "lora": {"rank": 8}}
    settings = {name: flatten(each) for name, each in (("a", base), ("b", base), ("c", other))}
    assert distinguishing(settings) == {"a": {}, "b": {}, "c": {"trainer.lr": 2, "lora.rank": 8}}


# The verdict claims what the paired interval says, and no trend of few steps.
@pytest.mark.parametrize(
    ("before", "after", "tone", "words"),
    [
        (2, 30, "good", "over 32 tasks: it learned (0.062 after step 0, 0.938 after step 9)"),
        (30, 2, "bad", "it got worse"),
        (15, 16, "open", "undecided, the interval holds 0"),
    ],
)
def test_the_verdict_is_what_the_interval_says(before, after, tone, words):
    evaluations = {
        step: {f"s/{task}": [float(task < solved)] for task in range(32)} for step, solved in ((0, before), (9, after))
    }
    said = verdict(evaluations, [0.1] * 9)
    assert said["tone"] == tone and words in said["text"] and said["text"].startswith("held-out ")


def test_without_evaluation_few_steps_show_no_trend():
    assert "too few for a trend" in verdict({}, [0.1] * 9)["text"]
    assert "no verdict" in verdict({}, [0.1] * 30)["text"]
    assert verdict({}, [])["text"] == "nothing trained or evaluated yet"
    assert "no second evaluation" in verdict({3: {"s/a": [1.0], "s/b": [0.0]}}, [])["text"]


# A configuration that is being written is an empty one, not an error.
def test_a_half_written_configuration_is_empty(tmp_path):
    run_dir = make_run(tmp_path / "a")
    run_dir.config.write_text(json.dumps({"run": {}})[:-3])
    assert read_settings(run_dir) == {}
    assert Workspace([tmp_path]).run_list()["runs"][0]["max_steps"] == 0


# The page of a failed run begins with the cause; the log below a traceback stays on the list of events.
def test_a_failed_run_leads_with_its_cause(tmp_path):
    run_dir = make_run(tmp_path / "a", steps=2)
    problem = "trainer-0 ended with exit status 1: KeyError: 'x'\nthe end of log:\n    Traceback"
    MetricsFile(run_dir.metrics, "launcher").log(2, {"event": "ended", "state": "failed", "problem": problem})
    said = Workspace([tmp_path]).run({"run": "a"})["verdict"]
    assert said["text"].startswith("failed: trainer-0 ended with exit status 1: KeyError: 'x' (held-out +0.")
    assert said["tone"] == "bad"
