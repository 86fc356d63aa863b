"""The lines of `composer report` about time, events and evaluations, from metrics written here."""

import json

from composer_prime.cli.report_command import report_run
from composer_prime.monitor.events import EventFile
from composer_prime.monitor.metrics_file import MetricsFile
from composer_prime.monitor.progress import RunProgress
from composer_prime.run.run_dir import RunDir


def test_warnings_stand_in_the_report(tmp_path):
    # Information is left out; a repeated event has its count; no event, no section.
    (tmp_path / "config.json").write_text("{}")
    MetricsFile(tmp_path / "metrics.jsonl", "trainer").log(1, {"loss/total": 0.1})
    assert "events" not in "\n".join(report_run(RunDir(tmp_path)))
    file = EventFile(RunDir(tmp_path), "orchestrator")
    file.write("checkpoint", "checkpoint of step 1 is saved")
    for _ in range(10):
        file.write("failure", "a rollout of 's' failed: KeyError", level="warning", where="env.py:3")
    text = "\n".join(report_run(RunDir(tmp_path)))
    assert "events       1 warning or error\n" in text and "checkpoint of step" not in text
    assert "orchestrator: a rollout of 's' failed: KeyError (10 times) (env.py:3)" in text


def test_a_steps_parts_add_up(tmp_path):
    # One step that waited long: medians of the parts would hide it, means a step sum up to the step.
    (tmp_path / "config.json").write_text("{}")
    metrics = MetricsFile(tmp_path / "metrics.jsonl", "trainer")
    for step, wait in ((1, 1.0), (2, 1.0), (3, 22.0)):
        parts = {"time/wait_s": wait, "time/forward_backward_s": 4.0, "time/step_s": wait + 5.0}
        metrics.log(step, {"loss/total": 0.1, **parts})
    text = "\n".join(report_run(RunDir(tmp_path)))
    parts = "waiting for a batch 8.00 s (62%), forward and backward 4.00 s (31%), the rest 1.00 s (8%)"
    assert f"a step       13.00 s on average: {parts}" in text


def test_the_model_that_a_joint_run_ended_with_is_named():
    # For comparison across machines: outer step and hash, from the line that the trainer writes at its end. A run that
    # continued since then has no such line.
    line = {"step": 8, "role": "trainer", "loss/total": 0.1, "diloco/outer_step": 4}
    later = line | {"step": 9}
    end = {"step": 8, "role": "trainer", "diloco/final_outer_step": 4, "diloco/final_hash": "0badcafe"}
    text = "outer step 4, hash 0badcafe, equal on every peer that ended at this outer step"

    def said(*more) -> str | None:
        progress = RunProgress()
        progress.update([line, *more])
        return progress.joint_model

    assert said(end) == text
    assert said({**end, "diloco/final_left_behind": 4}) == f"{text}; a delta of outer step 4 was left behind"
    resumed = {"step": 8, "role": "launcher", "event": "resume"}
    assert said(end, resumed) == text
    assert said(end, resumed, later) is None
    assert said(end, resumed, later, {**end, "step": 9}) == text
    assert said(end, {**resumed, "step": 6}) is None


def test_tasks_that_are_never_trained_on_stand_apart(tmp_path):
    # A source of weight 0 has lines of its own, and does not count among the held-out tasks.
    sources = [{"name": "near", "weight": 1.0}, {"name": "far", "weight": 0.0}]
    (tmp_path / "config.json").write_text(json.dumps({"orchestrator": {"source": sources}}))
    MetricsFile(tmp_path / "metrics.jsonl", "trainer").log(1, {"loss/total": 0.1})
    rewards = {"near": (1.0, 0.0, 1.0), "far": (0.0, 0.0)}
    lines = [
        json.dumps({"source": source, "task_id": f"t{task}", "reward": reward}) + "\n"
        for source, values in rewards.items()
        for task, reward in enumerate(values)
    ]
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "eval_000001.jsonl").write_text("".join(lines))
    text = "\n".join(report_run(RunDir(tmp_path)))
    near, far = (text.partition(f"held-out tasks of {name}")[2].partition("evaluation")[0] for name in ("near", "far"))
    assert "3 tasks" in near and "0.667" in near and "never" not in near
    assert "never trained on" in far and "2 tasks" in far and "0.000" in far
